"""Wan's video autoencoders, versions 2.1 and 2.2, to train: diffusers' ``AutoencoderKLWan``.

Usually only the decoder is trained: a diffusion model for the latents then keeps working. The
network is :mod:`.wan.network`; clips, losses and metrics are those of all video autoencoders
(:mod:`.reconstruction`).

A clip of 4 n + 1 frames has n + 1 latents. Encoder and decoder process the first one and then
`chunk` latents at a time, with exact gradients, so that long clips fit (`remat chunk`).

Shapes: B clips, T frames, H height, W width; L latents of size h, w with Z channels.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config import bounds
from jaxtrain.errors import InputError
from jaxtrain.models.contract import Tensors
from jaxtrain.models.reconstruction.losses import Channels, Teacher
from jaxtrain.models.reconstruction.reconstruction import (
    Frames,
    Reconstruction,
    ReconstructionConfig,
    Side,
)
from jaxtrain.models.reconstruction.timing import Timing
from jaxtrain.models.wan import network, slicing
from jaxtrain.models.wan.network import TIME_FACTOR, Architecture, Memory, Version
from jaxtrain.models.weight_table import WeightTable

Numbers = tuple[float, ...]
_LARGEST_RATE = 0.1  # times the widest layer, as of the small autoencoder

# fmt: off
PUBLISHED: dict[Version, tuple[Numbers, Numbers]] = {
    "wan2.1": (
        (
            -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715,
            0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
        ),
        (
            2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652,
            1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
        ),
    ),
    "wan2.2": (
        (
            -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542,
            0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109,
            0.2665, -0.2108, -0.2158, 0.2502, -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899,
            -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
            0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
        ),
        (
            0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894,
            1.0901, 0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146,
            0.8986, 0.5659, 0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709,
            0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537,
            0.5444, 0.4089, 0.7468, 0.7744,
        ),
    ),
}
# fmt: on
"""Means and standard deviations of the published models' latents, from their config.json."""


class CausalTiming(Timing):
    """T frames are padded to 4 n + 1 by repeating the last one, and become n + 1 latents."""

    def latent_frames(self, frames: int) -> int:
        """Returns the number of latents of `frames` frames."""
        return 1 + -(-(frames - 1) // TIME_FACTOR)

    def encoded_frames(self, frames: int) -> int:
        """Returns the frames that the encoder processes for a clip, padding included."""
        return self.decoded(self.latent_frames(frames))

    def pad_time(self, video_BTHWC: jax.Array) -> jax.Array:
        """Repeats the last frame until T is 4 n + 1."""
        frames = video_BTHWC.shape[1]
        missing = self.encoded_frames(frames) - frames
        return jnp.pad(video_BTHWC, ((0, 0), (0, missing), (0, 0), (0, 0), (0, 0)), mode="edge")

    def dropped(self, latents: int | None) -> int:
        """Returns 0: the first latent is one frame."""
        return 0

    @property
    def rule(self) -> str:
        """Returns the rule as a message states it."""
        return "4 n - 3 frames of n latents"

    def group(self, latent: int) -> int:
        """Returns the number of frames of a latent, by its number in the video."""
        return TIME_FACTOR if latent else 1

    def decoded(self, latents: int) -> int:
        """Returns the number of frames that `latents` latents are decoded to."""
        return 1 + TIME_FACTOR * (latents - 1)

    def filled(self, frames: int) -> int:
        """Returns the frames to encode for all latents, the last one repeated."""
        return self.encoded_frames(frames)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ReconstructionConfig):
    """Wan's video autoencoder."""

    in_weights = ("version", "latent_channels", "encoder_width", "decoder_width")
    not_in_weights = (("latents_mean", "mean"), ("latents_std", "deviation"))
    diffusers_class = network.CLASS

    frames: Frames
    """Frames per clip: 4 n + 1."""
    height: Side
    """Height of a clip (pixels); a multiple of 16, or of 8 for wan2.1."""
    width: Side
    """Width of a clip (pixels); a multiple of 16, or of 8 for wan2.1."""
    version: Version = "wan2.2"
    """Kind of network: wan2.1, or wan2.2 with patches of 2x2 pixels and skips over its blocks. Set
    the channels, too: the defaults are those of wan2.2."""
    latent_channels: Channels = 48
    """Channels of a latent, which stands for a group of frames and a square of 8x8 patches; 16 for
    wan2.1."""
    encoder_width: Channels = 160
    """Channels of the encoder's first layer; 96 for wan2.1."""
    decoder_width: Channels = 256
    """Channels of the decoder's last layer; 96 for wan2.1."""
    latents_mean: tuple[Annotated[float, bounds.Bounds()], ...] | None = None
    """Mean of each channel of the latents, as in config.json: diffusion models see latents with a
    mean of 0 and a standard deviation of 1. None uses that of the published weights, and 0 for
    other numbers of channels."""
    latents_std: tuple[bounds.Positive, ...] | None = None
    """Standard deviation of each channel of the latents, likewise; 1 for other numbers of
    channels."""
    chunk: Annotated[int, bounds.Bounds(least=1, most=2**16)] | None = 1
    """Latents that are encoded or decoded at a time, after the first. Each has 4 frames. More take
    more memory. None processes a clip at once, which compiles in half the time."""
    remat: Literal["none", "block", "chunk"] = "none"
    """Activation checkpointing: what the backward pass recomputes. block: each block, of which only
    the input is kept; chunk: also each chunk, of which only what the next one needs is kept, so
    that the decoder runs three times; none: nothing."""
    freeze: tuple[str, ...] = ("encoder",)
    """Parts that are not trained: encoder, decoder, or longer parameter paths such as
    decoder.up_blocks.0. They have no gradient, no weight decay, and no optimizer state. Without
    encoder, latents change, and diffusion models for the published ones no longer fit."""
    init_from: str | None = None
    """Initial parameters of a new run: a checkpoint, a run directory, a folder of diffusers'
    AutoencoderKLWan (config.json and .safetensors files), or a weights file that jaxtrain wrote. Of
    a wider encoder or decoder, the run starts from the channels that best rebuild the others."""

    def check(self) -> None:
        """Checks sizes of clips, and statistics of latents."""
        if self.frames % TIME_FACTOR != 1:
            nearest = 1 + TIME_FACTOR * max(0, round((self.frames - 1) / TIME_FACTOR))
            raise InputError(
                f"model.frames={self.frames}: use {TIME_FACTOR} n + 1 frames; the nearest is "
                f"{nearest}",
                about="model.frames",
            )
        if self.remat == "chunk" and self.chunk is None:
            raise InputError(
                "model.remat=chunk requires model.chunk: set --model.chunk 1, or --model.remat "
                "block",
                about=("model.remat", "model.chunk"),
            )
        super().check()
        for name in ("latents_mean", "latents_std"):
            values = self.latents_mean if name == "latents_mean" else self.latents_std
            if values is not None and len(values) != self.latent_channels:
                raise InputError(
                    f"model.{name} has {len(values)} numbers, but model.latent_channels="
                    f"{self.latent_channels}: use one for each channel, or None",
                    about=(f"model.{name}", "model.latent_channels"),
                )

    def _check_teacher(self, teacher: Teacher) -> None:
        """Also checks that a network has the same version, and that it teaches something."""
        super()._check_teacher(teacher)
        if teacher.network not in (None, self.version):
            raise InputError(
                f"model.teacher.network={teacher.network} has other latents than model.version="
                f"{self.version}: set --model.teacher.network {self.version}",
                about=("model.teacher.network", "model.version"),
            )
        if teacher.network is not None and not (self.teacher_encodes or teacher.decodes):
            raise InputError(
                "model.teacher has no effect on a frozen encoder, whose latents are the teacher's: "
                "set --model.teacher.feature_weight 1, or --model.teacher.target teacher",
                about=("model.teacher.feature_weight", "model.teacher.target", "model.freeze"),
            )

    @property
    def mean(self) -> Numbers:
        """Returns the mean of each channel of the latents."""
        return self._statistics[0] if self.latents_mean is None else self.latents_mean

    @property
    def deviation(self) -> Numbers:
        """Returns the standard deviation of each channel of the latents."""
        return self._statistics[1] if self.latents_std is None else self.latents_std

    @property
    def _statistics(self) -> tuple[Numbers, Numbers]:
        published = PUBLISHED[self.version]
        count = self.latent_channels
        return published if len(published[0]) == count else ((0.0,) * count, (1.0,) * count)

    @property
    def sizes(self) -> Architecture:
        """Returns the sizes of the network."""
        return dataclasses.replace(
            network.VERSIONS[self.version],
            width=self.encoder_width,
            decoder_width=self.decoder_width,
            latent_channels=self.latent_channels,
        )

    @property
    def space_factor(self) -> int:
        """Returns the pixels per latent along a side."""
        return self.sizes.space_factor

    @property
    def timing(self) -> Timing:
        """Returns how frames map to latents."""
        return CausalTiming()

    @property
    def features(self) -> tuple[tuple[int, int], ...]:
        """Implements :meth:`ReconstructionConfig.features`."""
        return self.sizes.features

    @property
    def teacher_encodes(self) -> bool:
        """Implements :meth:`ReconstructionConfig.teacher_encodes`."""
        return "encoder" not in self.freeze

    @property
    def largest_rate(self) -> float:
        """Returns a rate that falls with the widest layer, as Adam's updates require."""
        return _LARGEST_RATE / self.sizes.widest

    def build(self, rngs: nnx.Rngs) -> "WanAutoencoder":
        """Builds the module, with new float32 parameters."""
        return WanAutoencoder(self, rngs)

    def weight_tables(self) -> tuple[WeightTable, ...]:
        """Returns Wan's own names, and those of diffusers; the discriminator has none."""
        return tuple(network.table(self.sizes, decodes=True, own=own)[0] for own in (True, False))

    @classmethod
    def recognizes(cls, tensors: Tensors) -> bool:
        """Returns whether the arrays have Wan's own names."""
        return network.sizes_of(tensors) is not None

    @classmethod
    def guess(cls, tensors: Tensors, source: str) -> "Config":
        """Infers the config from a file with Wan's own names; the clip size is arbitrary."""
        sizes = network.sizes_of(tensors)
        if sizes is None or len(PUBLISHED[sizes.version][0]) != sizes.latent_channels:
            raise InputError(
                f"{source}: the mean and deviation of the latents do not follow from its "
                f"{len(tensors)} arrays: pass the folder that has them together with their "
                f"{network.SETTINGS}"
            )
        return cls._of(sizes, source)

    @classmethod
    def _of(cls, sizes: Architecture, source: str, **more: Any) -> "Config":
        side = 2 * sizes.space_factor
        try:
            return cls(
                frames=1 + TIME_FACTOR,
                height=side,
                width=side,
                version=sizes.version,
                latent_channels=sizes.latent_channels,
                encoder_width=sizes.width,
                decoder_width=sizes.decoder_width,
                **more,
            )
        except InputError as error:
            raise InputError(f"{source}: {error}") from error

    def slicer(self, theirs: Any, source: str) -> Callable[[Tensors], dict[str, np.ndarray]] | None:
        """Returns what keeps the channels that rebuild the others best (:mod:`.wan.slicing`).

        None for other networks, and for one of equal widths.
        """
        if not isinstance(theirs, Config) or (theirs.version, theirs.latent_channels) != (
            self.version,
            self.latent_channels,
        ):
            return None
        narrow = False
        for coder, width, wide in (
            ("encoder", self.encoder_width, theirs.encoder_width),
            ("decoder", self.decoder_width, theirs.decoder_width),
        ):
            field = f"{coder}_width"
            if width > wide:
                raise InputError(
                    f"model.{field}={width} is above the {wide} of {source}, and channels can only "
                    f"be dropped: set --model.{field} {wide}, or less",
                    about=f"model.{field}",
                )
            if width == wide:
                continue
            narrow = True
            if frozen := [path for path in self.freeze if path.partition(".")[0] == coder]:
                raise InputError(
                    f"model.{field}={width} slices the {coder} of {source}, of width {wide}, but "
                    f"model.freeze={' '.join(frozen)} would never train what is left: set "
                    f"--model.{field} {wide}, or --model.freeze without it",
                    about=(f"model.{field}", "model.freeze"),
                )
        sizes = theirs.sizes, self.sizes
        return functools.partial(slicing.sliced, *sizes) if narrow else None

    def to_settings(self) -> dict[str, Any]:
        """Returns the config.json of diffusers."""
        return network.to_settings(self.sizes, self.mean, self.deviation)

    @classmethod
    def from_settings(cls, content: Mapping[str, Any], source: str) -> "Config":
        """Reads a config.json of diffusers; the clip size is arbitrary."""
        sizes, (mean, deviation) = network.from_settings(content, source)
        statistics = {"latents_mean": tuple(mean), "latents_std": tuple(deviation)}
        return cls._of(sizes, source, **statistics)

    @classmethod
    def tiny(cls) -> "Config":
        """Returns a narrow network for 5 frames of 32x32 pixels, all of which is trained."""
        narrow: dict[str, Any] = {"latent_channels": 4, "encoder_width": 8, "decoder_width": 8}
        return cls(frames=5, height=32, width=32, chunk=None, freeze=(), **narrow)


class WanAutoencoder(Reconstruction):
    """Encoder and decoder, with the losses of the config."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.patch_size, self.chunk = config.sizes.patch_size, config.chunk
        self.recomputes_chunks = config.remat == "chunk"
        self.mean, self.deviation = config.mean, config.deviation
        self.encoder = network.Encoder(config.sizes)
        self.decoder = network.Decoder(config.sizes)
        for coder in (self.encoder, self.decoder):
            network.start(coder, rngs, "none" if config.remat == "none" else "block")
        super().__init__(config, rngs)

    def encode(self, video_BTHW3: jax.Array) -> jax.Array:
        """Maps [B, T, H, W, 3] in [0, 1] to normalized latents [B, L, h, w, Z].

        Latents are float32, the modes of their distributions.
        """
        video = self.timing.pad_time(video_BTHW3)
        frames = None if self.chunk is None else TIME_FACTOR * self.chunk
        return self._latents(self._coded(self.encoder, self._patches(video), frames))

    def decode(self, latents_BLhwZ: jax.Array) -> jax.Array:
        """Maps normalized latents to float32 [B, 4 L - 3, H, W, 3], not clamped."""
        return self._video(self._coded(self.decoder, self._input(latents_BLhwZ), self.chunk))

    def decode_with_features(self, latents_BLhwZ: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Implements :meth:`Reconstruction.decode_with_features`."""
        step = network.Decoder.step_with_features
        latents = self._input(latents_BLhwZ)
        patches, features = self._coded(self.decoder, latents, self.chunk, step=step)
        return self._video(patches), features

    def first_features(self, latents_BLhwZ: jax.Array) -> jax.Array:
        """Implements :meth:`Reconstruction.first_features`."""
        latents, step = self._input(latents_BLhwZ), network.Decoder.middle
        return jnp.asarray(self._coded(self.decoder, latents, self.chunk, step=step))

    def encode_next(self, video_BTHW3: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        """Encodes the next frames of a video: the first one, then 4 n; returns the new memory."""
        moments, memory = self.encoder.step(self._patches(video_BTHW3), memory)
        return self._latents(moments), memory

    def decode_next(self, latents_BLhwZ: jax.Array, memory: Memory) -> tuple[jax.Array, Memory]:
        """Decodes the next latents of a video; returns their frames and the new memory."""
        patches, memory = self.decoder.step(self._input(latents_BLhwZ), memory)
        return self._video(patches), memory

    def before_encoding(self, clips: int, height: int, width: int) -> Memory:
        """Returns the memory before the first frame."""
        return None

    def before_decoding(self, clips: int, height: int, width: int) -> Memory:
        """Returns the memory before the first latent."""
        return None

    def _coded(self, coder: Any, x_BTHWC: jax.Array, size: int | None, step: Any = None) -> Any:
        recompute = self.recomputes_chunks
        return network.in_chunks(coder, x_BTHWC, size, recompute=recompute, step=step)

    def _patches(self, video_BTHW3: jax.Array) -> jax.Array:
        return network.to_patches(video_BTHW3, self.patch_size, self._dtype)

    def _latents(self, moments_BLhwM: jax.Array) -> jax.Array:
        return network.normalized(moments_BLhwM, *self._statistics)

    def _input(self, latents_BLhwZ: jax.Array) -> jax.Array:
        return network.denormalized(latents_BLhwZ, *self._statistics).astype(self._dtype)

    def _video(self, patches_BTHWC: jax.Array) -> jax.Array:
        return network.to_pixels(patches_BTHWC, self.patch_size)

    @property
    def _statistics(self) -> tuple[jax.Array, jax.Array]:
        return jnp.asarray(self.mean, jnp.float32), jnp.asarray(self.deviation, jnp.float32)

    @property
    def _dtype(self) -> jnp.dtype:
        return self.decoder.norm_out.gamma[...].dtype
