"""What all video autoencoders have in common: clips, losses, metrics and samples.

A subclass of :class:`ReconstructionConfig` has the fields of its network, and one of
:class:`Reconstruction` the network itself. The small autoencoder (:mod:`..video_ae`) and Wan's
(:mod:`..wan_vae`) are two.

Shapes: B clips, T frames, H height, W width, 3 colors; L latents in time.
"""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxtrain import config
from jaxtrain.config import bounds
from jaxtrain.errors import InputError, Problem
from jaxtrain.models.contract import Batch, Model, ModelConfig, Sums
from jaxtrain.models.reconstruction import lpips, quality, samples, timing
from jaxtrain.models.reconstruction.adversary import Seraena
from jaxtrain.models.reconstruction.layers import Pointwise
from jaxtrain.models.reconstruction.losses import Adversary, Channels, Perceptual, Teacher
from jaxtrain.models.wan import network as wan_network
from jaxtrain.models.weight_table import shapes_of
from jaxtrain.ops.layers import FromFile
from jaxtrain.storage.atomic import expanded

_LEAST_SIDE = 16
Side = Annotated[int, bounds.Bounds(least=1, most=2**15)]
Frames = Annotated[int, bounds.Bounds(least=1, most=2**16)]
_DISCRIMINATOR = "adversary.discriminator."
_SAMPLE_CLIPS = 3
_LEAST_LATENTS = 3  # along a side, of which one is left without a border
_LEAST_SQUARE = 1e-12
_ERRORS = {"squared": jnp.square, "absolute": jnp.abs}
_OF_TEACHER = ("encoder_loss", "encoder_feature_loss", "feature_loss")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReconstructionConfig(ModelConfig):
    """The clips and losses of a video autoencoder."""

    task = "reconstruct"
    usage = "reconstruct {run} {input} {out}OUT.mp4 --side-by-side"

    frames: Frames
    """Frames per clip."""
    height: Side
    """Height of a clip (pixels); a multiple of 8 x patch_size."""
    width: Side
    """Width of a clip (pixels); a multiple of 8 x patch_size."""
    latent_channels: Channels = 16
    """Channels of a latent, which stands for a group of frames and a square of 8x8 patches."""
    reconstruction_weight: bounds.Positive = 20.0
    """Weight of the mean error of a clip, with colors from 0 to 1. As the only loss, its weight
    changes only gradient clipping: AdamW's steps do not depend on the scale of a loss."""
    reconstruction_error: Literal["squared", "absolute"] = "squared"
    """Error of a color: squared, which PSNR measures, or absolute."""
    perceptual: Perceptual | None = None
    """The LPIPS loss and metric; None turns it off."""
    adversary: Adversary | None = None
    """The discriminator and its loss; None turns it off."""
    teacher: Teacher | None = None
    """Training on a teacher's latents and frames; None turns it off."""

    def check(self) -> None:
        """Checks sizes of clips and of what sees them."""
        self._check_size()
        if self.adversary is not None:
            self._check_adversary(self.adversary)
        if self.teacher is not None:
            self._check_teacher(self.teacher)

    def _check_size(self) -> None:
        factor = self.space_factor
        if self.height % factor or self.width % factor:
            raise InputError(
                f"model.height={self.height} and model.width={self.width} must be multiples of "
                f"{factor}: the nearest are {self._nearest(self.height)} and "
                f"{self._nearest(self.width)}",
                about=("model.height", "model.width"),
            )
        if min(self.height, self.width) < _LEAST_SIDE:
            raise InputError(
                f"model.height={self.height} and model.width={self.width}: use at least "
                f"{_LEAST_SIDE} for each (SSIM has windows of {quality.SSIM_WINDOW} pixels)",
                about=("model.height", "model.width"),
            )
        if self.perceptual is not None and min(self.height, self.width) < lpips.LEAST_SIDE:
            raise InputError(
                f"model.height={self.height} and model.width={self.width}: model.perceptual needs "
                f"at least {lpips.LEAST_SIDE} for each: enlarge them, or set --model.perceptual "
                "None",
                about=("model.height", "model.width", "model.perceptual"),
            )

    def _check_adversary(self, settings: Adversary) -> None:
        crop, limit = settings.crop, min(self.height, self.width)
        if crop is not None and (crop % self.space_factor or not 0 < crop <= limit):
            raise InputError(
                f"model.adversary.crop={crop}: use a multiple of {self.space_factor} up to "
                f"{limit}, or None for the full frame",
                about="model.adversary.crop",
            )

    def _check_teacher(self, teacher: Teacher) -> None:
        if not teacher.encoder_feature_weight:
            return
        field = f"model.teacher.encoder_feature_weight={teacher.encoder_feature_weight}"
        if "decoder" not in self.freeze:
            raise InputError(
                f"{field} compares features of a decoder that is not trained meanwhile: set "
                "--model.freeze decoder, and --model.init_from to the run that trained it",
                about=("model.teacher.encoder_feature_weight", "model.freeze"),
            )
        _, high, wide, _ = self.latent_shape
        if min(high, wide) < _LEAST_LATENTS:
            raise InputError(
                f"{field}: without a border, nothing is left of {high}x{wide} latents: use clips "
                f"and crops of at least {_LEAST_LATENTS * self.space_factor} pixels",
                about=("model.teacher.encoder_feature_weight", "model.height", "model.width"),
            )

    @property
    def space_factor(self) -> int:
        """Returns the pixels per latent along a side."""
        raise NotImplementedError

    @property
    def features(self) -> tuple[tuple[int, int], ...]:
        """Returns channels, and frames per latent, of each of the decoder's features."""
        raise NotImplementedError

    @property
    def teacher_encodes(self) -> bool:
        """Returns whether a teacher's network encodes; otherwise the encoder is the teacher's."""
        return True

    @property
    def timing(self) -> timing.Timing:
        """Returns how frames map to latents."""
        raise NotImplementedError

    def bare(self) -> Self:
        """Returns the same network without its training-only parts."""
        return dataclasses.replace(self, perceptual=None, adversary=None, teacher=None)

    def problems(self) -> list[str]:
        """Returns why this model cannot be trained: missing files."""
        problems: list[str] = []
        if self.perceptual is not None:
            file = self.perceptual.weights
            if not os.path.exists(expanded(file)):
                problems.append(
                    Problem(
                        f"model.perceptual.weights={file}: no such file; pass a state dict "
                        "(.safetensors or .pth), or set --model.perceptual None",
                        "model.perceptual.weights",
                        "model.perceptual",
                    )
                )
        if self.teacher is not None and self.teacher.network is not None:
            path = self.teacher.weights
            if path is None or not os.path.isdir(expanded(path)):
                fault = "is not set" if path is None else f"={path}: no such folder"
                problems.append(
                    Problem(
                        f"model.teacher.weights{'' if path else ' '}{fault}: pass the local folder "
                        f"of {self.teacher.network}'s autoencoder in diffusers' format, or set "
                        "--model.teacher None",
                        "model.teacher.weights",
                        "model.teacher",
                    )
                )
        return problems

    def file_weights(self) -> dict[str, np.ndarray]:
        """Reads the weights of LPIPS and of the teacher, by dotted path in the module."""
        weights: dict[str, np.ndarray] = {}
        if self.perceptual is not None:
            _, arrays = lpips.read(expanded(self.perceptual.weights), "alex")
            weights |= {f"lpips.{name}": array for name, array in arrays.items()}
        sizes = None if self.teacher is None else self.teacher.sizes(self.latent_channels)
        if self.teacher is not None and sizes is not None:
            field = "model.teacher.weights"
            if self.teacher.weights is None:
                raise InputError(f"{field} is not set: pass the folder of {sizes.version}")
            folder, decodes = expanded(self.teacher.weights), self.teacher.decodes
            of_teacher = wan_network.read(folder, sizes, decodes=decodes, field=field)
            used = shapes_of(lambda: _teacher_network(self), FromFile)
            weights |= {f"teacher_network.{name}": of_teacher[name] for name in used}
        return weights

    def notes(self) -> list[str]:
        """Says which frames no loss compares, which losses begin later, and what is assumed."""
        later = [loss for loss in (self.perceptual, self.adversary) if loss is not None]
        lines = self.timing.unused(self.frames) + [line for loss in later for line in loss.begins()]
        return lines + ([] if self.teacher is None else self.teacher.assumed())

    def optimizer_groups(self) -> dict[str, config.Group | config.Role]:
        """Returns the kernels, for Muon, and the discriminator, which has its own AdamW."""
        groups: dict[str, config.Group | config.Role]
        groups = {"kernels": config.Role(prefix="", role="matrix")}
        if self.adversary is not None:
            settings = self.adversary
            groups["adversary"] = config.Group(
                prefix=_DISCRIMINATOR,
                peak_lr=settings.peak_lr,
                b1=settings.b1,
                b2=settings.b2,
                weight_decay=settings.weight_decay,
                start_step=settings.start_step,
            )
        return groups

    def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of a batch.

        `video` uint8 [B, T, H, W, 3], `weight` float32 [B]; with prepared latents of a teacher also
        `latents`, float32 [B, L, h, w, C].
        """
        shape = (batch_size, self.frames, self.height, self.width, 3)
        spec = {
            "video": jax.ShapeDtypeStruct(shape, jnp.uint8),
            "weight": jax.ShapeDtypeStruct((batch_size,), jnp.float32),
        }
        if self.teacher is not None and self.teacher.prepared:
            latents = (batch_size, *self.latent_shape)
            spec["latents"] = jax.ShapeDtypeStruct(latents, jnp.float32)
        return spec

    @property
    def latent_shape(self) -> tuple[int, int, int, int]:
        """Returns the shape of a clip's latents, [L, h, w, C]."""
        factor = self.space_factor
        latents = self.timing.latent_frames(self.frames)
        return latents, self.height // factor, self.width // factor, self.latent_channels

    def _nearest(self, size: int) -> int:
        """Returns the valid size nearest to `size`, at least 16."""
        factor = self.space_factor
        smallest = -(-_LEAST_SIDE // factor) * factor
        return max(smallest, (size + factor // 2) // factor * factor)


class Reconstruction(Model):
    """Losses and metrics of a video autoencoder; a subclass has ``encode`` and ``decode``.

    Args:
        rngs: for the discriminator and the projections, so a subclass first draws its own
            parameters.
    """

    chunk: int | None = None
    """Latents that a teacher encodes or decodes at a time, after the first; None for all."""

    def __init__(self, config: ReconstructionConfig, rngs: nnx.Rngs) -> None:
        self.timing = config.timing
        self.space_factor = config.space_factor
        self.reconstruction_weight = config.reconstruction_weight
        self.reconstruction_error = config.reconstruction_error
        self.lpips = None if config.perceptual is None else lpips.Lpips()
        self.perceptual, self.adversarial = config.perceptual, config.adversary
        self.adversary = _adversary(config, rngs)
        self.teacher = config.teacher
        self.teacher_network = _teacher_network(config)
        self.projections = _projections(config, rngs)

    def decode_with_features(self, latents_BLHWC: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        """Returns what ``decode`` does, and the features that ``ReconstructionConfig`` lists.

        Features before the first decoded frame are dropped later, if there are any.
        """
        raise NotImplementedError

    def first_features(self, latents_BLHWC: jax.Array) -> jax.Array:
        """Returns the first of these features."""
        raise NotImplementedError

    def encode_next(self, video_BTHW3: jax.Array, memory: Any) -> tuple[jax.Array, Any]:
        """Encodes the next groups of frames of a video; returns latents and the new memory."""
        raise NotImplementedError

    def decode_next(self, latents_BLHWC: jax.Array, memory: Any) -> tuple[jax.Array, Any]:
        """Decodes the next latents of a video; returns all their frames and the new memory."""
        raise NotImplementedError

    def before_encoding(self, clips: int, height: int, width: int) -> Any:
        """Returns the memory before the first frame, for frames of this size (pixels)."""
        raise NotImplementedError

    def before_decoding(self, clips: int, height: int, width: int) -> Any:
        """Returns the memory before the first latent, for latents of this size."""
        raise NotImplementedError

    def _teacher_latents(self, video_BTHW3: jax.Array, batch: Batch) -> jax.Array | None:
        """Returns the teacher's latents of these frames; None without a teacher's encoder."""
        if self.teacher is None:
            return None
        if self.teacher_network is None:
            return batch["latents"]
        if self.teacher_network.encoder is None:
            return None
        latents = self.teacher_network.encode(video_BTHW3, self._dtype, chunk=self.chunk)
        return lax.stop_gradient(latents)

    @property
    def _dtype(self) -> jnp.dtype:
        raise NotImplementedError

    def loss(self, batch: Batch, keys_B: jax.Array) -> tuple[jax.Array, jax.Array, Sums]:
        """Computes the weighted sum of all losses that are on, over clips.

        The metrics are `reconstruction_loss`, `psnr`, and those of the other losses. The losses use
        the reconstruction without clamping, which would remove the gradient of pixels outside [0,
        1]. PSNR is of the clamped reconstruction, as a viewer sees it.
        """
        video, weight_B = _to_float(batch["video"]), batch["weight"]
        out = self._outputs(video, batch)
        weight = weight_B.sum()
        total, metrics = self._losses(out, batch, weight)
        clipped = jnp.clip(out.reconstruction, 0, 1)
        metrics["psnr"] = _frame_sums(quality.psnr(out.target, clipped), weight_B)[:2]
        if self.adversary is not None and self.adversarial is not None:
            inputs = out.target, out.reconstruction, out.decoder_input, keys_B, self._dtype
            fraction = self.adversarial.weight_fraction(batch)
            factor: Any = self.adversarial.weight
            if fraction is None:
                adversarial = self.adversary(*inputs)
            else:
                adversarial = self.adversary.once_begun(fraction > 0, *inputs)
                factor *= fraction
            correction = (adversarial.decoder_B * weight_B).sum()
            # The discriminator's own loss trains only the discriminator, so it needs no weight.
            total += factor * correction + adversarial.discriminator * weight
            metrics |= {
                "adversary_loss": (correction, weight),
                "discriminator_loss": (adversarial.discriminator * weight, weight),
                "discriminator_accuracy": (adversarial.right * weight, weight),
            }
        return total, weight, metrics

    def evaluate(self, batch: Batch) -> Sums:
        """Computes `loss`, without adversary, `psnr`, `ssim`, and `lpips` of clips."""
        weight_B = batch["weight"]
        out = self._outputs(_to_float(batch["video"]), batch)
        weight = weight_B.sum()
        total, metrics = self._losses(out, batch, weight)
        clipped = jnp.clip(out.reconstruction, 0, 1)
        measured: Sums = {
            "loss": (total, weight),
            "psnr": _frame_sums(quality.psnr(out.target, clipped), weight_B),
            "ssim": _frame_sums(quality.ssim(out.target, clipped), weight_B),
        }
        measured |= {name: sums for name, sums in metrics.items() if name in _OF_TEACHER}
        if self.lpips is not None:
            of_frames = self._lpips_BT(out.target, clipped, jnp.float32)  # as in `evaluate`
            measured["lpips"] = _frame_sums(of_frames, weight_B)
        return measured

    def baseline_sums(self, batch: Batch) -> dict[str, jax.Array]:
        """Measures clips of one color, the mean of each original."""
        target = self._outputs(_to_float(batch["video"]), batch).target
        color = jnp.broadcast_to(target.mean((1, 2, 3), keepdims=True), target.shape)
        total, weight, _ = _frame_sums(quality.psnr(target, color), batch["weight"])
        return {"psnr": total, "frames": weight}

    @staticmethod
    def baseline(sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns the `psnr` of clips of one color."""
        frames = float(sums["frames"])
        return {"psnr": float(sums["psnr"]) / frames if frames else math.nan}

    def samples(self, batch: Batch) -> dict[str, jax.Array]:
        """Shows up to 3 clips: originals, reconstructions, and errors as a heat map, in rows.

        `reconstruction` is an image with up to 6 frames side by side, `clip` a video of all frames,
        and `latents` a grid of the channels of each clip's first latent.
        """
        first = {name: rows[:_SAMPLE_CLIPS] for name, rows in batch.items()}
        out = self._outputs(_to_float(first["video"]), first)
        images = samples.beside(out.target, jnp.clip(out.reconstruction, 0, 1))
        return {
            "reconstruction": samples.in_a_row(images),
            "clip": samples.moving(images),
            "latents": samples.grid(out.encoded[:, 0]),
        }

    @staticmethod
    def sample_labels(batch: Mapping[str, Any]) -> dict[str, tuple[Sequence[str], Sequence[str]]]:
        """Returns the labels of the rows and of the columns of each sample."""
        clips = min(_SAMPLE_CLIPS, batch["video"].shape[0])
        numbered = [f"clip {number + 1}" for number in range(clips)]
        rows = list(samples.ROWS)
        return {
            "reconstruction": (rows * clips, []),
            "clip": (rows, numbered),
            "latents": (numbered, []),
        }

    def _losses(self, out: "_Outputs", batch: Batch, weight: jax.Array) -> tuple[jax.Array, Sums]:
        """Returns the weighted sum of the losses without randomness, and each loss."""
        total, metrics, across = jnp.zeros(()), Sums(), (1, 2, 3, 4)

        def add(name: str, factor: float | jax.Array, error_B: jax.Array) -> None:
            nonlocal total
            error = (error_B * batch["weight"]).sum()
            total += factor * error
            metrics[name] = (error, weight)

        distance = _ERRORS[self.reconstruction_error]
        errors = [distance(out.reconstruction - each).mean(across) for each in out.targets]
        add("reconstruction_loss", self.reconstruction_weight, _mean(errors))
        if self.teacher is not None and out.teacher_latents is not None:
            distance = _ERRORS[self.teacher.error]
            error_B = distance(out.encoded - out.teacher_latents).mean(across)
            add("encoder_loss", self.teacher.encoder_weight, error_B)
            if self.teacher.encoder_feature_weight:
                latents = out.encoded if self.teacher.decode else out.teacher_latents
                first, second = (
                    _inside(x) for x in (out.features[0], self.first_features(latents))
                )
                error_B = distance(first - second).mean(across)
                add("encoder_feature_loss", self.teacher.encoder_feature_weight, error_B)
        if self.teacher is not None and self.projections is not None:
            pairs = zip(self.projections, out.features, out.teacher_features, strict=True)
            errors = [_relative_error(project(own), theirs) for project, own, theirs in pairs]
            add("feature_loss", self.teacher.feature_weight, _mean(errors))
        if self.perceptual is not None:

            def distance_B() -> jax.Array:
                arguments = out.reconstruction, self._dtype
                return _mean([self._lpips_BT(each, *arguments).mean(1) for each in out.targets])

            fraction = self.perceptual.weight_fraction(batch)
            if fraction is None:
                add("perceptual_loss", self.perceptual.weight, distance_B())
            else:
                error_B = lax.cond(
                    fraction > 0, distance_B, lambda: jnp.zeros_like(batch["weight"])
                )
                add("perceptual_loss", self.perceptual.weight * fraction, error_B)
        return total, metrics

    def _lpips_BT(self, video_BTHW3: jax.Array, other_BTHW3: jax.Array, dtype: Any) -> jax.Array:
        assert self.lpips is not None
        b, t, *shape = video_BTHW3.shape
        frames = [x.astype(dtype).reshape(b * t, *shape) for x in (video_BTHW3, other_BTHW3)]
        return self.lpips(*frames).reshape(b, t)

    def _outputs(self, video_BTHW3: jax.Array, batch: Batch) -> "_Outputs":
        """Encodes and decodes a batch."""
        target = self.timing.target(video_BTHW3)
        encoded = self.encode(video_BTHW3)
        teacher_latents = self._teacher_latents(video_BTHW3, batch)
        from_teacher = self.teacher is not None and self.teacher.decode
        decoder_input = teacher_latents if from_teacher and teacher_latents is not None else encoded
        features, teacher_features, targets = list[jax.Array](), list[jax.Array](), [target]
        settings = self.teacher
        if settings is not None and (settings.feature_weight or settings.encoder_feature_weight):
            reconstruction, features = self.decode_with_features(decoder_input)
        else:
            reconstruction = self.decode(decoder_input)
        if settings is not None and settings.decodes:
            assert self.teacher_network is not None, "only a network decodes"
            latents = lax.stop_gradient(encoded if teacher_latents is None else teacher_latents)
            frames, teacher_features = self.teacher_network.decode(
                latents.astype(jnp.float32), self._dtype, chunk=self.chunk
            )
            if frames is not None:
                targets = [target, frames] if settings.target == "both" else [frames]
        return _Outputs(
            target=target,
            targets=targets,
            reconstruction=reconstruction.astype(jnp.float32),
            features=features,
            encoded=encoded.astype(jnp.float32),
            decoder_input=decoder_input,
            teacher_latents=teacher_latents,
            teacher_features=teacher_features,
        )


class _Outputs(NamedTuple):
    """Inputs and outputs of encoder and decoder for a batch.

    Attributes:
        target: the original frames, float32 [B, T, H, W, 3].
        targets: frames to reconstruct, each with the same weight: the original, the teacher's.
        reconstruction: frames, not clamped, float32 [B, T, H, W, 3].
        encoded: our latents, float32 [B, L, h, w, C].
        teacher_latents: the teacher's latents; None without a teacher's encoder.
    """

    target: jax.Array
    targets: list[jax.Array]
    reconstruction: jax.Array
    features: list[jax.Array]
    encoded: jax.Array
    decoder_input: jax.Array
    teacher_latents: jax.Array | None
    teacher_features: list[jax.Array]


def _mean(errors: Sequence[jax.Array]) -> jax.Array:
    return jnp.stack(errors).mean(0)


def _inside(x_BLhwC: jax.Array) -> jax.Array:
    """Removes an eighth of each side, rounded up; float32.

    The zeros around a frame change the features there, and a student of such features had blobs
    near its corners (https://github.com/madebyollin/taesd/issues/11).
    """
    high, wide = (-(-side // 8) for side in x_BLhwC.shape[2:4])
    return x_BLhwC[:, :, high:-high, wide:-wide].astype(jnp.float32)


def _relative_error(own_BLhwR: jax.Array, theirs_BThwC: jax.Array) -> jax.Array:
    """Returns each clip's squared error, divided by the mean square of the teacher's features.

    The channels of ours are those of each of the R / C frames that the teacher has for one. The
    teacher has no frames before the first one.
    """
    theirs = lax.stop_gradient(theirs_BThwC.astype(jnp.float32))
    b, t, h, w, c = theirs.shape
    own = own_BLhwR.astype(jnp.float32).reshape(b, -1, h, w, own_BLhwR.shape[-1] // c, c)
    own = own.transpose(0, 1, 4, 2, 3, 5).reshape(b, -1, h, w, c)[:, -t:]
    error, scale = (jnp.square(x).mean((1, 2, 3, 4)) for x in (own - theirs, theirs))
    return error / jnp.maximum(scale, _LEAST_SQUARE)


def _teacher_network(config: ReconstructionConfig) -> Any:
    """Returns what runs of a teacher's network, :class:`wan_network.WanVae`; None without one."""
    teacher = config.teacher
    sizes = None if teacher is None else teacher.sizes(config.latent_channels)
    if teacher is None or sizes is None:
        return None
    whole = teacher.target != "original"
    return wan_network.WanVae(
        sizes, encodes=config.teacher_encodes, decodes=teacher.decodes, whole=whole
    )


def _projections(config: ReconstructionConfig, rngs: nnx.Rngs) -> nnx.List[Any] | None:
    """Returns the layers that map each feature to the teacher's; None without their loss."""
    teacher = config.teacher
    sizes = None if teacher is None else teacher.sizes(config.latent_channels)
    if teacher is None or sizes is None or not teacher.feature_weight:
        return None
    return nnx.List(
        [
            Pointwise(channels, theirs * (count // frames), use_bias=True, rngs=rngs)
            for (channels, frames), (theirs, count) in zip(
                config.features, sizes.features, strict=True
            )
        ]
    )


def _adversary(config: ReconstructionConfig, rngs: nnx.Rngs) -> Seraena | None:
    settings = config.adversary
    if settings is None:
        return None
    decoded = config.timing.decoded(config.timing.latent_frames(config.frames))
    return Seraena(
        frames=min(settings.frames, decoded),
        crop=settings.crop,
        replay=settings.replay,
        height=config.height,
        width=config.width,
        space_factor=config.space_factor,
        latent_channels=config.latent_channels,
        rngs=rngs,
    )


def _to_float(video: jax.Array) -> jax.Array:
    return video.astype(jnp.float32) / 255


def _frame_sums(value_BT: jax.Array, weight_B: jax.Array) -> tuple[jax.Array, ...]:
    """Returns sum and weight over clips of the means of their frames, and those of each clip."""
    value_B = value_BT.mean(1) * weight_B
    return value_B.sum(), weight_B.sum(), jnp.stack([value_B, weight_B])
