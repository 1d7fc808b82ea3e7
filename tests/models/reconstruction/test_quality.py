"""Tests PSNR and SSIM against plain NumPy, window by window."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.models.reconstruction import quality


def ssim_by_windows(x: np.ndarray, y: np.ndarray) -> float:
    """Computes one frame's SSIM from NumPy's mean, variance and covariance per window."""
    falls = np.exp(-(np.arange(-5, 6) ** 2) / (2 * 1.5**2))
    weights = np.outer(falls, falls).ravel()
    values = []
    for channel in range(x.shape[2]):
        for row in range(x.shape[0] - 10):
            for column in range(x.shape[1] - 10):
                a = x[row : row + 11, column : column + 11, channel].ravel()
                b = y[row : row + 11, column : column + 11, channel].ravel()
                (var_a, cov), (_, var_b) = np.cov(a, b, aweights=weights, ddof=0)
                mean_a, mean_b = np.average((a, b), 1, weights)
                c1, c2 = 0.01**2, 0.03**2
                values.append(
                    (2 * mean_a * mean_b + c1)
                    * (2 * cov + c2)
                    / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
                )
    return float(np.mean(values))


@pytest.fixture(scope="module")
def videos() -> tuple[np.ndarray, np.ndarray]:
    """Returns two clips of two frames, 14x17, with four degrees of similarity."""
    rng = np.random.default_rng(0)
    x = rng.random((2, 2, 14, 17, 3))
    noise = np.array([0.0, 0.05, 0.3, 1.0]).reshape(2, 2, 1, 1, 1)
    return x, np.clip(x + noise * rng.standard_normal(x.shape), 0, 1)


def test_ssim_matches_the_definition(videos: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = videos
    found = np.asarray(quality.ssim(jnp.float32(x), jnp.float32(y)))
    want = [[ssim_by_windows(x[b, t], y[b, t]) for t in range(2)] for b in range(2)]
    np.testing.assert_allclose(found, want, atol=2e-5)
    assert found[0, 0] == pytest.approx(1)


def test_psnr_is_computed_per_frame(videos: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = videos
    found = np.asarray(quality.psnr(jnp.float32(x), jnp.float32(y)))
    error = ((x - y) ** 2).mean((2, 3, 4))
    np.testing.assert_allclose(found.ravel()[1:], -10 * np.log10(error.ravel()[1:]), rtol=1e-5)
    assert found[0, 0] == 100  # identical


def test_ssim_refuses_frames_smaller_than_a_window() -> None:
    with pytest.raises(ValueError, match=r"height 8 and width 16 .* 11x11"):
        quality.ssim(jnp.zeros((1, 1, 8, 16, 3)), jnp.zeros((1, 1, 8, 16, 3)))


def test_metrics_of_motion() -> None:
    rng = np.random.default_rng(0)
    video = rng.random((2, 6, 16, 16, 3)).astype(np.float32)
    assert np.allclose(quality.temporal_consistency(video, video), 1)
    assert np.allclose(quality.flicker_ratio(video, video), 1)
    frozen = np.repeat(video[:, :1], 6, axis=1)
    assert np.allclose(quality.flicker_ratio(video, frozen), 0)
    assert (np.asarray(quality.temporal_consistency(video, frozen)) < 0.7).all()
    assert np.isnan(np.asarray(quality.flicker_ratio(frozen, video))).all()


@pytest.fixture(scope="module")
def still() -> np.ndarray:
    """A clip whose left half stands still, with noise of a codec, and whose right half moves."""
    rng = np.random.default_rng(0)
    video = np.repeat(rng.uniform(0.3, 0.7, (1, 1, 32, 32, 3)), 8, axis=1)
    video[:, :, :, 16:] = rng.uniform(0.3, 0.7, (1, 8, 32, 16, 3))
    return (video + rng.uniform(-1, 1, video.shape) / 255).astype(np.float32)


def test_static_flicker_sees_only_what_changes_where_nothing_moves(still: np.ndarray) -> None:
    rng = np.random.default_rng(1)
    assert float(quality.static_flicker(still, still)[0]) == 0
    bias = rng.normal(0, 0.1, (1, 1, 32, 32, 3)).astype(np.float32)
    assert float(quality.static_flicker(still, still + bias)[0]) < 1e-4
    moving = still.copy()
    moving[:, :, :, 16:] = rng.random((1, 8, 32, 16, 3))
    assert float(quality.static_flicker(still, moving)[0]) == 0
    alternating = still.copy()
    alternating[:, ::2] += 4 / 255
    assert float(quality.static_flicker(still, alternating)[0]) == pytest.approx(4, rel=1e-3)
    found = quality.static_flicker(still, still + bias + (alternating - still))
    assert float(found[0]) == pytest.approx(4, rel=1e-3)


@pytest.mark.parametrize("deviation", [1, 4, 16])
def test_static_flicker_of_noise_grows_with_its_deviation(
    still: np.ndarray, deviation: int
) -> None:
    noise = np.random.default_rng(2).normal(0, deviation / 255, still.shape).astype(np.float32)
    found = float(quality.static_flicker(still, still + noise)[0])
    assert found == pytest.approx(2 / np.sqrt(np.pi) * deviation, rel=0.05)


def test_static_flicker_is_undefined_where_everything_moves() -> None:
    video = np.random.default_rng(0).random((2, 6, 16, 16, 3)).astype(np.float32)
    video[1] = video[1, :1]
    found = np.asarray(quality.static_flicker(video, video))
    assert np.isnan(found[0])
    assert found[1] == 0
    assert np.isnan(np.asarray(quality.static_flicker(video[:, :1], video[:, :1]))).all()
