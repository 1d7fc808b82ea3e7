"""The convolution of images, with both gradients computed where the first is needed.

Shapes: N images, H height, W width, I input and O output channels; `_pad` marks a zero border.
"""

import functools

import jax
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from jaxtrain import by_device
from jaxtrain.by_device import Wanted


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def conv(x_NHWI: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Convolution with a zero border of one pixel, as `torch.nn.Conv2d(K, padding=1)`.

    All three are XLA's; on GPUs that is cuDNN, on CPUs Eigen (:func:`jaxtrain.compiling.options`).

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
    if wanted.of_rows:
        (grad_x,) = jax.linear_transpose(lambda x: _conv(x, kernel, stride), x_NHWI)(grad_NHWO)
    if wanted.of_shared:
        (grad_kernel,) = jax.linear_transpose(lambda k: _conv(x_NHWI, k, stride), kernel)(grad_NHWO)
    return grad_x, grad_kernel


conv.defvjp(_conv_forward, _conv_backward, symbolic_zeros=True)
