"""Resizes YUV 4:2:0 video and converts it to RGB, on the device.

Decoders yield a brightness plane and two color planes of half its height and width. Resizing and
converting them takes a CPU core as long as decoding, but a GPU hardly any time: two matmuls per
plane, about 24 GFLOP per clip of 12x480x720, where a training step takes thousands.

Shapes: B clips, T frames, h and w the planes' height and width, H and W those of the result.
"""

import jax
import jax.numpy as jnp

# ITU-R BT.709 with limited range: brightness from 16 to 235, colors from 16 to 240 around 128.
_RED, _BLUE = 0.2126, 0.0722
_GREEN = 1 - _RED - _BLUE
_LUMA, _COLOR = 255 / 219, 255 / 224


def to_rgb(
    luma_BThw: jax.Array, chroma_BT2hw: jax.Array, crop_B3: jax.Array, *, height: int, width: int
) -> jax.Array:
    """Resizes planes to one size and converts them to RGB.

    The kernel is that of libswscale's ``bilinear``: a triangle, which is widened when it shrinks an
    image. libswscale computes in integers of 12 to 15 bits, so up to 3% of the values differ by one
    of 255 levels, and a few at the border, where its weights are others, by two.

    Args:
        luma_BThw: uint8, brightness in the upper left corner of each plane, BT.709, limited range.
        chroma_BT2hw: uint8, blue and red difference, at half the height and width.
        crop_B3: int32, the height and width of each clip's part of the planes, which are even, and
            whether to swap left and right.
        height, width: H and W, in pixels.

    Returns:
        uint8 [B, T, H, W, 3], RGB, full range.
    """
    high_B, wide_B, mirror_B = crop_B3[:, 0], crop_B3[:, 1], crop_B3[:, 2] != 0
    straight_B = jnp.zeros_like(mirror_B)

    def resized(plane_BThw: jax.Array, subsampling: int) -> jax.Array:
        rows, columns = plane_BThw.shape[2:]
        down = _weights(high_B // subsampling, straight_B, height, rows)
        across = _weights(wide_B // subsampling, mirror_B, width, columns)
        x = plane_BThw.astype(jnp.float32)
        # HIGH is float32 on CPUs and TF32 on GPUs, which is off by at most 0.1 of 255 levels.
        x = jnp.einsum("bthw,bWw->bthW", x, across, precision="high")
        return jnp.einsum("bthW,bHh->btHW", x, down, precision="high")

    y = (resized(luma_BThw, 1) - 16) * _LUMA
    blue, red = (resized(chroma_BT2hw[:, :, i], 2) - 128 for i in range(2))
    r = y + 2 * (1 - _RED) * _COLOR * red
    b = y + 2 * (1 - _BLUE) * _COLOR * blue
    green = _BLUE * (1 - _BLUE) * blue + _RED * (1 - _RED) * red
    rgb = jnp.stack([r, y - 2 * _COLOR / _GREEN * green, b], -1)
    return jnp.clip(jnp.round(rgb), 0, 255).astype(jnp.uint8)


def _weights(size_B: jax.Array, mirror_B: jax.Array, new: int, length: int) -> jax.Array:
    """Returns the matrices that resize the first ``size`` of ``length`` pixels to ``new`` pixels.

    Args:
        size_B: int32 [B]; a size below 1, of a blank example, counts as 1.
        mirror_B: bool [B], whether to reverse the order of the new pixels.
        new: number of new pixels.

    Returns:
        float32 [B, new, length]; rows sum to 1.
    """
    size = jnp.maximum(size_B, 1)[:, None, None]
    scale = size.astype(jnp.float32) / new
    reach = jnp.maximum(scale, 1)
    number = jnp.arange(new, dtype=jnp.float32)[None, :, None]
    number = jnp.where(mirror_B[:, None, None], new - 1 - number, number)
    center = (number + 0.5) * scale - 0.5
    pixel = jnp.arange(length, dtype=jnp.int32)[None, None]
    triangle = jnp.maximum(1 - jnp.abs(pixel.astype(jnp.float32) - center) / reach, 0)
    weights = jnp.where(pixel < size, triangle, 0.0)
    return weights / weights.sum(-1, keepdims=True)
