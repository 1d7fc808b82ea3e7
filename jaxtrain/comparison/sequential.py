"""An interval for the mean of paired differences that is valid after every pair.

A user looks after each pair and stops when the result is clear, which invalidates a t test: with a
look after each of 200 pairs from the sixth on, a t test at 5% finds a difference between equals in
about four of ten experiments (tests/comparison/test_sequential.py measures it).

**The bet.** Suppose that the differences ``d`` are distributed symmetrically around ``theta``.
Then, whatever the magnitudes ``|d - theta|`` are, each sign is a fair coin, and a gambler who bets
on the signs gains nothing on average. With a stake that depends on the magnitudes, one bet
multiplies the gambler's wealth by ``2 / (1 + exp(-2 x))``, where ``x`` is the difference in units
of the root mean square of all differences so far, times a boldness (the self-normalized
supermartingale of de la Peña, https://doi.org/10.1214/aop/1022677285, as a product of fair bets).
The wealth is the mean of six gamblers: three degrees of boldness, for both signs. By Ville's
inequality, it exceeds ``1 / level`` at *any* time with a probability of at most ``level``. So the
values of ``theta`` against which the wealth has never exceeded ``1 / level`` are a confidence
sequence (https://doi.org/10.1214/20-AOS1991): it contains the true center at all looks together
with a probability of at least ``1 - level``.

**When it is exact.** There is no assumption on the variance or the tails, but one on symmetry. If
the two sides do not differ, they can be exchanged, the differences are symmetric around 0, and a
verdict of a difference is false in at most ``level`` of the experiments. For a real difference the
interval is one for the center of symmetry, if there is one. If there is none, as when one in ten
runs of a side collapses, "better" means that the side is better in most pairs, and its mean may be
worse. :func:`looks_symmetric` finds that in some of these cases (benchmarks/compare_simulated.py).

**The price.** No two-sided verdict at 5% is possible before the sixth pair: six coins that all show
the same side have a probability of 2/64. Measured by simulation: if the mean difference is as large
as its standard deviation, the median is 12 pairs; half as large, 37; twice, 7.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

LEVEL = 0.05

# Chosen by simulation: among eight mixtures, the fewest pairs for differences of 0.5 to 4 standard
# deviations together (benchmarks/LOG.md).
_BOLDNESS = (0.5, 1.5, 4.0)
_SHARES = (0.3, 0.4, 0.3)

_GRID = 2001
_BEYOND = 4.0  # how far the grid reaches beyond the differences, in units of their range
_BISECTIONS = 50
_LEAST_IN_TRIPLES, _MOST_IN_TRIPLES = 6, 60
_TRIPLES_Z = 1.96


@dataclasses.dataclass(frozen=True)
class Interval:
    """The values that the center of the differences may have, after some pairs.

    Attributes:
        low: infinite if no value is too low.
        high: likewise.
        center: the estimate of the center of symmetry, which is never outside: the median of the
            means of all pairs of differences (Hodges and Lehmann), or the nearest end.
        symmetric: whether the differences look symmetric around a value in the interval.
    """

    low: float
    high: float
    center: float
    mean: float
    symmetric: bool = True

    def excludes(self, value: float) -> bool:
        """Whether the center is not this one."""
        return not self.low <= value <= self.high

    def is_within(self, practical: float) -> bool:
        """Whether the center is smaller than ``practical``, in either direction."""
        return -practical < self.low and self.high < practical


def interval(differences: Sequence[float], level: float = LEVEL) -> Interval:
    """Returns the interval after these pairs.

    Args:
        differences: of each pair, in the order of the pairs; finite.
        level: the probability that the interval ever misses the center of symmetry.
    """
    d = np.asarray(differences, np.float64)
    if not d.size:
        return Interval(-math.inf, math.inf, math.nan, math.nan)
    if not np.isfinite(d).all():
        raise ValueError(f"differences must be finite: {d.tolist()}")
    smallest, largest = float(d.min()), float(d.max())
    reach = _BEYOND * (largest - smallest or abs(largest) or 1.0)
    grid = np.unique(np.concatenate([np.linspace(smallest - reach, largest + reach, _GRID), d]))
    possible = np.flatnonzero(_peak_log_wealth(d, grid) < -math.log(level))
    mean = float(d.mean())
    middle = center(d)
    if not possible.size:  # the differences are not symmetric around anything
        return Interval(-math.inf, math.inf, middle, mean, symmetric=False)
    first, last = possible[0], possible[-1]
    low = -math.inf if first == 0 else _edge(d, grid[first], grid[first - 1], level)
    high = math.inf if last == grid.size - 1 else _edge(d, grid[last], grid[last + 1], level)
    symmetric = low <= mean <= high and looks_symmetric(d)
    return Interval(low, high, min(max(middle, low), high), mean, symmetric)


def fewest_pairs(level: float = LEVEL) -> int:
    """Returns the first pair at which a verdict of a difference is possible.

    Each pair at most doubles the wealth of a gambler, and half of the six bet on the wrong sign.
    """
    return math.ceil(1 - math.log2(level))


def looks_symmetric(differences: Sequence[float] | np.ndarray) -> bool:
    """Returns whether differences may be symmetric around some value.

    It counts in which triples of them the middle one is nearer to the smallest than to the largest
    (Randles, Fligner, Policello, and Wolfe, https://doi.org/10.1080/01621459.1980.10477439), and
    takes at most the last 60. It finds 5% of normal samples not symmetric, and may miss
    others: a side that rarely collapses looks symmetric until it does.
    """
    d = np.asarray(differences, np.float64)[-_MOST_IN_TRIPLES:]
    count = d.size
    if count < _LEAST_IN_TRIPLES:
        return True
    above = np.sign(d[:, None, None] + d[None, :, None] - 2 * d[None, None, :])
    kernel = (above + above.transpose(0, 2, 1) + above.transpose(2, 1, 0)) / 3
    each = np.arange(count)
    kernel[each, each, :] = kernel[each, :, each] = kernel[:, each, each] = 0
    skew = kernel.sum() / (count * (count - 1) * (count - 2))
    of_one = ((kernel.sum((1, 2)) / ((count - 1) * (count - 2)) - skew) ** 2).mean()
    of_two = (kernel.sum(2) / (count - 2))[np.triu_indices(count, 1)]
    variance = (
        math.comb(count - 3, 2) * 3 * of_one
        + (count - 3) * 3 * ((of_two - skew) ** 2).mean()
        + (1 / 9 - skew**2)
    ) / math.comb(count, 3)
    return bool(skew**2 <= _TRIPLES_Z**2 * max(variance, 0.0)) or not skew


def center(differences: Sequence[float] | np.ndarray) -> float:
    """Returns an estimate of the center of symmetry (Hodges and Lehmann).

    It is the median of the means of all pairs of values, each with itself, too.
    """
    d = np.asarray(differences, np.float64)
    first, second = np.triu_indices(d.size)
    return float(np.median((d[first] + d[second]) / 2))


def evidence(differences: Sequence[float]) -> float:
    """Returns the largest wealth so far of a gambler against "there is no difference".

    ``1 / evidence`` is a p value that is valid at any time, if it is below 1.
    """
    d = np.asarray(differences, np.float64)
    return float(np.exp(_peak_log_wealth(d, np.zeros(1))[0])) if d.size else 1.0


def pairs_needed(differences: Sequence[float], level: float = LEVEL) -> int | None:
    """Estimates how many pairs a verdict takes in total, if the next ones are like these.

    It extrapolates how fast the evidence has grown. None if it has not grown: then the difference
    is small beside its noise, and no number of pairs can be named.
    """
    d = np.asarray(differences, np.float64)
    if not d.size:
        return None
    best = max(
        float(np.sum(_log_wealth_of_bet(side * boldness * _units(d))))
        for boldness in _BOLDNESS
        for side in (1, -1)
    )
    if best <= 0:
        return None
    lent = math.log(2 / min(_SHARES))  # what the best gambler lends the others
    return max(d.size, math.ceil(d.size * (lent - math.log(level)) / best))


def _edge(d: np.ndarray, possible: float, impossible: float, level: float) -> float:
    """Returns the value between two at which the wealth first exceeds ``1 / level``."""
    for _ in range(_BISECTIONS):
        middle = (possible + impossible) / 2
        if _peak_log_wealth(d, np.array([middle]))[0] < -math.log(level):
            possible = middle
        else:
            impossible = middle
    return float(possible)


def log_wealth(differences: np.ndarray) -> np.ndarray:
    """Returns the logarithm of the wealth after each pair [..., N], against "the center is 0".

    Args:
        differences: of the pairs, in order [..., N].
    """
    units = _units(differences)
    logs = [
        math.log(share / 2) + np.cumsum(_log_wealth_of_bet(side * boldness * units), axis=-1)
        for boldness, share in zip(_BOLDNESS, _SHARES, strict=True)
        for side in (1, -1)
    ]
    return np.asarray(np.logaddexp.reduce(np.stack(logs), axis=0))


def _peak_log_wealth(d: np.ndarray, centers: np.ndarray) -> np.ndarray:
    """Returns the logarithm of the largest wealth after any pair, against each center [C]."""
    return np.asarray(log_wealth(d[None] - centers[:, None]).max(axis=-1))


def _units(differences: np.ndarray) -> np.ndarray:
    """Returns differences [..., N] in units of the root mean square of those so far.

    Its own magnitude counts, too: a bet may depend on every magnitude, but on no sign to come.
    """
    count = np.arange(1, differences.shape[-1] + 1)
    scale = np.sqrt(np.cumsum(differences**2, axis=-1) / count)
    return differences / np.where(scale > 0, scale, 1.0)


def _log_wealth_of_bet(x: np.ndarray) -> np.ndarray:
    """Returns ``log(2 / (1 + exp(-2 x)))``, whose exponential has mean 1 over the signs of x."""
    return math.log(2) - np.logaddexp(0.0, -2 * x)
