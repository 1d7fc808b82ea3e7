"""Wan's video autoencoders, versions 2.1 and 2.2: diffusers' ``AutoencoderKLWan``.

A video of 4 n + 1 frames becomes n + 1 latents: the first frame alone, then four frames each. All
convolutions are causal. The network teaches others (:mod:`..reconstruction`), with weights that are
read from a folder, or is trained itself (:mod:`..wan_vae`).

``step`` processes the next frames of a video with the memory that the frames before it left. None
is the memory before the first frame. So one step with all frames equals diffusers' loop, the first
frame and then four at a time, which needs less memory (:func:`in_chunks`).

A causal convolution stacks each frame and the frames before it as input channels of a convolution
of single frames: XLA gives cuDNN 3D convolutions in NCDHW layout, which Tensor Cores do not take.

Shapes: B clips, T frames, H height, W width, C channels, layout BTHWC; L latents in time, h x w in
space, Z latent channels.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxtrain import errors
from jaxtrain.config import bounds
from jaxtrain.errors import InputError
from jaxtrain.models.weight_table import Layout, Row, WeightTable
from jaxtrain.ops import convolution, layers, per_device
from jaxtrain.ops.init import uniform_init
from jaxtrain.ops.layers import FromFile, Remat, einsum_float32
from jaxtrain.storage import atomic, tensor_files

CLASS = "AutoencoderKLWan"
"""The class in the config.json of a folder."""
SETTINGS = "config.json"
ARRAYS = "diffusion_pytorch_model.safetensors"
TIME_FACTOR = 4
"""Frames per latent after the first, which has one frame."""

Version = Literal["wan2.1", "wan2.2"]
_CHANNELS = bounds.Bounds(least=1, most=4096)
_MULTIPLES = (1, 2, 4, 4)
_BLOCKS = 2
_TIME = (False, True, True)  # whether a halving of the height and width also halves the frames
_SPACE_FACTOR = 2 ** len(_TIME)
_EPSILON = 1e-12
_ENCODING = ("encoder.", "quant_conv.")
_COLORS = 3

Memory = Any
"""What the frames before leave for a layer: nested tuples of arrays. None is before the first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """The sizes of a network.

    Attributes:
        width: channels of the encoder's first layer (base_dim in diffusers).
        decoder_width: of the decoder's last layer (decoder_base_dim).
        latent_channels: channels of a latent (z_dim).
        patch_size: side of the square patches that become channels (pixels).
        residual: whether blocks that change the size have a skip, as in 2.2 (is_residual).
    """

    width: int = 96
    decoder_width: int = 96
    latent_channels: int = 16
    patch_size: int = 1
    residual: bool = False

    @property
    def space_factor(self) -> int:
        """Returns the pixels per latent along a side."""
        return _SPACE_FACTOR * self.patch_size

    @property
    def widest(self) -> int:
        """Returns the channels of the widest blocks."""
        return max(_MULTIPLES) * max(self.width, self.decoder_width)

    @property
    def features(self) -> tuple[tuple[int, int], ...]:
        """Returns channels, and frames per latent, of each of the decoder's features."""
        first = max(_MULTIPLES) * self.decoder_width
        return (first, 1), (first if self.residual else first // 2, 2)

    @property
    def version(self) -> Version:
        """Returns the version with this kind of blocks."""
        return "wan2.2" if self.residual else "wan2.1"


VERSIONS: dict[Version, Architecture] = {
    "wan2.1": Architecture(),
    "wan2.2": Architecture(
        width=160, decoder_width=256, latent_channels=48, patch_size=2, residual=True
    ),
}
_USUAL = VERSIONS["wan2.1"]  # what diffusers uses for entries that a config.json lacks


def latent_frames(frames: int) -> int:
    """Returns the number of latents of `frames` frames; the rest of the division is not encoded."""
    return 1 + (frames - 1) // TIME_FACTOR


def encoded_frames(frames: int) -> int:
    """Returns how many of `frames` frames are encoded: 4 n + 1, as in diffusers."""
    return 1 + TIME_FACTOR * (latent_frames(frames) - 1)


def _from_file(*shape: int, theirs: tuple[int, ...] | None) -> FromFile | nnx.Param[jax.Array]:
    """Returns zeros; `theirs` is the shape in diffusers, or None for no array of a weights file.

    :func:`start` makes a parameter of it.
    """
    return FromFile(jnp.zeros(shape), theirs=theirs)


def _read(weight: nnx.Variable[jax.Array], dtype: jnp.dtype) -> jax.Array:
    """Casts before the gather, so that the devices communicate the smaller dtype."""
    value = weight[...].astype(dtype)
    return per_device.gathered(value) if isinstance(weight, FromFile) else value


class Conv(nnx.Module):
    """Convolution with a bias.

    Args:
        taps: (rows, columns) or (frames, rows, columns) of the kernel. Of several frames, the
            current one is the last; rows and columns are 1 or 3.
    """

    def __init__(self, inputs: int, outputs: int, taps: tuple[int, ...]) -> None:
        *time, rows, columns = taps
        self.frames = time[0] if time else 1
        self.kernel = _from_file(
            rows, columns, self.frames * inputs, outputs, theirs=(outputs, inputs, *taps)
        )
        self.bias = _from_file(outputs, theirs=(outputs,))

    def __call__(self, x_BTHWC: jax.Array, stride: int = 1) -> jax.Array:
        """Convolves frames that are already stacked (:func:`_stacked`).

        Args:
            x_BTHWC: [B, T, H, W, frames * inputs].
            stride: 2 adds the border of zeros only on the right and below, as diffusers does.
        """
        kernel = _read(self.kernel, x_BTHWC.dtype)
        bias = _read(self.bias, x_BTHWC.dtype)
        if kernel.shape[:2] == (1, 1):
            return layers.add_shared(x_BTHWC @ kernel[0, 0], bias)
        b, t, *hwc = x_BTHWC.shape
        x_NHWC = x_BTHWC.reshape(b * t, *hwc)
        if stride == 1:
            y_NHWC = convolution.conv(x_NHWC, kernel)
        else:
            y_NHWC = lax.conv_general_dilated(
                x_NHWC,
                kernel,
                window_strides=(stride, stride),
                padding=((0, 1), (0, 1)),
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
        return layers.add_shared(y_NHWC.reshape(b, t, *y_NHWC.shape[1:]), bias)

    def step(self, x_BTHWC: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        """Convolves each frame with those before it; zeros before the first."""
        b, _, *hwc = x_BTHWC.shape
        before = self.frames - 1
        past = jnp.zeros((b, before, *hwc), x_BTHWC.dtype) if memory is None else memory
        x = jnp.concatenate([past, x_BTHWC], axis=1)
        return self(_stacked(x, self.frames)), x[:, -before:]


def _stacked(x_BTHWC: jax.Array, count: int, stride: int = 1) -> jax.Array:
    """Stacks every `stride`-th run of successive frames as channels, the oldest frame first."""
    runs = (x_BTHWC.shape[1] - count) // stride + 1
    parts = [x_BTHWC[:, first : first + runs * stride : stride] for first in range(count)]
    return jnp.concatenate(parts, axis=-1)


class Norm(nnx.Module):
    """Scales each pixel's channels to a root mean square of 1, then by a factor per channel.

    Args:
        ones: dimensions of size 1 after the channels in diffusers' array.
    """

    def __init__(self, channels: int, ones: int = 3) -> None:
        self.gamma = _from_file(channels, theirs=(channels,) + (1,) * ones)

    def __call__(self, x_BTHWC: jax.Array, activate: bool = True) -> jax.Array:
        """Normalizes, and applies SiLU; float32 inside."""
        x = x_BTHWC.astype(jnp.float32)
        length = jnp.sqrt(jnp.square(x).sum(-1, keepdims=True))
        gamma = self.gamma[...].reshape(1, 1, 1, 1, -1)
        x = x / jnp.maximum(length, _EPSILON) * (math.sqrt(x.shape[-1]) * gamma)
        return (jax.nn.silu(x) if activate else x).astype(x_BTHWC.dtype)


class ResidualBlock(nnx.Module):
    """Two causal convolutions and a skip."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.norm1 = Norm(inputs)
        self.conv1 = Conv(inputs, outputs, (3, 3, 3))
        self.norm2 = Norm(outputs)
        self.conv2 = Conv(outputs, outputs, (3, 3, 3))
        self.conv_shortcut = None if inputs == outputs else Conv(inputs, outputs, (1, 1, 1))

    def step(self, x_BTHWC: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        """Maps [B, T, H, W, inputs] to [B, T, H, W, outputs]."""
        of_first, of_second = memory or (None, None)
        y, first = self.conv1.step(self.norm1(x_BTHWC), of_first)
        y, second = self.conv2.step(self.norm2(y), of_second)
        skipped = x_BTHWC if self.conv_shortcut is None else self.conv_shortcut(x_BTHWC)
        return y + skipped, (first, second)


class Attention(nnx.Module):
    """Attention among the pixels of each frame, with one head."""

    def __init__(self, channels: int) -> None:
        self.norm = Norm(channels, ones=2)
        self.to_qkv = Conv(channels, 3 * channels, (1, 1))
        self.proj = Conv(channels, channels, (1, 1))

    def __call__(self, x_BTHWC: jax.Array) -> jax.Array:
        """Maps [B, T, H, W, C] to the same shape; softmax in float32."""
        b, t, h, w, c = x_BTHWC.shape
        qkv = self.to_qkv(self.norm(x_BTHWC, activate=False)).reshape(b * t, h * w, 3 * c)
        q, k, v = jnp.split(qkv, 3, axis=-1)
        scores = einsum_float32("npc,nqc->npq", q, k) / math.sqrt(c)
        y = jax.nn.softmax(scores, axis=-1).astype(v.dtype) @ v
        return x_BTHWC + self.proj(y.reshape(b, t, h, w, c))


class Middle(nnx.Module):
    """The blocks at the smallest size."""

    def __init__(self, channels: int) -> None:
        self.resnets = nnx.List([ResidualBlock(channels, channels) for _ in range(2)])
        self.attentions = nnx.List([Attention(channels)])

    def step(self, x_BTHWC: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        """Maps [B, T, H, W, C] to the same shape."""
        of_first, of_second = memory or (None, None)
        x, first = self.resnets[0].step(x_BTHWC, of_first)
        x, second = self.resnets[1].step(self.attentions[0](x), of_second)
        return x, (first, second)


class Down(nnx.Module):
    """Halves the height and width, and with `time` the frames after the first."""

    def __init__(self, channels: int, time: bool) -> None:
        self.resample = Conv(channels, channels, (3, 3))
        self.time_conv = Conv(channels, channels, (3, 1, 1)) if time else None

    def step(self, x_BTHWC: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        """Maps [B, T, H, W, C] to [B, T', H / 2, W / 2, C]."""
        x = self.resample(x_BTHWC, stride=2)
        if self.time_conv is None:
            return x, ()
        with_last = x if memory is None else jnp.concatenate([memory, x], axis=1)
        halved = self.time_conv(_stacked(with_last, 3, stride=2))
        y = jnp.concatenate([x[:, :1], halved], axis=1) if memory is None else halved
        return y, x[:, -1:]


class Up(nnx.Module):
    """Doubles the height and width, and with `time` the frames after the first."""

    def __init__(self, inputs: int, outputs: int, time: bool) -> None:
        self.resample = Conv(inputs, outputs, (3, 3))
        self.time_conv = Conv(inputs, 2 * inputs, (3, 1, 1)) if time else None

    def step(self, x_BTHWC: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        """Maps [B, T, H, W, inputs] to [B, T', 2 H, 2 W, outputs]."""
        x, left = x_BTHWC, ()
        if self.time_conv is not None:
            # The first frame of a video stays one, and the others do not see it.
            alone, rest = (x[:, :1], x[:, 1:]) if memory is None else (x[:, :0], x)
            grown, left = self.time_conv.step(rest, memory)
            b, t, h, w, c = rest.shape
            grown = grown.reshape(b, t, h, w, 2, c).transpose(0, 1, 4, 2, 3, 5)
            x = jnp.concatenate([alone, grown.reshape(b, 2 * t, h, w, c)], axis=1)
        return self.resample(jnp.repeat(jnp.repeat(x, 2, axis=2), 2, axis=3)), left


class DownBlock(nnx.Module):
    """Blocks of 2.2's encoder, with a skip over all of them."""

    remat: Remat = "none"

    def __init__(self, inputs: int, outputs: int, *, space: int, time: int) -> None:
        blocks = [(inputs, outputs)] + [(outputs, outputs)] * (_BLOCKS - 1)
        self.resnets = nnx.List([ResidualBlock(*pair) for pair in blocks])
        self.downsampler = None if space == 1 else Down(outputs, time == 2)
        self.outputs, self.space, self.time = outputs, space, time

    def step(self, x_BTHWC: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        """Maps [B, T, H, W, inputs] to [B, T', H / space, W / space, outputs]."""
        blocks = [*self.resnets, *([] if self.downsampler is None else [self.downsampler])]
        x, left = _run(blocks, x_BTHWC, memory, self.remat)
        return x + self._skip(x_BTHWC), left

    def _skip(self, x_BTHWC: jax.Array) -> jax.Array:
        """Averages the values of a group of frames and a square of pixels over channels.

        A first frame is the second of its group, after one of zeros.
        """
        x = jnp.pad(x_BTHWC, ((0, 0), (-x_BTHWC.shape[1] % self.time, 0), *((0, 0),) * 3))
        b, t, h, w, c = x.shape
        time, side = self.time, self.space
        x = x.reshape(b, t // time, time, h // side, side, w // side, side, c)
        x = x.transpose(0, 1, 3, 5, 7, 2, 4, 6)
        grouped = x.reshape(b, t // time, h // side, w // side, self.outputs, -1)
        return grouped.mean(-1, dtype=jnp.float32).astype(x.dtype)


class UpBlock(nnx.Module):
    """Blocks of the decoder; in 2.2 with a skip over all of them if they enlarge the frames."""

    remat: Remat = "none"

    def __init__(self, inputs: int, outputs: int, *, space: int, time: int, residual: bool) -> None:
        blocks = [(inputs, outputs)] + [(outputs, outputs)] * _BLOCKS
        self.resnets = nnx.List([ResidualBlock(*pair) for pair in blocks])
        self.outputs, self.time = outputs, time
        self.upsampler = Up(outputs, outputs, time == 2) if residual and space == 2 else None
        below = [Up(outputs, outputs // 2, time == 2)] if not residual and space == 2 else []
        self.upsamplers = nnx.List(below)

    def step(self, x_BTHWC: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        """Maps [B, T, H, W, inputs] to [B, T', H * space, W * space, outputs]."""
        if self.upsampler is None:
            return _run([*self.resnets, *self.upsamplers], x_BTHWC, memory, self.remat)
        x, left = _run([*self.resnets, self.upsampler], x_BTHWC, memory, self.remat)
        return x + self._skip(x_BTHWC, first=memory is None), left

    def _skip(self, x_BTHWC: jax.Array, first: bool) -> jax.Array:
        """Spreads channels over a group of frames and a square of pixels, each repeated.

        A first frame becomes only the last of its group.
        """
        b, t, h, w, c = x_BTHWC.shape
        repeats = self.outputs * self.time * 4 // c
        x = jnp.repeat(x_BTHWC, repeats, axis=-1)
        x = x.reshape(b, t, h, w, self.outputs, self.time, 2, 2)
        x = x.transpose(0, 1, 5, 2, 6, 3, 7, 4)
        x = x.reshape(b, t * self.time, 2 * h, 2 * w, self.outputs)
        return x[:, self.time - 1 :] if first else x


def _run(
    blocks: Sequence[Any], x_BTHWC: jax.Array, memory: Memory, remat: Remat
) -> tuple[jax.Array, Memory]:
    """Steps through blocks in order; those that consist of blocks rematerialize these."""
    left = []
    for number, block in enumerate(blocks):
        step = type(block).step
        if remat == "block" and not isinstance(block, DownBlock | UpBlock):
            step = layers.remat(step, remat)
        x_BTHWC, kept = step(block, x_BTHWC, None if memory is None else memory[number])
        left.append(kept)
    return x_BTHWC, tuple(left)


class Encoder(nnx.Module):
    """Patches of pixels -> means and log variances of latents."""

    remat: Remat = "none"

    def __init__(self, sizes: Architecture) -> None:
        widths = [sizes.width * multiple for multiple in (1, *_MULTIPLES)]
        self.conv_in = Conv(3 * sizes.patch_size**2, widths[0], (3, 3, 3))
        stages: list[Any] = []
        for number, pair in enumerate(itertools.pairwise(widths)):
            last = number == len(_TIME)
            time = not last and _TIME[number]
            if sizes.residual:
                stages.append(DownBlock(*pair, space=1 if last else 2, time=2 if time else 1))
                continue
            stages += [ResidualBlock(*pair), ResidualBlock(pair[1], pair[1])]
            stages += [] if last else [Down(pair[1], time)]
        self.down_blocks = nnx.List(stages)
        self.mid_block = Middle(widths[-1])
        self.norm_out = Norm(widths[-1])
        self.conv_out = Conv(widths[-1], 2 * sizes.latent_channels, (3, 3, 3))
        self.quant_conv = Conv(2 * sizes.latent_channels, 2 * sizes.latent_channels, (1, 1, 1))

    def step(self, x_BTHWC: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        """Maps [B, 4 n + 1, H, W, C] to [B, n + 1, H / 8, W / 8, 2 Z]; later 4 n to n."""
        body, of_head = memory or (None, None)
        blocks = [self.conv_in, *self.down_blocks, self.mid_block]
        x, left = _run(blocks, x_BTHWC, body, self.remat)
        x, of_head = self.conv_out.step(self.norm_out(x), of_head)
        return self.quant_conv(x), (left, of_head)


class Decoder(nnx.Module):
    """Latents -> patches of pixels.

    Args:
        whole: False ends after the features, without the later layers and their weights.
    """

    remat: Remat = "none"

    def __init__(self, sizes: Architecture, *, whole: bool = True) -> None:
        widths = [sizes.decoder_width * multiple for multiple in (*_MULTIPLES, _MULTIPLES[-1])]
        widths.reverse()
        self.post_quant_conv = Conv(sizes.latent_channels, sizes.latent_channels, (1, 1, 1))
        self.conv_in = Conv(sizes.latent_channels, widths[0], (3, 3, 3))
        self.mid_block = Middle(widths[0])
        stages = []
        for number, (inputs, outputs) in enumerate(itertools.pairwise(widths)):
            last = number == len(_TIME)
            time = not last and _TIME[::-1][number]
            halved = number > 0 and not sizes.residual  # by the upsampler before
            stages.append(
                UpBlock(
                    inputs // 2 if halved else inputs,
                    outputs,
                    space=1 if last else 2,
                    time=2 if time else 1,
                    residual=sizes.residual,
                )
            )
        self.up_blocks = nnx.List(stages if whole else stages[:1])
        if whole:
            self.norm_out = Norm(widths[-1])
            self.conv_out = Conv(widths[-1], 3 * sizes.patch_size**2, (3, 3, 3))
        self.whole = whole

    def step(self, x_BTHWC: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        """Maps [B, n + 1, h, w, Z] to [B, 4 n + 1, 8 h, 8 w, C]; later n to 4 n."""
        (x, _), memory = self.step_with_features(x_BTHWC, memory)
        return x, memory

    def step_with_features(
        self, x_BTHWC: jax.Array, memory: Memory
    ) -> tuple[tuple[Any, list[jax.Array]], Memory]:
        """Also returns the outputs of the middle and of the first block that enlarges.

        Their sizes are [B, n + 1, h, w, C] and [B, 2 n + 1, 2 h, 2 w, C]. Without the later layers,
        the first result is None.
        """
        body, of_head = memory or (None, None)
        x, left = self.middle(x_BTHWC, body)
        features = [x]
        for blocks in (self.up_blocks[:1], self.up_blocks[1:]):
            done = len(left)
            x, kept = _run(blocks, x, None if body is None else body[done:], self.remat)
            left += kept
            features.append(x)
        if not self.whole:
            return (None, features[:2]), (left, None)
        x, of_head = self.conv_out.step(self.norm_out(x), of_head)
        return (x, features[:2]), (left, of_head)

    def middle(self, x_BTHWC: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        """Computes the first feature; the memory begins with that of these layers."""
        x = self.post_quant_conv(x_BTHWC)
        return _run([self.conv_in, self.mid_block], x, memory, self.remat)


class WanVae(nnx.Module):
    """The autoencoder, with weights of zero until :func:`read` reads the real ones."""

    def __init__(
        self, sizes: Architecture, *, encodes: bool = True, decodes: bool = True, whole: bool = True
    ) -> None:
        self.patch_size = sizes.patch_size
        self.encoder = Encoder(sizes) if encodes else None
        self.decoder = Decoder(sizes, whole=whole) if decodes else None
        self.latents_mean = _from_file(sizes.latent_channels, theirs=None)
        self.latents_std = FromFile(jnp.ones(sizes.latent_channels), theirs=None)

    def encode(
        self, video_BTHW3: jax.Array, dtype: jnp.dtype, *, chunk: int | None = None
    ) -> jax.Array:
        """Encodes a video to the modes of its latents, normalized as a diffusion model sees them.

        Args:
            video_BTHW3: in [0, 1]; frames beyond 4 n + 1 are not encoded, as in diffusers.
            chunk: latents that are computed at a time, after the first; None for all at once.

        Returns:
            float32 [B, n + 1, h, w, Z].
        """
        video = video_BTHW3[:, : encoded_frames(video_BTHW3.shape[1])]
        frames = None if chunk is None else TIME_FACTOR * chunk
        moments = in_chunks(self.encoder, to_patches(video, self.patch_size, dtype), frames)
        return normalized(moments, self.latents_mean[...], self.latents_std[...])

    def decode(
        self, latents_BLhwZ: jax.Array, dtype: jnp.dtype, *, chunk: int | None = None
    ) -> tuple[jax.Array | None, list[jax.Array]]:
        """Decodes normalized latents, as diffusers does, which clamps the frames.

        Returns:
            Float32 frames in [0, 1], None without the layers for them; and the features.
        """
        x = denormalized(latents_BLhwZ, self.latents_mean[...], self.latents_std[...])
        step = Decoder.step_with_features
        patches, features = in_chunks(self.decoder, x.astype(dtype), chunk, step=step)
        if patches is None:
            return None, features
        return jnp.clip(to_pixels(patches, self.patch_size), 0, 1), features


def normalized(moments_BLhwM: jax.Array, mean: jax.Array, deviation: jax.Array) -> jax.Array:
    """Returns the modes of latents as a diffusion model sees them, float32 [B, L, h, w, Z]."""
    mode, _ = jnp.split(moments_BLhwM.astype(jnp.float32), 2, axis=-1)
    mean, deviation = (x.reshape(1, 1, 1, 1, -1) for x in (mean, deviation))
    return (mode - mean) / deviation


def denormalized(latents_BLhwZ: jax.Array, mean: jax.Array, deviation: jax.Array) -> jax.Array:
    """Inverts :func:`normalized`."""
    mean, deviation = (x.reshape(1, 1, 1, 1, -1) for x in (mean, deviation))
    return latents_BLhwZ * deviation + mean


def in_chunks(
    coder: Any,
    x_BTHWC: jax.Array,
    size: int | None,
    *,
    recompute: bool = False,
    step: Callable[..., Any] | None = None,
) -> Any:
    """Steps through the frames of a video: all at once, or the first and then `size` at a time.

    Args:
        size: frames, or latents, per chunk; None for all at once.
        recompute: whether the backward pass keeps only what one chunk leaves for the next, and
            computes each chunk again.
        step: a method of its class; its results, trees of arrays, are joined. None is ``step``.
    """
    method = type(coder).step if step is None else step
    if size is None:
        return method(coder, x_BTHWC, None)[0]
    graph, weights = nnx.split(coder)
    # The chunks' gradients of the weights are summed in float32. In a forward pass alone, the
    # compiler drops both casts.
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)

    def run(wide: Any, x: jax.Array, memory: Memory) -> Any:
        cast = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), wide, weights)
        return method(nnx.merge(graph, cast), x, memory)

    if recompute:
        run = jax.checkpoint(run)
    y, memory = run(wide, x_BTHWC[:, :1], None)
    outputs = [y]
    count = (x_BTHWC.shape[1] - 1) // size
    if count:
        b, _, *hwc = x_BTHWC.shape
        chunks = x_BTHWC[:, 1 : 1 + count * size].reshape(b, count, size, *hwc)

        def body(memory: Memory, x: jax.Array) -> tuple[Memory, Any]:
            y, memory = run(wide, x, memory)
            return memory, y

        def joined(y: jax.Array) -> jax.Array:
            return jnp.moveaxis(y, 0, 1).reshape(b, -1, *y.shape[3:])

        memory, ys = lax.scan(body, memory, jnp.moveaxis(chunks, 1, 0))
        outputs.append(jax.tree.map(joined, ys))
    if (rest := x_BTHWC[:, 1 + count * size :]).shape[1]:
        outputs.append(run(wide, rest, memory)[0])
    return jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *outputs)


def start(network: nnx.Module, rngs: nnx.Rngs, remat: Remat) -> None:
    """Makes all weights parameters, with new values."""
    for _, layer in list(nnx.iter_modules(network)):
        if isinstance(layer, Norm):
            layer.gamma = nnx.Param(jnp.ones(layer.gamma.shape))
        elif isinstance(layer, Conv):
            shape = layer.kernel.shape
            layer.kernel = uniform_init(rngs, shape, math.sqrt(3 / math.prod(shape[:-1])))
            layer.bias = nnx.Param(jnp.zeros(layer.bias.shape))
        elif isinstance(layer, Encoder | Decoder | DownBlock | UpBlock):
            layer.remat = remat


def to_patches(video_BTHW3: jax.Array, side: int, dtype: jnp.dtype) -> jax.Array:
    """Returns the encoder's input for a video in [0, 1]."""
    return _patches((2 * video_BTHW3 - 1).astype(dtype), side)


def to_pixels(patches_BTHWC: jax.Array, side: int) -> jax.Array:
    """Returns the video, not clamped, for a decoder's output, float32."""
    return (_pixels(patches_BTHWC.astype(jnp.float32), side) + 1) / 2


def _patches(x_BTHWC: jax.Array, side: int) -> jax.Array:
    """Moves squares of pixels to channels (color, column, row): [B, T, H / P, W / P, C P P]."""
    b, t, h, w, c = x_BTHWC.shape
    x = x_BTHWC.reshape(b, t, h // side, side, w // side, side, c)
    return x.transpose(0, 1, 2, 4, 6, 5, 3).reshape(b, t, h // side, w // side, -1)


def _pixels(x_BTHWC: jax.Array, side: int) -> jax.Array:
    b, t, h, w, c = x_BTHWC.shape
    x = x_BTHWC.reshape(b, t, h, w, c // side**2, side, side)
    return x.transpose(0, 1, 2, 6, 3, 5, 4).reshape(b, t, h * side, w * side, -1)


def table(
    sizes: Architecture, *, decodes: bool, own: bool = False
) -> tuple[WeightTable, dict[str, tuple[int, ...]]]:
    """Returns the names in diffusers, or Wan's own, and the shapes of our arrays by dotted path."""
    module = nnx.eval_shape(lambda: WanVae(sizes, decodes=decodes))
    rows, shapes = [], {}
    for path, leaf in nnx.to_flat_state(nnx.state(module, FromFile)):
        if (theirs := leaf.get_metadata()["theirs"]) is not None:
            ours = ".".join(map(str, path))
            name = ours.replace(".kernel", ".weight").replace(".resample.", ".resample.1.")
            if "quant_conv." in name:  # beside the encoder and the decoder
                name = name.partition(".")[2]
            if own:
                name = own_name(name, sizes.version)
            rows.append(Row(name, ours, _layout(theirs, leaf.shape)))
            shapes[ours] = leaf.shape
    return WeightTable(rows=tuple(rows)), shapes


# Parts of the names in Wan's own files, for the same parts in diffusers.
_OWN_PARTS = {
    "conv_in": "conv1",
    "norm_out": "head.0",
    "conv_out": "head.2",
    "norm1": "residual.0",
    "conv1": "residual.2",
    "norm2": "residual.3",
    "conv2": "residual.6",
    "conv_shortcut": "shortcut",
    "quant_conv": "conv1",
    "post_quant_conv": "conv2",
}


def own_name(name: str, version: Version) -> str:
    """Returns the name of an array in Wan's own files, which ComfyUI's users have, too.

    The source is github.com/Wan-Video: Wan2.1's wan/modules/vae.py, which has all layers in one
    list, and Wan2.2's wan/modules/vae2_2.py, with a list for each block.
    """
    inside = r"\.(?:resnets\.(\d)|(?:down|up)samplers?(?:\.0)?)"
    block = re.fullmatch(rf"(.*)(down|up)_blocks\.(\d+)({inside})?(\..*)", name)
    if block is not None:
        start, way, number, inner, layer, rest = block.groups()
        last = _BLOCKS + (way == "up")  # the layer that changes the size
        at = last if layer is None else int(layer)
        if version == "wan2.2":
            place = f"{number}.{way}samples.{at}"
        else:  # in diffusers, too, the encoder has one list
            place = str((last + 1) * int(number) + at) if inner else number
        name = f"{start}{way}samples.{place}{rest}"
    name = name.replace("mid_block.attentions.0", "middle.1")
    name = re.sub(r"mid_block\.resnets\.(\d)", lambda part: f"middle.{2 * int(part[1])}", name)
    return ".".join(_OWN_PARTS.get(part, part) for part in name.split("."))


def _layout(theirs: tuple[int, ...], ours: tuple[int, ...]) -> Layout:
    """Kernels are [out, in, (frames,) rows, columns] in diffusers; here frames are channels."""
    axes = {5: (3, 4, 2, 1, 0), 4: (2, 3, 1, 0)}.get(len(theirs), tuple(range(len(theirs))))
    turned = [theirs[axis] for axis in axes]
    return Layout(
        lambda tensor: tensor.transpose(axes).reshape(ours),
        lambda array: array.reshape(turned).transpose(np.argsort(axes)),
    )


def read(
    folder: Path, sizes: Architecture, *, decodes: bool = False, field: str
) -> dict[str, np.ndarray]:
    """Reads a folder of diffusers: config.json, and safetensors files.

    Args:
        sizes: of the network, whose widths are those of the folder.

    Returns:
        Dotted path in :class:`WanVae` -> float32 array.
    """
    what = f"{field}={folder}"
    settings, sizes = _opened(folder, sizes, what)
    arrays = {
        name: _statistics(settings, name, sizes.latent_channels, what).astype(np.float32)
        for name in ("latents_mean", "latents_std")
    }
    if not (arrays["latents_std"] > 0).all():
        raise InputError(f"{what}: latents_std in its {SETTINGS} has values of 0 or less")
    paths = tensor_files.of_folder(folder, ARRAYS)
    if not paths:
        raise InputError(
            f"{what} has no weights: it lacks {ARRAYS} and {ARRAYS}{tensor_files.INDEX}; pass a "
            "folder with one of them (pickled files, such as .bin, are not read)"
        )
    tensors: dict[str, np.ndarray] = {}
    for path in paths:
        tensors |= tensor_files.read(path, lambda name: decodes or name.startswith(_ENCODING))[0]
    names, shapes = table(sizes, decodes=decodes)
    return arrays | names.inward(tensors, shapes, what, "Download the folder again")


def of_folder(folder: Path, sizes: Architecture, *, field: str) -> Architecture:
    """Returns these sizes with the widths of a folder of diffusers, from its config.json."""
    return _opened(folder, sizes, f"{field}={folder}")[1]


def _opened(folder: Path, sizes: Architecture, what: str) -> tuple[Mapping[str, Any], Architecture]:
    settings = _settings(folder, what)
    near = next(
        (
            f"--model.teacher.network {version} --model.latent_channels {known.latent_channels} "
            f"--model.patch_size {known.patch_size}"
            for version, known in VERSIONS.items()
            if not _differing(settings, known)
        ),
        f"the folder of {sizes.version}'s autoencoder",
    )
    return settings, _with_widths(settings, sizes, what, near)


def _settings(folder: Path, what: str) -> Mapping[str, Any]:
    path = folder / SETTINGS
    if folder.is_file():
        raise InputError(
            f"{what} is a file: pass a folder of {CLASS}, which `import` and then `export --format "
            "hf` make of a weights file of Wan's autoencoder"
        )
    if not path.is_file():
        below = folder / "vae"
        near = f"pass {below}" if (below / SETTINGS).is_file() else f"pass a folder of {CLASS}"
        raise InputError(f"{what} has no {SETTINGS}: {near}")
    try:
        settings = atomic.read_json(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{what}: its {SETTINGS} cannot be read: {error}") from error
    kind = settings.get("_class_name")
    if kind != CLASS:
        raise InputError(
            f"{what} has the class {errors.short_repr(kind)}: pass a folder of {CLASS}"
        )
    return settings


def sizes_of(tensors: Mapping[str, np.ndarray]) -> Architecture | None:
    """Returns the sizes of a network with these arrays, by Wan's own names; None for others."""
    first, last, latents, code = (
        tensors.get(name)
        for name in (
            "encoder.conv1.weight",
            "decoder.head.2.weight",
            "conv2.weight",
            "encoder.downsamples.0.downsamples.0.residual.2.weight",
        )
    )
    if first is None or last is None or latents is None or {first.ndim, last.ndim} != {5}:
        return None
    version: Version = "wan2.1" if code is None else "wan2.2"
    return dataclasses.replace(
        VERSIONS[version],
        width=first.shape[0],
        decoder_width=last.shape[1],
        latent_channels=latents.shape[0],
    )


def to_settings(
    sizes: Architecture, mean: Sequence[float], deviation: Sequence[float]
) -> dict[str, Any]:
    """Returns the config.json of a network, and of the statistics of its latents."""
    return {
        "_class_name": CLASS,
        "base_dim": sizes.width,
        "decoder_base_dim": sizes.decoder_width,
        "z_dim": sizes.latent_channels,
        "dim_mult": list(_MULTIPLES),
        "num_res_blocks": _BLOCKS,
        "temperal_downsample": list(_TIME),
        "attn_scales": [],
        "dropout": 0.0,
        "is_residual": sizes.residual,
        "in_channels": _COLORS * sizes.patch_size**2,
        "out_channels": _COLORS * sizes.patch_size**2,
        "patch_size": sizes.patch_size if sizes.patch_size > 1 else None,
        "scale_factor_temporal": TIME_FACTOR,
        "scale_factor_spatial": sizes.space_factor,
        "latents_mean": list(mean),
        "latents_std": list(deviation),
    }


def from_settings(settings: Mapping[str, Any], what: str) -> tuple[Architecture, list[list[float]]]:
    """Returns the sizes of the network of a config.json, and the statistics of its latents."""
    version: Version = "wan2.2" if settings.get("is_residual") is True else "wan2.1"
    given = {"z_dim": settings.get("z_dim", _USUAL.latent_channels)}
    channels = bounds.entry(given, "z_dim", _CHANNELS, what)
    sizes = dataclasses.replace(VERSIONS[version], latent_channels=channels)
    sizes = _with_widths(settings, sizes, what, f"the folder of {version}'s autoencoder")
    return sizes, [
        _statistics(settings, name, channels, what).tolist()
        for name in ("latents_mean", "latents_std")
    ]


def _with_widths(
    settings: Mapping[str, Any], sizes: Architecture, what: str, near: str
) -> Architecture:
    """Returns these sizes with the widths of a config.json.

    Raises:
        InputError: it has another kind of network, or widths that are not numbers of channels.
    """
    if differing := _differing(settings, sizes):
        raise InputError(f"{what} has another network ({', '.join(differing)}): pass {near}")
    base = settings.get("base_dim", _USUAL.width)
    given = {"base_dim": base, "decoder_base_dim": settings.get("decoder_base_dim") or base}
    width, decoder_width = (bounds.entry(given, name, _CHANNELS, what) for name in given)
    return dataclasses.replace(sizes, width=width, decoder_width=decoder_width)


def _differing(settings: Mapping[str, Any], sizes: Architecture) -> list[str]:
    actual = {
        "is_residual": settings.get("is_residual", False),
        "patch_size": settings.get("patch_size") or 1,
        "z_dim": settings.get("z_dim", _USUAL.latent_channels),
        "dim_mult": settings.get("dim_mult", list(_MULTIPLES)),
        "num_res_blocks": settings.get("num_res_blocks", _BLOCKS),
        "temperal_downsample": settings.get("temperal_downsample", list(_TIME)),
        "attn_scales": settings.get("attn_scales", []),
        "in_channels": settings.get("in_channels", _COLORS),
        "out_channels": settings.get("out_channels", _COLORS),
    }
    colors = _COLORS * sizes.patch_size**2
    expected = {
        "is_residual": sizes.residual,
        "patch_size": sizes.patch_size,
        "z_dim": sizes.latent_channels,
        "dim_mult": list(_MULTIPLES),
        "num_res_blocks": _BLOCKS,
        "temperal_downsample": list(_TIME),
        "attn_scales": [],
        "in_channels": colors,
        "out_channels": colors,
    }
    return [
        f"{name} {errors.short_repr(actual[name])} instead of {expected[name]}"
        for name in expected
        if actual[name] != expected[name]
    ]


def _statistics(settings: Mapping[str, Any], name: str, count: int, what: str) -> np.ndarray:
    values = settings.get(name)
    if (
        not isinstance(values, list)
        or len(values) != count
        or not all(isinstance(value, int | float) and math.isfinite(value) for value in values)
    ):
        raise InputError(f"{what}: {name} in its {SETTINGS} is not a list of {count} numbers")
    return np.array(values)
