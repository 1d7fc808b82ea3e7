"""Folds consecutive linear layers into one kernel.

The reference enlarges frames before convolving them, multiplies their number by one matrix and
joins frames by another. All of that is linear, so it can be applied to the kernel (a few thousand
numbers) instead of the frames (gigabytes), and the intermediate frames never exist. Kernels are
folded in float32 and cast to the frames' dtype once.

Shapes: a kernel is [3, 3, I, O], from top to bottom and left to right. S is the 4 pixels of a 2x2
square, row by row.
"""

import jax
import jax.numpy as jnp
import numpy as np

UP = 2
_SIDE = 3
_EXACT = jax.lax.Precision.HIGHEST


def after_matrix(matrix_IM: jax.Array, kernel_33MO: jax.Array) -> jax.Array:
    """Folds a matrix applied to each pixel into the convolution after it: [3, 3, I, O]."""
    return _sum("im,yxmo->yxio", matrix_IM, kernel_33MO)


def side_by_side(kernel_33IO: jax.Array, count: int) -> jax.Array:
    """Builds one convolution of `count` frames stacked as channels: [3, 3, N I, N O].

    Multiplying by the zeros costs nothing where N I is small: a GPU needs a multiple of 8 channels.
    """
    kernel = _sum("nm,yxio->yxnimo", np.eye(count), kernel_33IO)
    return kernel.reshape(_SIDE, _SIDE, count * kernel_33IO.shape[2], -1)


def enlarged(kernel_33IO: jax.Array) -> jax.Array:
    """Folds 2x2 nearest-neighbor upsampling into the convolution after it: [2, 2, I, S O].

    The folded kernel applies to the small frame with a border of one pixel. Of a frame of H x W it
    makes (H + 1) x (W + 1) squares, which cover the enlarged frame and a border of one pixel around
    it. Squares that begin at even pixels would need 3x3 taps, of which 5 are zeros.
    """
    kernel = _sum("pya,qxb,abio->yxipqo", _LOOK_SMALL, _LOOK_SMALL, kernel_33IO)
    return kernel.reshape(UP, UP, kernel_33IO.shape[2], -1)


def inside(height: int, width: int, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns which pixels of the squares of :func:`enlarged` are in the enlarged frame.

    Args:
        height: number of rows of squares.
        channels: S O.

    Returns:
        Whether the row is, [height, 1, channels], and whether the column is, [1, width, channels].
    """
    row, column, _ = np.indices((UP, UP, channels // UP**2)).reshape(3, channels)

    def within(squares: int, pixel: np.ndarray) -> np.ndarray:
        number = UP * np.arange(squares)[:, None] - 1 + pixel
        return (number >= 0) & (number < UP * (squares - 1))

    return within(height, row)[:, None], within(width, column)[None]


def of_enlarged(kernel_33IO: jax.Array) -> jax.Array:
    """Builds the convolution of the squares of :func:`enlarged`: [2, 2, S I, O S].

    Its result is as large as the small frame, and its squares begin at even pixels.
    """
    kernel = _sum("pyra,qxsb,abio->yxrsiopq", _LOOK_OFFSET, _LOOK_OFFSET, kernel_33IO)
    return kernel.reshape(UP, UP, UP**2 * kernel_33IO.shape[2], -1)


def of_squares(kernel_33IO: jax.Array) -> jax.Array:
    """Builds the convolution of a frame whose 2x2 squares are channels: [3, 3, S I, O S].

    Input channels are ordered by squares, output channels as ``blocks.shuffle`` expects them.
    """
    kernel = _sum("pyra,qxsb,abio->yxrsiopq", _LOOK_SQUARES, _LOOK_SQUARES, kernel_33IO)
    return kernel.reshape(_SIDE, _SIDE, UP**2 * kernel_33IO.shape[2], -1)


def square_major(array: jax.Array) -> jax.Array:
    """Reorders the last axis from ``blocks.shuffle``'s order to :func:`of_squares`'s: float32."""
    *others, channels = array.shape
    squares = array.astype(jnp.float32).reshape(*others, channels // UP**2, UP**2)
    return jnp.swapaxes(squares, -1, -2).reshape(array.shape)


def _look_small() -> np.ndarray:
    """[p, y, a] is 1 where tap a of the kernel at pixel p of a square reads small pixel y.

    Square i begins at row 2 i - 1, and reads the small pixels i - 1 and i.
    """
    return _look_offset().sum(axis=2)


def _look_offset() -> np.ndarray:
    """[p, y, r, a] is 1 where tap a of the kernel at pixel p reads pixel r of pair y.

    The pairs that are read begin one pixel before those of the result.
    """
    weights = np.zeros((UP, UP, UP, _SIDE))
    for p in range(UP):
        for tap in range(_SIDE):
            weights[(p, *divmod(p + tap, UP), tap)] = 1
    return weights


def _look_squares() -> np.ndarray:
    """[p, y, r, a] is 1 where tap a of the kernel at pixel p reads pixel r of pair y."""
    weights = np.zeros((UP, _SIDE, UP, _SIDE))
    for p in range(UP):
        for tap in range(_SIDE):
            pair, pixel = divmod(p + tap - 1, UP)
            weights[p, pair + 1, pixel, tap] = 1
    return weights


_LOOK_SMALL = _look_small()
_LOOK_OFFSET = _look_offset()
_LOOK_SQUARES = _look_squares()


def _sum(subscripts: str, *arrays: jax.Array | np.ndarray) -> jax.Array:
    wide = [jnp.asarray(array, jnp.float32) for array in arrays]
    return jnp.einsum(subscripts, *wide, precision=_EXACT)
