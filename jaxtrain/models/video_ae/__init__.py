"""A small video autoencoder: TAEHV's networks, trained to reconstruct clips.

Reading order: :class:`Config`, :class:`VideoAutoencoder`, then `network.py` and `blocks.py`.
`timing.py` says which frame belongs to which latent, `streaming.py` runs videos of any length,
`weights.py` reads and writes the reference's names. `augment.py` changes training clips on the
device, `quality.py` measures reconstructions.

Shapes: B clips, T frames, H height, W width, 3 colours; P side of a patch.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain import layers
from jaxtrain.errors import InputError
from jaxtrain.models.video_ae import augment, network, quality, timing, weights, work
from jaxtrain.models.video_ae.blocks import Memory

_LEAST_SIDE = 16
_SAMPLE_CLIPS = 3
_SAMPLE_FRAMES = 6

DecoderKind = Literal["base", "super"]
_DECODER_WIDTHS: dict[DecoderKind, tuple[int, ...]] = {
    "base": (256, 128, 64, 64),
    "super": (512, 256, 128, 64),
}
_DECODERS: dict[DecoderKind, type[network.Decoder | network.WideDecoder]] = {
    "base": network.Decoder,
    "super": network.WideDecoder,
}

Batch = dict[str, jax.Array]
Sums = dict[str, tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The video autoencoder."""

    frames: int
    """Frames of a clip."""
    height: int
    """Height of a clip; a multiple of 8 x patch_size (pixels)."""
    width: int
    """Width of a clip; a multiple of 8 x patch_size (pixels)."""
    patch_size: int = 1
    """Side of the squares that are folded into channels before the first layer (pixels)."""
    latent_channels: int = 16
    """Channels of a latent (numbers for each 4 frames of 8x8 patches)."""
    encoder_width: int = 64
    """Channels of the encoder's layers."""
    decoder: DecoderKind = "base"
    """base: the ordinary decoder; super: the larger one with depthwise convolutions."""
    decoder_widths: tuple[int, int, int, int] | None = None
    """Channels of the decoder's layers, from 1/8 of the size to the full size. None is the
    reference's: 256, 128, 64, 64, and 512, 256, 128, 64 for super."""
    time_upscale: tuple[bool, bool] = (True, True)
    """Whether the decoder doubles the frames in its second and its third stage. A decoder that does
    not gives a preview of fewer frames, and cannot be trained."""
    space_upscale: tuple[bool, bool, bool] = (True, True, True)
    """Whether the decoder doubles height and width in each of its stages. A decoder that does not
    gives a smaller preview, and cannot be trained."""
    trim: timing.Trim = "always"
    """When the first three decoded frames are dropped: always; odd_latents: only where the number
    of latents is odd, as weights for CogVideoX (taecvx) want it."""
    remat: layers.Remat = "none"
    """block: the backward pass computes the memory blocks again and keeps only what goes into them,
    which saves a third of the memory; none: it keeps everything."""
    reconstruction_weight: float = 20.0
    """The loss is this times the mean squared error of a clip, colours from 0 to 1."""

    def __post_init__(self) -> None:
        for name in ("frames", "patch_size", "latent_channels", "encoder_width"):
            if getattr(self, name) < 1:
                raise InputError(f"model.{name}={getattr(self, name)}: use at least 1")
        widths = self.decoder_widths
        if widths is not None and (len(widths) != 4 or min(widths) < 1):
            raise InputError(f"model.decoder_widths={widths}: use four widths of at least 1")
        for name, count in (("time_upscale", 2), ("space_upscale", 3)):
            if len(getattr(self, name)) != count:
                raise InputError(f"model.{name}={getattr(self, name)}: use {count} switches")
        if self.decoder == "super" and not all((*self.time_upscale, *self.space_upscale)):
            raise InputError(
                f"model.time_upscale={self.time_upscale} and model.space_upscale="
                f"{self.space_upscale}: only the base decoder has these switches; leave them out "
                "with model.decoder=super"
            )
        factor = self.space_factor
        if self.height % factor or self.width % factor:
            raise InputError(
                f"model.height={self.height} and model.width={self.width} must be multiples of "
                f"{factor}: the nearest are {self._nearest(self.height)} and "
                f"{self._nearest(self.width)}"
            )
        if min(self.height, self.width) < _LEAST_SIDE:
            raise InputError(
                f"model.height={self.height} and model.width={self.width}: use at least "
                f"{_LEAST_SIDE} for each (SSIM looks at windows of {quality.SSIM_WINDOW})"
            )
        if not self.reconstruction_weight > 0:
            raise InputError(
                f"model.reconstruction_weight={self.reconstruction_weight}: use a number above 0"
            )

    @property
    def space_factor(self) -> int:
        """Pixels of a side that a latent stands for."""
        return network.SPACE_FACTOR * self.patch_size

    @property
    def timing(self) -> timing.Timing:
        """How the decoder counts frames."""
        return timing.Timing(math.prod(self.grows), self.trim)

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the decoder."""
        return self.decoder_widths or _DECODER_WIDTHS[self.decoder]

    @property
    def grows(self) -> tuple[int, ...]:
        """Frames that each stage of the decoder makes of one."""
        return (1, *(2 if up else 1 for up in self.time_upscale))

    @property
    def space_ups(self) -> tuple[int, ...]:
        """Pixels of a side that each stage of the decoder makes of one."""
        return tuple(2 if up else 1 for up in self.space_upscale)

    def _nearest(self, size: int) -> int:
        """The allowed size nearest to `size`, at least 16."""
        factor = self.space_factor
        least = -(-_LEAST_SIDE // factor) * factor
        return max(least, (size + factor // 2) // factor * factor)

    def build(self, rngs: nnx.Rngs) -> "VideoAutoencoder":
        """The module, with fresh float32 parameters."""
        return VideoAutoencoder(self, rngs)

    def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """`video` uint8 [B, T, H, W, 3]; `augment` float32 [B, 5] (augment.FACTORS); `weight`."""
        shape = (batch_size, self.frames, self.height, self.width, 3)
        return {
            "video": jax.ShapeDtypeStruct(shape, jnp.uint8),
            "augment": jax.ShapeDtypeStruct((batch_size, augment.FACTORS), jnp.float32),
            "weight": jax.ShapeDtypeStruct((batch_size,), jnp.float32),
        }

    def flops_per_example(self) -> float:
        """Forward and backward pass of a clip: 3 x forward - first layer.

        A layer's two gradients cost as much as its output each; the first layer's input needs none.
        The formula of the forward pass stands in `work.py`.
        """
        forward, first = self.forward_flops()
        return 3 * forward - first

    def forward_flops(self) -> tuple[float, float]:
        """Of one clip: forward pass, and its first layer alone."""
        return work.forward(
            frames=self.frames,
            height=self.height,
            width=self.width,
            patch_size=self.patch_size,
            latent_channels=self.latent_channels,
            encoder_width=self.encoder_width,
            decoder_widths=self.widths,
            wide=self.decoder == "super",
            grows=self.grows,
            space_ups=self.space_ups,
            timing=self.timing,
        )

    def tokens_per_example(self) -> None:
        """A clip has no tokens."""
        return

    def to_weights(self, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Parameters by dotted path -> the reference's state dict, in its order."""
        return weights.to_reference(params, wide=self.decoder == "super")

    def from_weights(self, tensors: Mapping[str, np.ndarray], source: str) -> dict[str, np.ndarray]:
        """The way back.

        Raises:
            InputError: names every array that is missing, extra or misshapen.
        """
        module = nnx.eval_shape(lambda: self.build(nnx.Rngs(0)))
        paths = nnx.to_flat_state(nnx.state(module, nnx.Param))
        expected = {".".join(map(str, path)): leaf.get_value().shape for path, leaf in paths}
        wide = self.decoder == "super"
        return weights.from_reference(tensors, expected, wide=wide, source=source)

    @classmethod
    def guess(cls, tensors: Mapping[str, np.ndarray], source: str) -> "Config":
        """The config that the reference's weights ask for; sizes of clips are made up.

        Raises:
            InputError: these are no such weights.
        """
        fields = weights.guess(tensors, source)
        side = network.SPACE_FACTOR * int(fields["patch_size"]) * 2
        return cls(frames=timing.TIME_FACTOR, height=side, width=side, **fields)

    @classmethod
    def tiny(cls) -> "Config":
        """The same network, narrow, on 4 frames of 16x16."""
        return cls(
            frames=4,
            height=16,
            width=16,
            latent_channels=4,
            encoder_width=8,
            decoder_widths=(16, 8, 8, 8),
        )


class VideoAutoencoder(nnx.Module):
    """Encoder and decoder, and what training asks of them."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.encoder = network.Encoder(
            width=config.encoder_width,
            latent_channels=config.latent_channels,
            patch_size=config.patch_size,
            rngs=rngs,
        )
        self.decoder = _DECODERS[config.decoder](
            widths=config.widths,
            latent_channels=config.latent_channels,
            patch_size=config.patch_size,
            grows=config.grows,
            space_ups=config.space_ups,
            rngs=rngs,
        )
        self.timing = config.timing
        self.space_factor = config.space_factor
        self.space_up = math.prod(config.space_ups) * config.patch_size
        self.remat = config.remat
        self.reconstruction_weight = config.reconstruction_weight

    def encode(self, video_BTHW3: jax.Array) -> jax.Array:
        """[B, T, H, W, 3] in [0, 1] -> latents [B, ceil(T / 4), H / 8P, W / 8P, C]."""
        return self.encoder(timing.pad_time(video_BTHW3.astype(self._dtype)), self.remat)

    def decode(self, latents_BLHWC: jax.Array) -> jax.Array:
        """Latents [B, L, h, w, C] -> [B, 4 L - 3, 8P h, 8P w, 3], not clamped.

        That is for all switches on and `trim="always"`; see :class:`timing.Timing`.
        """
        first = self.timing.dropped(latents_BLHWC.shape[1])
        return self.decoder(latents_BLHWC.astype(self._dtype), self.remat, first)

    def encode_next(
        self, video_BTHW3: jax.Array, memory: list[Memory]
    ) -> tuple[jax.Array, list[Memory]]:
        """The next frames of a video, a multiple of 4 -> latents, and the memory after them."""
        return self.encoder.step(video_BTHW3.astype(self._dtype), memory)

    def decode_next(
        self, latents_BLHWC: jax.Array, memory: list[Memory]
    ) -> tuple[jax.Array, list[Memory]]:
        """The next latents of a video -> all their frames (none dropped), and the memory then."""
        return self.decoder.step(latents_BLHWC.astype(self._dtype), memory)

    def before_encoding(self, clips: int, height: int, width: int) -> list[Memory]:
        """The memory before the first frame, for frames of this size (pixels)."""
        return self.encoder.no_memory(clips, height, width, self._dtype)

    def before_decoding(self, clips: int, height: int, width: int) -> list[Memory]:
        """The memory before the first latent, for latents of this size."""
        return self.decoder.no_memory(clips, height, width, self._dtype)

    def loss(self, batch: Batch, keys_B: jax.Array) -> tuple[jax.Array, jax.Array, Sums]:
        """Weighted squared error, over clips; `reconstruction_loss` and `psnr` beside it.

        The error is that of the reconstruction as it comes, not clamped: clamping would take the
        gradient from pixels outside [0, 1]. PSNR is that of the clamped one, as a viewer sees it.
        """
        del keys_B  # the host drew the numbers of the augmentation
        video = augment.augment(_to_float(batch["video"]), batch["augment"])
        target, found = self._reconstruct(video)
        error, weight = _error_sum(target, found, batch["weight"])
        metrics: Sums = {
            "reconstruction_loss": (error, weight),
            "psnr": _frame_sums(quality.psnr(target, jnp.clip(found, 0, 1)), batch["weight"])[:2],
        }
        return self.reconstruction_weight * error, weight, metrics

    def evaluate(self, batch: Batch) -> Sums:
        """`loss` over clips, `psnr` and `ssim` over frames; clips as they are."""
        target, found = self._reconstruct(_to_float(batch["video"]))
        error, weight = _error_sum(target, found, batch["weight"])
        seen = jnp.clip(found, 0, 1)
        return {
            "loss": (self.reconstruction_weight * error, weight),
            "psnr": _frame_sums(quality.psnr(target, seen), batch["weight"]),
            "ssim": _frame_sums(quality.ssim(target, seen), batch["weight"]),
        }

    def samples(self, batch: Batch) -> dict[str, jax.Array]:
        """`reconstruction`: for up to 3 clips, up to 6 frames in a row, reconstructions below."""
        target, found = self._reconstruct(_to_float(batch["video"][:_SAMPLE_CLIPS]))
        shown = jnp.stack([target, jnp.clip(found, 0, 1)], axis=1)
        frames = shown.shape[2]
        count = min(frames, _SAMPLE_FRAMES)
        # Evenly spaced, the first and the last among them.
        picked = [i * (frames - 1) // max(count - 1, 1) for i in range(count)]
        shown = jnp.stack([shown[:, :, i] for i in picked], axis=2)
        b, rows, t, h, w, c = shown.shape
        picture = shown.transpose(0, 1, 3, 2, 4, 5).reshape(b * rows * h, t * w, c)
        return {"reconstruction": jnp.round(picture * 255).astype(jnp.uint8)}

    @property
    def _dtype(self) -> jnp.dtype:
        return self.encoder.head.kernel[...].dtype

    def _reconstruct(self, video_BTHW3: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Target and reconstruction, float32 [B, 4 L - 3, H, W, 3] each.

        Raises:
            InputError: the decoder gives frames of another size.
        """
        if self.space_up != self.space_factor:
            raise InputError(
                "a decoder whose frames are smaller than those that went in "
                "(model.space_upscale) has nothing to be compared with: use all switches to train"
            )
        target = self.timing.target(video_BTHW3)
        return target, self.decode(self.encode(video_BTHW3)).astype(jnp.float32)


def _to_float(video: jax.Array) -> jax.Array:
    return video.astype(jnp.float32) / 255


def _error_sum(
    target: jax.Array, found: jax.Array, weight_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Each clip's mean squared error, summed over clips, and the clips' weight."""
    error_B = jnp.square(found - target).mean((1, 2, 3, 4))
    return (error_B * weight_B).sum(), weight_B.sum()


def _frame_sums(value_BT: jax.Array, weight_B: jax.Array) -> tuple[jax.Array, ...]:
    """Sum, weight and sum of squares over frames."""
    weight_BT = jnp.broadcast_to(weight_B[:, None], value_BT.shape)
    weighted = value_BT * weight_BT
    return weighted.sum(), weight_BT.sum(), (weighted * value_BT).sum()
