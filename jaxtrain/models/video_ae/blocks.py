"""Layers of the video autoencoder (TAEHV, github.com/madebyollin/taehv).

A memory block also sees its own input for the previous frame, so information flows only from past
to future. Calling a layer processes all frames of a clip; ``step`` processes further frames of a
video, given the memory of the frames before, with the same result.

Shapes: B clips, T frames, H height, W width, C channels; P patch size. Layout BTHWC, kernels
[3, 3, in, out]. The kernel of a pointwise layer is [in, out], with the frames of a group in order
(pooling: frame-major input channels; growing: frame-major output channels).
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxtrain.models.reconstruction.layers import Pointwise, kernel, zeros
from jaxtrain.ops import convolution, layers, per_device

WIDE = 7
"""Side of the depthwise kernels of the "super" decoder (pixels)."""
Memory = list[jax.Array]
"""What each memory block, in order, keeps from the previous frame."""


VideoRemat = Literal["none", "ends", "block"]
"""What the backward pass recomputes: see ``Config.remat``."""


class Remembering(Protocol):
    """A block with a memory of one frame."""

    channels: int

    def __call__(self, x_BTHWC: jax.Array) -> jax.Array:
        """Processes all frames of a clip."""

    def step(self, x_BTHWC: jax.Array, memory_B1HWC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Processes further frames; returns them and the memory after them."""


@jax.custom_vjp
def relu(x: jax.Array) -> jax.Array:
    """Computes max(x, 0), with a gradient that needs only the output.

    The next convolution keeps that output anyway. `jax.nn.relu` would also keep a mask, and under
    `layers.remat(..., "none")` an array of zeros.
    """
    return jnp.maximum(x, 0)


def _relu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = relu(x)
    return y, y


def relu_backward(y: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    """Computes the gradient of the input from the output and its gradient."""
    # Without the barrier XLA compares the input: it then keeps that, too, and cannot fuse the ReLU
    # into cuDNN's convolution before it.
    y = lax.optimization_barrier(y)
    return (jnp.where(y > 0, grad, jnp.zeros((), grad.dtype)),)


relu.defvjp(_relu_forward, relu_backward)


def previous(x_BTHWC: jax.Array) -> jax.Array:
    """Returns each frame's predecessor; zeros for the first."""
    one_later = ((0, 0, 0), (1, -1, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0))
    return lax.pad(x_BTHWC, jnp.zeros((), x_BTHWC.dtype), one_later)


def after(memory_B1HWC: jax.Array, x_BTHWC: jax.Array) -> jax.Array:
    """Returns each frame's predecessor; ``memory`` for the first."""
    return jnp.concatenate([memory_B1HWC, x_BTHWC[:, :-1]], axis=1)


def unshuffle(x_BTHWC: jax.Array, side: int) -> jax.Array:
    """Moves patches of P x P pixels to channels, in torch's order: [B, T, H / P, W / P, C P P]."""
    b, t, h, w, c = x_BTHWC.shape
    patches = x_BTHWC.reshape(b, t, h // side, side, w // side, side, c)
    return patches.transpose(0, 1, 2, 4, 6, 3, 5).reshape(b, t, h // side, w // side, -1)


def shuffle(x_BTHWC: jax.Array, side: int) -> jax.Array:
    """Inverts :func:`unshuffle`."""
    b, t, h, w, c = x_BTHWC.shape
    patches = x_BTHWC.reshape(b, t, h, w, c // side**2, side, side)
    return patches.transpose(0, 1, 2, 5, 3, 6, 4).reshape(b, t, h * side, w * side, -1)


def grouped(x_BTHWC: jax.Array, count: int) -> jax.Array:
    """Moves groups of N successive frames to channels, frame-major: [B, T / N, H, W, N C]."""
    if count == 1:
        return x_BTHWC
    return jnp.concatenate([x_BTHWC[:, first::count] for first in range(count)], axis=-1)


def bordered(x_BTHWC: jax.Array) -> jax.Array:
    """Adds a border of one pixel of zeros to each frame."""
    return jnp.pad(x_BTHWC, ((0, 0), (0, 0), (1, 1), (1, 1), (0, 0)))


SAME = np.outer([0.0, 1.0, 0.0], [0.0, 1.0, 0.0])
MEAN_OF_SQUARE = np.outer([0.0, 0.5, 0.5], [0.0, 0.5, 0.5])
"""What a 3x3 kernel does to a carried channel (:func:`carry`): nothing, or with a stride of 2 the
mean of each 2x2 square."""


def carry(
    kernel: nnx.Param[jax.Array],
    channels: int,
    taps: np.ndarray = np.ones(()),  # noqa: B008
    *,
    pool: int = 1,
    grow: int = 1,
    copies: int = 1,
) -> None:
    """Makes the first output channels of a kernel the first input channels, unmixed.

    Args:
        kernel: [*taps.shape, inputs, outputs].
        channels: how many are carried; the other outputs keep their weights.
        taps: what happens to each of them in space, [3, 3], or [] for a pointwise layer.
        pool: groups of this many frames are averaged: [.., pool * inputs, outputs], frame-major.
        grow: each frame is repeated this many times: [.., inputs, grow * outputs], frame-major.
        copies: each channel becomes this many neighbors.
    """
    taps_in = kernel[...]
    inputs, outputs = taps_in.shape[-2] // pool, taps_in.shape[-1] // grow
    for into in range(grow):
        first = into * outputs
        taps_in = taps_in.at[..., first : first + copies * channels].set(0)
        for channel in range(channels):
            own_outputs = slice(first + copies * channel, first + copies * (channel + 1))
            for past in range(pool):
                taps_in = taps_in.at[..., past * inputs + channel, own_outputs].set(
                    taps[..., None] / pool
                )
    kernel[...] = taps_in


def conv_frames(
    x_BTHWC: jax.Array,
    kernel: Any,
    bias: jax.Array | None = None,
    stride: int = 1,
    fold: convolution.Fold = lambda kernel: kernel,
    skip_BTHWC: jax.Array | None = None,
) -> jax.Array:
    """Convolves each frame with a kernel and a bias of any dtype.

    Args:
        x_BTHWC: frames.
        kernel: [3, 3, C, outputs], or [2, 2, C, outputs] without a border; or arrays from which
            `fold` computes it.
        bias: [outputs].
        stride: 1 or 2.
        skip_BTHWC: is added to the result. cuDNN adds it, the bias and a ReLU in the same call, but
            XLA recognizes that only without a reshape between them.
    """
    b, t, *hwc = x_BTHWC.shape
    x_NHWC, dtype = x_BTHWC.reshape(b * t, *hwc), x_BTHWC.dtype
    y = convolution.folded_conv(x_NHWC, kernel, lambda weights: fold(weights).astype(dtype), stride)
    if bias is not None:
        y = layers.add_shared(y, bias)
    if skip_BTHWC is not None:
        y = y + skip_BTHWC.reshape(y.shape)
    return y.reshape(b, t, *y.shape[1:])


class Conv(nnx.Module):
    """3x3 convolution of each frame."""

    def __init__(
        self, inputs: int, outputs: int, *, stride: int = 1, use_bias: bool = True, rngs: nnx.Rngs
    ) -> None:
        self.kernel = kernel(rngs, (3, 3, inputs, outputs), 9 * inputs)
        self.bias = zeros(outputs) if use_bias else None
        self.stride = stride

    def __call__(self, x_BTHWC: jax.Array, skip_BTHWC: jax.Array | None = None) -> jax.Array:
        """Maps [B, T, H, W, inputs] to [B, T, H / stride, W / stride, outputs], adds the skip."""
        bias = None if self.bias is None else self.bias[...]
        return conv_frames(x_BTHWC, self.kernel[...], bias, self.stride, skip_BTHWC=skip_BTHWC)


class MemoryConv(nnx.Module):
    """3x3 convolution of each frame and its predecessor.

    The reference convolves [frame, predecessor] stacked over channels. A convolution is linear and
    maps zeros to zeros, so this one convolves each frame once, with twice the output channels: the
    first half is for the frame itself, the second for its successor. So no stacked copy of the
    input exists. The reference's kernel is both halves stacked over input channels.
    """

    def __init__(self, channels: int, *, rngs: nnx.Rngs) -> None:
        self.kernel = kernel(rngs, (3, 3, channels, 2 * channels), 9 * 2 * channels)
        self.bias = zeros(channels)

    def outputs(self, x_BTHWC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns each frame's outputs for itself and for its successor, [B, T, H, W, C] each."""
        of_frame, left = jnp.split(conv_frames(x_BTHWC, self.kernel[...]), 2, axis=-1)
        return of_frame, left

    def joined(self, own_BTHWC: jax.Array, inherited_BTHWC: jax.Array) -> jax.Array:
        """Adds a frame's own output, its predecessor's output for it, and the bias."""
        return layers.add_shared(own_BTHWC + inherited_BTHWC, self.bias[...])

    def rectified(self, x_BTHWC: jax.Array) -> jax.Array:
        """Returns the ReLU of all frames' outputs, [B, T, H, W, C]."""
        return _rectified(conv_frames(x_BTHWC, self.kernel[...]), self.bias[...])


@jax.custom_vjp
def _rectified(outputs_BTHWE: jax.Array, bias: jax.Array) -> jax.Array:
    """Adds both outputs of all frames (:meth:`MemoryConv.outputs`, not split), takes the ReLU."""
    of_frame, left = jnp.split(outputs_BTHWE, 2, axis=-1)
    return jnp.maximum(of_frame + previous(left) + bias.reshape(1, 1, 1, 1, -1), 0)


def _rectified_forward(outputs_BTHWE: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = _rectified(outputs_BTHWE, bias)
    return y, y


def _rectified_backward(y: jax.Array, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    (grad,) = relu_backward(y, grad)
    zero = jnp.zeros((), grad.dtype)
    following = lax.pad(grad, zero, ((0, 0, 0), (-1, 1, 0), *((0, 0, 0),) * 3))
    # The barrier makes XLA write both in one pass, before it sums the gradient of the bias.
    grads = lax.optimization_barrier(jnp.concatenate([grad, following], axis=-1))
    of_frame = grads[..., : grad.shape[-1]]
    return grads, per_device.batch_sum(of_frame, 4)


_rectified.defvjp(_rectified_forward, _rectified_backward)


class MemoryBlock(nnx.Module):
    """Three convolutions and a skip; the first one also sees the previous frame."""

    def __init__(self, channels: int, *, rngs: nnx.Rngs) -> None:
        self.channels = channels
        self.conv1 = MemoryConv(channels, rngs=rngs)
        self.conv2 = Conv(channels, channels, rngs=rngs)
        self.conv3 = Conv(channels, channels, rngs=rngs)
        self.conv3.kernel = zeros(3, 3, channels, channels)  # a block starts as its skip

    def __call__(self, x_BTHWC: jax.Array) -> jax.Array:
        """Maps [B, T, H, W, C] to the same shape."""
        return self._after_first(x_BTHWC, self.conv1.rectified(x_BTHWC))

    def step(self, x_BTHWC: jax.Array, memory_B1HWC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Processes further frames; the memory is the previous frame's output for the next."""
        of_frame, left = self.conv1.outputs(x_BTHWC)
        y = self._after_first(x_BTHWC, relu(self.conv1.joined(of_frame, after(memory_B1HWC, left))))
        return y, left[:, -1:]

    def _after_first(self, x_BTHWC: jax.Array, y_BTHWC: jax.Array) -> jax.Array:
        return relu(self.conv3(relu(self.conv2(y_BTHWC)), x_BTHWC))


class WideMemoryBlock(nnx.Module):
    """Memory block of the "super" decoder: a 7x7 depthwise convolution, then two linear layers.

    It stacks the two frames: with a depthwise convolution, splitting the output saves nothing. So
    the memory is the previous frame.
    """

    def __init__(self, channels: int, *, rngs: nnx.Rngs) -> None:
        self.channels = channels
        self.around = kernel(rngs, (WIDE, WIDE, 1, 2 * channels), WIDE**2)
        self.up = Pointwise(2 * channels, 4 * channels, use_bias=True, rngs=rngs)
        self.down = Pointwise(4 * channels, channels, use_bias=False, rngs=rngs)
        self.down.kernel = zeros(4 * channels, channels)  # a block starts as its skip

    def __call__(self, x_BTHWC: jax.Array) -> jax.Array:
        """Maps [B, T, H, W, C] to the same shape."""
        return self._with_past(x_BTHWC, previous(x_BTHWC))

    def step(self, x_BTHWC: jax.Array, memory_B1HWC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Processes further frames; the memory is the previous frame."""
        return self._with_past(x_BTHWC, after(memory_B1HWC, x_BTHWC)), x_BTHWC[:, -1:]

    def _with_past(self, x_BTHWC: jax.Array, past_BTHWC: jax.Array) -> jax.Array:
        stacked = jnp.concatenate([x_BTHWC, past_BTHWC], axis=-1)
        b, t, h, w, c = stacked.shape
        looked = lax.conv_general_dilated(
            stacked.reshape(b * t, h, w, c),
            self.around[...],
            window_strides=(1, 1),
            padding="SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=c,
        )
        return self.down(relu(self.up(looked.reshape(b, t, h, w, c)))) + x_BTHWC


class TimePool(nnx.Module):
    """The matrix that merges a group of `stride` frames (:func:`grouped`), for each pixel."""

    def __init__(self, channels: int, stride: int, *, rngs: nnx.Rngs) -> None:
        self.kernel = kernel(rngs, (stride * channels, channels), stride * channels)
        self.stride = stride


class TimeGrow(nnx.Module):
    """Maps each frame to `stride` successive ones, linearly, for each pixel."""

    def __init__(self, channels: int, stride: int, *, rngs: nnx.Rngs) -> None:
        self.kernel = kernel(rngs, (channels, stride * channels), channels)
        self.stride = stride

    def matrices(self) -> list[jax.Array]:
        """Returns a matrix [C, C] for each of the frames that one becomes."""
        return jnp.split(self.kernel[...], self.stride, axis=-1)

    def __call__(self, x_BTHWC: jax.Array) -> jax.Array:
        """Maps [B, T, H, W, C] to [B, T * stride, H, W, C]."""
        b, t, h, w, c = x_BTHWC.shape
        grown = jnp.split(x_BTHWC @ self.kernel[...], self.stride, axis=-1)
        return jnp.stack(grown, axis=2).reshape(b, t * self.stride, h, w, c)


def run(blocks: Sequence[Remembering], x_BTHWC: jax.Array, remat: VideoRemat) -> jax.Array:
    """Applies blocks in order to all frames of a clip."""
    for block in blocks:
        apply = type(block).__call__
        # Otherwise without layers.remat, which would gather the parameters again in the backward
        # pass: they are small, and its barrier separates a sum of gradients from the next ReLU's.
        x_BTHWC = (layers.remat(apply, "block") if remat == "block" else apply)(block, x_BTHWC)
    return x_BTHWC


def run_step(
    blocks: Sequence[Remembering], x_BTHWC: jax.Array, memory: Memory
) -> tuple[jax.Array, Memory]:
    """Applies blocks in order to further frames; returns them and the memory after them."""
    following: Memory = []
    for block, of_block in zip(blocks, memory, strict=True):
        x_BTHWC, left = block.step(x_BTHWC, of_block)
        following.append(left)
    return x_BTHWC, following
