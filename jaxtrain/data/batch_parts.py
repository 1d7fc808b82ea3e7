"""Divides batches, and runs of batches, among worker processes.

The rows of a batch are divided among workers, so that they load one batch together instead of one
batch each. If there are more workers than parts, the others load the next batch.

A run is a number of consecutive batches. If examples come in groups (clips that share a decoding),
a group's examples are in the same row of consecutive batches. A worker then loads its rows of a
complete run, with all examples of its groups at once, and keeps no state between runs.
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

# Smaller arrays are sent through a pipe, because creating, mapping and freeing shared memory costs
# more. But a worker's prefetched batches must fit into the pipe (64 KiB): when the run stops, they
# are no longer read, and Grain waits 25 s for a worker that is blocked on writing them.
MIN_SHARED_BYTES = 2**12

_IN_HAND = 3  # batches that the pipeline holds in addition to those that workers have ready


def parts(rows: int, length: int, workers: int, devices: int) -> int:
    """Returns the number of equal parts into which a process's rows of a batch are divided.

    With several devices, a part holds the rows of one or more complete devices, so no rows are
    concatenated first: a node's batch of clips can be 1.6 GB, three times per second. A single
    device, or a run of groups, leaves more time for that, so there may be more parts.

    Args:
        rows: rows of a batch that the process loads; a multiple of ``devices``.
        length: batches per run; 1 without groups.
        workers: workers of the process.
        devices: devices of the process.
    """
    most = devices if length == 1 and devices > 1 else rows
    return math.gcd(most, max(1, workers))


def run_length(group: int, spread: int, batch_size: int) -> int:
    """Returns the number of batches per run, over which each group is spread."""
    return group * max(1, spread // batch_size)


def buffered(prefetch: int, parts: int, length: int) -> int:
    """Returns how many elements a worker holds ready.

    Without groups these are ``prefetch`` parts; with groups, about ``prefetch`` complete batches.
    """
    return prefetch if length == 1 else max(1, prefetch * parts // length)


def held(rows: int, length: int, workers: int, prefetch: int, devices: int) -> float:
    """Returns the largest number of batches in shared memory.

    Counts the batches that are ready, being loaded, and in the main process.

    Args:
        rows: rows of a batch that the process loads.
        length: batches per run; 1 without groups.
        workers: workers of the process.
        prefetch: ``data.prefetch``.
        devices: devices of the process.
    """
    share = parts(rows, length, workers, devices)
    elements = workers * (buffered(prefetch, share, length) + 1)
    run_in_hand = 0 if length == 1 else length
    return elements * length / share + run_in_hand + _IN_HAND


@dataclasses.dataclass(frozen=True)
class Runs:
    """A sequence whose element ``r * parts + p`` is part p of each batch of run r.

    Args:
        rows: rows of the batches.
        parts: number of parts of a batch; divides the number of rows.
    """

    rows: TrainingRows
    parts: int

    @property
    def length(self) -> int:
        """Returns the number of batches per run."""
        groups = self.rows.order
        if not isinstance(groups, sampler.GroupedOrder):
            return 1
        return run_length(groups.group, groups.spread, self.rows.batch_size)

    @property
    def first(self) -> int:
        """Returns the number of batches of the first run: a resume within a block completes it."""
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
    """Yields batches, each as the list of its parts, from the elements of a `Runs`.

    Args:
        elements: elements of the `Runs`, in order.
        parts: number of parts of a batch.
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
        """Releases the batches that are held, and closes the elements."""
        self._run.clear()
        close = getattr(self._elements, "close", None)
        if close is not None:
            close()
        self._elements = iter(())
