"""Times repeated actions."""

import dataclasses
import time
from collections.abc import Callable

import numpy as np

Clock = Callable[[], float]


@dataclasses.dataclass(frozen=True)
class Times:
    """Measured times of one action, in seconds."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The median."""
        return float(np.median(self.seconds))

    @property
    def mean_s(self) -> float:
        """The mean, for rates over all of them."""
        return float(np.mean(self.seconds))

    @property
    def p95_s(self) -> float:
        """The 95th percentile."""
        return float(np.percentile(self.seconds, 95))

    @property
    def spread(self) -> float:
        """Half the interquartile range, as a fraction of the median."""
        first, third = np.percentile(self.seconds, (25, 75))
        return float((third - first) / 2 / self.median_s)

    def summary(self) -> dict[str, float]:
        """Returns the statistics as a JSON-able dict."""
        return {
            "median_s": self.median_s,
            "p95_s": self.p95_s,
            "spread": self.spread,
            "count": len(self.seconds),
        }


def measure(
    action: Callable[[], object],
    *,
    at_least: int,
    at_most_s: float,
    at_most: int = 1000,
    clock: Clock = time.perf_counter,
) -> Times:
    """Times ``action`` repeatedly; it must return only when its work is done.

    Args:
        at_most_s: stops after this many seconds, once ``at_least`` is reached.
        clock: monotonic seconds.
    """
    action()
    times: list[float] = []
    began = clock()
    while len(times) < at_most and (len(times) < at_least or clock() - began < at_most_s):
        before = clock()
        action()
        times.append(clock() - before)
    return Times(tuple(times))
