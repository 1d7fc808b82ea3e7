"""Two consecutive convolutions of single frames at full resolution.

The intermediate frames between the two are a third of a step's memory, so the backward pass can
compute them again.

Shapes: B clips, T frames, H height, W width, C channels.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import (
    CustomVJPPrimal,
    SymbolicZero,
    custom_vjp_primal_tree_values,
)

from jaxtrain.models.video_ae import blocks
from jaxtrain.ops import convolution, per_device
from jaxtrain.ops.per_device import Wanted


class Pair(NamedTuple):
    """Kernels and biases of two convolutions with a ReLU between them, float32."""

    kernel: jax.Array
    bias: jax.Array | None
    next_kernel: jax.Array
    next_bias: jax.Array | None


Fold = Callable[[Any], Pair]
"""Builds a pair from its parts; must not close over any arrays but constants."""


def by_pair(
    x_BTHWC: jax.Array, parts: Any, fold: Fold, stride: int, remat: blocks.VideoRemat
) -> jax.Array:
    """Applies a convolution, a ReLU, and a second convolution, each to single frames.

    Args:
        x_BTHWC: the frames.
        parts: arrays that the pair is folded from. They are gathered once for all frames and kept
            until the backward pass, since they are small. Their gradients are summed over devices
            in their dtype.
        fold: builds the pair from the parts.
        stride: stride of the second convolution.
        remat: with "none", the frames between the convolutions are kept for the backward pass.
            Otherwise it computes them again.
    """
    return _pair(x_BTHWC, parts, fold, stride, remat == "none")


def _first(x_BTHWC: jax.Array, pair: Pair) -> jax.Array:
    return blocks.conv_frames(x_BTHWC, pair.kernel, pair.bias)


def _second(x_BTHWC: jax.Array, pair: Pair, stride: int) -> jax.Array:
    return blocks.conv_frames(x_BTHWC, pair.next_kernel, pair.next_bias, stride)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _pair(x_BTHWC: jax.Array, parts: Any, fold: Fold, stride: int, keep: bool) -> jax.Array:
    """Computes :func:`by_pair`, and keeps the frames between the convolutions or only `x_BTHWC`."""
    del keep
    pair = fold(parts)
    return _second(_between(x_BTHWC, pair), pair, stride)


def _between(x_BTHWC: jax.Array, pair: Pair) -> jax.Array:
    return blocks.relu(_first(x_BTHWC, pair))


def _pair_forward(
    x_BTHWC: CustomVJPPrimal, parts: Any, fold: Fold, stride: int, keep: bool
) -> tuple[jax.Array, tuple[tuple[jax.Array, jax.Array | None], Any, Wanted]]:
    x, values = custom_vjp_primal_tree_values((x_BTHWC, parts))
    pair = fold(values)
    between = _between(x, pair)
    kept = (x, between if keep else None)
    return _second(between, pair, stride), (kept, values, _wanted(x_BTHWC, parts))


def _pair_backward(
    fold: Fold,
    stride: int,
    keep: bool,
    kept: tuple[tuple[jax.Array, jax.Array | None], Any, Wanted],
    grad_BTHWC: jax.Array,
) -> tuple[jax.Array | None, Any]:
    (x_BTHWC, between), parts, wanted = kept
    if isinstance(grad_BTHWC, SymbolicZero):
        return None, None
    if not keep:
        # Otherwise XLA finds that they are those of the forward pass, and keeps them.
        x_BTHWC, grad_BTHWC = lax.optimization_barrier((x_BTHWC, grad_BTHWC))

    def gradients(rows: Any, parts: Any) -> tuple[jax.Array | None, Any]:
        x, between, grad = rows
        pair, unfold = jax.vjp(fold, parts)
        if between is None:
            between = _between(x, pair)
        both = Wanted(of_rows=True, of_shared=wanted.of_shared)
        grad_between, *of_second = _of_convolution(
            between, pair.next_kernel, pair.next_bias, grad, stride, both
        )
        assert grad_between is not None
        (grad_y,) = blocks.relu_backward(between, grad_between)
        grad_x, *of_first = _of_convolution(x, pair.kernel, pair.bias, grad_y, 1, wanted)
        if not wanted.of_shared:
            return grad_x, None
        return grad_x, unfold(Pair(*of_first, *of_second))[0]

    return per_device.at_once(gradients, (x_BTHWC, between, grad_BTHWC), parts)


_pair.defvjp(_pair_forward, _pair_backward, symbolic_zeros=True)


def _wanted(x_BTHWC: CustomVJPPrimal, parts: Any) -> Wanted:
    leaves = jax.tree.leaves(parts, is_leaf=lambda leaf: isinstance(leaf, CustomVJPPrimal))
    return Wanted(x_BTHWC.perturbed, any(leaf.perturbed for leaf in leaves))


def _of_convolution(
    x_BTHWC: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    grad_BTHWC: jax.Array,
    stride: int,
    wanted: Wanted,
) -> tuple[jax.Array | None, Any, Any]:
    """Computes the gradients of frames, kernel and bias of a convolution, without its result.

    ``jax.vjp`` would trace the result, too, and the plan would count its operations.
    """
    b, t, *hwc = x_BTHWC.shape
    rows = x_BTHWC.reshape(b * t, *hwc), grad_BTHWC.reshape(b * t, *grad_BTHWC.shape[2:])
    of_rows, of_kernel = per_device.at_once(
        functools.partial(convolution.gradients, stride=stride, wanted=wanted),
        rows,
        kernel.astype(x_BTHWC.dtype),
    )
    grad_x = None if of_rows is None else of_rows.reshape(x_BTHWC.shape)
    if not wanted.of_shared:
        return grad_x, None, None
    of_bias = None
    if bias is not None:
        of_bias = jnp.sum(rows[1], (0, 1, 2), dtype=jnp.float32).astype(bias.dtype)
    return grad_x, of_kernel.astype(kernel.dtype), of_bias


def _frames(x_BTHWC: jax.Array) -> list[jax.Array]:
    frames = x_BTHWC.shape[1]
    return jnp.split(x_BTHWC, frames, axis=1) if frames else []


def interleaved(parts: Sequence[jax.Array], first: int) -> jax.Array:
    """Interleaves frames: frame i is the next frame of part i modulo the number of parts.

    Args:
        parts: arrays [B, n, H, W, C].
        first: number of the first frame that the parts contain.
    """
    if len(parts) == 1:
        return parts[0]
    following = [iter(_frames(part)) for part in parts]
    count = sum(part.shape[1] for part in parts)
    frames = [next(following[n % len(parts)]) for n in range(first, first + count)]
    return jnp.concatenate(frames, axis=1)
