"""The network of the video autoencoder: the base model of TAEHV (github.com/madebyollin/taehv).

Space shrinks by 8, time by 4. All frames of a clip are computed at once. A memory block sees its
own input of the frame before, so information flows from past to future only; the time-pooling
layers join groups of four frames into one latent.

Shapes: B clips, T frames, H height, W width, C channels; L latents in time. Layout BTHWC, kernels
[3, 3, in, out]; the kernel of a layer without extent in space is [in, out] with the frames of a
group in order (pooling: frame-major input channels; growing: frame-major output channels).
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxtrain import layers

SPACE_FACTOR = 8
TIME_FACTOR = 4
FIRST_DROPPED = TIME_FACTOR - 1
"""Decoded frames that come before the first input frame: the decoder of latent 0 has no past."""
MEMORY_BLOCKS = 3
ENCODER_POOLS = (2, 2, 1)
DECODER_GROWS = (1, 2, 2)


def latent_frames(frames: int) -> int:
    """Latents that `frames` frames become: the last group is filled with the last frame."""
    return math.ceil(frames / TIME_FACTOR)


def decoded_frames(frames: int) -> int:
    """Frames that come back; frame i reconstructs input frame i (counting filled-up ones)."""
    return latent_frames(frames) * TIME_FACTOR - FIRST_DROPPED


def pad_time(video_BTHWC: jax.Array) -> jax.Array:
    """Repeats the last frame until T is a multiple of 4."""
    missing = -video_BTHWC.shape[1] % TIME_FACTOR
    return jnp.pad(video_BTHWC, ((0, 0), (0, missing), (0, 0), (0, 0), (0, 0)), mode="edge")


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


def _relu_backward(y: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    return (jnp.where(y > 0, grad, jnp.zeros((), grad.dtype)),)


relu.defvjp(_relu_forward, _relu_backward)


def previous(x_BTHWC: jax.Array) -> jax.Array:
    """Each frame's predecessor; zeros before the first."""
    one_later = ((0, 0, 0), (1, -1, 0), (0, 0, 0), (0, 0, 0), (0, 0, 0))
    return lax.pad(x_BTHWC, jnp.zeros((), x_BTHWC.dtype), one_later)


def upsample(x_BTHWC: jax.Array) -> jax.Array:
    """Nearest neighbour, twice the height and width."""
    b, t, h, w, c = x_BTHWC.shape
    doubled = jnp.broadcast_to(x_BTHWC[:, :, :, None, :, None], (b, t, h, 2, w, 2, c))
    return doubled.reshape(b, t, 2 * h, 2 * w, c)


def _kernel(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int) -> nnx.Param[jax.Array]:
    """U(-b, b) with b = sqrt(3 / fan_in): what comes out varies as much as what goes in.

    Not PyTorch's default (a third of the variance), from which the reference starts: under it a
    signal fades on its way through sixty layers, and training sits for hundreds of steps on clips
    of one colour (14.7 dB where this start reaches 20; benchmarks/RESULTS.md).
    """
    bound = math.sqrt(3 / fan_in)
    return nnx.Param(jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound))


def _zeros(*shape: int) -> nnx.Param[jax.Array]:
    return nnx.Param(jnp.zeros(shape))


def _conv_frames(x_BTHWC: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    b, t, *hwc = x_BTHWC.shape
    y = layers.conv3x3(x_BTHWC.reshape(b * t, *hwc), kernel, stride)
    return y.reshape(b, t, *y.shape[1:])


def _add_bias(x_BTHWC: jax.Array, bias: nnx.Param[jax.Array]) -> jax.Array:
    return x_BTHWC + bias[...].reshape(1, 1, 1, 1, -1)


class Conv(nnx.Module):
    """3x3 convolution of each frame."""

    def __init__(
        self, inputs: int, outputs: int, *, stride: int = 1, use_bias: bool = True, rngs: nnx.Rngs
    ) -> None:
        self.kernel = _kernel(rngs, (3, 3, inputs, outputs), 9 * inputs)
        self.bias = _zeros(outputs) if use_bias else None
        self.stride = stride

    def __call__(self, x_BTHWC: jax.Array) -> jax.Array:
        """[B, T, H, W, inputs] -> [B, T, H / stride, W / stride, outputs]."""
        y = _conv_frames(x_BTHWC, self.kernel[...], self.stride)
        return y if self.bias is None else _add_bias(y, self.bias)


class MemoryConv(nnx.Module):
    """3x3 convolution of each frame beside its predecessor.

    The reference convolves [frame, predecessor] stacked over channels. A convolution is linear and
    maps zeros to zeros, so this one convolves each frame once, with twice the output channels:
    the first half is the frame's own share, the second what it leaves to its successor. No stacked
    copy of the input exists. The reference's kernel is both halves stacked over input channels.
    """

    def __init__(self, channels: int, *, rngs: nnx.Rngs) -> None:
        self.kernel = _kernel(rngs, (3, 3, channels, 2 * channels), 9 * 2 * channels)
        self.bias = _zeros(channels)

    def __call__(self, x_BTHWC: jax.Array) -> jax.Array:
        """[B, T, H, W, C] -> the same shape."""
        own, left = jnp.split(_conv_frames(x_BTHWC, self.kernel[...], 1), 2, axis=-1)
        return _add_bias(own + previous(left), self.bias)


class MemoryBlock(nnx.Module):
    """Three convolutions and a skip; the first one remembers the frame before."""

    def __init__(self, channels: int, *, rngs: nnx.Rngs) -> None:
        self.conv1 = MemoryConv(channels, rngs=rngs)
        self.conv2 = Conv(channels, channels, rngs=rngs)
        self.conv3 = Conv(channels, channels, rngs=rngs)
        self.conv3.kernel = _zeros(3, 3, channels, channels)  # a block starts as its skip

    def __call__(self, x_BTHWC: jax.Array) -> jax.Array:
        """[B, T, H, W, C] -> the same shape."""
        h = relu(self.conv1(x_BTHWC))
        h = relu(self.conv2(h))
        return relu(self.conv3(h) + x_BTHWC)


class TimePool(nnx.Module):
    """Joins groups of `stride` frames into one, linearly, pixel by pixel."""

    def __init__(self, channels: int, stride: int, *, rngs: nnx.Rngs) -> None:
        self.kernel = _kernel(rngs, (stride * channels, channels), stride * channels)
        self.stride = stride

    def __call__(self, x_BTHWC: jax.Array) -> jax.Array:
        """[B, T, H, W, C] -> [B, T / stride, H, W, C]."""
        groups = [x_BTHWC[:, first :: self.stride] for first in range(self.stride)]
        return jnp.concatenate(groups, -1) @ self.kernel[...]


class TimeGrow(nnx.Module):
    """Splits each frame into `stride` successive ones, linearly, pixel by pixel."""

    def __init__(self, channels: int, stride: int, *, rngs: nnx.Rngs) -> None:
        self.kernel = _kernel(rngs, (channels, stride * channels), channels)
        self.stride = stride

    def __call__(self, x_BTHWC: jax.Array) -> jax.Array:
        """[B, T, H, W, C] -> [B, T * stride, H, W, C]."""
        b, t, h, w, c = x_BTHWC.shape
        grown = jnp.split(x_BTHWC @ self.kernel[...], self.stride, axis=-1)
        return jnp.stack(grown, axis=2).reshape(b, t * self.stride, h, w, c)


class EncoderStage(nnx.Module):
    """Half the height and width, a part of the frames, then memory blocks."""

    def __init__(self, width: int, pool: int, *, rngs: nnx.Rngs) -> None:
        self.pool = TimePool(width, pool, rngs=rngs)
        self.down = Conv(width, width, stride=2, use_bias=False, rngs=rngs)
        self.blocks = nnx.List([MemoryBlock(width, rngs=rngs) for _ in range(MEMORY_BLOCKS)])

    def __call__(self, x_BTHWC: jax.Array, remat: layers.Remat) -> jax.Array:
        """[B, T, H, W, C] -> [B, T / pool, H / 2, W / 2, C]."""
        return _blocks(self.blocks, self.down(self.pool(x_BTHWC)), remat)


class Encoder(nnx.Module):
    """Video -> latents."""

    def __init__(self, *, width: int, latent_channels: int, rngs: nnx.Rngs) -> None:
        self.head = Conv(3, width, rngs=rngs)
        self.stages = nnx.List([EncoderStage(width, pool, rngs=rngs) for pool in ENCODER_POOLS])
        self.tail = Conv(width, latent_channels, rngs=rngs)

    def __call__(self, video_BTHWC: jax.Array, remat: layers.Remat) -> jax.Array:
        """[B, T, H, W, 3] in [0, 1], T a multiple of 4 -> [B, T / 4, H / 8, W / 8, latents]."""
        x = relu(self.head(video_BTHWC))
        for stage in self.stages:
            x = stage(x, remat)
        return self.tail(x)


class DecoderStage(nnx.Module):
    """Memory blocks, then twice the height and width and `grow` times the frames."""

    def __init__(self, width: int, next_width: int, grow: int, *, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([MemoryBlock(width, rngs=rngs) for _ in range(MEMORY_BLOCKS)])
        self.grow = TimeGrow(width, grow, rngs=rngs)
        self.out = Conv(width, next_width, use_bias=False, rngs=rngs)

    def __call__(self, x_BTHWC: jax.Array, remat: layers.Remat, first_frame: int) -> jax.Array:
        """[B, T, H, W, C] -> [B, T * grow - first_frame, 2 H, 2 W, next_width].

        The reference enlarges before it grows. Growing works pixel by pixel, so the order does not
        matter, and this one costs a quarter. Frames before `first_frame` are not computed further.
        """
        x = self.grow(_blocks(self.blocks, x_BTHWC, remat))
        return self.out(upsample(x[:, first_frame:]))


class Decoder(nnx.Module):
    """Latents -> video."""

    def __init__(self, *, widths: tuple[int, ...], latent_channels: int, rngs: nnx.Rngs) -> None:
        self.head = Conv(latent_channels, widths[0], rngs=rngs)
        pairs = zip(widths[:-1], widths[1:], DECODER_GROWS, strict=True)
        self.stages = nnx.List([DecoderStage(*pair, rngs=rngs) for pair in pairs])
        self.tail = Conv(widths[-1], 3, rngs=rngs)
        # Grey, so that few pixels start outside [0, 1] (the reference does so from scratch).
        assert self.tail.bias is not None
        self.tail.bias = nnx.Param(jnp.full((3,), 0.5))

    def __call__(self, latents_BLHWC: jax.Array, remat: layers.Remat) -> jax.Array:
        """[B, L, h, w, latents] -> [B, 4 L - 3, 8 h, 8 w, 3], not clamped."""
        x = relu(self.head(3 * jnp.tanh(latents_BLHWC / 3)))
        for stage in self.stages[:-1]:
            x = stage(x, remat, 0)
        # The last layers look at one frame at a time: those dropped in the end are dropped here.
        return self.tail(relu(self.stages[-1](x, remat, FIRST_DROPPED)))


def _blocks(blocks: nnx.List[MemoryBlock], x: jax.Array, remat: layers.Remat) -> jax.Array:
    block_of = layers.remat(MemoryBlock.__call__, remat)
    return functools.reduce(lambda x, block: block_of(block, x), blocks, x)


def forward_flops(
    *,
    frames: int,
    height: int,
    width: int,
    latent_channels: int,
    encoder_width: int,
    decoder_widths: tuple[int, ...],
) -> tuple[float, float]:
    """Multiplications and additions of encoder and decoder for one clip, and of the first layer.

    A 3x3 convolution costs `18 * in * out` a pixel of its output; a memory block four of them
    (its first has twice the output channels); a pooling or growing layer `2 * in * out`.
    """
    latents = latent_frames(frames)
    t, pixels = latents * TIME_FACTOR, height * width
    w = encoder_width
    first = 18.0 * t * pixels * 3 * w
    total = first
    for pool in ENCODER_POOLS:
        t //= pool
        total += 2 * t * pixels * pool * w * w
        pixels //= 4
        total += 18 * t * pixels * w * w * (1 + 4 * MEMORY_BLOCKS)
    total += 18 * t * pixels * (w * latent_channels + latent_channels * decoder_widths[0])
    for w, following, grow in zip(
        decoder_widths[:-1], decoder_widths[1:], DECODER_GROWS, strict=True
    ):
        total += 18 * t * pixels * w * w * 4 * MEMORY_BLOCKS + 2 * t * pixels * w * w * grow
        t, pixels = t * grow, pixels * 4
        kept = t if t < latents * TIME_FACTOR else decoded_frames(frames)
        total += 18 * kept * pixels * w * following
    total += 18 * decoded_frames(frames) * pixels * decoder_widths[-1] * 3
    return total, first
