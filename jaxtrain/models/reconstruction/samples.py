"""Draws the sample images of a validation: originals, reconstructions, errors, and latents.

Shapes: B clips, T frames, H height, W width; R rows per clip (original, reconstruction, error).
"""

import math

import jax
import jax.numpy as jnp

ROWS = ("original", "reconstruction", "error")

_FRAMES = 6  # per clip in an image
_WIDEST_IMAGE, _WIDEST_CLIP = 2160, 1080  # pixels; wider ones are scaled down
_BRIGHTEST = 0.25  # mean absolute error of a pixel drawn white in the heat map
_LEAST_CHANNEL = 64  # approximate length in pixels of the longer side of a latent's channel
_LINE = 2  # pixels
_DEVIATIONS = 2.5  # standard deviations of a latent's channel from middle gray to black or white


def beside(target_BTHW3: jax.Array, reconstruction_BTHW3: jax.Array) -> jax.Array:
    """Stacks original, reconstruction, and error of each frame: [B, R, T, H, W, 3] in [0, 1].

    The error is drawn as a heat map: black where there is none, then red, yellow and white.
    """
    error = jnp.abs(reconstruction_BTHW3 - target_BTHW3).mean(-1, keepdims=True) / _BRIGHTEST
    heat = jnp.concatenate([jnp.clip(3 * error - start, 0, 1) for start in (0, 1, 2)], axis=-1)
    return jnp.stack([target_BTHW3, reconstruction_BTHW3, heat], axis=1)


def in_a_row(shown_BRTHW3: jax.Array) -> jax.Array:
    """Draws up to 6 frames of each clip from left to right: uint8 [B R H, frames W, 3]."""
    frames = shown_BRTHW3.shape[2]
    count = min(frames, _FRAMES)
    # Evenly spaced, including the first and the last frame.
    picked = [i * (frames - 1) // max(count - 1, 1) for i in range(count)]
    some = jnp.stack([shown_BRTHW3[:, :, i] for i in picked], axis=2)
    some = _smaller(some, _WIDEST_IMAGE // count)
    b, rows, t, h, w, c = some.shape
    return _bytes(some.transpose(0, 1, 3, 2, 4, 5).reshape(b * rows * h, t * w, c))


def moving(shown_BRTHW3: jax.Array) -> jax.Array:
    """Draws a video of all clips side by side: uint8 [T, R H, B W, 3]."""
    small = _smaller(shown_BRTHW3, _WIDEST_CLIP // shown_BRTHW3.shape[0])
    b, rows, t, h, w, c = small.shape
    return _bytes(small.transpose(2, 1, 3, 0, 4, 5).reshape(t, rows * h, b * w, c))


def grid(latent_BHWC: jax.Array) -> jax.Array:
    """Draws each clip's channels in a grid of gray images, uint8; gray is a channel's mean.

    Small latents are enlarged; white lines separate the channels.
    """
    b, h, w, c = latent_BHWC.shape
    across = math.ceil(math.sqrt(c))
    down = math.ceil(c / across)
    mean = latent_BHWC.mean((1, 2), keepdims=True)
    deviation = latent_BHWC.std((1, 2), keepdims=True) + 1e-6
    gray = jnp.clip(0.5 + (latent_BHWC - mean) / (2 * _DEVIATIONS * deviation), 0, 1)
    gray = jnp.pad(gray, ((0, 0), (0, 0), (0, 0), (0, down * across - c)), constant_values=1)
    side = max(1, _LEAST_CHANNEL // max(h, w))
    large = jnp.repeat(jnp.repeat(gray, side, axis=1), side, axis=2)
    large = jnp.pad(large, ((0, 0), (0, _LINE), (0, _LINE), (0, 0)), constant_values=1)
    _, h, w, _ = large.shape
    cells = large.reshape(b, h, w, down, across).transpose(0, 3, 1, 4, 2)
    image = cells.reshape(b * down * h, across * w)
    return _bytes(jnp.repeat(image[..., None], 3, axis=-1))


def _smaller(shown_BRTHW3: jax.Array, widest: int) -> jax.Array:
    """Averages squares of pixels so that no frame is wider than `widest`."""
    b, rows, t, h, w, c = shown_BRTHW3.shape
    side = math.ceil(w / widest)
    cut = shown_BRTHW3[:, :, :, : h // side * side, : w // side * side]
    squares = cut.reshape(b, rows, t, h // side, side, w // side, side, c)
    return squares.mean((4, 6))


def _bytes(values: jax.Array) -> jax.Array:
    return jnp.round(values * 255).astype(jnp.uint8)
