"""The Fréchet distance, compared with scipy's matrix square root."""

import numpy as np
import pytest
import scipy.linalg

from jaxtrain.errors import InputError
from jaxtrain.inference.evaluation import frechet


def by_scipy(one: np.ndarray, other: np.ndarray) -> float:
    gap = one.mean(0) - other.mean(0)
    covariances = [np.cov(features, rowvar=False) for features in (one, other)]
    root = scipy.linalg.sqrtm(covariances[0] @ covariances[1])
    return float(gap @ gap + np.trace(covariances[0] + covariances[1] - 2 * root.real))


def features(count: int, width: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((count, width)) @ rng.standard_normal((width, width))
    return (mixed + rng.standard_normal(width)).astype(np.float32)


@pytest.mark.parametrize(("count", "other"), [(60, 60), (200, 60), (40, 500)])
def test_the_distance_is_that_of_scipys_square_root(count: int, other: int) -> None:
    one, two = features(count, 20, 0), features(other, 20, 1)
    assert frechet.distance(one, two) == pytest.approx(by_scipy(one, two), rel=1e-6)


def test_fewer_samples_than_features() -> None:
    """The covariances are then singular, and scipy's square root of them less exact."""
    one, two = features(8, 20, 0), features(8, 20, 1)
    assert frechet.distance(one, two) == pytest.approx(by_scipy(one, two), rel=1e-3)


def test_equal_sets_have_no_distance_and_a_shift_has_its_square() -> None:
    one = features(30, 20, 0)
    assert frechet.distance(one, one) == pytest.approx(0, abs=1e-6)
    assert frechet.distance(one, one[::-1] + 2) == pytest.approx(20 * 4, rel=1e-5)


def test_one_sample_has_no_covariance() -> None:
    with pytest.raises(InputError, match=r"rFVD needs at least two clips, not 1: add videos"):
        frechet.distance(features(1, 20, 0), features(5, 20, 1))
