"""Tests color jitter and blur against independent definitions."""

import colorsys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.data.video import clips
from jaxtrain.models.reconstruction import augment

AUGMENT = jax.jit(augment.augment)  # without jit it takes ten times as long
NOTHING = (1.0, 1.0, 1.0, 0.0, 0.0)


def video(clips: int = 2, frames: int = 2, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((clips, frames, 9, 10, 3)).astype(np.float32)


def changed(x: np.ndarray, *factors: tuple[float, ...]) -> np.ndarray:
    return np.asarray(AUGMENT(jnp.asarray(x), jnp.asarray(factors, jnp.float32)))


def test_neutral_settings_change_nothing() -> None:
    x = video()
    np.testing.assert_allclose(changed(x, NOTHING, NOTHING), x, atol=1e-6)


def test_each_clip_has_its_own_random_factors() -> None:
    x = video()
    y = changed(x, NOTHING, (0.5, 1.2, 0.8, 0.1, 1.0))
    np.testing.assert_allclose(y[0], x[0], atol=1e-6)
    assert np.abs(y[1] - x[1]).max() > 0.1
    # They do not depend on the other clips of the batch.
    x[0] /= 2
    np.testing.assert_array_equal(changed(x, NOTHING, (0.5, 1.2, 0.8, 0.1, 1.0))[1], y[1])


def test_all_frames_of_a_clip_get_the_same_augmentation() -> None:
    frame = video(frames=1)
    y = changed(np.repeat(frame, 3, 1), *[(0.9, 1.3, 0.7, 0.2, 1.5)] * 2)
    np.testing.assert_array_equal(y[:, 0], y[:, 1])
    np.testing.assert_array_equal(y[:, 0], y[:, 2])


def test_factors_scale_brightness_contrast_and_saturation() -> None:
    x = 0.4 + 0.2 * video(clips=1)  # far from 0 and 1, so that nothing is clipped
    grey = (x * np.array([0.299, 0.587, 0.114])).sum(-1, keepdims=True)
    for place, factor, want in [
        (0, 1.2, 1.2 * x),
        (1, 1.2, grey.mean() + 1.2 * (x - grey.mean())),
        (2, 0.0, np.broadcast_to(grey, x.shape)),
        (2, 1.5, grey + 1.5 * (x - grey)),
    ]:
        factors = list(NOTHING)
        factors[place] = factor
        np.testing.assert_allclose(changed(x, tuple(factors)), want, atol=1e-5)


@pytest.mark.parametrize("turns", [-0.4, 0.08, 1 / 3])
def test_hue_shift_matches_hsv(turns: float) -> None:
    x = video(clips=1, frames=1)
    want = []
    for pixel in x.reshape(-1, 3):
        hue, saturation, value = colorsys.rgb_to_hsv(*map(float, pixel))
        want.append(colorsys.hsv_to_rgb((hue + turns) % 1, saturation, value))
    found = changed(x, (1, 1, 1, turns, 0)).reshape(-1, 3)
    np.testing.assert_allclose(found, want, atol=1e-5)


def test_a_hue_shift_leaves_gray_unchanged() -> None:
    x = np.repeat(video()[..., :1], 3, -1)
    np.testing.assert_allclose(changed(x, *[(1, 1, 1, 0.3, 0)] * 2), x, atol=1e-6)


@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_blur_is_a_gaussian_with_repeated_borders(sigma: float) -> None:
    x = video(clips=1, frames=1)
    taps = np.exp(-(np.arange(-6, 7) ** 2) / (2 * sigma**2))
    padded = np.pad(x[0, 0], ((6, 6), (6, 6), (0, 0)), mode="edge")
    windows = np.lib.stride_tricks.sliding_window_view(padded, (13, 13), (0, 1))
    want = np.einsum("hwcij,i,j->hwc", windows, taps / taps.sum(), taps / taps.sum())
    np.testing.assert_allclose(changed(x, (1, 1, 1, 0, sigma))[0, 0], want, atol=1e-5)


def test_no_blur_is_larger_than_the_kernel_can_hold() -> None:
    assert clips.SIGMAS[1] == augment.LARGEST_SIGMA
