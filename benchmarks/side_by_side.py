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
        """First and third quartile of the ratios of neighbours."""
        low, high = np.percentile(np.divide(self.theirs, self.ours), (25, 75))
        return float(low), float(high)


def alternate(
    ours: Callable[[], None], theirs: Callable[[], None], *, rounds: int, steps: int = 1
) -> Comparison:
    """Times both in turn.

    Args:
        ours: does one step's work and returns when it is done.
        theirs: the same.
        rounds: measurements of each, after one that does not count.
        steps: in a measurement.
    """
    for step in (ours, theirs):
        step()
    pairs = [(seconds(ours, steps), seconds(theirs, steps)) for _ in range(rounds)]
    return Comparison(*map(tuple, zip(*pairs, strict=True)))


def seconds(step: Callable[[], None], steps: int) -> float:
    """Time of one of ``steps`` steps."""
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - began) / steps


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    """Of two loss curves, relative to theirs."""
    return float(np.max(np.abs(np.subtract(ours, theirs)) / np.abs(theirs)))
