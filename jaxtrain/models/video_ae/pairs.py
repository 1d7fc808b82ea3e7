"""Two convolutions of single frames, frame after frame: where frames are as large as the video.

What lies between them is most of a step's memory, and neither sees the frame before. So it need
not exist of all frames at a time.

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
from jaxtrain.ops import per_device
from jaxtrain.ops.per_device import Wanted


class Pair(NamedTuple):
    """Kernels and biases of two convolutions with a rectifier between them, float32."""

    kernel: jax.Array
    bias: jax.Array | None
    next_kernel: jax.Array
    next_bias: jax.Array | None


Fold = Callable[[Any], Pair]
"""Makes a pair of its parts; by itself it has no arrays but constants."""


def by_pair(
    x_BTHWC: jax.Array, parts: Any, fold: Fold, stride: int, remat: blocks.VideoRemat
) -> jax.Array:
    """A convolution, a rectifier, a convolution, each of single frames.

    Args:
        x_BTHWC: what goes in.
        parts: arrays of which the pair is folded. They are gathered already, once for all frames,
            and kept until the backward pass: unlike what blocks gather they are small. Their
            gradients travel between devices, in their dtype; with `remat` "none" the pair's do.
        fold: makes the pair of them.
        stride: of the second one.
        remat: but for "none" one frame follows the other. The backward pass computes what lies
            between the two of a frame again just before it needs it, so that it exists of few
            frames at a time.
    """
    if remat == "none" or not x_BTHWC.shape[1]:
        pair = fold(parts)
        return _second(blocks.relu(_first(x_BTHWC, pair)), pair, stride)
    return _in_turn(x_BTHWC, parts, fold, stride)


def _first(x_BTHWC: jax.Array, pair: Pair) -> jax.Array:
    return blocks.conv_frames(x_BTHWC, pair.kernel, pair.bias)


def _second(x_BTHWC: jax.Array, pair: Pair, stride: int) -> jax.Array:
    return blocks.conv_frames(x_BTHWC, pair.next_kernel, pair.next_bias, stride)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _in_turn(x_BTHWC: jax.Array, parts: Any, fold: Fold, stride: int) -> jax.Array:
    """As :func:`by_pair`; nothing but its arguments is kept.

    Without the barriers the compiler, which sees room, works on all frames at the same time.
    """
    pair, found = fold(parts), list[jax.Array]()
    for frame in _frames(x_BTHWC):
        if found:
            frame, found[-1] = lax.optimization_barrier((frame, found[-1]))
        found.append(_second(blocks.relu(_first(frame, pair)), pair, stride))
    return jnp.concatenate(found, axis=1)


def _in_turn_forward(
    x_BTHWC: CustomVJPPrimal, parts: Any, fold: Fold, stride: int
) -> tuple[jax.Array, tuple[jax.Array, Any, Wanted]]:
    x, values = custom_vjp_primal_tree_values((x_BTHWC, parts))
    # Nothing trains what lies before a pair and not the pair itself.
    return _in_turn(x, values, fold, stride), (x, values, Wanted(x_BTHWC.perturbed, of_shared=True))


def _in_turn_backward(
    fold: Fold, stride: int, kept: tuple[jax.Array, Any, Wanted], grad_BTHWC: jax.Array
) -> tuple[jax.Array | None, Any]:
    x_BTHWC, parts, wanted = kept
    if isinstance(grad_BTHWC, SymbolicZero):
        return None, None

    def gradients(rows: tuple[jax.Array, jax.Array], parts: Any) -> tuple[jax.Array | None, Any]:
        pair, unfold = jax.vjp(fold, parts)
        grad_x, grad_pair = _gradients(rows, pair, stride=stride, wanted=wanted)
        return grad_x, unfold(grad_pair)[0]

    return per_device.at_once(gradients, (x_BTHWC, grad_BTHWC), parts)


def _gradients(
    rows: tuple[jax.Array, jax.Array], pair: Pair, *, stride: int, wanted: Wanted
) -> tuple[jax.Array | None, Pair]:
    """Of the frames, and of the pair.

    Each frame's gradient of a kernel comes from its convolution in the frames' dtype; they are
    added up in float32.
    """
    x_BTHWC, grad_BTHWC = lax.optimization_barrier(rows)
    total: Pair | None = None
    grads: list[jax.Array] = []
    waiting: tuple[jax.Array, Callable[..., Any]] | None = None

    def finish() -> None:
        nonlocal total
        assert waiting is not None
        before, back = waiting
        *of_frame, more = back(before)
        grads.extend(of_frame)
        assert total is not None
        total = jax.tree.map(jnp.add, total, more)

    for frame, grad in zip(_frames(x_BTHWC), _frames(grad_BTHWC), strict=True):
        if waiting is not None:
            frame, grad, before = lax.optimization_barrier((frame, grad, waiting[0]))
            waiting = (before, waiting[1])
            finish()
        if wanted.of_rows:
            y, back = jax.vjp(_first, frame, pair)
        else:
            y, back = jax.vjp(functools.partial(_first, frame), pair)
        between = blocks.relu(y)
        _, back_second = jax.vjp(lambda x, p: _second(x, p, stride), between, pair)
        grad_between, more = back_second(grad)
        total = more if total is None else jax.tree.map(jnp.add, total, more)
        (grad_y,) = blocks.relu_backward(between, grad_between)
        waiting = (grad_y, back)
    finish()
    assert total is not None
    return jnp.concatenate(grads, axis=1) if grads else None, total


_in_turn.defvjp(_in_turn_forward, _in_turn_backward, symbolic_zeros=True)


def _frames(x_BTHWC: jax.Array) -> list[jax.Array]:
    frames = x_BTHWC.shape[1]
    return jnp.split(x_BTHWC, frames, axis=1) if frames else []


def interleaved(parts: Sequence[jax.Array], first: int) -> jax.Array:
    """Frames in their order: frame i is the next one of part i modulo their number.

    Args:
        parts: [B, n, H, W, C] each.
        first: the first frame that there is.
    """
    if len(parts) == 1:
        return parts[0]
    following = [iter(_frames(part)) for part in parts]
    count = sum(part.shape[1] for part in parts)
    frames = [next(following[n % len(parts)]) for n in range(first, first + count)]
    return jnp.concatenate(frames, axis=1)
