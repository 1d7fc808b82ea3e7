"""Reads the examples of a split: ranges of the streams of shards.

:mod:`jaxtrain.data.text.layout` describes the files.
"""

import dataclasses
import functools

import numpy as np

from jaxtrain.data.number_file import NumberFile, numbers_of

SHARD = np.dtype(
    [("folder", "S40"), ("tokens", "u8"), ("run", "u8"), ("runs", "u8"), ("examples", "u8")]
)
"""A shard with examples: path of its folder relative to the cache's, length of its stream, its
first run, number of runs, and the number of examples in it and in all shards before it."""
_OPEN_FILES = 64  # of a process; a corpus may have thousands of shards


@dataclasses.dataclass(frozen=True)
class Streams:
    """The streams of a split of a source.

    Cheap to pickle: opens the files at first use.

    Attributes:
        folder: of the shards.
        prefix: of the paths of the split's own files.
    """

    folder: str
    prefix: str
    dtype: str
    examples: int

    def place(self, index: int) -> tuple[int, int, int]:
        """Returns the shard of an example, its number there, and the length of the stream.

        Raises:
            IndexError: there is no such example.
            DiskAway, BadExample: it cannot be read, now or at all.
        """
        if not 0 <= index < self.examples:
            raise IndexError(f"example {index} of {self.examples}")
        table = _table(self.prefix)
        shard = int(np.searchsorted(table["examples"], index, "right"))
        before = int(table["examples"][shard - 1]) if shard else 0
        return shard, index - before, int(table["tokens"][shard])

    def window(self, index: int, step: int, overlap: int = 0) -> np.ndarray:
        """Returns the ids of an example that is a window of a shard's stream.

        Windows follow each other every ``step`` tokens, and have ``overlap`` tokens of the next.
        """
        shard, number, length = self.place(index)
        return self.read(shard, number * step, min((number + 1) * step + overlap, length))

    def pieces(self, index: int) -> list[list[int]]:
        """Returns the pieces of an example: see :class:`jaxtrain.data.text.packing.Fitted`."""
        rows = _file(f"{self.prefix}.rows", "uint64").read(2 * index, 2 * index + 2)
        first, last = map(int, rows)
        numbers = _file(f"{self.prefix}.pieces", "uint64").read(3 * first, 3 * last)
        return [list(map(int, piece)) for piece in numbers.reshape(-1, 3)]

    def read(self, shard: int, start: int, stop: int) -> np.ndarray:
        """Returns the ids from ``start`` to ``stop`` of a shard's stream."""
        row = _table(self.prefix)[shard]
        first, count = int(row["run"]), int(row["runs"])
        runs = _file(f"{self.prefix}.runs", "uint64").read(2 * first, 2 * (first + count))
        positions, begins = runs.reshape(-1, 2).astype(np.int64).T
        ids = _file(f"{self.folder}/{row['folder'].decode()}/tokens", self.dtype)
        parts = []
        run = int(np.searchsorted(positions, start, "right")) - 1
        while start < stop:
            end = min(stop, int(positions[run + 1])) if run + 1 < count else stop
            shift = int(begins[run] - positions[run])
            parts.append(ids.read(start + shift, end + shift))
            start, run = end, run + 1
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, self.dtype), *parts])


@functools.lru_cache(_OPEN_FILES)
def _table(prefix: str) -> np.ndarray:
    return numbers_of(f"{prefix}.shards", SHARD)


@functools.lru_cache(_OPEN_FILES)
def _file(path: str, dtype: str) -> NumberFile:
    return NumberFile(path, dtype)
