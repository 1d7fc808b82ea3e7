"""A small video autoencoder: TAEHV's base network, trained to reconstruct clips.

Reading order: :class:`Config`, :class:`VideoAutoencoder`, then `network.py`. `augment.py` changes
training clips on the device, `quality.py` measures reconstructions.

Frames: T frames are filled up to a multiple of 4 by repeating the last one and become
L = ceil(T / 4) latents. These decode to 4 L frames, of which the first 3 are dropped; decoded frame
i then reconstructs frame i of the filled-up clip.

Shapes: B clips, T frames, H height, W width, 3 colours.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain import layers
from jaxtrain.errors import InputError
from jaxtrain.models.video_ae import augment, network, quality

_LEAST_SIDE = 16
_SAMPLE_CLIPS = 3
_SAMPLE_FRAMES = 6

Batch = dict[str, jax.Array]
Sums = dict[str, tuple[jax.Array, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The video autoencoder."""

    frames: int
    """Frames of a clip."""
    height: int
    """Height of a clip; a multiple of 8 (pixels)."""
    width: int
    """Width of a clip; a multiple of 8 (pixels)."""
    latent_channels: int = 16
    """Channels of a latent (numbers for each 4 frames of 8x8 pixels)."""
    encoder_width: int = 64
    """Channels of the encoder's layers."""
    decoder_widths: tuple[int, int, int, int] = (256, 128, 64, 64)
    """Channels of the decoder's layers, from 1/8 of the size to the full size."""
    remat: layers.Remat = "none"
    """block: the backward pass computes the memory blocks again and keeps only what goes into them,
    which saves a third of the memory; none: it keeps everything."""
    reconstruction_weight: float = 20.0
    """The loss is this times the mean squared error of a clip, colours from 0 to 1."""

    def __post_init__(self) -> None:
        for name in ("frames", "latent_channels", "encoder_width"):
            if getattr(self, name) < 1:
                raise InputError(f"model.{name}={getattr(self, name)}: use at least 1")
        if len(self.decoder_widths) != 4 or min(self.decoder_widths) < 1:
            raise InputError(
                f"model.decoder_widths={self.decoder_widths}: use four widths of at least 1"
            )
        factor = network.SPACE_FACTOR
        if self.height % factor or self.width % factor:
            raise InputError(
                f"model.height={self.height} and model.width={self.width} must be multiples of "
                f"{factor}: the nearest are {_nearest(self.height)} and {_nearest(self.width)}"
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
        The formula of the forward pass stands at `network.forward_flops`.
        """
        forward, first = network.forward_flops(
            frames=self.frames,
            height=self.height,
            width=self.width,
            latent_channels=self.latent_channels,
            encoder_width=self.encoder_width,
            decoder_widths=self.decoder_widths,
        )
        return 3 * forward - first

    def tokens_per_example(self) -> None:
        """A clip has no tokens."""
        return

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
            width=config.encoder_width, latent_channels=config.latent_channels, rngs=rngs
        )
        self.decoder = network.Decoder(
            widths=config.decoder_widths, latent_channels=config.latent_channels, rngs=rngs
        )
        self.remat = config.remat
        self.reconstruction_weight = config.reconstruction_weight

    def encode(self, video_BTHW3: jax.Array) -> jax.Array:
        """[B, T, H, W, 3] in [0, 1] -> latents [B, ceil(T / 4), H / 8, W / 8, latent_channels]."""
        return self.encoder(network.pad_time(video_BTHW3.astype(self._dtype)), self.remat)

    def decode(self, latents: jax.Array) -> jax.Array:
        """Latents [B, L, h, w, latent_channels] -> [B, 4 L - 3, 8 h, 8 w, 3], not clamped."""
        return self.decoder(latents.astype(self._dtype), self.remat)

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
        """Target and reconstruction, float32 [B, 4 L - 3, H, W, 3] each."""
        target = network.pad_time(video_BTHW3)[:, : network.decoded_frames(video_BTHW3.shape[1])]
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


def _nearest(size: int) -> int:
    """The multiple of 8 nearest to `size`, at least 16."""
    factor = network.SPACE_FACTOR
    return max(_LEAST_SIDE, (size + factor // 2) // factor * factor)
