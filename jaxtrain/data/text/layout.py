"""Lays out examples in shards: which documents train and validate, and where each example begins.

A document trains if its digest is below a limit, otherwise it validates; of files whose names or
paths say what validates, all documents do. ``data.max_examples`` takes the documents with the
smallest digests of each side of each shard. So each side is a range of the sorted documents of a
shard, with holes: a document is not trained on if an equal one validates, here or in another
source.

The tokens of a side without its holes are the *stream* of a shard. Examples do not cross streams.
A folder of the cache has, for each source and split,

* ``SOURCE.SPLIT.shards``: see :data:`jaxtrain.data.text.streams.SHARD`.
* ``SOURCE.SPLIT.runs``: uint64 [runs, 2], where the stream continues after each hole: the position
  in the stream, and that in the tokens of the shard.
* ``SOURCE.SPLIT.rows``: uint64 [examples, 2], and ``SOURCE.SPLIT.pieces``: uint64 [pieces, 3], of
  documents that are fitted into rows: see :class:`jaxtrain.data.text.packing.Fitted`.

For causal models, it also has ``token_bytes``: how many bytes of text each id stands for, int32.
"""

import contextlib
import dataclasses
import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxtrain.data import mixture
from jaxtrain.data.text import byte_level, packing, tokenizer_file
from jaxtrain.data.text.shards import (
    BYTES,
    CHARACTERS,
    COLUMNS,
    DIGEST,
    LOST,
    TOKENS,
    CachedShard,
    Recipe,
)
from jaxtrain.data.text.streams import SHARD
from jaxtrain.errors import InputError
from jaxtrain.storage import cache
from jaxtrain.terminal import Say

Split = Literal["train", "val"]
SPLITS: tuple[Split, Split] = ("train", "val")
LaidOut = tuple[Path, list[dict[Split, dict[str, Any]]]]
TOKEN_BYTES = "token_bytes"
LARGEST_HELD_OUT = 0.1
_LEAST_BYTES, _ENOUGH_BYTES, _SMALL_SHARE = 5_000_000, 40_000_000, 0.01
_VERSION = 2  # of the files, and of the rules for documents, packing, and windows


@dataclasses.dataclass(frozen=True)
class Corpus:
    """A source of text.

    Attributes:
        shards: its shards, each with its side; None splits its documents by their digests.
        train_split: fraction of the documents for training, where they are split.
        max_documents: how many to use; None uses all.
    """

    name: str
    shards: tuple[tuple[CachedShard, Split | None], ...]
    train_split: float
    max_documents: int | None

    def key(self) -> list[Any]:
        """Returns JSON values that change with the documents of a split."""
        shards = [(shard.folder.name, shard.sha256, side) for shard, side in self.shards]
        return [shards, self.train_split, self.max_documents]


@dataclasses.dataclass(frozen=True)
class Rule:
    """What an example is.

    Attributes:
        step: tokens from the beginning of a window to that of the next one; of fitted documents,
            the targets of a sequence.
        overlap: further tokens of a window, which the next one begins with.
        fit: whether an example has complete documents; otherwise it is a window.
    """

    step: int
    overlap: int
    fit: bool = False

    def windows(self, length: int) -> int:
        """Returns how many windows a stream has; the last one may be short."""
        return -(-max(length - self.overlap, 0) // self.step)


def lay_out(
    corpora: Sequence[Corpus],
    rule: Rule,
    recipe: Recipe,
    root: Path,
    say: Say,
    bucket: cache.CacheBucket | None = None,
) -> LaidOut:
    """Finds the examples of all sources, unless the cache has them.

    Returns:
        The folder, and counts for each source and split: ``documents``, ``tokens``, ``bytes``,
        ``characters`` and how many of these are ``lost``, ``examples``, and of fitted ones
        ``padding`` (positions); and ``sha256``, a digest of the text.

    Raises:
        InputError: a source has a single document, or there is no text for a split.
        RunAgain: a shard is damaged.
    """

    def build(work: Path) -> dict[str, Any]:
        for shard in {
            shard.folder: shard for corpus in corpora for shard, _ in corpus.shards
        }.values():
            shard.verify()
        limits = [_limits(corpus) for corpus in corpora]
        validating = [
            shard.documents[slice(*of_shard["val"]), DIGEST]
            for corpus, of_corpus in zip(corpora, limits, strict=True)
            for (shard, _), of_shard in zip(corpus.shards, of_corpus, strict=True)
        ]
        held_out = np.unique(np.concatenate([np.empty(0, np.uint64), *validating]))
        sources, skipped = [], 0
        for number, (corpus, of_corpus) in enumerate(zip(corpora, limits, strict=True)):
            facts = {}
            for split in SPLITS:
                with _Writer(work / f"{number}.{split}", rule) as writer:
                    for (shard, _), of_shard in zip(corpus.shards, of_corpus, strict=True):
                        omitted = held_out if split == "train" else held_out[:0]
                        writer.add(shard, *of_shard[split], omitted)
                    facts[split] = writer.facts()
                skipped += writer.skipped
                if writer.skipped and not facts[split]["documents"]:
                    raise InputError(
                        f"{corpus.name}: no text is left for training, because all of it "
                        "validates; pass other text with --data.path or --data.val_path"
                    )
            sources.append(facts)
        if any(corpus.max_documents is not None for corpus in corpora):
            used = sum(facts[split]["documents"] for facts in sources for split in SPLITS)
            say(f"data.max_examples: using {used:,} documents")
        if skipped:
            say(f"{skipped:,} documents are not trained on, because equal documents validate")
        for split in SPLITS:
            if not any(facts[split]["examples"] for facts in sources):
                raise InputError(f"no text to tokenize in the {split} split: add more text")
        if recipe.lossless:
            tokenizer = tokenizer_file.parsed(recipe.tokenizer, recipe.name)
            (work / TOKEN_BYTES).write_bytes(byte_level.lengths(tokenizer).tobytes())
        return {"sources": sources}

    key = cache.digest(_VERSION, [corpus.key() for corpus in corpora], dataclasses.astuple(rule))
    folder = root / f"layout-{key[:24]}"
    return folder, cache.make_folder(folder, build, say, bucket=bucket)["sources"]


def _limits(corpus: Corpus) -> list[dict[Split, tuple[int, int]]]:
    """Returns the documents of each side of each shard, as a range of their numbers."""
    counts = [len(shard.documents) for shard, _ in corpus.shards]
    by_document = any(side is None for _, side in corpus.shards)
    edge = _edge(corpus, sum(counts)) if by_document else 0
    edges = [
        int(np.searchsorted(shard.documents[:, DIGEST], np.uint64(edge)))
        if side is None
        else count * (side == "train")
        for count, (shard, side) in zip(counts, corpus.shards, strict=True)
    ]
    train, val = edges, [count - edge for count, edge in zip(counts, edges, strict=True)]
    if corpus.max_documents is not None and corpus.max_documents < sum(counts):
        keep_val = round(corpus.max_documents * sum(val) / sum(counts))
        if sum(train) and sum(val):
            keep_val = min(max(keep_val, 1), corpus.max_documents - 1, sum(val))
        keep_train = min(corpus.max_documents - keep_val, sum(train))
        train = mixture.shared_out(keep_train, train) if keep_train else [0] * len(train)
        val = mixture.shared_out(keep_val, val) if keep_val else [0] * len(val)
    return [
        {"train": (0, of_train), "val": (edge, edge + of_val)}
        for of_train, edge, of_val in zip(train, edges, val, strict=True)
    ]


def _edge(corpus: Corpus, count: int) -> int:
    """Returns the least digest of a document that validates; each side has at least one."""
    digests = [shard.documents[:, DIGEST] for shard, _ in corpus.shards if len(shard.documents)]
    smallest = min((int(of_shard[0]) for of_shard in digests), default=0)
    greatest = max((int(of_shard[-1]) for of_shard in digests), default=0)
    if smallest == greatest:
        documents = "1 document" if count == 1 else f"{count:,} documents, which are all equal"
        raise InputError(
            f"{corpus.name} has {documents}, but training and validation need one each: add more "
            "text, or set --data.val_path"
        )
    return max(min(limit(corpus.train_split), greatest), smallest + 1)


def held_out(documents: int, text_bytes: int, val_documents: int | None) -> float:
    """Returns the fraction of the documents that validates, where no name says it.

    It is a tenth, a twentieth, and so on: the smallest that has enough text. So it follows from the
    text alone, it changes only when the text doubles, and then documents that validated train, but
    no other does the reverse.

    Args:
        val_documents: how many documents are enough; None is what the shipped configs need: at
            least 5 MB of text, of which 256 sequences of 2048 tokens take half. A fraction below 1%
            must have at least 40 MB (9216 sequences of 1024 tokens).
    """
    share = LARGEST_HELD_OUT
    while True:
        minimum = _LEAST_BYTES if share > _SMALL_SHARE else _ENOUGH_BYTES
        have, enough = (
            (text_bytes, minimum) if val_documents is None else (documents, val_documents)
        )
        if share / 2 * have < max(1, enough):
            return share
        share /= 2


def limit(train_split: float) -> int:
    """Returns the number that the digests of documents for training are below."""
    return int(train_split * 2**64)


class _Writer(contextlib.ExitStack):
    """Writes the files of a split of a source.

    Attributes:
        skipped: number of documents that are not trained on because equal ones validate.
    """

    def __init__(self, prefix: Path, rule: Rule) -> None:
        super().__init__()
        self._rule = rule
        self.skipped = self._written = 0
        self._counts, self._content = Counter[str](), hashlib.sha256()
        self._pieces_written = 0
        self._shards, self._runs, self._rows, self._pieces = (
            self.enter_context(open(f"{prefix}.{name}", "wb"))  # noqa: SIM115 - closed by the stack
            for name in ("shards", "runs", "rows", "pieces")
        )

    def add(self, shard: CachedShard, begin: int, end: int, omitted: np.ndarray) -> None:
        """Adds a range of the documents of a shard.

        Args:
            omitted: sorted digests of documents to omit.
        """
        documents = shard.documents[begin:end]
        before = shard.documents[begin - 1] if begin else np.zeros(len(COLUMNS), np.uint64)
        keep = ~_contained(documents[:, DIGEST], omitted)
        self.skipped += len(keep) - int(keep.sum())
        if not keep.any():
            return
        edges = np.flatnonzero(np.diff(keep.astype(np.int8), prepend=0, append=0))
        firsts, lasts = edges[::2], edges[1::2] - 1
        table = np.concatenate([before[None], documents])
        starts, stops = table[firsts], table[lasts + 1]  # of runs of documents without holes
        lengths = stops[:, TOKENS] - starts[:, TOKENS]
        positions = np.cumsum(lengths, dtype=np.uint64) - lengths
        length = int(lengths.sum())
        if self._rule.fit:
            counted = np.diff(table[:, TOKENS].astype(np.int64))[keep]
            fitted = packing.fit(counted, self._rule.step)
            self._pieces.write(fitted.pieces.astype(np.uint64).tobytes())
            rows = fitted.rows + self._pieces_written
            self._rows.write(rows.astype(np.uint64).tobytes())
            self._pieces_written += len(fitted.pieces)
            self._counts.update(padding=fitted.padding)
            examples = len(rows)
        else:
            examples = self._rule.windows(length)
        if not examples:
            return
        content = np.stack([positions, starts[:, TOKENS]], 1).tobytes()
        self._runs.write(content)
        sums = documents[keep].sum(0)
        self._counts.update(
            documents=int(keep.sum()),
            tokens=length,
            examples=examples,
            bytes=int(sums[BYTES]),
            characters=int(sums[CHARACTERS]),
            lost=int(sums[LOST]),
        )
        name, examples = shard.folder.name.encode(), self._counts["examples"]
        row = (name, length, self._written, len(firsts), examples)
        self._shards.write(np.array(row, SHARD).tobytes())
        self._written += len(firsts)
        self._content.update(shard.sha256.encode() + content + length.to_bytes(8))

    def facts(self) -> dict[str, Any]:
        """Returns the counts and the digest, see :func:`lay_out`."""
        names = ("documents", "tokens", "examples", "bytes", "characters", "lost")
        counts = {name: self._counts[name] for name in (*names, "padding")}
        return {**counts, "sha256": self._content.hexdigest()}


def _contained(digests: np.ndarray, in_these: np.ndarray) -> np.ndarray:
    """Returns which digests are among sorted ones."""
    if not len(in_these):
        return np.zeros(len(digests), bool)
    at = np.minimum(np.searchsorted(in_these, digests), len(in_these) - 1)
    return in_these[at] == digests
