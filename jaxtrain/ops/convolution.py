"""The convolution of images, with gradients that suit the platform.

On GPUs each device computes both where the first is needed (:mod:`jaxtrain.ops.per_device`); on
CPUs those of a strided one are found by phases.

Shapes: N images, H height, W width, I input and O output channels; K taps in each direction; P and
Q phases of rows and of columns.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import (
    CustomVJPPrimal,
    SymbolicZero,
    custom_vjp_primal_tree_values,
)

from jaxtrain.ops import per_device
from jaxtrain.ops.per_device import Wanted
from jaxtrain.xla.target import platform

Fold = Callable[[Any], jax.Array]
"""Makes a kernel of its parts; by itself it has no arrays but constants."""


def conv(x_NHWI: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Convolution with a zero border of one pixel, as `torch.nn.Conv2d(K, padding=1)`.

    On GPUs cuDNN computes it and its gradients; on CPUs Eigen, where the program is compiled with
    :func:`jaxtrain.xla.options.options`.

    Args:
        x_NHWI: images [N, H, W, I].
        kernel: [K, K, I, O], of the dtype of `x_NHWI`; K at least 3.
        stride: 1 or 2, in both directions.

    Returns:
        [N, (H + 2 - K) // stride + 1, (W + 2 - K) // stride + 1, O], of the dtype of `x_NHWI`.
    """
    return by_parts(x_NHWI, kernel, lambda kernel: kernel, stride)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def by_parts(x_NHWI: jax.Array, parts: Any, fold: Fold, stride: int) -> jax.Array:
    """:func:`conv` by a kernel that is folded of others.

    Each device turns its gradient of the kernel into those of the parts before devices sum them up:
    the parts may be much smaller, and these sums travel in their dtype.

    Args:
        x_NHWI: as of :func:`conv`.
        parts: arrays, in any structure.
        fold: the kernel, of the dtype of `x_NHWI`.
        stride: as of :func:`conv`.
    """
    return _conv(x_NHWI, fold(parts), stride)


def _conv(x_NHWI: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    return lax.conv_general_dilated(
        x_NHWI,
        kernel,
        window_strides=(stride, stride),
        padding=((1, 1), (1, 1)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def _forward(
    x_NHWI: CustomVJPPrimal, parts: Any, fold: Fold, stride: int
) -> tuple[jax.Array, tuple[jax.Array, Any, Wanted]]:
    x, values = custom_vjp_primal_tree_values((x_NHWI, parts))
    trained = any(part.perturbed for part in jax.tree.leaves(parts, is_leaf=_is_primal))
    return _conv(x, fold(values), stride), (x, values, Wanted(x_NHWI.perturbed, trained))


def _is_primal(value: Any) -> bool:
    return isinstance(value, CustomVJPPrimal)


def _backward(
    fold: Fold, stride: int, kept: tuple[jax.Array, Any, Wanted], grad_NHWO: jax.Array
) -> tuple[jax.Array | None, Any]:
    x_NHWI, parts, wanted = kept
    if isinstance(grad_NHWO, SymbolicZero):
        return None, None

    def backward(rows: tuple[jax.Array, jax.Array], parts: Any) -> tuple[jax.Array | None, Any]:
        kernel, unfold = jax.vjp(fold, parts)
        grad_x, grad_kernel = _gradients(rows, kernel, stride=stride, wanted=wanted)
        return grad_x, None if grad_kernel is None else unfold(grad_kernel)[0]

    return per_device.at_once(backward, (x_NHWI, grad_NHWO), parts)


def _gradients(
    rows: tuple[jax.Array, jax.Array], kernel: jax.Array, *, stride: int, wanted: Wanted
) -> tuple[jax.Array | None, jax.Array | None]:
    x_NHWI, grad_NHWO = rows
    forward = functools.partial(_conv, stride=stride)
    by_phases = functools.partial(_by_phases, stride=stride, shape=x_NHWI.shape)
    on_cpu = platform() == "cpu"
    grad_x = grad_kernel = None
    if wanted.of_rows:
        if on_cpu:
            grad_x = by_phases(grad_NHWO, kernel)
        else:
            (grad_x,) = jax.linear_transpose(lambda x: forward(x, kernel), x_NHWI)(grad_NHWO)
    if wanted.of_shared:
        # <conv(x, kernel), grad> = <x, by_phases(grad, kernel)>: both have the kernel's gradient.
        # Eigen makes patches of conv's x or by_phases' grad: fewer channels are less work.
        inputs, outputs = kernel.shape[2:]
        if on_cpu and (stride > 1 or outputs < inputs):
            (grad_kernel,) = jax.linear_transpose(lambda k: by_phases(grad_NHWO, k), kernel)(x_NHWI)
        else:
            (grad_kernel,) = jax.linear_transpose(lambda k: forward(x_NHWI, k), kernel)(grad_NHWO)
    return grad_x, grad_kernel


def _by_phases(
    grad_NHWO: jax.Array, kernel: jax.Array, *, stride: int, shape: tuple[int, ...]
) -> jax.Array:
    """The gradient of images of `shape`, those of even and of odd rows and columns by themselves.

    Each is a dense convolution with the part of the kernel that reaches such pixels. XLA's own for
    CPUs puts zeros between the pixels of a strided gradient, and computes with them on one thread.
    """
    n, height, width, channels = shape
    rows = [_phase(p, stride, kernel.shape[0], grad_NHWO.shape[1], height) for p in range(stride)]
    columns = [_phase(p, stride, kernel.shape[1], grad_NHWO.shape[2], width) for p in range(stride)]

    def one(row: _Phase, column: _Phase) -> jax.Array:
        part = kernel[row.taps, column.taps]
        padding = (row.padding, column.padding)
        return lax.conv_general_dilated(
            grad_NHWO, part, (1, 1), padding, dimension_numbers=("NHWC", "HWOI", "NHWC")
        )

    if stride == 1:
        return one(rows[0], columns[0])
    by_row = [jnp.stack([one(row, column) for column in columns], axis=3) for row in rows]
    x_NHPWQI = jnp.stack(by_row, axis=2)
    _, h, p, w, q, _ = x_NHPWQI.shape
    return x_NHPWQI.reshape(n, h * p, w * q, channels)[:, :height, :width]


class _Phase(NamedTuple):
    """Every `stride`th row, or column, of the images.

    Attributes:
        taps: the kernel's rows that reach it, from the last one to the first.
        padding: of the gradient, before and behind; negative where its last row is not needed.
    """

    taps: slice
    padding: tuple[int, int]


def _phase(number: int, stride: int, side: int, outputs: int, inputs: int) -> _Phase:
    """Of `inputs` rows those that are `number` modulo `stride`, by the gradient's `outputs` rows.

    Output row h saw input row stride h - 1 by tap 0, the next one by tap 1, and so on up to `side`.
    """
    first = (number + 1) % stride
    count = len(range(first, side, stride))
    last = first + (count - 1) * stride
    before = (last - 1 - number) // stride
    behind = -(-inputs // stride) + count - 1 - outputs - before
    return _Phase(slice(last, first - 1 if first else None, -stride), (before, behind))


by_parts.defvjp(_forward, _backward, symbolic_zeros=True)
