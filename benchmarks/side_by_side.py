"""Two programs that do the same work, timed in turn in one process: both see one machine."""

import dataclasses
import time
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Times of a step of ours and of theirs, s, in the order in which they were measured."""

    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """How many times as long as ours theirs takes: ratio of medians."""
        return float(np.median(self.theirs) / np.median(self.ours))

    @property
    def range(self) -> tuple[float, float]:
        """The least and the largest ratio of neighbours."""
        ratios = np.divide(self.theirs, self.ours)
        return float(ratios.min()), float(ratios.max())


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two.

    Attributes:
        step: hands over one step's work.
        finish: waits until all that was handed over is done.
    """

    step: Callable[[], object]
    finish: Callable[[], object]

    def seconds(self, steps: int) -> float:
        """Time of one of ``steps`` steps, handed over one behind the other as a loop does."""
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.finish()
        return (time.perf_counter() - began) / steps


def alternate(ours: Side, theirs: Side, *, rounds: int, steps: int, warm_up: int) -> Comparison:
    """Times both in turn.

    Args:
        ours: one side.
        theirs: the other.
        rounds: measurements of each.
        steps: in a measurement.
        warm_up: steps of each that do not count.
    """
    for side in (ours, theirs):
        side.seconds(warm_up)
    pairs = [(ours.seconds(steps), theirs.seconds(steps)) for _ in range(rounds)]
    return Comparison(*map(tuple, zip(*pairs, strict=True)))


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    """Of two loss curves, relative to theirs."""
    return float(np.max(np.abs(np.subtract(ours, theirs)) / np.abs(theirs)))
