"""Packing: where the examples of a sequence length lie in the token streams of a cache.

An example is a span of a stream, found once and kept as two uint64 an example, so that any example
is one look-up.
"""

import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data import cache
from jaxtrain.data.text.splitting import SPLITS

_VERSION = 2  # of the rule and of the files
_BLOCK = 1 << 18  # examples that are found before they are written


def pack(
    folder: Path, manifest: dict[str, Any], sequence_length: int, say: Callable[[str], None]
) -> tuple[Path, dict[str, Any]]:
    """The packing index of a token cache for one sequence length: (its folder, its manifest).

    ``<split>.spans`` holds uint64 [examples, 2]: start and end of each example's span. The manifest
    gives for each split ``examples``, ``padding`` (positions that are padding) and ``cut``
    (examples that end inside a sentence). A split without text has none.
    """
    streams = [manifest["splits"][name]["sha256"] for name in SPLITS]
    sep = manifest["specials"]["sep"]
    key = cache.digest(_VERSION, streams, sep, sequence_length)

    def build(work: Path) -> dict[str, Any]:
        facts: dict[str, Any] = {"version": _VERSION, "sequence_length": sequence_length}
        for name in SPLITS:
            examples = padding = cut = 0
            with open(work / f"{name}.spans", "wb") as file:
                if manifest["splits"][name]["tokens"]:
                    tokens = np.asarray(
                        np.memmap(folder / f"{name}.tokens", manifest["dtype"], "r")
                    )
                    ends = np.asarray(np.memmap(folder / f"{name}.ends", np.uint64, "r"))
                    for spans in span_blocks(tokens, ends, sequence_length, sep):
                        file.write(spans.tobytes())
                        lengths = spans[:, 1] - spans[:, 0]
                        examples += len(spans)
                        padding += len(spans) * (sequence_length - 2) - int(lengths.sum())
                        whole = ends[np.searchsorted(ends, spans[:, 1])] == spans[:, 1]
                        cut += len(spans) - int(np.count_nonzero(whole))
            facts[name] = {"examples": examples, "padding": padding, "cut": cut}
        return facts

    target = folder.with_name(f"packed-{key[:20]}")
    return target, cache.make_folder(target, build, say)


def span_blocks(
    tokens: np.ndarray, ends: np.ndarray, sequence_length: int, sep: int
) -> Iterator[np.ndarray]:
    """Pack sentences into sequences: RoBERTa's FULL-SENTENCES, with a bound on the padding.

    Sentences follow one another, across documents, with the [SEP] that ends each document between
    them (https://arxiv.org/abs/1907.11692, section 4.2). A sequence holds two tokens less, for
    [CLS] before and [SEP] after. A sentence that does not fit begins the next sequence; but where
    that would leave more than 1/50 of the sequence empty, it is cut and goes on in the next one.
    So padding stays below 1% on average, whatever the text; whole sentences alone would leave 9%
    empty at length 256 (measured on English novels).

    Args:
        tokens: the stream [tokens].
        ends: ascending positions after each sentence.
        sequence_length: at least 3.
        sep: id of [SEP].

    Yields:
        uint64 [examples, 2], ascending. The spans cover every token once, save separators between
        two examples.
    """
    room, slack = sequence_length - 2, max(1, sequence_length // 50)
    spans = array.array("Q")
    start, first, total = 0, 0, len(tokens)
    while start < total:
        if tokens[start] == sep:  # the one after an example's last document
            start += 1
            continue
        limit = start + room
        window = ends[first : first + room + 2]  # a sentence has at least one token
        passed = int(np.searchsorted(window, limit, "right"))
        end = int(window[passed - 1]) if passed else start
        if end <= start or (limit - end > slack and end + 1 < total):
            end = min(limit, total)
        spans.extend((start, end))
        first += int(np.searchsorted(window, end, "right"))
        start = end
        if len(spans) >= 2 * _BLOCK:
            yield np.frombuffer(spans, np.uint64).reshape(-1, 2)
            spans = array.array("Q")
    if spans:
        yield np.frombuffer(spans, np.uint64).reshape(-1, 2)


class Packed:
    """Reads packed examples by number. Picklable and light: maps the files at first use.

    Args:
        tokens: path of a stream.
        dtype: of its ids.
        spans: path of its packing index.
    """

    def __init__(self, tokens: str, dtype: str, spans: str) -> None:
        self._paths = (tokens, dtype, spans)
        self._maps: tuple[np.ndarray, np.ndarray] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_paths": self._paths, "_maps": None}  # a memory map would be copied whole

    def __getitem__(self, index: int) -> np.ndarray:
        """Tokens of example ``index``, without [CLS] before and [SEP] after."""
        if self._maps is None:
            tokens, dtype, spans = self._paths
            self._maps = (
                np.asarray(np.memmap(tokens, dtype, "r")),
                np.asarray(np.memmap(spans, np.uint64, "r")).reshape(-1, 2),
            )
        stream, index_map = self._maps
        start, end = index_map[index]
        return stream[int(start) : int(end)]
