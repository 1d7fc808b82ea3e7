"""Color jitter and blur of what an encoder sees in training, on the device.

The host draws the factors, so that they depend only on the order of examples. The device applies
them to all frames of a clip in the same way, so that clips do not flicker.

Shapes: B clips, T frames, H height, W width, 3 colors (red, green, blue) in [0, 1].
"""

import jax
import jax.numpy as jnp

FACTORS = 5
"""Numbers per clip: brightness, contrast, and saturation factors, hue shift in turns, blur sigma in
pixels. (1, 1, 1, 0, 0) changes nothing."""

LARGEST_SIGMA = 2.0
"""Largest sigma of the blur that the kernel is large enough for (pixels)."""

_RADIUS = 6  # 3 x LARGEST_SIGMA
_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


def augment(video_BTHW3: jax.Array, factors: jax.Array) -> jax.Array:
    """Applies brightness, contrast, saturation, and hue, then blurs.

    Args:
        video_BTHW3: float32 in [0, 1].
        factors: float32 [B, 5], see `FACTORS`. Sigma is at most `LARGEST_SIGMA`.

    Returns:
        float32 of the same shape, in [0, 1].
    """
    brightness, contrast, saturation, hue, sigma = (
        factors[:, i].reshape(-1, 1, 1, 1, 1) for i in range(FACTORS)
    )
    x = jnp.clip(video_BTHW3 * brightness, 0, 1)
    # The mean of the clip, not of each frame: contrast must not change when a scene brightens.
    x = _blend(_gray(x).mean((1, 2, 3, 4), keepdims=True), x, contrast)
    x = _blend(_gray(x), x, saturation)
    return blur(shift_hue(x, hue[..., 0]), sigma.reshape(-1))


def shift_hue(rgb: jax.Array, turns: jax.Array) -> jax.Array:
    """Turns the colors around the gray axis of HSV (Smith 1978, "Color gamut transform pairs").

    Args:
        rgb: float32 [..., 3] in [0, 1].
        turns: float32, of a shape that broadcasts to [...]; 1 is a full turn.
    """
    red, green, blue = (rgb[..., i] for i in range(3))
    largest = jnp.maximum(jnp.maximum(red, green), blue)
    chroma = largest - jnp.minimum(jnp.minimum(red, green), blue)
    divisor = jnp.where(chroma > 0, chroma, 1)  # gray has no hue and stays gray
    sixths = jnp.where(
        largest == red,
        (green - blue) / divisor,
        jnp.where(largest == green, (blue - red) / divisor + 2, (red - green) / divisor + 4),
    )
    sixths = (sixths + 6 * turns) % 6
    # How much each color lacks: nothing within a sixth of a turn from its own hue (0, 2, 4), all of
    # the chroma beyond a third.
    lacks = (2 - jnp.abs(sixths - 3), jnp.abs(sixths - 2) - 1, jnp.abs(sixths - 4) - 1)
    return largest[..., None] - chroma[..., None] * jnp.clip(jnp.stack(lacks, -1), 0, 1)


def blur(video_BTHW3: jax.Array, sigma_B: jax.Array) -> jax.Array:
    """Applies a Gaussian blur along height and width; border pixels are repeated outward.

    Args:
        video_BTHW3: float32.
        sigma_B: float32 [B], pixels; 0 changes nothing.
    """
    distance = jnp.arange(-_RADIUS, _RADIUS + 1, dtype=jnp.float32)
    sigma = jnp.clip(sigma_B, 1e-3, LARGEST_SIGMA)[:, None]
    weights = jax.nn.softmax(-jnp.square(distance[None] / sigma) / 2, -1)
    x = video_BTHW3
    for axis in (2, 3):
        size = x.shape[axis]
        first, last = (jax.lax.slice_in_dim(x, i, i + 1, axis=axis) for i in (0, size - 1))
        # Not jnp.pad, whose two concatenations are separate passes on a GPU.
        padded = jnp.concatenate([first] * _RADIUS + [x] + [last] * _RADIUS, axis)
        x = jnp.zeros_like(x)
        for i in range(2 * _RADIUS + 1):
            share = weights[:, i].reshape(-1, 1, 1, 1, 1)
            x = x + share * jax.lax.slice_in_dim(padded, i, i + size, axis=axis)
    return x


def _gray(video_BTHW3: jax.Array) -> jax.Array:
    r, g, b = (w * video_BTHW3[..., i : i + 1] for i, w in enumerate(_LUMA))
    return r + g + b


def _blend(from_x: jax.Array, to_x: jax.Array, factor: jax.Array) -> jax.Array:
    """Interpolates from `from_x` (factor 0) to `to_x` (1), extrapolates above 1, and clips."""
    return jnp.clip(from_x + factor * (to_x - from_x), 0, 1)
