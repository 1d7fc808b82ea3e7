"""Windows: cuts token streams into examples of one length, for causal language models.

Example i of a stream predicts its tokens ``[i*S + 1, i*S + S]``, each from the earlier tokens in
``[i*S, i*S + S - 1]``. Consecutive windows overlap by one token, so each token but the stream's
first (a <|bos|>) is predicted exactly once. The last window of a stream may be short.

:class:`FittedSource` gives complete documents instead, as :func:`jaxtrain.data.text.packing.fit`
has fitted them.

Shapes: S is the sequence length, V the number of ids of the tokenizer.
"""

import dataclasses
import functools

import numpy as np

from jaxtrain.data.number_file import numbers_of
from jaxtrain.data.text.streams import Streams

IGNORED = -1  # target of positions without a prediction


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowSource:
    """One split as windows; see :class:`jaxtrain.data.source.Source`.

    Cheap to pickle: opens the files at first use.

    Attributes:
        token_bytes: path of the table of byte counts per id, int32 [V].
        fingerprint: digest of the token streams, the tokenizer, S and the cutting rule.
    """

    streams: Streams
    token_bytes: str
    sequence_length: int
    fingerprint: str

    def __len__(self) -> int:
        return self.streams.examples

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
        size, window = self.sequence_length, self._tokens(index).astype(np.int32)
        tokens_S, bytes_S = np.zeros(size, np.int32), np.zeros(size, np.int32)
        targets_S = np.full(size, IGNORED, np.int32)
        targets = window[1:]
        tokens_S[: len(window)] = window[:size]
        targets_S[: len(targets)] = targets
        bytes_S[: len(targets)] = _bytes_of(self.token_bytes)[targets]
        return {"tokens": tokens_S, "targets": targets_S, "target_bytes": bytes_S}

    def _tokens(self, index: int) -> np.ndarray:
        """Returns at most S + 1 tokens, of which all but the first are predicted."""
        return self.streams.window(index, self.sequence_length, overlap=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FittedSource(WindowSource):
    """One split as rows of complete documents.

    Attributes:
        begin: id that begins a piece that continues a document.
    """

    begin: int

    def _tokens(self, index: int) -> np.ndarray:
        shard, _, _ = self.streams.place(index)
        parts = []
        for start, stop, continues in self.streams.pieces(index):
            ids = self.streams.read(shard, start, stop)
            parts.append(np.insert(ids, 0, self.begin) if continues else ids)
        return np.concatenate(parts)


@functools.lru_cache(4)
def _bytes_of(path: str) -> np.ndarray:
    return numbers_of(path, "int32")
