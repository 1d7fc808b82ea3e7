"""Times of something that was done several times."""

import dataclasses
import time
from collections.abc import Callable

import numpy as np

Clock = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Times:
    """Some measured times of the same thing, s."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Half of them took longer."""
        return float(np.median(self.seconds))

    @property
    def mean_s(self) -> float:
        """Of all of them: what a rate over them is made of."""
        return float(np.mean(self.seconds))

    @property
    def p95_s(self) -> float:
        """One of twenty took longer."""
        return float(np.percentile(self.seconds, 95))

    @property
    def spread(self) -> float:
        """Half the distance from the first to the third quartile, as a share of the median."""
        first, third = np.percentile(self.seconds, (25, 75))
        return float((third - first) / 2 / self.median_s)

    def summary(self) -> dict[str, float]:
        """For a JSON file."""
        return {
            "median_s": self.median_s,
            "p95_s": self.p95_s,
            "spread": self.spread,
            "count": len(self.seconds),
        }


def measure(
    action: Callable[[], object],
    *,
    least: int,
    at_most_s: float,
    most: int = 1000,
    clock: Clock = time.perf_counter,
) -> Times:
    """Times ``action`` again and again; it has to return only when its work is done.

    Args:
        action: called once without timing it, then timed.
        least: times at least, however long they take.
        at_most_s: stops after this time, if ``least`` is reached.
        most: times at most.
        clock: seconds, monotonic.
    """
    action()
    found: list[float] = []
    began = clock()
    while len(found) < most and (len(found) < least or clock() - began < at_most_s):
        before = clock()
        action()
        found.append(clock() - before)
    return Times(tuple(found))
