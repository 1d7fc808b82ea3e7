"""Encodes and decodes videos of any length with the memory of a few frames.

Two ways give the same numbers. A model's ``encode`` and ``decode`` process a complete clip at once.
:class:`EncoderStream` and :class:`DecoderStream` take one frame or latent at a time and return each
result once it is ready.

Shapes: B videos, T frames, H height, W width; L latents.
"""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain.models.reconstruction.reconstruction import Reconstruction
from jaxtrain.models.reconstruction.timing import H3_BLACK, without


class EncoderStream:
    """Takes frames one by one and returns a latent for every group of frames.

    With ``trim="h3"``, the last three latents of a chunk are returned during the next chunk,
    because those of the last chunk are dropped.
    """

    def __init__(self, module: Reconstruction) -> None:
        self._module = module
        self._step = _jitted(module, "encode_next")
        self._waiting: list[jax.Array] = []
        self._ready: collections.deque[jax.Array] = collections.deque()
        self._withheld: list[jax.Array] = []
        self._shape: tuple[int, ...] | None = None
        self._last: jax.Array | None = None
        self._memory: Any = None
        self._groups = 0  # of this chunk, or of the video

    def push(self, frame_BHW3: jax.Array) -> jax.Array | None:
        """Adds a frame, in [0, 1]; returns the next latent [B, h, w, C] that is ready, or None.

        Raises:
            ValueError: the frame's shape differs from that of the first frame.
        """
        self._shape = self._shape or frame_BHW3.shape
        if frame_BHW3.shape != self._shape:
            raise ValueError(
                f"this frame has shape {frame_BHW3.shape}, the first one {self._shape}: a stream "
                "takes frames of one shape"
            )
        timing, module = self._module.timing, self._module
        if self._memory is None:
            b, h, w, _ = frame_BHW3.shape
            self._memory = module.before_encoding(b, h, w)
            if timing.chunked:
                self._waiting = [jnp.zeros_like(frame_BHW3)] * H3_BLACK
                self._ready.extend(self._withheld)  # not the last chunk
                self._withheld.clear()
        self._waiting.append(frame_BHW3)
        self._last = frame_BHW3
        if len(self._waiting) == timing.group(self._groups):
            latent, self._memory = self._step(jnp.stack(self._waiting, axis=1), self._memory)
            self._waiting.clear()
            self._groups += 1
            withheld = timing.chunked and self._groups > timing.latent_frames(1)
            (self._withheld if withheld else self._ready).append(latent[:, 0])
            if self._groups == timing.groups_per_chunk:
                self._memory, self._groups = None, 0
        return self._ready.popleft() if self._ready else None

    def flush(self) -> jax.Array | None:
        """Returns the next latent of the pending frames, padded with the last; None at the end.

        The next frame then starts a new video.
        """
        latent = self._ready.popleft() if self._ready else None
        while latent is None and self._is_pending():
            assert self._last is not None
            latent = self.push(self._last)
        if not self._ready and not self._is_pending():
            self._waiting.clear()
            self._withheld.clear()
            self._memory, self._shape, self._last, self._groups = None, None, None, 0
        return latent

    def _is_pending(self) -> bool:
        timing = self._module.timing
        if timing.chunked:
            return self._memory is not None and self._groups < timing.latent_frames(1)
        return bool(self._waiting)


class DecoderStream:
    """Takes latents one by one and returns their frames.

    Args:
        latents: number of latents of the video; required only if ``module.timing.trim`` is
            "odd_latents".
    """

    def __init__(self, module: Reconstruction, latents: int | None = None) -> None:
        self._module = module
        self._step = _jitted(module, "decode_next")
        self._dropped = module.timing.dropped(latents)
        self._memory: Any = None
        self._count = 0

    def push(self, latent_BHWC: jax.Array) -> jax.Array:
        """Decodes the next latent to [B, T, H, W, 3], not clamped: first 1 frame, then 4 each."""
        number, self._count = self._count, self._count + 1
        if self._memory is None:
            b, h, w, _ = latent_BHWC.shape
            self._memory = self._module.before_decoding(b, h, w)
        frames, self._memory = self._step(latent_BHWC[:, None], self._memory)
        if number == 0:
            return frames[:, self._dropped :]
        return without(frames, self._module.timing.dropped_later(range(number, number + 1)))


def _jitted(module: Reconstruction, method: str) -> Callable[..., Any]:
    graph, arrays = nnx.split(module)
    return functools.partial(_step, graph, method, arrays)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _step(graph: Any, method: str, arrays: Any, x: jax.Array, memory: Any) -> Any:
    """Compiles once for all streams of models of the same structure."""
    return getattr(nnx.merge(graph, arrays), method)(x, memory)
