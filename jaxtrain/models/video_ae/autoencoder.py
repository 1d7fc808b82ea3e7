"""The small video autoencoder: its config, encoder, and decoder.

Shapes: B clips, T frames, H height, W width, 3 colors; L latents in time.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config import bounds
from jaxtrain.errors import InputError
from jaxtrain.models.reconstruction import timing
from jaxtrain.models.reconstruction.losses import Channels, Teacher
from jaxtrain.models.reconstruction.reconstruction import Reconstruction, ReconstructionConfig
from jaxtrain.models.reconstruction.timing import without
from jaxtrain.models.video_ae import blocks, network, weights
from jaxtrain.models.video_ae.blocks import Memory
from jaxtrain.models.wan import network as wan_network
from jaxtrain.models.weight_table import WeightTable

DecoderKind = Literal["base", "super"]
_ENCODER_WIDTH = 64
_LARGEST_RATE = 0.1  # times the widest layer
_DECODER_WIDTHS: dict[DecoderKind, tuple[int, ...]] = {
    "base": (256, 128, 64, 64),
    "super": (512, 256, 128, 64),
}


class _Comfyui(NamedTuple):
    """What ComfyUI infers from the number of latent channels (comfy/taesd/taehv.py, comfy/sd.py).

    Attributes:
        name: the name by which previews find the file (nodes.py, ``VAELoader.video_taes``).
    """

    patch_size: int
    time_downscale: tuple[bool, bool, bool]
    trim: timing.Trim
    name: str


_COMFYUI = {
    16: _Comfyui(1, (True, True, False), "always", "taehv"),
    24: _Comfyui(2, (True, True, False), "h3", "taeh3"),
    48: _Comfyui(2, (True, True, False), "always", "lighttaew2_2"),
    128: _Comfyui(4, (True, True, True), "always", "taeltx_2"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ReconstructionConfig):
    """The video autoencoder."""

    in_weights = ("patch_size", "latent_channels", "decoder", "time_downscale")
    not_in_weights = (("trim", "trim"),)

    patch_size: Annotated[int, bounds.Bounds(least=1, most=64)] = 1
    """Side of the square patches that become channels before the first layer (pixels)."""
    encoder_width: Channels = _ENCODER_WIDTH
    """Channels of the encoder's layers."""
    decoder: DecoderKind = "base"
    """Kind of decoder. base: the ordinary one; super: a larger one with depthwise convolutions."""
    decoder_widths: tuple[Channels, Channels, Channels, Channels] | None = None
    """Channels of the decoder's stages, from 1/8 size to full size. None uses the reference's: 256,
    128, 64, 64, or 512, 256, 128, 64 for super."""
    time_downscale: tuple[bool, bool, bool] = (True, True, False)
    """Whether the encoder halves the number of frames in each of its stages. Use all three for
    8 frames per latent, as in LTX-2's models (taeltx). The decoder doubles them in as many of its
    last stages."""
    trim: timing.Trim = "always"
    """Which frames to drop. always: the first decoded frames (3 of 4 per latent); odd_latents: the
    same, but only if the number of latents is odd, as weights for CogVideoX (taecvx) require; h3:
    encodes in chunks of 17 frames, as weights for MiniMax H3 (taeh3) require."""
    remat: blocks.VideoRemat = "none"
    """Activation checkpointing: what the backward pass recomputes. ends: full-size activations
    (between the first layer and the first halving, and between the last doubling and the last
    layer), frame by frame; they are a third of the memory. block: these and the memory blocks, of
    which only the inputs are kept. none: nothing."""
    init: Literal["random", "thumbnail"] = "random"
    """Initial parameters of a new run, where model.init_from has none. random: all of them, so
    training starts with gray clips; thumbnail: the first channels of each layer carry the colors,
    so it starts with the mean color of each 8x8 square over the frames of a latent, and the other
    channels learn the details."""
    freeze: tuple[str, ...] = ()
    """Parts that are not trained: encoder, decoder, or longer parameter paths such as
    decoder.stages.0. They have no gradient, no weight decay, and no optimizer state, and are never
    communicated. encoder trains only the decoder, as the original's recipe does."""
    init_from: str | None = None
    """Initial parameters of a new run: a checkpoint, a run directory, a weights file (.safetensors,
    .pth) with the names of the reference implementation, or ``hf:ORG/MODEL[@REVISION][:FILE]`` on
    the Hugging Face Hub."""

    def check(self) -> None:
        """Checks sizes of clips and of what sees them."""
        self._check_frames()
        super().check()
        self._check_init()

    def _check_frames(self) -> None:
        frames = self.timing
        if frames.chunked and frames.factor != timing.TIME_FACTOR:
            raise InputError(
                f"model.trim=h3 has {timing.TIME_FACTOR} frames per latent, not {frames.factor} "
                "(model.time_downscale): set --model.trim always, or the default of "
                "model.time_downscale",
                about=("model.trim", "model.time_downscale"),
            )
        frames.check_clip(self.frames)

    def _check_init(self) -> None:
        narrowest = min(self.latent_channels, self.encoder_width, *self.widths)
        if self.init == "thumbnail" and narrowest < 3 * self.patch_size**2:
            raise InputError(
                f"model.init=thumbnail carries 3 x model.patch_size^2 = {3 * self.patch_size**2} "
                f"channels through all layers, but the narrowest has {narrowest} "
                "(model.latent_channels, model.encoder_width, model.decoder_widths): widen it, or "
                "set --model.init random",
                about=("model.init", "model.patch_size"),
            )

    def _check_teacher(self, teacher: Teacher) -> None:
        """Also checks that the teacher's network has latents of the same places and frames."""
        super()._check_teacher(teacher)
        if teacher.network is None:
            return
        sizes = wan_network.VERSIONS[teacher.network]
        if sizes.patch_size != self.patch_size:
            raise InputError(
                f"model.patch_size={self.patch_size}: model.teacher.network={teacher.network} has "
                f"one latent per {sizes.space_factor}x{sizes.space_factor} pixels: set "
                f"--model.patch_size {sizes.patch_size}",
                about=("model.patch_size", "model.teacher.network"),
            )

        if not self.timing.same_frames(self.frames, wan_network.TIME_FACTOR):
            latents = self.timing.latent_frames(self.frames)
            nearest = self.timing.nearest_with_same_frames(self.frames, wan_network.TIME_FACTOR)
            raise InputError(
                f"model.frames={self.frames}: model.teacher.network={teacher.network} makes "
                f"{wan_network.latent_frames(self.frames)} latents of {self.frames} frames, which "
                f"cover {wan_network.encoded_frames(self.frames)} of them; this model makes "
                f"{latents}, which cover {self.timing.decoded(latents)} (model.time_downscale, "
                f"model.trim): use --model.frames {nearest}",
                about=("model.frames", "model.teacher.network"),
            )

    @property
    def space_factor(self) -> int:
        """Returns the pixels per latent along a side."""
        return network.SPACE_FACTOR * self.patch_size

    @property
    def timing(self) -> timing.Timing:
        """Returns how frames map to latents."""
        return timing.Timing(math.prod(self.pools), self.trim)

    @property
    def pools(self) -> tuple[int, ...]:
        """Returns the frames that each stage of the encoder merges."""
        return tuple(2 if down else 1 for down in self.time_downscale)

    @property
    def widths(self) -> tuple[int, ...]:
        """Returns the channels of the decoder's stages."""
        return self.decoder_widths or _DECODER_WIDTHS[self.decoder]

    def comfyui_name(self) -> str:
        """Returns the name by which ComfyUI finds the weights for previews, without a suffix."""
        if self.decoder == "super":
            raise InputError(
                "model.decoder=super: ComfyUI has only the base decoder: omit --format comfyui, or "
                "train a model with --model.decoder base"
            )
        if note := self.export_note():
            raise InputError(note)
        if self.latent_channels == 32:
            raise InputError(
                "model.latent_channels=32: ComfyUI uses LeakyReLU in networks with 32 latent "
                "channels, and this model has ReLU, so colors would be wrong: omit --format "
                "comfyui (TAEHV's code and stable-diffusion.cpp have ReLU)"
            )
        expected = _COMFYUI.get(self.latent_channels)
        if expected is None:
            raise InputError(
                f"model.latent_channels={self.latent_channels}: ComfyUI supports "
                f"{', '.join(map(str, _COMFYUI))}: omit --format comfyui"
            )
        for field in ("patch_size", "time_downscale", "trim"):
            value, wanted = getattr(self, field), getattr(expected, field)
            if value != wanted:
                raise InputError(
                    f"model.{field}={value}: ComfyUI assumes {wanted} for "
                    f"{self.latent_channels} latent channels: omit --format comfyui"
                )
        return expected.name

    def comfyui_note(self) -> str | None:
        """Explains why ComfyUI would show wrong colors: its latents of Wan are not scaled."""
        if self.teacher is None or self.teacher.network is None:
            return None
        if self.teacher.network == "wan2.2" and not self.teacher.normalizes():
            return None
        return (
            f"ComfyUI would show wrong colors: the latents of model.teacher.network="
            f"{self.teacher.network} are scaled, as a diffusion model has them, and ComfyUI passes "
            f"{self.comfyui_name()} others; see docs/guides/distill.md"
        )

    def export_note(self) -> str | None:
        """Explains why TAEHV and ComfyUI cannot load the weights: they fix the widths."""
        expected = _DECODER_WIDTHS[self.decoder]
        if self.encoder_width == _ENCODER_WIDTH and self.widths == expected:
            return None
        return (
            f"TAEHV and ComfyUI cannot load these weights: model.encoder_width={self.encoder_width}"
            f" and model.decoder_widths={' '.join(map(str, self.widths))} differ from their fixed "
            f"widths, {_ENCODER_WIDTH} and {' '.join(map(str, expected))}; jaxtrain can load them. "
            "To export weights for these programs, train with their widths"
        )

    @property
    def features(self) -> tuple[tuple[int, int], ...]:
        """Implements :meth:`ReconstructionConfig.features`."""
        return (self.widths[0], 1), (self.widths[1], self.grows[0])

    @property
    def grows(self) -> tuple[int, ...]:
        """Returns the factor of the number of frames of each stage of the decoder."""
        doublings = sum(self.time_downscale)
        return (1,) * (3 - doublings) + (2,) * doublings

    def build(self, rngs: nnx.Rngs) -> "VideoAutoencoder":
        """Builds the module, with new float32 parameters."""
        return VideoAutoencoder(self, rngs)

    @property
    def largest_rate(self) -> float:
        """Returns a rate that falls with the widest layer, as Adam's updates require.

        `demo`, 64 wide, trains with 1e-3 and no Muon. At the published widths, up to 256, and with
        a warm-up of one step, the loss rose from 0.07 to 579 with 1e-3, and to 8 with 2.5e-4, where
        it was back at 0.16 four steps later.
        """
        return _LARGEST_RATE / max(self.encoder_width, *self.widths)

    def weight_tables(self) -> tuple[WeightTable, ...]:
        """Returns the names of the reference; the discriminator has none."""
        return (weights.table(wide=self.decoder == "super"),)

    @classmethod
    def guess(cls, tensors: Mapping[str, np.ndarray], source: str) -> "Config":
        """Infers the config from the reference's weights; the clip size is arbitrary."""
        fields = weights.guess(tensors, source)
        if fields.get("decoder_widths") == _DECODER_WIDTHS[fields["decoder"]]:
            del fields["decoder_widths"]
        side = network.SPACE_FACTOR * int(fields["patch_size"]) * 2
        factor = 2 ** sum(fields["time_downscale"])
        frames = timing.Timing(factor, fields["trim"]).decoded(2)
        try:
            return cls(frames=frames, height=side, width=side, **fields)
        except InputError as error:
            raise InputError(f"{source} does not have weights of TAEHV: {error}") from error

    @classmethod
    def ambiguity(cls, tensors: Mapping[str, np.ndarray], source: str) -> str | None:
        """Explains which values of ``trim`` fit the reference's weights; None if one does."""
        return weights.ambiguity(cls.guess(tensors, source), source)

    @classmethod
    def tiny(cls) -> "Config":
        """Returns a narrow network for 4 frames of 16x16 pixels."""
        return cls(
            frames=4,
            height=16,
            width=16,
            latent_channels=4,
            encoder_width=8,
            decoder_widths=(16, 8, 8, 8),
        )


_DECODERS: dict[DecoderKind, type[network.Decoder | network.WideDecoder]] = {
    "base": network.Decoder,
    "super": network.WideDecoder,
}


class VideoAutoencoder(Reconstruction):
    """Encoder and decoder, with the losses of the config."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.encoder = network.Encoder(
            width=config.encoder_width,
            latent_channels=config.latent_channels,
            patch_size=config.patch_size,
            pools=config.pools,
            rngs=rngs,
        )
        self.decoder = _DECODERS[config.decoder](
            widths=config.widths,
            latent_channels=config.latent_channels,
            patch_size=config.patch_size,
            grows=config.grows,
            rngs=rngs,
        )
        if config.init == "thumbnail":
            self.encoder.start_as_thumbnail()
            self.decoder.start_as_thumbnail()
        self.remat = config.remat
        super().__init__(config, rngs)

    def encode(self, video_BTHW3: jax.Array) -> jax.Array:
        """Maps [B, T, H, W, 3] in [0, 1] to latents [B, ceil(T / 4), H / 8P, W / 8P, C].

        With other `time_downscale` or `trim`, their number differs: see :class:`timing.Timing`.
        """
        chunks = self.timing.chunks(video_BTHW3.astype(self._dtype))
        return self.timing.joined(self.encoder(chunks, self.remat), video_BTHW3.shape[0])

    def decode(self, latents_BLHWC: jax.Array) -> jax.Array:
        """Maps latents [B, L, h, w, C] to [B, 4 L - 3, 8P h, 8P w, 3], not clamped.

        With other `time_downscale` or `trim`, the number of frames differs: see
        :class:`timing.Timing`.
        """
        return self.decode_with_features(latents_BLHWC)[0]

    def decode_with_features(self, latents_BLHWC: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Implements :meth:`Reconstruction.decode_with_features`."""
        count = latents_BLHWC.shape[1]
        self.timing.check_latents(count)
        first = self.timing.dropped(count)
        frames, features = self.decoder(latents_BLHWC.astype(self._dtype), self.remat, first)
        later = [number - first for number in self.timing.dropped_later(range(count))]
        return without(frames, later), features[:2]

    def first_features(self, latents_BLHWC: jax.Array) -> jax.Array:
        """Implements :meth:`Reconstruction.first_features`."""
        return self.decoder.first_features(latents_BLHWC.astype(self._dtype), self.remat)

    def encode_next(
        self, video_BTHW3: jax.Array, memory: list[Memory]
    ) -> tuple[jax.Array, list[Memory]]:
        """Encodes the next groups of frames of a video; returns latents and new memory."""
        return self.encoder.step(video_BTHW3.astype(self._dtype), memory)

    def decode_next(
        self, latents_BLHWC: jax.Array, memory: list[Memory]
    ) -> tuple[jax.Array, list[Memory]]:
        """Decodes the next latents of a video; returns all their frames and the new memory."""
        return self.decoder.step(latents_BLHWC.astype(self._dtype), memory)

    def before_encoding(self, clips: int, height: int, width: int) -> list[Memory]:
        """Returns the memory before the first frame, for frames of this size (pixels)."""
        return self.encoder.no_memory(clips, height, width, self._dtype)

    def before_decoding(self, clips: int, height: int, width: int) -> list[Memory]:
        """Returns the memory before the first latent, for latents of this size."""
        return self.decoder.no_memory(clips, height, width, self._dtype)

    @property
    def _dtype(self) -> jnp.dtype:
        return self.encoder.head.kernel[...].dtype
