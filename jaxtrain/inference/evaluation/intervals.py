"""Statistics of small samples: Student's t intervals and paired tests."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95
Values = Sequence[float] | np.ndarray
_EXACT = 12  # up to this many differences, the sign-flip test is exact
_FLIPS = 20_000
_CHUNK = 1_000


@dataclasses.dataclass(frozen=True)
class Estimate:
    """An estimate of a mean.

    Attributes:
        std: sample standard deviation (n - 1); None for a single value.
        low, high: Student's t interval of the mean at 95% confidence; None for a single value.
    """

    mean: float
    std: float | None
    low: float | None
    high: float | None
    count: int


@dataclasses.dataclass(frozen=True)
class Difference:
    """The difference of two means over the same items.

    Attributes:
        p_student: p-value of the paired t-test, two-sided; None for a single value.
        p_signs: p-value of the sign-flip test, two-sided, which assumes no distribution; None for a
            single value.
    """

    estimate: Estimate
    p_student: float | None
    p_signs: float | None


def estimate(values: Values, limits: tuple[float, float] = (-math.inf, math.inf)) -> Estimate:
    """Estimates the mean of values, of which there is at least one.

    Args:
        limits: the smallest and the largest possible value; the interval ends there.
    """
    array = np.asarray(values, np.float64)
    count, mean = len(array), float(array.mean())
    if count < 2:
        return Estimate(mean, None, None, None, count)
    std = float(array.std(ddof=1))
    reach = student_quantile((1 + CONFIDENCE) / 2, count - 1) * std / math.sqrt(count)
    low, high = max(mean - reach, limits[0]), min(mean + reach, limits[1])
    return Estimate(mean, std, low, high, count)


def difference(first: Values, second: Values) -> Difference:
    """Estimates the mean of second minus first, pair by pair."""
    gaps = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    gap = estimate(gaps)
    if gap.std is None:
        return Difference(gap, None, None)
    if gap.std == 0:
        p = 1.0 if gap.mean == 0 else 0.0
        return Difference(gap, p, signs_test(gaps))
    t = abs(gap.mean) / (gap.std / math.sqrt(gap.count))
    from scipy import special  # imported here: other commands do not need it

    beyond = float(2 * special.stdtr(gap.count - 1, -t))  # the probability that |T| > t
    return Difference(gap, beyond, signs_test(gaps))


def signs_test(gaps: np.ndarray) -> float:
    """Two-sided sign-flip test: fraction of sign patterns with a mean at least as far from zero.

    For up to 12 differences all patterns are tried. For more, 20,000 are drawn with a fixed seed,
    and the observed one is added, so that the fraction is never zero.
    """
    count, observed = len(gaps), abs(float(gaps.sum()))
    threshold = observed - 1e-12 * float(np.abs(gaps).sum())  # sums differ in their last digits
    if count <= _EXACT:
        signs = np.array(list(itertools.product((-1, 1), repeat=count)))
        return float((np.abs(signs @ gaps) >= threshold).mean())
    rng = np.random.default_rng(0)
    reached = sum(
        int((np.abs(rng.choice((-1.0, 1.0), (_CHUNK, count)) @ gaps) >= threshold).sum())
        for _ in range(_FLIPS // _CHUNK)
    )
    return (reached + 1) / (_FLIPS + 1)


def student_quantile(share: float, freedom: int) -> float:
    """Quantile of Student's t distribution; ``share`` is the probability below it."""
    from scipy import special

    return float(special.stdtrit(freedom, share))
