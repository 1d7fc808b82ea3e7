"""Linear layers that follow one another, folded into one kernel.

The reference enlarges frames before it convolves them, grows their number by a matrix, and joins
frames by another. All of that is linear, so it can be done to the kernel (a few thousand numbers)
in place of the frames (gigabytes): the layer in between never exists. What is folded is float32,
and cast to the frames' dtype once.

Shapes: a kernel is [3, 3, I, O]: what lies above and left comes first. S pixels of a square of 2x2,
rows first.
"""

import jax
import jax.numpy as jnp
import numpy as np

UP = 2
_SIDE = 3
_EXACT = jax.lax.Precision.HIGHEST


def after_matrix(matrix_IM: jax.Array, kernel_33MO: jax.Array) -> jax.Array:
    """A matrix for each pixel, then a convolution: [3, 3, I, O]."""
    return _sum("im,yxmo->yxio", matrix_IM, kernel_33MO)


def side_by_side(kernel_33IO: jax.Array, count: int) -> jax.Array:
    """The same convolution of `count` frames that lie beside one another: [3, 3, N I, N O].

    The products with zeros cost nothing where I is small: a GPU fills up to 8 channels anyway.
    """
    kernel = _sum("nm,yxio->yxnimo", np.eye(count), kernel_33IO)
    return kernel.reshape(_SIDE, _SIDE, count * kernel_33IO.shape[2], -1)


def enlarged(kernel_33IO: jax.Array) -> jax.Array:
    """Repeats each pixel in a square of 2x2, then convolves: kernel [3, 3, I, S O].

    On the small frame; a pixel of it becomes a square.
    """
    kernel = _sum("pya,qxb,abio->yxipqo", _LOOK_SMALL, _LOOK_SMALL, kernel_33IO)
    return kernel.reshape(_SIDE, _SIDE, kernel_33IO.shape[2], -1)


def of_squares(kernel_33IO: jax.Array) -> jax.Array:
    """A convolution of a frame whose squares of 2x2 pixels are channels: [3, 3, S I, O S].

    Channels come as :func:`enlarged` makes them, and go as ``blocks.shuffle`` takes them.
    """
    kernel = _sum("pyra,qxsb,abio->yxrsiopq", _LOOK_SQUARES, _LOOK_SQUARES, kernel_33IO)
    return kernel.reshape(_SIDE, _SIDE, UP**2 * kernel_33IO.shape[2], -1)


def square_major(array: jax.Array) -> jax.Array:
    """The last axis as :func:`of_squares` takes it, from how ``blocks.shuffle`` does: float32."""
    *others, channels = array.shape
    squares = array.astype(jnp.float32).reshape(*others, channels // UP**2, UP**2)
    return jnp.swapaxes(squares, -1, -2).reshape(array.shape)


def _look_small() -> np.ndarray:
    """[2, 3, 3]: pixel p of an enlarged pair sees at tap a of the kernel the small pixel y."""
    found = np.zeros((UP, _SIDE, _SIDE))
    for p in range(UP):
        for tap in range(_SIDE):
            found[p, (p + tap - 1) // UP + 1, tap] = 1
    return found


def _look_squares() -> np.ndarray:
    """[2, 3, 2, 3]: pixel p sees at tap a pixel r of the pair y."""
    found = np.zeros((UP, _SIDE, UP, _SIDE))
    for p in range(UP):
        for tap in range(_SIDE):
            pair, pixel = divmod(p + tap - 1, UP)
            found[p, pair + 1, pixel, tap] = 1
    return found


_LOOK_SMALL = _look_small()
_LOOK_SQUARES = _look_squares()


def _sum(subscripts: str, *arrays: jax.Array | np.ndarray) -> jax.Array:
    wide = [jnp.asarray(array, jnp.float32) for array in arrays]
    return jnp.einsum(subscripts, *wide, precision=_EXACT)
