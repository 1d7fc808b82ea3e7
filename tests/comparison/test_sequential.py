"""The interval is valid at every look, whatever the distribution, and finds real differences."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from jaxtrain.comparison import sequential

LOOKS, EXPERIMENTS = 200, 2000
# At a true rate of 5%, 2,000 experiments show more than 6.5% with a probability of 0.1%.
MOST = 0.065

Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
DISTRIBUTIONS: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "laplace": lambda rng, shape: rng.laplace(size=shape),
    "t with 2 degrees of freedom": lambda rng, shape: rng.standard_t(2, size=shape),
    "cauchy": lambda rng, shape: rng.standard_cauchy(size=shape),
    "mixed scales": lambda rng, shape: (
        rng.normal(size=shape) * rng.choice([0.01, 1, 100], size=shape)
    ),
    "growing scale": lambda rng, shape: (
        rng.normal(size=shape) * np.exp(np.linspace(0, 5, shape[1]))
    ),
    "bounded": lambda rng, shape: rng.uniform(-1, 1, size=shape),
    "coins": lambda rng, shape: rng.choice([-1.0, 1.0], size=shape),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_equals_are_found_to_differ_in_one_of_twenty_experiments_at_most(name: str) -> None:
    rng = np.random.default_rng(54)
    most = sequential.log_wealth(DISTRIBUTIONS[name](rng, (EXPERIMENTS, LOOKS))).max(axis=1)
    assert (most >= math.log(20)).mean() <= MOST


def test_a_t_test_after_every_pair_finds_differences_between_equals() -> None:
    """Why the interval is needed: the same experiments, judged as usual."""
    rng = np.random.default_rng(54)
    given = rng.normal(size=(500, LOOKS))
    count = np.arange(1, LOOKS + 1)
    mean = np.cumsum(given, axis=1) / count
    variance = (np.cumsum(given**2, axis=1) - count * mean**2)[:, 5:] / (count[5:] - 1)
    t = np.abs(mean[:, 5:]) / np.sqrt(variance / count[5:])
    # The 97.5% quantile of t at 5 degrees of freedom, the largest here.
    assert (t > 2.571).any(axis=1).mean() > 0.15


@pytest.mark.parametrize(
    ("difference", "median"), [(0.5, 45), (1.0, 13), (2.0, 7), (4.0, 7)], ids=str
)
def test_a_difference_is_found_within_pairs(difference: float, median: int) -> None:
    """In units of the standard deviation of a pair."""
    rng = np.random.default_rng(54)
    given = rng.normal(difference, 1, size=(EXPERIMENTS, LOOKS))
    found = sequential.log_wealth(given) >= math.log(20)
    needed = np.where(found.any(axis=1), found.argmax(axis=1) + 1, LOOKS + 1)
    assert np.median(needed) <= median
    assert needed.min() >= 6


def test_no_verdict_is_possible_before_the_sixth_pair() -> None:
    for pairs in range(1, 6):
        assert not sequential.interval([1.0] * pairs).excludes(0.0)
        assert not sequential.interval([1e9, *[1e-9] * (pairs - 1)]).excludes(0.0)
    assert sequential.interval([1.0] * 7).excludes(0.0)


@pytest.mark.parametrize("name", ["normal", "cauchy", "mixed scales"])
def test_the_interval_contains_the_center_and_shrinks(name: str) -> None:
    rng = np.random.default_rng(54)
    missed = 0
    for given in DISTRIBUTIONS[name](rng, (40, 20)) + 3.0:
        before = sequential.Interval(-math.inf, math.inf, math.nan, math.nan)
        for pairs in (6, 8, 12, 20):
            now = sequential.interval(given[:pairs])
            assert before.low <= now.low + 1e-9
            assert now.high <= before.high + 1e-9
            before = now
        missed += before.excludes(3.0)
    assert missed <= 6  # at 5%, 40 experiments miss more than 6 with a probability of 0.3%


def test_the_interval_does_not_depend_on_units_and_mirrors() -> None:
    given = np.random.default_rng(54).normal(0.3, 1, size=20)
    one = sequential.interval(given)
    scaled = sequential.interval(1e-6 * given)
    mirrored = sequential.interval(-given)
    assert scaled.low == pytest.approx(1e-6 * one.low)
    assert scaled.high == pytest.approx(1e-6 * one.high)
    assert (mirrored.low, mirrored.high) == pytest.approx((-one.high, -one.low))


def test_the_verdict_of_the_interval_is_that_of_the_evidence() -> None:
    rng = np.random.default_rng(54)
    for effect in (0.0, 0.8, 3.0):
        for _ in range(20):
            given = rng.normal(effect, 1, size=12)
            found = sequential.evidence(given) >= 20
            assert sequential.interval(given).excludes(0.0) == found


def test_equal_differences_have_a_point_as_interval_and_zero_proves_nothing() -> None:
    zero = sequential.interval([0.0] * 12)
    assert (zero.low, zero.high) == pytest.approx((0, 0), abs=1e-6)
    assert sequential.evidence([0.0] * 50) == pytest.approx(1.0)
    assert zero.is_within(0.01)
    assert not zero.excludes(0.0)


def test_differences_that_are_symmetric_around_nothing_have_no_interval() -> None:
    """It would be a point, and look like certainty."""
    found = sequential.interval([0.0] * 12 + [1.0] * 12)
    assert (found.low, found.high, found.mean) == (-math.inf, math.inf, 0.5)
    assert not found.symmetric


@pytest.mark.parametrize("name", ["cauchy", "exponential", "lognormal", "collapses"])
def test_what_is_printed_as_the_center_is_in_the_interval(name: str) -> None:
    """The mean is not, in up to a third of such experiments."""
    rng = np.random.default_rng(56)
    draws = {
        "cauchy": lambda: rng.standard_cauchy(20),
        "exponential": lambda: rng.exponential(size=20) - 1,
        "lognormal": lambda: np.exp(rng.normal(size=20)) - math.exp(0.5),
        "collapses": lambda: np.where(rng.random(20) < 0.1, -9, 1) + 0.1 * rng.normal(size=20),
    }
    outside = 0
    for _ in range(10):
        given = draws[name]()
        for pairs in (2, 20):
            found = sequential.interval(given[:pairs])
            assert found.low <= found.center <= found.high
            outside += not found.low <= found.mean <= found.high
            assert found.symmetric <= (found.low <= found.mean <= found.high)
    assert outside or name != "cauchy"


def test_skewed_differences_do_not_look_symmetric() -> None:
    rng = np.random.default_rng(54)

    def rejected(draw: Callable[[], np.ndarray]) -> float:
        return float(np.mean([not sequential.looks_symmetric(draw()) for _ in range(100)]))

    assert rejected(lambda: rng.normal(size=12)) <= 0.1
    assert rejected(lambda: rng.exponential(size=20)) >= 0.6
    assert rejected(lambda: np.exp(rng.normal(size=20))) >= 0.7
    assert sequential.looks_symmetric([1.0] * 5)
    assert sequential.looks_symmetric([0.0] * 20)
    assert sequential.looks_symmetric([-1.0, 1.0] * 10)


def test_the_first_possible_verdict_depends_on_the_level() -> None:
    assert sequential.fewest_pairs() == 6
    for changes in (1, 2, 5, 10):
        level = sequential.LEVEL / changes
        least = sequential.fewest_pairs(level)
        for pairs in range(1, least):
            growing = 10.0 ** np.arange(pairs)
            assert not sequential.interval(growing, level).excludes(0.0)
        assert sequential.interval([1.0] * (least + 1), level).excludes(0.0)


def test_the_evidence_is_the_mean_wealth_of_six_gamblers() -> None:
    """Of two equal differences, each of which is 1 in units of their root mean square."""
    wealth = sum(
        share / 2 * (2 / (1 + math.exp(-2 * side * boldness))) ** 2
        for boldness, share in ((0.5, 0.3), (1.5, 0.4), (4.0, 0.3))
        for side in (1, -1)
    )
    assert sequential.evidence([7.0, 7.0]) == pytest.approx(wealth)


def test_the_pairs_needed_are_of_the_right_order() -> None:
    rng = np.random.default_rng(54)
    for effect, low, high in ((1.0, 8, 30), (3.0, 6, 10)):
        estimates = [sequential.pairs_needed(rng.normal(effect, 1, size=5)) for _ in range(200)]
        known = [one for one in estimates if one is not None]
        assert len(known) > 150
        assert low <= np.median(known) <= high
    assert sequential.pairs_needed([]) is None
    assert sequential.pairs_needed([1.0, -1.0]) is None


def test_a_difference_of_nan_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        sequential.interval([0.1, math.nan])
