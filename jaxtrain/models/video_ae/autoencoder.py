"""The small video autoencoder: encoder, decoder, and teacher.

Shapes: B clips, T frames, H height, W width, 3 colors; L latents in time.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.reconstruction.reconstruction import Reconstruction
from jaxtrain.models.reconstruction.timing import without
from jaxtrain.models.video_ae import network
from jaxtrain.models.video_ae.blocks import Memory
from jaxtrain.models.video_ae.config import Config, DecoderKind

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
