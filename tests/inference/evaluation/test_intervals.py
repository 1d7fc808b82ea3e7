"""Student's intervals and paired tests, against printed tables and SciPy's numbers."""

import numpy as np
import pytest

from jaxtrain.inference.evaluation import intervals


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [  # from any table of Student's t
        (0.975, 1, 12.7062),
        (0.975, 2, 4.3027),
        (0.975, 3, 3.1824),
        (0.975, 10, 2.2281),
        (0.975, 29, 2.0452),
        (0.975, 120, 1.9799),
        (0.95, 5, 2.0150),
        (0.995, 8, 3.3554),
    ],
)
def test_quantiles(probability: float, freedom: int, value: float) -> None:
    assert intervals.student_quantile(probability, freedom) == pytest.approx(value, abs=6e-5)


def test_an_interval() -> None:
    found = intervals.estimate([1.0, 2.0, 3.0, 4.0])
    assert (found.mean, found.count) == (2.5, 4)
    assert found.std == pytest.approx(np.sqrt(5 / 3))
    assert found.low is not None
    assert found.high is not None
    assert found.high - 2.5 == pytest.approx(2.5 - found.low)
    assert found.high - 2.5 == pytest.approx(3.18245 * np.sqrt(5 / 3) / 2, rel=1e-5)
    alone = intervals.estimate([7.0])
    assert (alone.mean, alone.std, alone.low, alone.high) == (7.0, None, None, None)


def test_intervals_have_their_nominal_coverage() -> None:
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(1000):
        found = intervals.estimate(rng.normal(3.0, 2.0, 6))
        assert found.low is not None
        assert found.high is not None
        covered += found.low < 3.0 < found.high
    assert 930 <= covered <= 968


def test_paired_t_test() -> None:
    """Student's own data on sleep (1908): t = 4.0621, p = 0.002833."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    found = intervals.difference(first, second)
    assert found.estimate.mean == pytest.approx(1.58)
    assert found.p_student == pytest.approx(0.002833, abs=1e-6)
    assert found.p_signs == 2 / 512  # one zero is dropped; the rest have one sign
    other_way = intervals.difference(second, first)
    assert other_way.estimate.mean == pytest.approx(-1.58)
    assert (other_way.p_student, other_way.p_signs) == (found.p_student, found.p_signs)


def test_exact_and_sampled_sign_tests_agree() -> None:
    rng = np.random.default_rng(1)
    few = rng.normal(0.4, 1.0, 12)
    exact = intervals.signs_test(few)
    sampled = intervals.signs_test(np.append(few, 0.0))  # a zero only changes the method
    assert sampled == pytest.approx(exact, abs=0.01)
    assert intervals.signs_test(np.append(few, 0.0)) == sampled


def test_no_difference_and_a_constant_one() -> None:
    none = intervals.difference([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert (none.p_student, none.p_signs) == (1.0, 1.0)
    constant = intervals.difference([1.0, 2.0, 3.0], [2.0, 3.0, 4.0])
    assert (constant.p_student, constant.p_signs) == (0.0, 0.25)
    single = intervals.difference([1.0], [2.0])
    assert (single.p_student, single.p_signs) == (None, None)


def test_tests_have_their_nominal_error_rate() -> None:
    rng = np.random.default_rng(2)
    rejected = np.zeros(2)
    for _ in range(400):
        found = intervals.difference(rng.normal(size=8), rng.normal(size=8))
        rejected += [(p or 0) < 0.05 for p in (found.p_student, found.p_signs)]
    assert (rejected < 34).all()
    assert (rejected > 8).all()
