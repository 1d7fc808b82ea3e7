"""Which example stands where: the one global order, and what replaces a broken example.

With ``n`` examples seen, the next global batch holds the examples at positions ``[n, n+B)``. A
position's example, its randomness and its substitutes are pure functions of (seed, position): not
of process, worker or device count. So the whole data state of a run is the integer ``n``.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from jaxtrain.data.mixture import Mixture
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.data.source import Grouped, Source
from jaxtrain.errors import BadExample, InputError

# A source in which this many examples in a row are broken is not worth going on with. The share of
# bad files that a config tolerates is far below one half, so 2**-32 is the chance to meet it.
MAX_SUBSTITUTES = 32

# Fields of an example that are for the host, not for the model.
ID = "_id"
WEIGHT = "weight"

Tried = tuple[int, dict[str, np.ndarray] | BadExample]
"""An example's number, and the example or what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class Order:
    """A seeded permutation of each epoch, in constant memory.

    Args:
        size: examples in an epoch.
        seed: of the permutations; each epoch has its own.
    """

    size: int
    seed: int

    def __call__(self, position: int) -> int:
        """The example at a position of the endless order."""
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
    """A seeded permutation of each epoch's groups, shuffled in blocks of ``spread`` of them.

    Position ``b * group * spread + m * spread + s`` holds example m of the group at place
    ``b * spread + s`` of the groups' own order: a block has first one example of each of its
    groups, then another one of each, in the same order. Where ``spread`` is the batch's size, a
    group is in as many batches in a row, each time in the same row.

    An epoch of groups has each example once. It ends within a block, where the block's size does
    not divide it: there the last examples of one epoch stand among the first of the next.

    Args:
        size: examples in an epoch.
        seed: of the permutations; each epoch has its own.
        group: examples of a group; divides ``size``.
        spread: positions from one example of a group to the next.
    """

    size: int
    seed: int
    group: int
    spread: int

    def __call__(self, position: int) -> int:
        """The example at a position of the endless order."""
        place, member = self.place(position)
        return self.begin(place) + member

    def begin(self, place: int) -> int:
        """The first example of the group at a place."""
        return self._groups(place) * self.group

    def place(self, position: int) -> tuple[int, int]:
        """The place in the order of groups, and the example's number in its group."""
        block, rest = divmod(position, self.group * self.spread)
        member, slot = divmod(rest, self.spread)
        return block * self.spread + slot, member

    @functools.cached_property
    def _groups(self) -> Order:
        return Order(self.size // self.group, self.seed)


@dataclasses.dataclass(frozen=True)
class MixedOrder:
    """The order of a mixture: see :mod:`jaxtrain.data.mixture`. Constant memory, as for one source.

    Args:
        sizes: examples of each source.
        places: of each source in an epoch; together as many as there are examples.
        seed: of all permutations.
    """

    sizes: tuple[int, ...]
    places: tuple[int, ...]
    seed: int

    @property
    def size(self) -> int:
        """Examples of all sources, and places in an epoch."""
        return sum(self.sizes)

    def __call__(self, position: int) -> int:
        """The example at a position of the endless order, counted over all sources."""
        own_places, of_sources = self._orders
        place = own_places(position)
        begins = [0, *itertools.accumulate(self.places)]
        part = bisect.bisect_right(begins, place) - 1
        turn = position // self.size * self.places[part] + place - begins[part]
        return sum(self.sizes[:part]) + of_sources[part](turn)

    @functools.cached_property
    def _orders(self) -> tuple[Order, list[Order]]:
        seeds = [int(generator(self.seed, i).integers(2**31)) for i in range(len(self.sizes))]
        return Order(self.size, self.seed), [
            Order(size, seed) for size, seed in zip(self.sizes, seeds, strict=True)
        ]

    def __getstate__(self) -> dict[str, Any]:
        return {"sizes": self.sizes, "places": self.places, "seed": self.seed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


AnyOrder = Order | GroupedOrder | MixedOrder


def of(source: Source, seed: int) -> AnyOrder:
    """The order in which a source's examples are seen."""
    if isinstance(source, Grouped) and source.group > 1:
        return GroupedOrder(len(source), seed, source.group, source.spread)
    if isinstance(source, Mixture):
        return MixedOrder(source.sizes, source.places, seed)
    return Order(len(source), seed)


def generator(seed: int, *place: int) -> np.random.Generator:
    """Randomness that depends on its arguments alone (Philox, keyed by all of them)."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, *place))))


@dataclasses.dataclass(frozen=True)
class TrainingRows:
    """Rows that one process loads, in its order: row -> example with weight one.

    Args:
        source: the training split.
        order: position -> example.
        start: examples seen before the first row's batch.
        batch_size: global.
        first: this process's first row within a global batch.
        rows: this process's rows of a global batch.
        batches: how many batches there are to come.
        quarantine: where broken examples are recorded.
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
        """The position in the order of one of this process's rows of a batch still to come."""
        return self.start + batch * self.batch_size + self.first + row

    def load(self, positions: Sequence[int]) -> list[dict[str, np.ndarray]]:
        """The examples at these positions; those of one group are made together."""
        made = self._first_try(positions)
        return [self._good(position, made.pop(position)) for position in positions]

    def _first_try(self, positions: Sequence[int]) -> dict[int, Tried]:
        if not isinstance(self.order, GroupedOrder):
            return {position: self._try(position, self.order(position)) for position in positions}
        assert isinstance(self.source, Grouped)
        by_group: dict[int, dict[int, int]] = {}
        for position in positions:
            place, member = self.order.place(position)
            by_group.setdefault(place, {})[position] = member
        made: dict[int, Tried] = {}
        for place, members in by_group.items():
            begin = self.order.begin(place)
            indices = [begin + member for member in members.values()]
            rngs = [generator(self.order.seed, position, 0) for position in members]
            # Three numbers, as two are those of an example's generator.
            shared = generator(self.order.seed, place, 0, 1)
            tried = self.source.together(indices, rngs, shared)
            made |= dict(zip(members, zip(indices, tried, strict=True), strict=True))
        return made

    def _try(self, position: int, index: int, attempt: int = 0) -> Tried:
        try:
            rng = generator(self.order.seed, position, attempt)
            if attempt:
                # A substitute is drawn from the whole data, so that the neighbours of a broken
                # example are not seen more often than others.
                index = int(rng.integers(self.order.size))
            return index, self.source.example(index, rng)
        except BadExample as bad:
            return index, bad

    def _good(self, position: int, tried: Tried) -> dict[str, np.ndarray]:
        """What was made for a position, or a substitute."""
        for attempt in range(1, MAX_SUBSTITUTES + 1):
            index, made = tried
            if not isinstance(made, BadExample):
                return made | {WEIGHT: np.array(1, np.float32), ID: np.array(index, np.int64)}
            self.quarantine.add(made, found="training", position=position)
            if attempt < MAX_SUBSTITUTES:
                tried = self._try(position, index, attempt)
        raise InputError(
            f"{MAX_SUBSTITUTES} examples in a row are broken at position {position}; the last: "
            f"example {index}; {self.quarantine.path} lists them: mend or remove these files"
        )


@dataclasses.dataclass(frozen=True)
class ValidationRows:
    """Rows of the validation batches of one process: examples evenly spaced over the split.

    The last batch is filled up with rows of weight zero, and so is the place of a broken example:
    a metric divides by the weights.

    Args:
        source: the validation split.
        seed: randomness of an example is a function of this and of its index.
        examples: how many are used, at most all.
        batch_size: global.
        first: this process's first row within a global batch.
        rows: this process's rows of a global batch.
        blank: makes an example of zeros.
        quarantine: where broken examples are recorded.
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
        place = batch * self.batch_size + self.first + offset
        weight, example = np.array(0, np.float32), None
        if place < self.examples:
            index = place * len(self.source) // self.examples
            try:
                example = self.source.example(index, generator(self.seed, index))
                weight = np.array(1, np.float32)
            except BadExample as bad:
                self.quarantine.add(bad, found="validation", position=place)
        return (self.blank() if example is None else example) | {WEIGHT: weight}
