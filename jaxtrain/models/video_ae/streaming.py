"""Encodes and decodes videos of any length with the memory of four frames.

Three ways give the same numbers. :meth:`VideoAutoencoder.encode` and ``decode`` process a complete
clip at once. :func:`encode_in_turn` and :func:`decode_in_turn` also take a complete clip, but
compute one latent after another inside one compiled function. :class:`EncoderStream` and
:class:`DecoderStream` take one frame or latent at a time and return each result once it is ready.

Shapes: B videos, T frames, H height, W width; L latents.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.video_ae import VideoAutoencoder, timing
from jaxtrain.models.video_ae.blocks import Memory


def encode_in_turn(module: VideoAutoencoder, video_BTHW3: jax.Array) -> jax.Array:
    """Computes ``module.encode``, one group of four frames at a time."""
    video = timing.pad_time(video_BTHW3)
    b, t, h, w, _ = video.shape
    groups = video.reshape(b, t // timing.TIME_FACTOR, timing.TIME_FACTOR, h, w, 3)

    def body(memory: list[Memory], group: jax.Array) -> tuple[list[Memory], jax.Array]:
        latent, following = module.encode_next(group, memory)
        return following, latent[:, 0]

    _, latents = jax.lax.scan(body, module.before_encoding(b, h, w), jnp.moveaxis(groups, 1, 0))
    return jnp.moveaxis(latents, 0, 1)


def decode_in_turn(module: VideoAutoencoder, latents_BLHWC: jax.Array) -> jax.Array:
    """Computes ``module.decode``, one latent at a time."""
    b, count, h, w, _ = latents_BLHWC.shape

    def body(memory: list[Memory], latent: jax.Array) -> tuple[list[Memory], jax.Array]:
        frames, following = module.decode_next(latent[:, None], memory)
        return following, frames

    start = module.before_decoding(b, h, w)
    _, frames = jax.lax.scan(body, start, jnp.moveaxis(latents_BLHWC, 1, 0))
    frames = jnp.moveaxis(frames, 0, 1)
    joined = frames.reshape(b, -1, *frames.shape[3:])
    return joined[:, module.timing.dropped(count) :]


class EncoderStream:
    """Takes frames one by one and returns a latent after every fourth."""

    def __init__(self, module: VideoAutoencoder) -> None:
        self._module = module
        self._step = _jitted(module, "encode_next")
        self._waiting: list[jax.Array] = []
        self._shape: tuple[int, ...] | None = None
        self._memory: list[Memory] | None = None

    def push(self, frame_BHW3: jax.Array) -> jax.Array | None:
        """Adds a frame, in [0, 1]; returns the latent [B, h, w, C] that it completes, or None.

        Raises:
            ValueError: the frame's shape differs from that of the first frame.
        """
        self._shape = self._shape or frame_BHW3.shape
        if frame_BHW3.shape != self._shape:
            raise ValueError(
                f"this frame has shape {frame_BHW3.shape}, the first one {self._shape}: a stream "
                "takes frames of one shape"
            )
        self._waiting.append(frame_BHW3)
        if len(self._waiting) < timing.TIME_FACTOR:
            return None
        if self._memory is None:
            b, h, w, _ = frame_BHW3.shape
            self._memory = self._module.before_encoding(b, h, w)
        latent, self._memory = self._step(jnp.stack(self._waiting, axis=1), self._memory)
        self._waiting.clear()
        return latent[:, 0]

    def flush(self) -> jax.Array | None:
        """Returns the latent of the pending frames, padded with the last; None if none is pending.

        The next frame then starts a new video.
        """
        latent = None
        while self._waiting:
            latent = self.push(self._waiting[-1])
        self._memory = self._shape = None
        return latent


class DecoderStream:
    """Takes latents one by one and returns their frames.

    Args:
        module: the autoencoder.
        latents: number of latents of the video; required only if ``module.timing.trim`` is
            "odd_latents".

    Raises:
        InputError: the number of latents is required but not given.
    """

    def __init__(self, module: VideoAutoencoder, latents: int | None = None) -> None:
        self._module = module
        self._step = _jitted(module, "decode_next")
        self._dropped = module.timing.dropped(latents)
        self._memory: list[Memory] | None = None

    def push(self, latent_BHWC: jax.Array) -> jax.Array:
        """Decodes the next latent to [B, T, H, W, 3], not clamped: first 1 frame, then 4 each."""
        first = 0
        if self._memory is None:
            b, h, w, _ = latent_BHWC.shape
            self._memory = self._module.before_decoding(b, h, w)
            first = self._dropped
        frames, self._memory = self._step(latent_BHWC[:, None], self._memory)
        return frames[:, first:]


def _jitted(module: VideoAutoencoder, method: str) -> Callable[..., Any]:
    graph, arrays = nnx.split(module)
    return functools.partial(_step, graph, method, arrays)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step(graph: Any, method: str, arrays: Any, x: jax.Array, memory: list[Memory]) -> Any:
    """Compiles once for all streams of models of the same structure."""
    return getattr(nnx.merge(graph, arrays), method)(x, memory)
