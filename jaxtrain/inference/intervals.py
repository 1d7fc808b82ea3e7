"""What a few numbers say about all of their kind: Student's intervals, and paired tests."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95
Values = Sequence[float] | np.ndarray
_EXACT = 12  # up to so many differences all their signs are tried
_FLIPS = 20_000
_CHUNK = 1_000


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Of a mean.

    Attributes:
        mean: of the values.
        std: of the values (with n - 1); None for a single one.
        low, high: Student's interval that holds the true mean with a confidence of 95%; None for a
            single value.
        count: of the values.
    """

    mean: float
    std: float | None
    low: float | None
    high: float | None
    count: int


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of two means over the same things.

    Attributes:
        estimate: of the mean difference.
        p_student: probability of one as large if there were none: paired t-test, two-sided.
        p_signs: the same by flipping signs at random, which assumes no distribution. Both are None
            for a single value.
    """

    estimate: Estimate
    p_student: float | None
    p_signs: float | None


def estimate(values: Values) -> Estimate:
    """What values say of their mean; there must be at least one."""
    array = np.asarray(values, np.float64)
    count, mean = len(array), float(array.mean())
    if count < 2:
        return Estimate(mean, None, None, None, count)
    std = float(array.std(ddof=1))
    reach = student_quantile((1 + CONFIDENCE) / 2, count - 1) * std / math.sqrt(count)
    return Estimate(mean, std, mean - reach, mean + reach, count)


def difference(first: Values, second: Values) -> Difference:
    """Second minus first, pair by pair."""
    gaps = np.asarray(second, np.float64) - np.asarray(first, np.float64)
    found = estimate(gaps)
    if found.std is None:
        return Difference(found, None, None)
    if found.std == 0:
        p = 1.0 if found.mean == 0 else 0.0
        return Difference(found, p, signs_test(gaps))
    t = abs(found.mean) / (found.std / math.sqrt(found.count))
    return Difference(found, _student_beyond(t, found.count - 1), signs_test(gaps))


def signs_test(gaps: np.ndarray) -> float:
    """Share of all ways to sign the differences whose mean is as far from zero; two-sided.

    Up to 12 differences all ways are tried; above, 20,000 drawn with a fixed seed, and the one
    that was seen counts too, so that no share is zero.
    """
    count, seen = len(gaps), abs(float(gaps.sum()))
    least = seen - 1e-12 * float(np.abs(gaps).sum())  # sums differ in their last digits
    if count <= _EXACT:
        signs = np.array(list(itertools.product((-1, 1), repeat=count)))
        return float((np.abs(signs @ gaps) >= least).mean())
    rng = np.random.default_rng(0)
    reached = sum(
        int((np.abs(rng.choice((-1.0, 1.0), (_CHUNK, count)) @ gaps) >= least).sum())
        for _ in range(_FLIPS // _CHUNK)
    )
    return (reached + 1) / (_FLIPS + 1)


def student_quantile(share: float, freedom: int) -> float:
    """The value that a share of Student's distribution stays below."""
    from scipy import special  # imported here: no other command pays for it

    return float(special.stdtrit(freedom, share))


def _student_beyond(t: float, freedom: int) -> float:
    """Probability that |T| > t."""
    from scipy import special

    return float(2 * special.stdtr(freedom, -t))
