"""What a worker makes: some rows of a batch, or of a run of batches.

A batch's rows are divided among workers, so that one batch is under way and not one for each of
them; where there are more workers than parts, others make the batch after it.

Where examples come in groups (clips of one decoding), a group's examples stand in the same row of
successive batches. A worker then makes its rows of a run of batches, all examples of its groups at
once, and nothing has to be remembered from one to the next.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxtrain.data import sampler
from jaxtrain.data.sampler import TrainingRows

Arrays = dict[str, np.ndarray]

_IN_HAND = 3  # batches that the pipeline holds besides those that workers have ready


def parts(rows: int, length: int, workers: int, devices: int) -> int:
    """Into how many equal parts a process's rows of a batch are divided.

    Where there are several devices, a part is what goes to one or more of them, and no rows have
    to be copied together first: a node's batch of clips can be 1.6 GB, three times a second. One
    device takes longer for its batch, and groups for their run, so they may have more parts.

    Args:
        rows: of a batch that the process loads; its devices divide them evenly.
        length: batches of a run; 1 is without groups.
        workers: of the process.
        devices: of the process.
    """
    most = devices if length == 1 and devices > 1 else rows
    return math.gcd(most, max(1, workers))


def run_length(group: int, spread: int, batch_size: int) -> int:
    """Batches of a run: those over which a group is spread."""
    return group * max(1, spread // batch_size)


def buffered(prefetch: int, parts: int, length: int) -> int:
    """Elements that a worker holds ready: ``prefetch``; of runs about as many whole batches."""
    return prefetch if length == 1 else max(1, prefetch * parts // length)


def held(rows: int, length: int, workers: int, prefetch: int, devices: int) -> float:
    """Batches that lie in shared memory at most: ready, in the making, and in the main process.

    Args:
        rows: of a batch that the process loads.
        length: batches of a run; 1 is without groups.
        workers: of the process.
        prefetch: as in the config.
        devices: of the process.
    """
    share = parts(rows, length, workers, devices)
    elements = workers * (buffered(prefetch, share, length) + 1)
    run_in_hand = 0 if length == 1 else length
    return elements * length / share + run_in_hand + _IN_HAND


@dataclasses.dataclass(frozen=True)
class Runs:
    """Element ``r * parts + p`` is part p of each batch of run r.

    Args:
        rows: what the batches are made of.
        parts: into which a batch's rows are divided; divides them.
    """

    rows: TrainingRows
    parts: int

    @property
    def length(self) -> int:
        """Batches of a run."""
        groups = self.rows.order
        if not isinstance(groups, sampler.GroupedOrder):
            return 1
        return run_length(groups.group, groups.spread, self.rows.batch_size)

    @property
    def first(self) -> int:
        """Batches of the first run: a training that goes on within a block goes on to its end."""
        groups = self.rows.order
        if not isinstance(groups, sampler.GroupedOrder):
            return 1
        left = -self.rows.start % (groups.group * groups.spread)
        return min(-(-left // self.rows.batch_size) or self.length, self.length)

    def __len__(self) -> int:
        return self.rows.batches // self.length * self.parts

    def __getitem__(self, element: Any) -> tuple[Arrays, ...]:
        run, part = divmod(int(element), self.parts)
        begin = self.first + (run - 1) * self.length if run else 0
        length = self.length if run else self.first
        share = self.rows.rows // self.parts
        places = [
            self.rows.position(batch, row)
            for batch in range(begin, begin + length)
            for row in range(part * share, (part + 1) * share)
        ]
        examples = self.rows.load(places)
        return tuple(
            {name: np.stack([one[name] for one in own]) for name in own[0]}
            for own in (examples[i : i + share] for i in range(0, len(examples), share))
        )


class Joined(Iterator[list[Arrays]]):
    """Batches, one after the other, each as the list of its parts, of the elements of a `Runs`.

    Args:
        elements: in order.
        parts: into which a batch is divided.
    """

    def __init__(self, elements: Iterator[tuple[Arrays, ...]], parts: int) -> None:
        self._elements = elements
        self._parts = parts
        self._run: collections.deque[list[Arrays]] = collections.deque()

    def __next__(self) -> list[Arrays]:
        if not self._run:
            elements = [next(self._elements) for _ in range(self._parts)]
            self._run.extend(map(list, zip(*elements, strict=True)))
        return self._run.popleft()

    def close(self) -> None:
        """Lets go of what has come, and closes the elements."""
        self._run.clear()
        close = getattr(self._elements, "close", None)
        if close is not None:
            close()
        self._elements = iter(())
