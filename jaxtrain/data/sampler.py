"""Defines the global order of examples, and the substitutes for broken ones.

With ``n`` examples seen, the next global batch holds the examples at positions ``[n, n+B)``. A
position's example, its randomness and its substitutes are pure functions of (seed, position), and
independent of process, worker and device counts. So the complete data state of a run is ``n``.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import grain
import numpy as np

from jaxtrain.data.mixture import Mixture
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.data.source import Grouped, Source
from jaxtrain.errors import BadExample, InputError
from jaxtrain.storage import disks

# A run stops if this many examples in a row are broken. Configs tolerate far less than half of the
# files being bad, so the probability of reaching this limit by chance is below 2**-32.
MAX_SUBSTITUTES = 32

# Fields of an example that the pipeline adds.
ID = "_id"
WEIGHT = "weight"

Tried = tuple[int, dict[str, np.ndarray] | BadExample]
"""An example's index, and the example or its error."""


@dataclasses.dataclass(frozen=True)
class Order:
    """A seeded shuffle of each epoch, in constant memory.

    Args:
        size: number of examples in an epoch.
        seed: seed of the permutations; each epoch has its own permutation.
    """

    size: int
    seed: int

    def __call__(self, position: int) -> int:
        """Returns the index of the example at a position of the endless order."""
        return int(self._epochs[position])

    @functools.cached_property
    def _epochs(self) -> Any:
        return grain.MapDataset.range(self.size).seed(self.seed).shuffle().repeat()

    def __getstate__(self) -> dict[str, int]:
        return {"size": self.size, "seed": self.seed}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__dict__.update(state)


@dataclasses.dataclass(frozen=True)
class GroupedOrder:
    """A seeded shuffle of each epoch's groups, interleaved in blocks of ``spread`` groups.

    Position ``b * group * spread + m * spread + s`` holds example m of the group with rank
    ``b * spread + s`` of the groups' own order: a block has first one example of each of its
    groups, then the next one of each, in the same order. If ``spread`` is the batch size, a group
    is spread over ``group`` consecutive batches, always in the same row.

    An epoch of groups has each example once. If the block size does not divide the epoch, the epoch
    ends within a block, where its last examples mix with the first of the next epoch.

    Args:
        size: number of examples in an epoch.
        seed: seed of the permutations; each epoch has its own permutation.
        group: examples per group; divides ``size``.
        spread: positions from one example of a group to the next.
    """

    size: int
    seed: int
    group: int
    spread: int

    def __call__(self, position: int) -> int:
        """Returns the index of the example at a position of the endless order."""
        rank, member = self.group_of(position)
        return self.begin(rank) + member

    def begin(self, rank: int) -> int:
        """Returns the index of the first example of the group with a rank."""
        return self._groups(rank) * self.group

    def group_of(self, position: int) -> tuple[int, int]:
        """Returns the rank of its group in their order, and the example's number in its group."""
        block, rest = divmod(position, self.group * self.spread)
        member, slot = divmod(rest, self.spread)
        return block * self.spread + slot, member

    @functools.cached_property
    def _groups(self) -> Order:
        return Order(self.size // self.group, self.seed)


@dataclasses.dataclass(frozen=True)
class MixedOrder:
    """The order of a mixture, in constant memory; see :mod:`jaxtrain.data.mixture`.

    Args:
        sizes: number of examples of each source.
        per_epoch: examples of each source in an epoch; their sum is the number of examples.
        seed: seed of all permutations.
    """

    sizes: tuple[int, ...]
    per_epoch: tuple[int, ...]
    seed: int

    @property
    def size(self) -> int:
        """Returns the total number of examples, which is also their number per epoch."""
        return sum(self.sizes)

    def __call__(self, position: int) -> int:
        """Returns the index of the example at a position, counted over all sources."""
        of_epoch, of_sources = self._orders
        rank = of_epoch(position)
        begins = [0, *itertools.accumulate(self.per_epoch)]
        part = bisect.bisect_right(begins, rank) - 1
        turn = position // self.size * self.per_epoch[part] + rank - begins[part]
        return sum(self.sizes[:part]) + of_sources[part](turn)

    @functools.cached_property
    def _orders(self) -> tuple[Order, list[Order]]:
        seeds = [int(generator(self.seed, i).integers(2**31)) for i in range(len(self.sizes))]
        return Order(self.size, self.seed), [
            Order(size, seed) for size, seed in zip(self.sizes, seeds, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {"sizes": self.sizes, "per_epoch": self.per_epoch, "seed": self.seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


AnyOrder = Order | GroupedOrder | MixedOrder


def order_of(source: Source, seed: int) -> AnyOrder:
    """Returns the order of a source's examples."""
    if getattr(source, "group", 1) > 1:
        grouped = cast(Grouped, source)
        return GroupedOrder(len(source), seed, grouped.group, grouped.spread)
    if isinstance(source, Mixture):
        return MixedOrder(source.sizes, source.per_epoch, seed)
    return Order(len(source), seed)


def generator(seed: int, *numbers: int) -> np.random.Generator:
    """Returns a generator that depends only on its arguments (Philox, keyed by all of them)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, *numbers))))


@dataclasses.dataclass(frozen=True)
class TrainingRows:
    """The rows that one process loads, in order; a row is an example of weight one.

    Args:
        source: the training split.
        order: maps a position to an example's index.
        start: number of examples seen before the first batch.
        batch_size: global batch size.
        first: this process's first row in a global batch.
        rows: number of this process's rows in a global batch.
        batches: number of batches.
        quarantine: records broken examples.
    """

    source: Source
    order: AnyOrder
    start: int
    batch_size: int
    first: int
    rows: int
    batches: int
    quarantine: Quarantine

    def __len__(self) -> int:
        return self.batches * self.rows

    def __getitem__(self, row: Any) -> dict[str, np.ndarray]:
        return self.load([self.position(*divmod(int(row), self.rows))])[0]

    def position(self, batch: int, row: int) -> int:
        """Returns the position of a row of this process; batches are counted from ``start``."""
        return self.start + batch * self.batch_size + self.first + row

    def load(self, positions: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """Returns the examples at these positions; those of one group are loaded together."""
        made = self._first_try(positions)
        return [self._good(position, made.pop(position)) for position in positions]

    def _first_try(self, positions: Sequence[int]) -> dict[int, Tried]:
        if not isinstance(self.order, GroupedOrder):
            return {position: self._try(position, self.order(position)) for position in positions}
        by_group: dict[int, dict[int, int]] = {}
        for position in positions:
            rank, member = self.order.group_of(position)
            by_group.setdefault(rank, {})[position] = member
        made: dict[int, Tried] = {}
        for rank, members in by_group.items():
            begin = self.order.begin(rank)
            indices = [begin + member for member in members.values()]
            load = functools.partial(self._together, rank, tuple(members), indices)
            tried = disks.when_readable(load)
            made |= dict(zip(members, zip(indices, tried, strict=True), strict=True))
        return made

    def _together(
        self, rank: int, positions: Sequence[int], indices: Sequence[int]
    ) -> list[dict[str, np.ndarray] | BadExample]:
        rngs = [generator(self.order.seed, position, 0) for position in positions]
        # Three numbers, because an example's generator is keyed by two.
        shared = generator(self.order.seed, rank, 0, 1)
        return cast(Grouped, self.source).together(indices, rngs, shared)

    def _try(self, position: int, index: int, attempt: int = 0) -> Tried:
        def load() -> dict[str, np.ndarray]:
            nonlocal index
            rng = generator(self.order.seed, position, attempt)
            if attempt:
                # A substitute is drawn from the complete split, so that the neighbors of a broken
                # example are not seen more often than others.
                index = int(rng.integers(self.order.size))
            return self.source.example(index, rng)

        try:
            return index, disks.when_readable(load)
        except BadExample as bad:
            return index, bad

    def _good(self, position: int, tried: Tried) -> dict[str, np.ndarray]:
        """Returns the example that was loaded for a position, or a substitute."""
        for attempt in range(1, MAX_SUBSTITUTES + 1):
            index, made = tried
            if not isinstance(made, BadExample):
                return made | {WEIGHT: np.array(1, np.float32), ID: np.array(index, np.int64)}
            self.quarantine.add(made, found="training", position=position)
            if attempt < MAX_SUBSTITUTES:
                tried = self._try(position, index, attempt)
        raise InputError(
            f"{MAX_SUBSTITUTES} examples in a row are broken at position {position} (the last is "
            f"example {index}): fix or remove the files listed in {self.quarantine.path}"
        )


@dataclasses.dataclass(frozen=True)
class ValidationRows:
    """The rows of one process's validation batches: examples evenly spaced over the split.

    Rows of weight zero fill up the last batch and replace broken examples. Metrics divide by the
    sum of the weights.

    Args:
        source: the validation split.
        seed: an example's randomness is a function of this seed and its index.
        examples: number of examples used; at most the size of the split.
        batch_size: global batch size.
        first: this process's first row in a global batch.
        rows: number of this process's rows in a global batch.
        blank: makes an example of zeros.
        quarantine: records broken examples.
    """

    source: Source
    seed: int
    examples: int
    batch_size: int
    first: int
    rows: int
    blank: Callable[[], dict[str, np.ndarray]]
    quarantine: Quarantine

    def __len__(self) -> int:
        return -(-self.examples // self.batch_size) * self.rows

    def __getitem__(self, row: Any) -> dict[str, np.ndarray]:
        batch, offset = divmod(int(row), self.rows)
        position = batch * self.batch_size + self.first + offset
        weight, example = np.array(0, np.float32), None
        if position < self.examples:
            index = position * len(self.source) // self.examples
            try:
                example = disks.when_readable(
                    lambda: self.source.example(index, generator(self.seed, index))
                )
                weight = np.array(1, np.float32)
            except BadExample as bad:
                self.quarantine.add(bad, found="validation", position=position)
        return (self.blank() if example is None else example) | {WEIGHT: weight}
