"""Convolution of images, with gradients that suit the platform.

On GPUs each device computes both gradients when the first one is needed
(:mod:`jaxtrain.ops.per_device`); on CPUs :func:`jaxtrain.ops.cpu.conv_gradients` computes them.

Shapes: N images, H height, W width, I input and O output channels; K taps in each direction.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero, custom_vjp_primal_tree_values

from jaxtrain.ops import cpu, per_device
from jaxtrain.ops.per_device import Wanted, platform

Fold = Callable[[Any], jax.Array]
"""Computes a kernel from weights. Must not close over arrays, other than constants."""


def conv(x_NHWI: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Convolves with a zero border, as `torch.nn.Conv2d(K, padding=(K - 1) // 2)` does.

    cuDNN computes it and its gradients on GPUs; Eigen does on CPUs, if the function is compiled
    with :func:`jaxtrain.xla.options.options`.

    Args:
        x_NHWI: images [N, H, W, I].
        kernel: [K, K, I, O], in the dtype of `x_NHWI`; K is 2, without a border, or 3 or 4, with a
            border of one pixel.
        stride: 1 or 2, in both directions.

    Returns:
        [N, (H + 2 B - K) // stride + 1, (W + 2 B - K) // stride + 1, O] with a border of B pixels,
        in the dtype of `x_NHWI`.
    """
    return folded_conv(x_NHWI, kernel, lambda kernel: kernel, stride)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def folded_conv(x_NHWI: jax.Array, weights: Any, fold: Fold, stride: int) -> jax.Array:
    """Computes :func:`conv` with a kernel that is computed from other arrays.

    Each device converts its gradient of the kernel to gradients of the weights before they are
    summed over devices: these may be much smaller, and are communicated in their own dtype.

    Args:
        fold: weights -> kernel, in the dtype of `x_NHWI`.
    """
    return _conv(x_NHWI, fold(weights), stride)


def _conv(x_NHWI: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    border = cpu.border(kernel.shape[0])
    return lax.conv_general_dilated(
        x_NHWI,
        kernel,
        window_strides=(stride, stride),
        padding=((border, border),) * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def _forward(
    x_NHWI: CustomVJPPrimal, weights: Any, fold: Fold, stride: int
) -> tuple[jax.Array, tuple[jax.Array, Any, Wanted]]:
    x, values = custom_vjp_primal_tree_values((x_NHWI, weights))
    trained = any(weight.perturbed for weight in jax.tree.leaves(weights, is_leaf=_is_primal))
    return _conv(x, fold(values), stride), (x, values, Wanted(x_NHWI.perturbed, trained))


def _is_primal(value: Any) -> bool:
    return isinstance(value, CustomVJPPrimal)


def _backward(
    fold: Fold, stride: int, kept: tuple[jax.Array, Any, Wanted], grad_NHWO: jax.Array
) -> tuple[jax.Array | None, Any]:
    x_NHWI, weights, wanted = kept
    if isinstance(grad_NHWO, SymbolicZero):
        return None, None

    def backward(rows: tuple[jax.Array, jax.Array], weights: Any) -> tuple[jax.Array | None, Any]:
        kernel, unfold = jax.vjp(fold, weights)
        grad_x, grad_kernel = gradients(rows, kernel, stride=stride, wanted=wanted)
        return grad_x, None if grad_kernel is None else unfold(grad_kernel)[0]

    return per_device.at_once(backward, (x_NHWI, grad_NHWO), weights)


def gradients(
    rows: tuple[jax.Array, jax.Array], kernel: jax.Array, *, stride: int, wanted: Wanted
) -> tuple[jax.Array | None, jax.Array | None]:
    """Computes the gradients of :func:`conv`'s arguments, without computing its result.

    Args:
        wanted: the gradients needed; the other is None.
    """
    x_NHWI, grad_NHWO = rows
    if platform() == "cpu":
        return cpu.conv_gradients(x_NHWI, kernel, grad_NHWO, stride=stride, wanted=wanted)
    forward = functools.partial(_conv, stride=stride)
    grad_x = grad_kernel = None
    if wanted.of_rows:
        (grad_x,) = jax.linear_transpose(lambda x: forward(x, kernel), x_NHWI)(grad_NHWO)
    if wanted.of_shared:
        (grad_kernel,) = jax.linear_transpose(lambda k: forward(x_NHWI, k), kernel)(grad_NHWO)
    return grad_x, grad_kernel


folded_conv.defvjp(_forward, _backward, symbolic_zeros=True)
