"""What all video autoencoders have in common: clips, losses, metrics and samples.

A subclass of :class:`ReconstructionConfig` has the fields of its network, and one of
:class:`Reconstruction` the network itself. The small autoencoder (:mod:`.autoencoder`) and Wan's
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

from jaxtrain import config
from jaxtrain.config import bounds
from jaxtrain.errors import InputError, Problem
from jaxtrain.models.contract import Batch, Model, ModelConfig, Sums
from jaxtrain.models.video_ae import augment, lpips, quality, samples, timing
from jaxtrain.models.video_ae.adversary import Seraena
from jaxtrain.models.video_ae.losses import Adversary, Channels, Perceptual, Teacher
from jaxtrain.storage.atomic import expanded

_LEAST_SIDE = 16
Side = Annotated[int, bounds.Bounds(least=1, most=2**15)]
Frames = Annotated[int, bounds.Bounds(least=1, most=2**16)]
_DISCRIMINATOR = "adversary.discriminator."
_SAMPLE_CLIPS = 3


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

    def check(self) -> None:
        """Checks sizes of clips and of what sees them."""
        self._check_size()
        if self.adversary is not None:
            self._check_adversary(self.adversary)

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
        decoded = self.timing.decoded(self.timing.latent_frames(self.frames))
        if decoded < settings.frames:
            raise InputError(
                f"model.adversary.frames={settings.frames}: a clip of model.frames={self.frames} "
                f"has {decoded} reconstructed frames; use that many at most",
                about=("model.adversary.frames", "model.frames"),
            )
        crop, most = settings.crop, min(self.height, self.width)
        if crop is not None and (crop % self.space_factor or not 0 < crop <= most):
            raise InputError(
                f"model.adversary.crop={crop}: use a multiple of {self.space_factor} up to {most}, "
                "or None for the full frame",
                about="model.adversary.crop",
            )

    @property
    def space_factor(self) -> int:
        """Returns the pixels per latent along a side."""
        raise NotImplementedError

    @property
    def timing(self) -> timing.Timing:
        """Returns how frames map to latents."""
        raise NotImplementedError

    def bare(self) -> Self:
        """Returns the same network without its training-only parts."""
        return dataclasses.replace(self, perceptual=None, adversary=None)

    def problems(self) -> list[str]:
        """Returns why this model cannot be trained: missing files."""
        problems: list[str] = []
        if self.perceptual is not None:
            for name in ("weights", "backbone"):
                path = getattr(self.perceptual, name)
                if path is not None and not os.path.exists(expanded(path)):
                    problems.append(
                        Problem(
                            f"model.perceptual.{name}={path}: no such file; pass a state dict "
                            "(.safetensors or .pth), or set --model.perceptual None",
                            f"model.perceptual.{name}",
                            "model.perceptual",
                        )
                    )
        return problems

    def file_weights(self) -> dict[str, np.ndarray]:
        """Reads the weights of LPIPS, by dotted path in the module.

        Raises:
            InputError: the files are missing or have other contents.
        """
        if self.perceptual is None:
            return {}
        backbone = self.perceptual.backbone
        _, arrays = lpips.read(
            expanded(self.perceptual.weights),
            None if backbone is None else expanded(backbone),
            "alex",
        )
        return {f"lpips.{name}": array for name, array in arrays.items()}

    def formulas(self) -> list[str]:
        """Says if the loss compares only some frames of a clip."""
        return self.timing.unused(self.frames)

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
                max_grad_norm=settings.max_grad_norm,
            )
        return groups

    def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of a batch.

        `video` uint8 [B, T, H, W, 3], `augment` float32 [B, 5] (augment.FACTORS), `weight` float32
        [B].
        """
        shape = (batch_size, self.frames, self.height, self.width, 3)
        return {
            "video": jax.ShapeDtypeStruct(shape, jnp.uint8),
            "augment": jax.ShapeDtypeStruct((batch_size, augment.FACTORS), jnp.float32),
            "weight": jax.ShapeDtypeStruct((batch_size,), jnp.float32),
        }

    def _nearest(self, size: int) -> int:
        """Returns the valid size nearest to `size`, at least 16."""
        factor = self.space_factor
        least = -(-_LEAST_SIDE // factor) * factor
        return max(least, (size + factor // 2) // factor * factor)


class Reconstruction(Model):
    """Losses and metrics of a video autoencoder; a subclass has ``encode`` and ``decode``.

    Args:
        config: the config.
        rngs: for the discriminator, so a subclass first draws its own parameters.
    """

    teacher: Teacher | None = None

    def __init__(self, config: ReconstructionConfig, rngs: nnx.Rngs) -> None:
        self.timing = config.timing
        self.space_factor = config.space_factor
        self.reconstruction_weight = config.reconstruction_weight
        self.reconstruction_error = config.reconstruction_error
        self.lpips = None if config.perceptual is None else lpips.Lpips()
        self.perceptual_weight = 0.0 if config.perceptual is None else config.perceptual.weight
        self.adversary = _adversary(config, rngs)

    def _teacher_latents(self, video_BTHW3: jax.Array, batch: Batch) -> jax.Array | None:
        """Returns the teacher's latents of these frames; None without a teacher."""
        return None

    @property
    def _dtype(self) -> jnp.dtype:
        """Returns the dtype of the computation."""
        raise NotImplementedError

    def loss(self, batch: Batch, keys_B: jax.Array) -> tuple[jax.Array, jax.Array, Sums]:
        """Computes the weighted sum of all losses that are on, over clips.

        Color jitter and blur are in what the encoder sees, but not in the target, nor in what a
        teacher sees.

        The metrics are `reconstruction_loss`, `psnr`, and those of the other losses. The losses use
        the reconstruction without clamping, which would remove the gradient of pixels outside [0,
        1]. PSNR is of the clamped reconstruction, as a viewer sees it.
        """
        video, weight_B = _to_float(batch["video"]), batch["weight"]
        out = self._outputs(video, batch, augment.augment(video, batch["augment"]))
        weight = weight_B.sum()
        total, metrics = self._losses(out, weight_B, weight)
        shown = jnp.clip(out.reconstruction, 0, 1)
        metrics["psnr"] = _frame_sums(quality.psnr(out.target, shown), weight_B)[:2]
        if self.adversary is not None:
            adversarial = self.adversary(
                out.target, out.reconstruction, out.decoder_input, keys_B, self._dtype
            )
            correction = (adversarial.decoder_B * weight_B).sum()
            # The discriminator's own loss trains only the discriminator, so it needs no weight.
            total += self.adversary.weight * correction + adversarial.discriminator * weight
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
        total, metrics = self._losses(out, weight_B, weight)
        shown = jnp.clip(out.reconstruction, 0, 1)
        measured: Sums = {
            "loss": (total, weight),
            "psnr": _frame_sums(quality.psnr(out.target, shown), weight_B),
            "ssim": _frame_sums(quality.ssim(out.target, shown), weight_B),
        }
        if self.teacher is not None:
            measured["encoder_loss"] = metrics["encoder_loss"]
        if self.lpips is not None:
            of_frames = self._lpips_BT(out.target, shown, jnp.float32)  # as in `evaluate`
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
        shown = samples.beside(out.target, jnp.clip(out.reconstruction, 0, 1))
        return {
            "reconstruction": samples.in_a_row(shown),
            "clip": samples.moving(shown),
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

    def _losses(
        self, out: "_Outputs", weight_B: jax.Array, weight: jax.Array
    ) -> tuple[jax.Array, Sums]:
        """Returns the weighted sum of the losses without randomness, and each loss."""
        error_of = jnp.square if self.reconstruction_error == "squared" else jnp.abs
        error = (error_of(out.reconstruction - out.target).mean((1, 2, 3, 4)) * weight_B).sum()
        total = self.reconstruction_weight * error
        metrics: Sums = {"reconstruction_loss": (error, weight)}
        if self.teacher is not None:
            assert out.teacher_latents is not None, "there is a teacher"
            encoder_error = (
                jnp.square(out.encoded - out.teacher_latents).mean((1, 2, 3, 4)) * weight_B
            ).sum()
            total += self.teacher.encoder_weight * encoder_error
            metrics["encoder_loss"] = (encoder_error, weight)
        if self.lpips is not None:
            of_frames = self._lpips_BT(out.target, out.reconstruction, self._dtype)
            distance = (of_frames.mean(1) * weight_B).sum()
            total += self.perceptual_weight * distance
            metrics["perceptual_loss"] = (distance, weight)
        return total, metrics

    def _lpips_BT(self, video_BTHW3: jax.Array, other_BTHW3: jax.Array, dtype: Any) -> jax.Array:
        assert self.lpips is not None
        b, t, *shape = video_BTHW3.shape
        frames = [x.astype(dtype).reshape(b * t, *shape) for x in (video_BTHW3, other_BTHW3)]
        return self.lpips(*frames).reshape(b, t)

    def _outputs(
        self, video_BTHW3: jax.Array, batch: Batch, seen_BTHW3: jax.Array | None = None
    ) -> "_Outputs":
        """Encodes and decodes a batch; the encoder may see other frames, such as blurred ones."""
        target = self.timing.target(video_BTHW3)
        encoded = self.encode(video_BTHW3 if seen_BTHW3 is None else seen_BTHW3)
        teacher_latents = self._teacher_latents(video_BTHW3, batch)
        from_teacher = self.teacher is not None and self.teacher.decode
        decoder_input = teacher_latents if from_teacher and teacher_latents is not None else encoded
        return _Outputs(
            target=target,
            reconstruction=self.decode(decoder_input).astype(jnp.float32),
            encoded=encoded.astype(jnp.float32),
            decoder_input=decoder_input,
            teacher_latents=teacher_latents,
        )


class _Outputs(NamedTuple):
    """Inputs and outputs of encoder and decoder for a batch.

    Attributes:
        target: frames to reconstruct, float32 [B, T, H, W, 3].
        reconstruction: frames, not clamped, float32 [B, T, H, W, 3].
        encoded: our latents, float32 [B, L, h, w, C].
        decoder_input: the latents that were decoded: ours, or the teacher's.
        teacher_latents: the teacher's latents; None without a teacher.
    """

    target: jax.Array
    reconstruction: jax.Array
    encoded: jax.Array
    decoder_input: jax.Array
    teacher_latents: jax.Array | None


def _adversary(config: ReconstructionConfig, rngs: nnx.Rngs) -> Seraena | None:
    settings = config.adversary
    if settings is None:
        return None
    return Seraena(
        weight=settings.weight,
        frames=settings.frames,
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
