"""Encodes and decodes videos of any length with a trained autoencoder, in memory for a few frames.

Frames are uint8 images of any size: they are padded to what the model takes by repeating their
right and bottom edges, and cropped afterwards. As many frames come out as went in: if the decoder
drops the first ones, the last frame is repeated to make one more latent.

Shapes: H, W of an image, h, w of a latent, C channels; n frames of a latent.
"""

import collections
import copy
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import Precision, to_dict
from jaxtrain.inference import load
from jaxtrain.models.reconstruction import streaming

_AHEAD = 2  # results by which the device may be ahead of the host


@dataclasses.dataclass(frozen=True)
class Padding:
    """Padding of an image.

    Attributes:
        bottom, right: rows and columns to add.
    """

    bottom: int
    right: int

    def __call__(self, pixels_HW3: np.ndarray) -> np.ndarray:
        """Pads an image by repeating its edges."""
        if not self.bottom and not self.right:
            return pixels_HW3
        return np.pad(pixels_HW3, ((0, self.bottom), (0, self.right), (0, 0)), mode="edge")


def even(height: int, width: int) -> Padding:
    """Returns the padding that makes both sides even."""
    return Padding(height % 2, width % 2)


class Autoencoder:
    """A model and its parameters on one device."""

    def __init__(
        self,
        source: Path | load.TrainedModel,
        precision: Precision = "float32",
        *,
        command: str = "reconstruct",
    ) -> None:
        if isinstance(source, load.TrainedModel):
            trained = source
            load.use_cache()
        else:
            trained = load.load(source, command, "reconstruct")
        self.trained, self.precision = trained, precision
        self.model, self.source = trained.config, trained.source
        self._device: jax.Device | None = None
        self.module = trained.definition.module(trained.on_device(precision), {})

    def on(self, device: jax.Device) -> "Autoencoder":
        """Returns the same model with its parameters on a device."""
        other = copy.copy(self)
        other._device = device
        arrays = self.trained.on_device(self.precision, device)
        other.module = self.trained.definition.module(arrays, {})
        return other

    def digest(self) -> str:
        """Returns a checksum of the parameters and the model's config."""
        digest = hashlib.sha256(json.dumps(to_dict(self.model), sort_keys=True).encode())
        for name in sorted(self.trained.params):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(self.trained.params[name]).data)
        return digest.hexdigest()[:16]

    def padding(self, height: int, width: int) -> Padding:
        """Returns the padding that makes an image of this size fit the model."""
        factor = self.model.space_factor
        return Padding(-height % factor, -width % factor)

    def encoded(self, images: Iterable[np.ndarray]) -> Iterator[jax.Array]:
        """Encodes images uint8 [H, W, 3] of one size to latents [h, w, C], on the device."""
        stream = streaming.EncoderStream(self.module)
        frames, last = 0, None
        for pixels in images:
            padded = self.padding(*pixels.shape[:2])(pixels)
            last = jax.device_put(padded, self._device)[None].astype(jnp.float32) / 255
            frames += 1
            latent = stream.push(last)
            if latent is not None:
                yield latent[0]
        if last is None:
            return
        for _ in range(self.model.timing.filled(frames) - frames):
            latent = stream.push(last)
            if latent is not None:
                yield latent[0]
        while (latent := stream.flush()) is not None:
            yield latent[0]

    def decoded(
        self, latents: Iterable[Any], *, height: int, width: int, count: int | None
    ) -> Iterator[np.ndarray]:
        """Decodes latents [h, w, C] to images uint8 [H, W, 3]; the last latent may give extra ones.

        Args:
            latents: all latents of a video, in order.
            height, width: size of an image, without padding.
            count: number of latents; only needed if ``model.trim`` depends on it.
        """
        stream = streaming.DecoderStream(self.module, count)
        pending: collections.deque[jax.Array] = collections.deque()
        for latent in latents:
            placed = jax.device_put(latent, self._device)
            pending.append(_images(stream.push(placed[None]), height=height, width=width))
            if len(pending) > _AHEAD:
                yield from np.asarray(pending.popleft())
        while pending:
            yield from np.asarray(pending.popleft())


def fetched(arrays: Iterable[jax.Array]) -> Iterator[np.ndarray]:
    """Yields arrays as float32 on the host; meanwhile the device computes the next ones."""
    pending: collections.deque[jax.Array] = collections.deque()
    for array in arrays:
        pending.append(array)
        if len(pending) > _AHEAD:
            yield np.asarray(pending.popleft(), np.float32)
    while pending:
        yield np.asarray(pending.popleft(), np.float32)


@partial(jax.jit, static_argnames=("height", "width"))
def _images(frames: jax.Array, *, height: int, width: int) -> jax.Array:
    """Crops decoded frames [1, n, H, W, 3] to uint8 [n, height, width, 3]."""
    cut = frames[0, :, :height, :width].astype(jnp.float32)
    return jnp.round(jnp.clip(cut, 0, 1) * 255).astype(jnp.uint8)
