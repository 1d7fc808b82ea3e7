"""Defines the global order of examples, and the substitutes for broken ones.

With ``n`` examples seen, the next global batch holds the examples at positions ``[n, n+B)``. A
position's example, its randomness and its substitutes are pure functions of (seed, position), and
independent of process, worker and device counts. So the complete data state of a run is ``n``.
"""

import bisect
import dataclasses
import functools
import itertools
from typing import Any, ClassVar

import grain
import numpy as np

from jaxtrain.data.mixture import Mixture
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.data.source import Source
from jaxtrain.errors import BadExample, InputError
from jaxtrain.storage import disks

# A run stops if an example and all its substitutes are broken, this many in all. With the default
# data.max_bad_share, 0.1, the probability of reaching this limit by chance is 1e-32.
MAX_ATTEMPTS = 32

# Fields of an example that this file adds.
ID = "_id"
WEIGHT = "weight"


@dataclasses.dataclass(frozen=True)
class Order:
    """A seeded shuffle of each epoch, in constant memory.

    Args:
        size: number of examples in an epoch; a multiple of ``block``.
        block: number of successive examples that stay together
            (:attr:`jaxtrain.data.source.Source.block`).
    """

    size: int
    seed: int
    block: int = 1

    def __call__(self, position: int) -> int:
        """Returns the index of the example at a position of the endless order."""
        number, place = divmod(position, self.block)
        return int(_epochs(self.size // self.block, self.seed)[number]) * self.block + place


@functools.lru_cache(maxsize=64)
def _epochs(size: int, seed: int) -> Any:
    """Returns the shuffles. Cached here, because an order is pickled and this is not."""
    return grain.MapDataset.range(size).seed(seed).shuffle().repeat()


@dataclasses.dataclass(frozen=True)
class MixedOrder:
    """The order of a mixture, in constant memory; see :mod:`jaxtrain.data.mixture`.

    Args:
        per_epoch: examples of each source in an epoch; their sum is the number of examples.
    """

    sizes: tuple[int, ...]
    per_epoch: tuple[int, ...]
    seed: int
    block: ClassVar[int] = 1

    @property
    def size(self) -> int:
        """Returns the total number of examples, which is also their number per epoch."""
        return sum(self.sizes)

    def __call__(self, position: int) -> int:
        """Returns the index of the example at a position, counted over all sources.

        With ``sizes=(4, 2)`` and ``per_epoch=(3, 3)``, slots 0 to 2 of an epoch are for source 0,
        and 3 to 5 for source 1. Position 7 is in the second epoch. If the shuffle gives it slot 4,
        it has example number 1 * 3 + 4 - 3 = 4 of source 1's own endless order.
        """
        slot = int(_epochs(self.size, self.seed)[position])
        starts = [0, *itertools.accumulate(self.per_epoch)]
        source_index = bisect.bisect_right(starts, slot) - 1
        epoch = position // self.size
        nth_of_source = epoch * self.per_epoch[source_index] + slot - starts[source_index]
        source_order = _epochs(self.sizes[source_index], _seed(self.seed, source_index))
        return sum(self.sizes[:source_index]) + int(source_order[nth_of_source])


@functools.lru_cache(maxsize=64)
def _seed(seed: int, source_index: int) -> int:
    """Returns the seed of a source of a mixture."""
    return int(generator(seed, source_index).integers(2**31))


AnyOrder = Order | MixedOrder


def order_of(source: Source, seed: int) -> AnyOrder:
    """Returns the order of a source's examples."""
    if isinstance(source, Mixture):
        return MixedOrder(source.sizes, source.per_epoch, seed)
    return Order(len(source), seed, getattr(source, "block", 1))


def generator(seed: int, *numbers: int) -> np.random.Generator:
    """Returns a generator that depends only on its arguments (Philox, keyed by all of them)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, *numbers))))


@dataclasses.dataclass(frozen=True)
class TrainingRows:
    """The rows that one process loads, in order; a row is an example of weight one.

    Args:
        order: maps a position to an example's index.
        first_row: this process's first row in a global batch.
        rows_per_batch: number of this process's rows in a global batch.
    """

    source: Source
    order: AnyOrder
    start: int
    batch_size: int
    first_row: int
    rows_per_batch: int
    batches: int
    quarantine: Quarantine

    def __len__(self) -> int:
        return self.batches * self.rows_per_batch

    def __getitem__(self, row: Any) -> dict[str, np.ndarray]:
        batch, offset = divmod(int(row), self.rows_per_batch)
        return self.load(self.start + batch * self.batch_size + self.first_row + offset)

    def load(self, position: int) -> dict[str, np.ndarray]:
        """Returns the example at a position of the order, or a substitute for it."""
        for attempt in range(MAX_ATTEMPTS):
            try:
                return disks.when_readable(functools.partial(self._attempt, position, attempt))
            except BadExample as bad:
                last = bad
                self.quarantine.add(bad, during="training", position=position)
        raise InputError(
            f"{MAX_ATTEMPTS} examples in a row are broken at position {position} (the last is "
            f"{last.path}): fix or remove the files listed in {self.quarantine.path}"
        )

    def _attempt(self, position: int, attempt: int) -> dict[str, np.ndarray]:
        number, place = divmod(position, self.order.block)
        rng = generator(self.order.seed, number, attempt)
        index = self.order(position)
        if attempt:
            # A substitute is drawn from the complete split, so that the neighbors of a broken
            # example are not seen more often than others.
            blocks = self.order.size // self.order.block
            index = int(rng.integers(blocks)) * self.order.block + place
            if isinstance(self.order, MixedOrder):  # by the weights of the mixture
                index = self.order(index)
        example = self.source.example(index, rng)
        return example | {WEIGHT: np.array(1, np.float32), ID: np.array(index, np.int64)}
