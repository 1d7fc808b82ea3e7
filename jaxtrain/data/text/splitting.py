"""Splits documents into training, validation, and skipped ones.

A document's side is computed from its number when needed, so a corpus of a billion documents needs
no table.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxtrain.errors import InputError

TRAIN, VAL, SKIPPED = 0, 1, 2
SPLITS = ("train", "val")
_BLOCK = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """The side of each document in a list of files.

    Attributes:
        counts: number of documents in each file.
        sides: TRAIN or VAL for each file; None splits by document, by a hash of its number over all
            files.
        train_split: if ``sides`` is None, documents with a hash below this are for training.
        exception: (document, its side), if a side would be empty otherwise.
        totals: number of documents in (TRAIN, VAL).
        kept: how many of them are used, spread evenly over the corpus.
    """

    counts: tuple[int, ...]
    sides: tuple[int, ...] | None
    train_split: float = 1.0
    exception: tuple[int, int] | None = None
    totals: tuple[int, int]
    kept: tuple[int, int]

    def key(self) -> list[Any]:
        """Returns JSON values that are equal for equal splits."""
        return list(dataclasses.astuple(self))

    def thinned(self, most: int) -> "Split":
        """Limits the split to ``most`` documents, in proportion, with at least one on each side."""
        if most >= sum(self.totals):
            return self
        train, val = self.totals
        if not train or not val:
            return dataclasses.replace(self, kept=(min(most, train), min(most, val)))
        keep_val = round(most * val / (train + val))
        keep_val = min(max(keep_val, 1), most - 1, val)
        keep_train = min(most - keep_val, train)
        return dataclasses.replace(self, kept=(keep_train, most - keep_train))

    def for_training(self) -> "Split":
        """Returns the split without files for validation; skips other validation documents."""
        kept = self.kept[TRAIN], 0
        if self.sides is None:
            return dataclasses.replace(self, kept=kept)
        counts = [n for n, side in zip(self.counts, self.sides, strict=True) if side == TRAIN]
        return Split(
            counts=tuple(counts),
            sides=(TRAIN,) * len(counts),
            totals=(self.totals[TRAIN], 0),
            kept=kept,
        )

    def of_file(self, file: int) -> Iterator[np.ndarray]:
        """Yields uint8 blocks of TRAIN, VAL, or SKIPPED for a file's documents, in order."""
        ranks = [0, 0] if self.kept == self.totals else self._before[file].tolist()
        for block in self._unthinned(file):
            for side in (TRAIN, VAL):
                at = np.flatnonzero(block == side)
                rank = ranks[side] + np.arange(len(at))
                ranks[side] += len(at)
                total, keep = self.totals[side], self.kept[side]
                if keep < total:
                    block[at[(rank + 1) * keep // total == rank * keep // total]] = SKIPPED
            yield block

    def used_before(self, file: int) -> tuple[int, int]:
        """Returns how many documents of (TRAIN, VAL) are used in the files before a file."""
        counts = self._before[file].tolist() if file < len(self.counts) else self.totals
        return tuple(  # type: ignore[return-value]
            count if keep == total else count * keep // total
            for count, keep, total in zip(counts, self.kept, self.totals, strict=True)
        )

    def _unthinned(self, file: int) -> Iterator[np.ndarray]:
        """Yields the same blocks without skipping any document."""
        first = int(self._first[file])
        for start in range(first, first + self.counts[file], _BLOCK):
            stop = min(start + _BLOCK, first + self.counts[file])
            if self.sides is not None:
                yield np.full(stop - start, self.sides[file], np.uint8)
                continue
            fractions = number_hash(start, stop)
            block = np.where(fractions >= self.train_split, VAL, TRAIN).astype(np.uint8)
            if self.exception and start <= self.exception[0] < stop:
                block[self.exception[0] - start] = self.exception[1]
            yield block

    @functools.cached_property
    def _first(self) -> np.ndarray:
        """Number of each file's first document, over all files."""
        return np.cumsum((0, *self.counts))

    @functools.cached_property
    def _before(self) -> np.ndarray:
        """Documents of (TRAIN, VAL) in earlier files, for each file: [files, 2]."""
        own = np.zeros((len(self.counts), 2), np.int64)
        if self.sides is not None:
            own[np.arange(len(own)), self.sides] = self.counts
        else:
            for file in range(len(own) - 1):
                for block in self._unthinned(file):
                    own[file] += np.bincount(block, minlength=2)
        return np.cumsum(own, axis=0) - own


def by_document(
    counts: list[int], name: str, *, train_split: float, max_examples: int | None
) -> Split:
    """Splits documents into training and validation by the hashes of their numbers.

    Each split gets at least one document.

    Args:
        counts: number of documents in each file.
        name: of the source, for an error.
        train_split: expected fraction for training.
        max_examples: documents to keep over both splits, spread evenly over the corpus.

    Raises:
        InputError: fewer than two documents.
    """
    count = sum(counts)
    if count < 2:
        raise InputError(
            f"{name} has {count} document, but training and validation need one each: add more "
            "text, or set --data.val_path"
        )
    in_val, most, least = 0, (-1.0, 0), (2.0, 0)
    for start in range(0, count, _BLOCK):
        fractions = number_hash(start, min(start + _BLOCK, count))
        in_val += int(np.count_nonzero(fractions >= train_split))
        top, bottom = int(np.argmax(fractions)), int(np.argmin(fractions))
        most = max(most, (float(fractions[top]), start + top))
        least = min(least, (float(fractions[bottom]), start + bottom))
    exception = None
    if in_val == 0:
        in_val, exception = 1, (most[1], VAL)
    elif in_val == count:
        in_val, exception = count - 1, (least[1], TRAIN)
    totals = (count - in_val, in_val)
    split = Split(
        counts=tuple(counts),
        sides=None,
        train_split=train_split,
        exception=exception,
        totals=totals,
        kept=totals,
    )
    return split if max_examples is None else split.thinned(max_examples)


def of_sides(counts: list[int], sides: list[int], max_examples: int | None) -> Split:
    """Assigns each file to a split, and uses ``max_examples`` documents, spread evenly."""
    in_val = sum(count for count, side in zip(counts, sides, strict=True) if side == VAL)
    totals = (sum(counts) - in_val, in_val)
    split = Split(counts=tuple(counts), sides=tuple(sides), totals=totals, kept=totals)
    return split if max_examples is None else split.thinned(max_examples)


def number_hash(start: int, stop: int) -> np.ndarray:
    """Hashes start..stop-1 to numbers in [0, 1): SplitMix64's output (Steele et al. 2014)."""
    x = (np.arange(start, stop, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / 2**53
