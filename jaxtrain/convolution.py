"""The convolution of images, with gradients that suit the platform.

Shapes: N images, H height, W width, I input and O output channels; `_pad` marks a zero border.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jaxtrain import by_device
from jaxtrain.by_device import Wanted

_NUMBERS_PER_PIECE = 2**24
_PIXELS_APART = 2**10


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def conv(x_NHWI: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Convolution with a zero border of one pixel, as `torch.nn.Conv2d(K, padding=1)`.

    Forward and input gradient are XLA's. The kernel's gradient depends on the platform: GPUs take
    XLA's (cuDNN); CPUs take :func:`_kernel_gradient_by_dots`, because XLA's runs there at a
    seventh of the speed of the other two (24x64x64, 64 -> 64 channels in float32, processor time:
    96 ms forward, 94 ms for the input's gradient, 686 ms for the kernel's; 212 ms by dots).

    Args:
        x_NHWI: images [N, H, W, I].
        kernel: [K, K, I, O], of the dtype of `x_NHWI`; K at least 3.
        stride: 1 or 2, in both directions.

    Returns:
        [N, (H + 2 - K) // stride + 1, (W + 2 - K) // stride + 1, O], of the dtype of `x_NHWI`.
    """
    return _conv(x_NHWI, kernel, stride)


def _conv(x_NHWI: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    return lax.conv_general_dilated(
        x_NHWI,
        kernel,
        window_strides=(stride, stride),
        padding=((1, 1), (1, 1)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def _conv_forward(
    x_NHWI: CustomVJPPrimal, kernel: CustomVJPPrimal, stride: int
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, Wanted]]:
    wanted = Wanted(x_NHWI.perturbed, kernel.perturbed)
    return _conv(x_NHWI.value, kernel.value, stride), (x_NHWI.value, kernel.value, wanted)


def _conv_backward(
    stride: int, kept: tuple[jax.Array, jax.Array, Wanted], grad_NHWO: jax.Array
) -> tuple[jax.Array | None, jax.Array | None]:
    x_NHWI, kernel, wanted = kept
    if isinstance(grad_NHWO, SymbolicZero):
        return None, None
    backward = functools.partial(_gradients, stride=stride, wanted=wanted)
    return by_device.at_once(backward, (x_NHWI, grad_NHWO), kernel)


def _gradients(
    rows: tuple[jax.Array, jax.Array], kernel: jax.Array, *, stride: int, wanted: Wanted
) -> tuple[jax.Array | None, jax.Array | None]:
    x_NHWI, grad_NHWO = rows
    grad_x = grad_kernel = None

    def by_xla(x: jax.Array, grad: jax.Array) -> jax.Array:
        return jax.linear_transpose(lambda k: _conv(x, k, stride), kernel)(grad)[0]

    if wanted.of_rows:
        (grad_x,) = jax.linear_transpose(lambda x: _conv(x, kernel, stride), x_NHWI)(grad_NHWO)
    if wanted.of_shared:
        grad_kernel = lax.platform_dependent(
            x_NHWI,
            grad_NHWO,
            cpu=functools.partial(_kernel_gradient_by_dots, side=kernel.shape[0], stride=stride),
            default=by_xla,
        )
    return grad_x, grad_kernel


conv.defvjp(_conv_forward, _conv_backward, symbolic_zeros=True)


def _kernel_gradient_by_dots(
    x_NHWI: jax.Array, grad_NHWO: jax.Array, *, side: int, stride: int
) -> jax.Array:
    """Gradient of the kernel: a dot of the output's gradient with the K x K shifted inputs.

    At stride 1 the input is shifted sideways only and the gradient up and down: the product of K
    copies of one with K of the other holds all K x K sums, and 2 K copies are written instead of
    K K. At other strides the input takes all shifts (there are few output pixels).

    Copies are made for some rows at a time. Pieces are cut along H, never along N: N may lie across
    devices, and each device then works on its own images only. A gather makes them, because it
    compiles faster than slices and their concatenation, and runs faster.

    Returns:
        [K, K, I, O], of the dtype of `x_NHWI`; summed in float32.
    """
    inputs, outputs = x_NHWI.shape[-1], grad_NHWO.shape[-1]
    images, height, width = grad_NHWO.shape[:3]
    right = stride * jnp.arange(width).reshape(1, -1, 1)
    one = jnp.zeros((1, 1, 1), jnp.int32)
    shift = jnp.arange(side).reshape(1, 1, -1)
    if stride == 1:
        height = x_NHWI.shape[1]
        x_pad = jnp.pad(x_NHWI, ((0, 0), (0, 0), (1, 1), (0, 0)))
        grad_pad = jnp.pad(grad_NHWO, ((0, 0), (side - 2, side - 2), (0, 0), (0, 0)))
        x_down, x_right, grad_down = one, shift, side - 1 - shift
    else:
        x_pad = jnp.pad(x_NHWI, ((0, 0), (1, 1), (1, 1), (0, 0)))
        grad_pad = grad_NHWO
        both = jnp.arange(side**2).reshape(1, 1, -1)
        x_down, x_right, grad_down = both // side, both % side, one
    wide = (x_right.size * inputs, grad_down.size * outputs)
    fitting = max(1, _NUMBERS_PER_PIECE // (images * width * sum(wide)))
    rows = max(size for size in range(1, min(fitting, height) + 1) if height % size == 0)
    # A product for each image keeps all cores busy, unless the images are small.
    apart = stride == 1 and rows * width >= _PIXELS_APART

    def copies(padded: jax.Array, down: jax.Array, right: jax.Array) -> jax.Array:
        """[N, rows, width, shifts, channels] -> [N, pixels, shifts channels], N perhaps 1."""
        found = padded.at[:, down, right].get(mode="promise_in_bounds")
        return found.reshape(images if apart else 1, -1, found.shape[-2] * found.shape[-1])

    def piece(number: jax.Array | int) -> jax.Array:
        row = number * rows + jnp.arange(rows).reshape(-1, 1, 1)
        x = copies(x_pad, stride * row + x_down, right + x_right)
        grad = copies(grad_pad, row + grad_down, right // stride)
        over_pixels = (((1,), (1,)), ((0,), (0,)))
        return lax.dot_general(x, grad, over_pixels, preferred_element_type=jnp.float32).sum(0)

    if rows == height:
        total = piece(0)
    else:
        zeros = jnp.zeros(wide, jnp.float32)
        total, _ = lax.scan(lambda s, n: (s + piece(n), None), zeros, jnp.arange(height // rows))
    if stride == 1:
        total = total.reshape(side, inputs, side, outputs).transpose(2, 0, 1, 3)
    return total.reshape(side, side, inputs, outputs).astype(x_NHWI.dtype)
