"""Layers of the video autoencoder (TAEHV, github.com/madebyollin/taehv).

A memory block sees its own input of the frame before, so information flows from past to future
only. Called, a layer takes all frames of a clip; ``step`` takes some more frames of a video and the
memory that those before have left, and gives the same.

Shapes: B clips, T frames, H height, W width, C channels; P side of a patch. Layout BTHWC, kernels
[3, 3, in, out]; the kernel of a layer without extent in space is [in, out] with the frames of a
group in order (pooling: frame-major input channels; growing: frame-major output channels).
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxtrain.ops import convolution, layers
from jaxtrain.ops.init import uniform_init

WIDE = 7
"""Side of the window in which a channel of the "super" decoder looks around."""
Memory = list[jax.Array]
"""What the memory blocks of a part of the network keep of the frame before, in their order."""


VideoRemat = Literal["none", "ends", "block"]
"""What the backward pass computes again: see ``Config.remat``."""


class Remembering(Protocol):
    """A block with a memory of one frame."""

    channels: int

    def __call__(self, x_BTHWC: jax.Array) -> jax.Array:
        """All frames of a clip."""

    def step(self, x_BTHWC: jax.Array, memory_B1HWC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Further frames, and the memory after them."""


@jax.custom_vjp
def relu(x: jax.Array) -> jax.Array:
    """max(x, 0), whose gradient needs its output only.

    The next convolution keeps that output anyway. `jax.nn.relu` would keep a mask beside it, and
    under `layers.remat(..., "none")` an array of zeros as well.
    """
    return jnp.maximum(x, 0)


def _relu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = relu(x)
    return y, y


def relu_backward(y: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    """The gradient of what went in, from what came out and its gradient."""
    # Without the barrier XLA compares what went in: it then keeps that too, and cannot have cuDNN
    # do the rectifier in the convolution before it.
    y = lax.optimization_barrier(y)
    return (jnp.where(y > 0, grad, jnp.zeros((), grad.dtype)),)


relu.defvjp(_relu_forward, relu_backward)


def previous(x_BTHWC: jax.Array) -> jax.Array:
    """Each frame's predecessor; zeros before the first."""
    one_later = ((0, 0, 0), (1, -1, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0))
    return lax.pad(x_BTHWC, jnp.zeros((), x_BTHWC.dtype), one_later)


def after(memory_B1HWC: jax.Array, x_BTHWC: jax.Array) -> jax.Array:
    """Each frame's predecessor, where ``memory`` is that of the first."""
    return jnp.concatenate([memory_B1HWC, x_BTHWC[:, :-1]], axis=1)


def unshuffle(x_BTHWC: jax.Array, side: int) -> jax.Array:
    """Patches of P x P pixels become channels, as torch does: [B, T, H / P, W / P, C P P]."""
    b, t, h, w, c = x_BTHWC.shape
    patches = x_BTHWC.reshape(b, t, h // side, side, w // side, side, c)
    return patches.transpose(0, 1, 2, 4, 6, 3, 5).reshape(b, t, h // side, w // side, -1)


def shuffle(x_BTHWC: jax.Array, side: int) -> jax.Array:
    """The way back from :func:`unshuffle`."""
    b, t, h, w, c = x_BTHWC.shape
    patches = x_BTHWC.reshape(b, t, h, w, c // side**2, side, side)
    return patches.transpose(0, 1, 2, 5, 3, 6, 4).reshape(b, t, h * side, w * side, -1)


def grouped(x_BTHWC: jax.Array, count: int) -> jax.Array:
    """Groups of successive frames become channels, frame-major: [B, T / N, H, W, N C]."""
    if count == 1:
        return x_BTHWC
    return jnp.concatenate([x_BTHWC[:, first::count] for first in range(count)], axis=-1)


def upsample(x_BTHWC: jax.Array) -> jax.Array:
    """Nearest neighbour, twice the height and width."""
    b, t, h, w, c = x_BTHWC.shape
    doubled = jnp.broadcast_to(x_BTHWC[:, :, :, None, :, None], (b, t, h, 2, w, 2, c))
    return doubled.reshape(b, t, 2 * h, 2 * w, c)


def kernel(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int) -> nnx.Param[jax.Array]:
    """U(-b, b) with b = sqrt(3 / fan_in): what comes out varies as much as what goes in.

    Not PyTorch's default (a third of the variance), from which the reference starts: under it a
    signal fades on its way through sixty layers, and training sits for hundreds of steps on clips
    of one colour (14.7 dB where this start reaches 20; benchmarks/LOG.md).
    """
    bound = math.sqrt(3 / fan_in)
    return uniform_init(rngs, shape, bound)


def zeros(*shape: int) -> nnx.Param[jax.Array]:
    """A bias, or a kernel that adds nothing at first."""
    return nnx.Param(jnp.zeros(shape))


def conv_frames(
    x_BTHWC: jax.Array,
    kernel: Any,
    bias: jax.Array | None = None,
    stride: int = 1,
    fold: convolution.Fold = lambda kernel: kernel,
) -> jax.Array:
    """3x3 convolution of each frame, by a bias and a kernel of any dtype.

    Args:
        x_BTHWC: frames.
        kernel: [3, 3, C, outputs], or arrays of which `fold` makes it.
        bias: [outputs].
        stride: 1 or 2.
        fold: see :func:`jaxtrain.ops.convolution.by_parts`.
    """
    b, t, *hwc = x_BTHWC.shape
    x_NHWC, dtype = x_BTHWC.reshape(b * t, *hwc), x_BTHWC.dtype
    y = convolution.by_parts(x_NHWC, kernel, lambda parts: fold(parts).astype(dtype), stride)
    if bias is not None:
        y = y + bias.astype(x_BTHWC.dtype).reshape(1, 1, 1, -1)
    return y.reshape(b, t, *y.shape[1:])


def _add_bias(x_BTHWC: jax.Array, bias: nnx.Param[jax.Array]) -> jax.Array:
    return x_BTHWC + bias[...].reshape(1, 1, 1, 1, -1)


class Conv(nnx.Module):
    """3x3 convolution of each frame."""

    def __init__(
        self, inputs: int, outputs: int, *, stride: int = 1, use_bias: bool = True, rngs: nnx.Rngs
    ) -> None:
        self.kernel = kernel(rngs, (3, 3, inputs, outputs), 9 * inputs)
        self.bias = zeros(outputs) if use_bias else None
        self.stride = stride

    def __call__(self, x_BTHWC: jax.Array) -> jax.Array:
        """[B, T, H, W, inputs] -> [B, T, H / stride, W / stride, outputs]."""
        bias = None if self.bias is None else self.bias[...]
        return conv_frames(x_BTHWC, self.kernel[...], bias, self.stride)


class MemoryConv(nnx.Module):
    """3x3 convolution of each frame beside its predecessor.

    The reference convolves [frame, predecessor] stacked over channels. A convolution is linear and
    maps zeros to zeros, so this one convolves each frame once, with twice the output channels:
    the first half is the frame's own share, the second what it leaves to its successor. No stacked
    copy of the input exists. The reference's kernel is both halves stacked over input channels.
    """

    def __init__(self, channels: int, *, rngs: nnx.Rngs) -> None:
        self.kernel = kernel(rngs, (3, 3, channels, 2 * channels), 9 * 2 * channels)
        self.bias = zeros(channels)

    def shares(self, x_BTHWC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[B, T, H, W, C] -> each frame's own share and what it leaves, of the same shape each."""
        own, left = jnp.split(conv_frames(x_BTHWC, self.kernel[...]), 2, axis=-1)
        return own, left

    def joined(self, own_BTHWC: jax.Array, inherited_BTHWC: jax.Array) -> jax.Array:
        """A frame's own share, what its predecessor has left, and the bias."""
        return _add_bias(own_BTHWC + inherited_BTHWC, self.bias)


class MemoryBlock(nnx.Module):
    """Three convolutions and a skip; the first one remembers the frame before."""

    def __init__(self, channels: int, *, rngs: nnx.Rngs) -> None:
        self.channels = channels
        self.conv1 = MemoryConv(channels, rngs=rngs)
        self.conv2 = Conv(channels, channels, rngs=rngs)
        self.conv3 = Conv(channels, channels, rngs=rngs)
        self.conv3.kernel = zeros(3, 3, channels, channels)  # a block starts as its skip

    def __call__(self, x_BTHWC: jax.Array) -> jax.Array:
        """[B, T, H, W, C] -> the same shape."""
        own, left = self.conv1.shares(x_BTHWC)
        return self._rest(x_BTHWC, self.conv1.joined(own, previous(left)))

    def step(self, x_BTHWC: jax.Array, memory_B1HWC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Further frames; the memory is the share that the frame before has left."""
        own, left = self.conv1.shares(x_BTHWC)
        y = self._rest(x_BTHWC, self.conv1.joined(own, after(memory_B1HWC, left)))
        return y, left[:, -1:]

    def _rest(self, x_BTHWC: jax.Array, y_BTHWC: jax.Array) -> jax.Array:
        return relu(self.conv3(relu(self.conv2(relu(y_BTHWC)))) + x_BTHWC)


class Pointwise(nnx.Module):
    """The same matrix for each pixel."""

    def __init__(self, inputs: int, outputs: int, *, use_bias: bool, rngs: nnx.Rngs) -> None:
        self.kernel = kernel(rngs, (inputs, outputs), inputs)
        self.bias = zeros(outputs) if use_bias else None

    def __call__(self, x_BTHWC: jax.Array) -> jax.Array:
        """[B, T, H, W, inputs] -> [B, T, H, W, outputs]."""
        y = x_BTHWC @ self.kernel[...]
        return y if self.bias is None else _add_bias(y, self.bias)


class WideMemoryBlock(nnx.Module):
    """The "super" decoder's: each channel looks around 7x7 pixels, then two matrices for a pixel.

    Here the two frames are stacked: a channel is convolved with itself alone, so nothing is saved
    by sharing, and the memory is the frame before.
    """

    def __init__(self, channels: int, *, rngs: nnx.Rngs) -> None:
        self.channels = channels
        self.around = kernel(rngs, (WIDE, WIDE, 1, 2 * channels), WIDE**2)
        self.up = Pointwise(2 * channels, 4 * channels, use_bias=True, rngs=rngs)
        self.down = Pointwise(4 * channels, channels, use_bias=False, rngs=rngs)
        self.down.kernel = zeros(4 * channels, channels)  # a block starts as its skip

    def __call__(self, x_BTHWC: jax.Array) -> jax.Array:
        """[B, T, H, W, C] -> the same shape."""
        return self._both(x_BTHWC, previous(x_BTHWC))

    def step(self, x_BTHWC: jax.Array, memory_B1HWC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Further frames; the memory is the frame before."""
        return self._both(x_BTHWC, after(memory_B1HWC, x_BTHWC)), x_BTHWC[:, -1:]

    def _both(self, x_BTHWC: jax.Array, past_BTHWC: jax.Array) -> jax.Array:
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
    """The matrix that joins a group of `stride` frames (:func:`grouped`), for each pixel."""

    def __init__(self, channels: int, stride: int, *, rngs: nnx.Rngs) -> None:
        self.kernel = kernel(rngs, (stride * channels, channels), stride * channels)
        self.stride = stride


class TimeGrow(nnx.Module):
    """Splits each frame into `stride` successive ones, linearly, pixel by pixel."""

    def __init__(self, channels: int, stride: int, *, rngs: nnx.Rngs) -> None:
        self.kernel = kernel(rngs, (channels, stride * channels), channels)
        self.stride = stride

    def matrices(self) -> list[jax.Array]:
        """[C, C] for each of the frames that one becomes."""
        return jnp.split(self.kernel[...], self.stride, axis=-1)

    def __call__(self, x_BTHWC: jax.Array) -> jax.Array:
        """[B, T, H, W, C] -> [B, T * stride, H, W, C]."""
        b, t, h, w, c = x_BTHWC.shape
        grown = jnp.split(x_BTHWC @ self.kernel[...], self.stride, axis=-1)
        return jnp.stack(grown, axis=2).reshape(b, t * self.stride, h, w, c)


def run(blocks: Sequence[Remembering], x_BTHWC: jax.Array, remat: VideoRemat) -> jax.Array:
    """All frames of a clip through block after block."""
    mode: layers.Remat = "none" if remat == "ends" else remat
    for block in blocks:
        x_BTHWC = layers.remat(type(block).__call__, mode)(block, x_BTHWC)
    return x_BTHWC


def run_step(
    blocks: Sequence[Remembering], x_BTHWC: jax.Array, memory: Memory
) -> tuple[jax.Array, Memory]:
    """Further frames through block after block, and the memory after them."""
    following: Memory = []
    for block, of_block in zip(blocks, memory, strict=True):
        x_BTHWC, left = block.step(x_BTHWC, of_block)
        following.append(left)
    return x_BTHWC, following
