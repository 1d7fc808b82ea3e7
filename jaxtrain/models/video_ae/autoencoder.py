"""The video autoencoder: encoder, decoder, losses, and samples.

Shapes: B clips, T frames, H height, W width, 3 colors; L latents in time.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxtrain.models.contract import Batch, Model, Sums
from jaxtrain.models.video_ae import augment, network, quality, samples
from jaxtrain.models.video_ae.adversary import Seraena
from jaxtrain.models.video_ae.blocks import Memory
from jaxtrain.models.video_ae.config import Config, DecoderKind
from jaxtrain.models.video_ae.lpips import Lpips
from jaxtrain.models.wan_network import WanVae

_SAMPLE_CLIPS = 3
_DECODERS: dict[DecoderKind, type[network.Decoder | network.WideDecoder]] = {
    "base": network.Decoder,
    "super": network.WideDecoder,
}


class VideoAutoencoder(Model):
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
        self.timing = config.timing
        self.space_factor = config.space_factor
        self.remat = config.remat
        self.reconstruction_weight = config.reconstruction_weight
        self.teacher = config.teacher
        sizes = None if config.teacher is None else config.teacher.sizes(config.latent_channels)
        self.teacher_network = None if sizes is None else WanVae(sizes, decodes=False)
        self.lpips = None if config.perceptual is None else Lpips()
        self.perceptual_weight = 0.0 if config.perceptual is None else config.perceptual.weight
        self.adversary = _adversary(config, rngs)

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
        count = latents_BLHWC.shape[1]
        self.timing.check_latents(count)
        first = self.timing.dropped(count)
        frames = self.decoder(latents_BLHWC.astype(self._dtype), self.remat, first)
        later = [number - first for number in self.timing.dropped_later(range(count))]
        return without(frames, later)

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

    def loss(self, batch: Batch, keys_B: jax.Array) -> tuple[jax.Array, jax.Array, Sums]:
        """Computes the weighted sum of all losses that are on, over clips.

        The metrics are `reconstruction_loss`, `psnr`, and those of the other losses. The losses use
        the reconstruction without clamping, which would remove the gradient of pixels outside [0,
        1]. PSNR is of the clamped reconstruction, as a viewer sees it.
        """
        video = augment.augment(_to_float(batch["video"]), batch["augment"])
        weight_B = batch["weight"]
        seen = self._seen(video, batch)
        weight = weight_B.sum()
        total, metrics = self._losses(seen, weight_B, weight)
        shown = jnp.clip(seen.found, 0, 1)
        metrics["psnr"] = _frame_sums(quality.psnr(seen.target, shown), weight_B)[:2]
        if self.adversary is not None:
            found = self.adversary(seen.target, seen.found, seen.decoded, keys_B, self._dtype)
            correction = (found.decoder_B * weight_B).sum()
            # The discriminator's own loss trains only the discriminator, so it needs no weight.
            total += self.adversary.weight * correction + found.discriminator * weight
            metrics |= {
                "adversary_loss": (correction, weight),
                "discriminator_loss": (found.discriminator * weight, weight),
                "discriminator_accuracy": (found.right * weight, weight),
            }
        return total, weight, metrics

    def evaluate(self, batch: Batch) -> Sums:
        """Computes `loss` over clips, without adversary; `psnr`, `ssim`, `lpips` over frames."""
        weight_B = batch["weight"]
        seen = self._seen(_to_float(batch["video"]), batch)
        weight = weight_B.sum()
        total, metrics = self._losses(seen, weight_B, weight)
        shown = jnp.clip(seen.found, 0, 1)
        measured: Sums = {
            "loss": (total, weight),
            "psnr": _frame_sums(quality.psnr(seen.target, shown), weight_B),
            "ssim": _frame_sums(quality.ssim(seen.target, shown), weight_B),
        }
        if self.teacher is not None:
            measured["encoder_loss"] = metrics["encoder_loss"]
        if self.lpips is not None:
            measured["lpips"] = _frame_sums(self._lpips_BT(seen.target, shown), weight_B)
        return measured

    def constant_sums(self, batch: Batch) -> dict[str, jax.Array]:
        """Measures clips of one color, the mean of each original."""
        target = self._seen(_to_float(batch["video"]), batch).target
        color = jnp.broadcast_to(target.mean((1, 2, 3), keepdims=True), target.shape)
        total, weight, _ = _frame_sums(quality.psnr(target, color), batch["weight"])
        return {"psnr": total, "frames": weight}

    @staticmethod
    def constant(sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns the `psnr` of clips of one color."""
        frames = float(sums["frames"])
        return {"psnr": float(sums["psnr"]) / frames if frames else math.nan}

    def samples(self, batch: Batch) -> dict[str, jax.Array]:
        """Shows up to 3 clips: originals, reconstructions, and errors as a heat map, in rows.

        `reconstruction` is an image with up to 6 frames side by side, `clip` a video of all frames,
        and `latents` a grid of the channels of each clip's first latent.
        """
        first = {name: rows[:_SAMPLE_CLIPS] for name, rows in batch.items()}
        seen = self._seen(_to_float(first["video"]), first)
        shown = samples.beside(seen.target, jnp.clip(seen.found, 0, 1))
        return {
            "reconstruction": samples.in_a_row(shown),
            "clip": samples.moving(shown),
            "latents": samples.grid(seen.encoded[:, 0]),
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

    @property
    def _dtype(self) -> jnp.dtype:
        return self.encoder.head.kernel[...].dtype

    def _losses(
        self, seen: "_Seen", weight_B: jax.Array, weight: jax.Array
    ) -> tuple[jax.Array, Sums]:
        """Returns the weighted sum of the losses without randomness, and each loss."""
        error = (jnp.square(seen.found - seen.target).mean((1, 2, 3, 4)) * weight_B).sum()
        total = self.reconstruction_weight * error
        metrics: Sums = {"reconstruction_loss": (error, weight)}
        if self.teacher is not None:
            assert seen.taught is not None, "there is a teacher"
            far = (jnp.square(seen.encoded - seen.taught).mean((1, 2, 3, 4)) * weight_B).sum()
            total += self.teacher.encoder_weight * far
            metrics["encoder_loss"] = (far, weight)
        if self.lpips is not None:
            distance = (self._lpips_BT(seen.target, seen.found).mean(1) * weight_B).sum()
            total += self.perceptual_weight * distance
            metrics["perceptual_loss"] = (distance, weight)
        return total, metrics

    def _lpips_BT(self, video_BTHW3: jax.Array, other_BTHW3: jax.Array) -> jax.Array:
        assert self.lpips is not None
        b, t, *shape = video_BTHW3.shape
        frames = [x.astype(self._dtype).reshape(b * t, *shape) for x in (video_BTHW3, other_BTHW3)]
        return self.lpips(*frames).reshape(b, t)

    def _seen(self, video_BTHW3: jax.Array, batch: Batch) -> "_Seen":
        """Encodes and decodes a batch."""
        target = self.timing.target(video_BTHW3)
        encoded = self.encode(video_BTHW3)
        taught = self._taught(video_BTHW3, batch)
        from_teacher = self.teacher is not None and self.teacher.decode
        decoded = taught if from_teacher and taught is not None else encoded
        found = self.decode(decoded).astype(jnp.float32)
        return _Seen(target, found, encoded.astype(jnp.float32), decoded, taught)

    def _taught(self, video_BTHW3: jax.Array, batch: Batch) -> jax.Array | None:
        """Returns the teacher's latents of these frames; None without a teacher."""
        if self.teacher is None:
            return None
        if self.teacher_network is None:
            return batch["latents"]
        return lax.stop_gradient(self.teacher_network.encode(video_BTHW3, self._dtype))


class _Seen(NamedTuple):
    """Inputs and outputs of encoder and decoder for a batch.

    Attributes:
        target: frames to reconstruct, float32 [B, T, H, W, 3].
        found: reconstructed frames, not clamped, float32 [B, T, H, W, 3].
        encoded: our latents, float32 [B, L, h, w, C].
        decoded: the latents that were decoded.
        taught: the teacher's latents; None without a teacher.
    """

    target: jax.Array
    found: jax.Array
    encoded: jax.Array
    decoded: jax.Array
    taught: jax.Array | None


def without(frames_BTHWC: jax.Array, dropped: Sequence[int]) -> jax.Array:
    """Returns the frames except those with these numbers."""
    if not dropped:
        return frames_BTHWC
    kept = np.delete(np.arange(frames_BTHWC.shape[1]), dropped)
    return frames_BTHWC[:, kept]


def _adversary(config: Config, rngs: nnx.Rngs) -> Seraena | None:
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
    """Returns sum, weight, and sum of squares over frames."""
    weight_BT = jnp.broadcast_to(weight_B[:, None], value_BT.shape)
    weighted = value_BT * weight_BT
    return weighted.sum(), weight_BT.sum(), (weighted * value_BT).sum()
