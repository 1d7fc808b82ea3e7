"""Measures the similarity of two videos: PSNR and SSIM per frame, and how they change over time.

Shapes: B clips, T frames, H height, W width, C channels. Values in [0, 1], float32.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SSIM_WINDOW = 11
_SSIM_SIGMA = 1.5
_K1, _K2 = 0.01, 0.03
_LEAST_ERROR = 1e-10
_LEAST_SPREAD = 1e-6  # smaller deviations are float32 rounding errors
_LEVELS = 255
_STILL = 2.5 / _LEVELS  # a pixel whose colors change by at most two levels does not move
_LEAST_STILL = 0.01


def psnr(video_BTHWC: jax.Array, other_BTHWC: jax.Array) -> jax.Array:
    """Computes the peak signal-to-noise ratio of each frame, 10 log10(1 / mean squared error).

    Returns:
        float32 [B, T], in decibels; at most 100, the value for identical frames.
    """
    error = jnp.square(video_BTHWC - other_BTHWC).mean((2, 3, 4))
    return -10 * jnp.log10(jnp.maximum(error, _LEAST_ERROR))


def ssim(video_BTHWC: jax.Array, other_BTHWC: jax.Array) -> jax.Array:
    """Computes the structural similarity of each frame as Wang et al. 2004 do.

    Uses Gaussian windows of 11x11 pixels with sigma 1.5, inside the frame (which excludes a border
    of 5 pixels), K1 = 0.01, K2 = 0.03 and values from 0 to 1. The result is the mean over pixels
    and channels. Papers compute it so; it is scikit-image's with ``gaussian_weights``, sigma 1.5,
    and without ``use_sample_covariance``.

    Returns:
        float32 [B, T], at most 1.

    Raises:
        ValueError: the frames are smaller than a window.
    """
    height, width = video_BTHWC.shape[2:4]
    if min(height, width) < SSIM_WINDOW:
        raise ValueError(
            f"frames of height {height} and width {width} are smaller than the "
            f"{SSIM_WINDOW}x{SSIM_WINDOW} windows of SSIM: use larger frames"
        )
    x, y = video_BTHWC, other_BTHWC
    mean_x, mean_y = _window_means(x), _window_means(y)
    var_x = _window_means(x * x) - mean_x * mean_x
    var_y = _window_means(y * y) - mean_y * mean_y
    covariance = _window_means(x * y) - mean_x * mean_y
    c1, c2 = _K1**2, _K2**2
    similarity = ((2 * mean_x * mean_y + c1) * (2 * covariance + c2)) / (
        (mean_x * mean_x + mean_y * mean_y + c1) * (var_x + var_y + c2)
    )
    return similarity.mean((2, 3, 4))


def temporal_consistency(video_BTHWC: jax.Array, other_BTHWC: jax.Array) -> jax.Array:
    """Compares how much two videos change: 1 - mean absolute difference of their changes.

    A video's change at t is the mean absolute difference of the frames t and t + 1.

    Returns:
        float32 [B], at most 1; NaN for a single frame, which has no change.
    """
    return 1 - jnp.abs(_changes(video_BTHWC) - _changes(other_BTHWC)).mean(1)


def flicker_ratio(video_BTHWC: jax.Array, other_BTHWC: jax.Array) -> jax.Array:
    """Computes how unevenly `other` changes over time, relative to `video`.

    This is the ratio of the standard deviations, over time, of the changes that
    :func:`temporal_consistency` compares. Above 1, `other` flickers.

    Returns:
        float32 [B]; NaN where `video` changes evenly, for example where nothing moves.
    """
    even = _changes(video_BTHWC).std(1)
    return jnp.where(even > _LEAST_SPREAD, _changes(other_BTHWC).std(1) / even, jnp.nan)


def static_flicker(video_BTHWC: jax.Array, other_BTHWC: jax.Array) -> jax.Array:
    """Computes how much `other` changes, from frame to frame, where `video` stands still.

    With d[t] = x[t + 1] - x[t], this is the mean of |d_other - d_video| over the pixels and times
    where no color of `video` changes by more than two of 255 levels. A constant error, such as
    blur or a wrong color, is not flicker and gives 0; noise that is drawn again for each frame
    gives 1.13 times its standard deviation.

    Returns:
        float32 [B], in levels of 255; NaN where less than 1% of `video` stands still.
    """
    change, other = jnp.diff(video_BTHWC, axis=1), jnp.diff(other_BTHWC, axis=1)
    still = (jnp.abs(change).max(-1, keepdims=True) <= _STILL).astype(jnp.float32)
    total = (still * jnp.abs(other - change)).sum((1, 2, 3, 4))
    pixels, colors = still.sum((1, 2, 3, 4)), video_BTHWC.shape[-1]
    enough = pixels > _LEAST_STILL * still[0].size
    return jnp.where(enough, _LEVELS * total / jnp.maximum(pixels * colors, 1), jnp.nan)


def _changes(x_BTHWC: jax.Array) -> jax.Array:
    return jnp.abs(jnp.diff(x_BTHWC, axis=1)).mean((2, 3, 4))


def _window_means(x_BTHWC: jax.Array) -> jax.Array:
    """Computes the means of all windows inside each frame: [B, T, H - 10, W - 10, C]."""
    weights = np.exp(-np.square((np.arange(SSIM_WINDOW) - SSIM_WINDOW // 2) / _SSIM_SIGMA) / 2)
    weights /= weights.sum()
    for axis in (2, 3):
        size = x_BTHWC.shape[axis] - SSIM_WINDOW + 1
        terms = (
            float(weight) * lax.slice_in_dim(x_BTHWC, at, at + size, axis=axis)
            for at, weight in enumerate(weights)
        )
        x_BTHWC = functools.reduce(jnp.add, terms)
    return x_BTHWC
