"""Windows: cuts a token stream into examples of one length, for causal language models.

Example i predicts the tokens ``[i*S + 1, i*S + S]`` of the stream, each from the earlier tokens in
``[i*S, i*S + S - 1]``. Consecutive windows overlap by one token, so each token but the stream's
first (a <|bos|>) is predicted exactly once. The last window may be short.

Shapes: S is the sequence length, V the number of ids of the tokenizer.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data import cache
from jaxtrain.data.number_file import NumberFile, numbers_of
from jaxtrain.data.text import tokenizer, tokens

IGNORED = -1  # target of positions without a prediction
_VERSION = 1  # of the cutting rule


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowSource:
    """One split as windows; see :class:`jaxtrain.data.source.Source`.

    Cheap to pickle: opens the files at first use.

    Attributes:
        stream: path of the split's token stream.
        dtype: dtype of its ids.
        length: number of tokens in the stream.
        token_bytes: path of the table of byte counts per id, int32.
        sequence_length: S.
        fingerprint: digest of the token stream, the tokenizer, S and the cutting rule.
        tokenizer_path: path of the tokenizer's ``tokenizer.json``.
    """

    stream: str
    dtype: str
    length: int
    token_bytes: str
    sequence_length: int
    fingerprint: str
    tokenizer_path: str

    def __len__(self) -> int:
        return count(self.length, self.sequence_length)

    def example(self, index: int, rng: np.random.Generator | None = None) -> dict[str, np.ndarray]:
        """Returns example ``index``; ``rng`` is not used.

        Returns:
            ``tokens``, ``targets`` and ``target_bytes``, int32 [S]. Each target is the next token
            of the stream, and ``target_bytes`` the number of UTF-8 bytes it stands for, 0 for a
            special token. Past the stream's end the token is 0, the target -1 and the bytes 0.

        Raises:
            IndexError: there is no such example.
            DiskAway, BadExample: it cannot be read, now or at all.
        """
        del rng
        if not 0 <= index < len(self):
            raise IndexError(f"example {index} of {len(self)}")
        start, size = index * self.sequence_length, self.sequence_length
        stop = min(start + size + 1, self.length)
        window = self._stream.read(start, stop).astype(np.int32)
        tokens_S, bytes_S = np.zeros(size, np.int32), np.zeros(size, np.int32)
        targets_S = np.full(size, IGNORED, np.int32)
        targets = window[1:]
        tokens_S[: len(window)] = window[:size]
        targets_S[: len(targets)] = targets
        bytes_S[: len(targets)] = self._bytes_V[targets]
        return {"tokens": tokens_S, "targets": targets_S, "target_bytes": bytes_S}

    @functools.cached_property
    def _stream(self) -> NumberFile:
        return NumberFile(self.stream, self.dtype)

    @functools.cached_property
    def _bytes_V(self) -> np.ndarray:
        return numbers_of(self.token_bytes, "int32")

    def __getstate__(self) -> dict[str, Any]:
        """Returns the fields without what has been read."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def count(length: int, sequence_length: int) -> int:
    """Returns how many windows a stream has: each token but the first is a target once."""
    return -(-max(length - 1, 0) // sequence_length)


def open_split(
    folder: Path, manifest: dict[str, Any], split: str, sequence_length: int
) -> WindowSource:
    """Returns a split of an exact token cache (:mod:`jaxtrain.data.text.tokens`) as windows."""
    facts = manifest["splits"][split]
    return WindowSource(
        stream=str(folder / f"{split}.tokens"),
        dtype=manifest["dtype"],
        length=facts["tokens"],
        token_bytes=str(folder / tokens.TOKEN_BYTES),
        sequence_length=sequence_length,
        fingerprint=cache.digest(facts["sha256"], manifest["tokenizer"], _VERSION, sequence_length),
        tokenizer_path=str(folder / tokenizer.NAME),
    )
