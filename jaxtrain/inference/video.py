"""A trained video autoencoder at work on videos of any length, with the memory of a few frames.

Pictures are uint8 and of any size: they are filled up to what the model takes by repeating their
right and lower edges, and cut back. What comes out has as many frames as went in: where the
decoder drops the first ones, one more latent is made of the last frame, repeated.

Shapes: H, W of a picture, h, w of a latent, C channels; n frames of a latent.
"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import Precision
from jaxtrain.errors import InputError
from jaxtrain.inference import load
from jaxtrain.models.video_ae import streaming
from jaxtrain.models.video_ae.timing import TIME_FACTOR

_AHEAD = 2  # results that the device may be ahead of the host


@dataclasses.dataclass(frozen=True)
class Padding:
    """What is added to a picture.

    Attributes:
        bottom, right: rows and columns.
    """

    bottom: int
    right: int

    def __call__(self, pixels_HW3: np.ndarray) -> np.ndarray:
        """The picture with its edges repeated."""
        if not self.bottom and not self.right:
            return pixels_HW3
        return np.pad(pixels_HW3, ((0, self.bottom), (0, self.right), (0, 0)), mode="edge")


def even(height: int, width: int) -> Padding:
    """What makes both sides even."""
    return Padding(height % 2, width % 2)


class Autoencoder:
    """A model and its parameters on the first device.

    Args:
        source: a checkpoint, a run's directory or a weights file.
        precision: of the computation.
        command: that uses it, for messages.

    Attributes:
        model: its config.
        source: where the parameters come from.
        module: the network.

    Raises:
        InputError: there are none, or not of a video autoencoder; or jax does not see the GPU.
    """

    def __init__(
        self, source: Path, precision: Precision = "float32", *, command: str = "reconstruct"
    ) -> None:
        trained = load.load(source, command, "decode")
        self.model, self.source = trained.config, trained.source
        self.module = trained.definition.module(trained.on_device(precision), {})

    @property
    def whole(self) -> bool:
        """Whether decoded videos are as large and long as those that were encoded."""
        timing = self.model.timing
        same_size = self.module.space_up == self.module.space_factor
        return bool(same_size and timing.growth == TIME_FACTOR)

    def require_whole(self) -> None:
        """Refuses a decoder that gives fewer or smaller frames.

        Raises:
            InputError: says so.
        """
        if not self.whole:
            raise InputError(
                f"{self.source} has a decoder for previews (model.time_upscale, "
                "model.space_upscale), whose frames have nothing to be compared with: take "
                "weights with all switches on"
            )

    def padding(self, height: int, width: int) -> Padding:
        """What makes of a picture of this size one that the model takes."""
        factor = self.model.space_factor
        return Padding(-height % factor, -width % factor)

    def encoded(self, pictures: Iterable[np.ndarray]) -> Iterator[jax.Array]:
        """Pictures uint8 [H, W, 3], all of one size -> latents [h, w, C], on the device."""
        stream = streaming.EncoderStream(self.module)
        frames, latents, last = 0, 0, None
        for pixels in pictures:
            padded = self.padding(*pixels.shape[:2])(pixels)
            last = jnp.asarray(padded)[None].astype(jnp.float32) / 255
            frames += 1
            latent = stream.push(last)
            if latent is not None:
                latents += 1
                yield latent[0]
        if last is None:
            return
        needed = self.model.timing.needed(frames)
        while latents < needed:
            latent = stream.push(last)
            if latent is not None:
                latents += 1
                yield latent[0]

    def decoded(
        self, latents: Iterable[Any], *, height: int, width: int, count: int | None
    ) -> Iterator[np.ndarray]:
        """Latents [h, w, C] -> pictures uint8 [H, W, 3], in order, those of the last one too many.

        Args:
            latents: of a whole video.
            height, width: of a picture, without padding.
            count: of the latents; needed only where ``model.trim`` asks for it.
        """
        stream = streaming.DecoderStream(self.module, count)
        up, factor = self.module.space_up, self.module.space_factor
        size = {"height": -(-height * up // factor), "width": -(-width * up // factor)}
        pending: collections.deque[jax.Array] = collections.deque()
        for latent in latents:
            pending.append(_pictures(stream.push(jnp.asarray(latent)[None]), **size))
            if len(pending) > _AHEAD:
                yield from np.asarray(pending.popleft())
        while pending:
            yield from np.asarray(pending.popleft())


def fetched(arrays: Iterable[jax.Array]) -> Iterator[np.ndarray]:
    """Arrays on the host, float32; the device works on while the host takes one."""
    pending: collections.deque[jax.Array] = collections.deque()
    for array in arrays:
        pending.append(array)
        if len(pending) > _AHEAD:
            yield np.asarray(pending.popleft(), np.float32)
    while pending:
        yield np.asarray(pending.popleft(), np.float32)


@partial(jax.jit, static_argnames=("height", "width"))
def _pictures(frames: jax.Array, *, height: int, width: int) -> jax.Array:
    """[1, n, H, W, 3] as decoded -> uint8 [n, height, width, 3]."""
    cut = frames[0, :, :height, :width].astype(jnp.float32)
    return jnp.round(jnp.clip(cut, 0, 1) * 255).astype(jnp.uint8)
