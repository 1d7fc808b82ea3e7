"""Two consecutive convolutions of single frames, one frame at a time, at full resolution.

The intermediate frames between the two would be most of a step's memory. Neither convolution sees
the previous frame, so the intermediates need not exist for all frames at once.

Shapes: B clips, T frames, H height, W width, C channels.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero, custom_vjp_primal_tree_values

from jaxtrain.models.video_ae import blocks, folding
from jaxtrain.ops import convolution, per_device
from jaxtrain.ops.per_device import Wanted


class Pair(NamedTuple):
    """Kernels and biases of two convolutions with a ReLU between them, float32."""

    kernel: jax.Array
    bias: jax.Array | None
    next_kernel: jax.Array
    next_bias: jax.Array | None


Fold = Callable[[Any], Pair]
"""Builds a pair from weights; must not close over any arrays but constants."""

# Channels of a pixel that cuDNN reads and writes together: 16 bytes of bfloat16. XLA pads only the
# channels of float16. On an H100, convolutions from 6 and to 12 channels at full resolution reached
# 43 to 225 TFLOP/s, and others 480 (benchmarks/LOG.md). On a CPU, the step of `demo` is 9% slower.
_UNIT = 8


def by_pair(
    x_BTHWC: jax.Array, weights: Any, fold: Fold, stride: int, remat: blocks.VideoRemat
) -> jax.Array:
    """Applies a convolution, a ReLU, and a second convolution, each to single frames.

    Between convolutions of 2x2 taps, the frames have squares as channels and a border
    (:func:`folding.enlarged`), which is zeros after the ReLU.

    Args:
        x_BTHWC: the frames.
        weights: arrays that the pair is folded from. They are gathered once for all frames and kept
            until the backward pass, since they are small. Their gradients are summed over devices
            in their dtype.
        stride: stride of the second convolution.
        remat: with "none", all frames are computed at once. Otherwise they are computed one after
            another, and the backward pass recomputes a frame's intermediate result just before it
            is needed, so that it exists for only a few frames at a time.
    """
    apply = _together if remat == "none" or not x_BTHWC.shape[1] else _in_turn
    if per_device.platform() == "cpu":
        return apply(x_BTHWC, weights, fold, stride)
    pair = jax.eval_shape(fold, weights)
    if missing := -pair.kernel.shape[2] % _UNIT:
        ones, zeros = (0, 1), (0, missing - 1)
        frames = ((0, 0),) * (x_BTHWC.ndim - 1)
        x_BTHWC = jnp.pad(x_BTHWC, (*frames, ones), constant_values=1)
        x_BTHWC = jnp.pad(x_BTHWC, (*frames, zeros))
    padded = functools.partial(_padded, fold, remat == "none")
    y_BTHWC = apply(x_BTHWC, weights, padded, stride)
    return y_BTHWC[..., : pair.next_kernel.shape[3]]


def _padded(fold: Fold, at_once: bool, weights: Any) -> Pair:
    """Returns a pair whose first inputs and last outputs are a multiple of `_UNIT` channels.

    The first channel that is added to the inputs is 1 in all pixels, and has the bias as its tap in
    the middle: so the kernel's gradient has that of the bias, which otherwise is a pass over the
    frames between the convolutions. Not if frames are computed one after another: the gradient of
    each would be rounded before they are summed.
    """
    pair = fold(weights)
    if missing := -pair.kernel.shape[2] % _UNIT:
        more = jnp.zeros((*pair.kernel.shape[:2], missing, pair.kernel.shape[3]), pair.kernel.dtype)
        if pair.bias is not None and at_once:
            more = more.at[1, 1, 0].set(pair.bias)
            pair = pair._replace(bias=None)
        pair = pair._replace(kernel=jnp.concatenate([pair.kernel, more], axis=2))
    outputs = ((0, -pair.next_kernel.shape[3] % _UNIT),)
    if pair.next_bias is not None:
        pair = pair._replace(next_bias=jnp.pad(pair.next_bias, outputs))
    return pair._replace(next_kernel=jnp.pad(pair.next_kernel, (*((0, 0),) * 3, *outputs)))


def _first(x_BTHWC: jax.Array, pair: Pair) -> jax.Array:
    return blocks.conv_frames(x_BTHWC, pair.kernel, pair.bias)


def _rectified(y_BTHWC: jax.Array, pair: Pair) -> jax.Array:
    rectified = blocks.relu(y_BTHWC)
    if pair.kernel.shape[0] != folding.UP:
        return rectified
    row, column = folding.inside(*rectified.shape[2:])
    inside = jnp.logical_and(row[None, None], column[None, None])
    return jnp.where(inside, rectified, jnp.zeros((), rectified.dtype))


def _second(x_BTHWC: jax.Array, pair: Pair, stride: int) -> jax.Array:
    return blocks.conv_frames(x_BTHWC, pair.next_kernel, pair.next_bias, stride)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _together(x_BTHWC: jax.Array, weights: Any, fold: Fold, stride: int) -> jax.Array:
    """Computes :func:`by_pair` for all frames and keeps the result between the convolutions."""
    return _together_kept(x_BTHWC, weights, fold, stride)[0]


def _together_kept(
    x_BTHWC: jax.Array, weights: Any, fold: Fold, stride: int
) -> tuple[jax.Array, jax.Array]:
    pair = fold(weights)
    between = _rectified(_first(x_BTHWC, pair), pair)
    return _second(between, pair, stride), between


def _together_forward(
    x_BTHWC: CustomVJPPrimal, weights: Any, fold: Fold, stride: int
) -> tuple[jax.Array, tuple[tuple[jax.Array, jax.Array], Any, Wanted]]:
    x, values = custom_vjp_primal_tree_values((x_BTHWC, weights))
    outputs, between = _together_kept(x, values, fold, stride)
    return outputs, ((x, between), values, _wanted(x_BTHWC, weights))


def _together_backward(
    fold: Fold,
    stride: int,
    kept: tuple[tuple[jax.Array, jax.Array], Any, Wanted],
    grad_BTHWC: jax.Array,
) -> tuple[jax.Array | None, Any]:
    (x_BTHWC, between), weights, wanted = kept
    if isinstance(grad_BTHWC, SymbolicZero):
        return None, None

    def gradients(rows: tuple[jax.Array, ...], weights: Any) -> tuple[jax.Array | None, Any]:
        x, between, grad = rows
        pair, unfold = jax.vjp(fold, weights)
        with_rows = Wanted(of_rows=True, of_shared=wanted.of_shared)
        grad_between, *of_second = _of_convolution(
            between, pair.next_kernel, pair.next_bias, grad, stride, with_rows
        )
        assert grad_between is not None
        (grad_y,) = blocks.relu_backward(between, grad_between)
        grad_x, *of_first = _of_convolution(x, pair.kernel, pair.bias, grad_y, 1, wanted)
        if not wanted.of_shared:
            return grad_x, None
        return grad_x, unfold(Pair(*of_first, *of_second))[0]

    return per_device.at_once(gradients, (x_BTHWC, between, grad_BTHWC), weights)


_together.defvjp(_together_forward, _together_backward, symbolic_zeros=True)


def _wanted(x_BTHWC: CustomVJPPrimal, weights: Any) -> Wanted:
    leaves = jax.tree.leaves(weights, is_leaf=lambda leaf: isinstance(leaf, CustomVJPPrimal))
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _in_turn(x_BTHWC: jax.Array, weights: Any, fold: Fold, stride: int) -> jax.Array:
    """Computes :func:`by_pair` and keeps only the arguments for the backward pass.

    Without the barriers the compiler computes all frames at once when it finds enough memory.
    """
    pair, outputs = fold(weights), list[jax.Array]()
    for frame in _frames(x_BTHWC):
        if outputs:
            frame, outputs[-1] = lax.optimization_barrier((frame, outputs[-1]))
        outputs.append(_second(_rectified(_first(frame, pair), pair), pair, stride))
    return jnp.concatenate(outputs, axis=1)


def _in_turn_forward(
    x_BTHWC: CustomVJPPrimal, weights: Any, fold: Fold, stride: int
) -> tuple[jax.Array, tuple[jax.Array, Any, Wanted]]:
    x, values = custom_vjp_primal_tree_values((x_BTHWC, weights))
    # No model trains the layers before a pair without training the pair.
    return _in_turn(x, values, fold, stride), (x, values, Wanted(x_BTHWC.perturbed, of_shared=True))


def _in_turn_backward(
    fold: Fold, stride: int, kept: tuple[jax.Array, Any, Wanted], grad_BTHWC: jax.Array
) -> tuple[jax.Array | None, Any]:
    x_BTHWC, weights, wanted = kept
    if isinstance(grad_BTHWC, SymbolicZero):
        return None, None

    def gradients(rows: tuple[jax.Array, jax.Array], weights: Any) -> tuple[jax.Array | None, Any]:
        pair, unfold = jax.vjp(fold, weights)
        grad_x, grad_pair = _gradients(rows, pair, stride=stride, wanted=wanted)
        return grad_x, unfold(grad_pair)[0]

    return per_device.at_once(gradients, (x_BTHWC, grad_BTHWC), weights)


def _gradients(
    rows: tuple[jax.Array, jax.Array], pair: Pair, *, stride: int, wanted: Wanted
) -> tuple[jax.Array | None, Pair]:
    """Computes the gradients of the frames and of the pair.

    Each frame's contribution to a kernel's gradient is computed in the frames' dtype; the
    contributions are summed in float32.
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
        between = _rectified(y, pair)
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


def interleaved(sequences: Sequence[jax.Array], first: int) -> jax.Array:
    """Interleaves frames: frame i is the next one of sequence i modulo their number.

    Args:
        sequences: arrays [B, n, H, W, C].
        first: number of the first frame that they contain.
    """
    if len(sequences) == 1:
        return sequences[0]
    following = [iter(_frames(sequence)) for sequence in sequences]
    count = sum(sequence.shape[1] for sequence in sequences)
    frames = [next(following[n % len(sequences)]) for n in range(first, first + count)]
    return jnp.concatenate(frames, axis=1)
