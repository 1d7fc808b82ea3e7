"""Converts between numbers of frames and latents, and matches decoded frames to originals.

T frames are padded to a multiple of ``factor`` (4 or 8) by repeating the last one and become L =
ceil(T / factor) latents. A decoder makes ``factor`` frames of each latent. The first ``factor - 1``
are dropped, because the first latent has no past: decoded frame i then reconstructs frame i of the
padded clip. Two families of weights have other rules, see :data:`Trim`.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import InputError

TIME_FACTOR = 4
"""Frames per latent of most models."""

Trim = Literal["always", "odd_latents", "h3"]
"""Which frames the decoder's output keeps. always: all but the first ``factor - 1``; odd_latents:
the same if the number of latents is odd, else all, for the latents of CogVideoX, whose models
encode 4 n + 1 frames as n + 1 latents.

h3: for MiniMax H3. T frames are padded to 17 n. Each chunk of 17 is encoded by itself, with 3 black
frames in front, to 5 latents; the last 3 latents of the video are dropped. Decoding keeps the
memory between chunks, and drops the first 3 of every 20 frames, so 5 n - 3 latents become 17 n - 12
frames."""

H3_CHUNK = 17
"""Frames per chunk of ``trim="h3"``."""
H3_BLACK = 3
"""Black frames in front of a chunk."""
_H3_LATENTS = (H3_CHUNK + H3_BLACK) // TIME_FACTOR
_H3_DROPPED = 3  # latents at the end of a video
_H3_SHOWN = H3_CHUNK - _H3_DROPPED * TIME_FACTOR  # frames of a last chunk


@dataclasses.dataclass(frozen=True)
class Timing:
    """How an encoder and a decoder map frames to latents and back.

    Attributes:
        factor: frames per latent.
        trim: which decoded frames are kept.
    """

    factor: int = TIME_FACTOR
    trim: Trim = "always"

    @property
    def chunked(self) -> bool:
        """Whether the encoder forgets its memory before each chunk of 17 frames."""
        return self.trim == "h3"

    @property
    def rule(self) -> str:
        """Returns the rule as a message states it."""
        return f"model.trim={self.trim}"

    def group(self, latent: int) -> int:
        """Returns the number of frames of a latent, by its number in the video."""
        return self.factor

    @property
    def groups_per_chunk(self) -> int | None:
        """Returns the latents after which the encoder forgets; None if it never does."""
        return _H3_LATENTS if self.chunked else None

    def latent_frames(self, frames: int) -> int:
        """Returns the number of latents of `frames` frames; the last group is padded."""
        if self.chunked:
            return _H3_LATENTS * math.ceil(frames / H3_CHUNK) - _H3_DROPPED
        return math.ceil(frames / self.factor)

    def pad_time(self, video_BTHWC: jax.Array) -> jax.Array:
        """Repeats the last frame until T is a multiple of `factor`, or of 17 for H3."""
        missing = -video_BTHWC.shape[1] % (H3_CHUNK if self.chunked else self.factor)
        return jnp.pad(video_BTHWC, ((0, 0), (0, missing), (0, 0), (0, 0), (0, 0)), mode="edge")

    def chunks(self, video_BTHWC: jax.Array) -> jax.Array:
        """Pads a clip in time and, for H3, splits it into clips of 3 black and 17 frames."""
        video = self.pad_time(video_BTHWC)
        if not self.chunked:
            return video
        b, t, *hwc = video.shape
        each = video.reshape(b * t // H3_CHUNK, H3_CHUNK, *hwc)
        return jnp.pad(each, ((0, 0), (H3_BLACK, 0), (0, 0), (0, 0), (0, 0)))

    def joined(self, latents_BLHWC: jax.Array, clips: int) -> jax.Array:
        """Joins the latents of the chunks of `clips` clips."""
        if not self.chunked:
            return latents_BLHWC
        whole = latents_BLHWC.reshape(clips, -1, *latents_BLHWC.shape[2:])
        return whole[:, :-_H3_DROPPED]

    def check_latents(self, latents: int) -> None:
        """Checks that a decoder can take this number of latents."""
        if not self.chunked or latents % _H3_LATENTS == _H3_LATENTS - _H3_DROPPED:
            return
        below = (latents + _H3_DROPPED) // _H3_LATENTS * _H3_LATENTS - _H3_DROPPED
        nearest = f"{below} or {below + _H3_LATENTS}" if below > 0 else f"{below + _H3_LATENTS}"
        raise InputError(
            f"{latents} latents: model.trim=h3 decodes 5 n - 3 latents, as its encoder makes them; "
            f"the nearest is {nearest}",
            about="model.trim",
        )

    def dropped(self, latents: int | None) -> int:
        """Returns the number of decoded frames that are dropped at the start.

        Args:
            latents: number of latents of the complete video; None if not known yet.
        """
        if self.trim == "odd_latents":
            if latents is None:
                raise InputError(
                    "model.trim=odd_latents: which frames are dropped depends on the number of "
                    "latents of the complete video; pass it before the first one is decoded",
                    about="model.trim",
                )
            if latents % 2 == 0:
                return 0
        return self.factor - 1

    def dropped_later(self, latents: range) -> list[int]:
        """Returns which frames of latents after the first are dropped, counted in `latents`."""
        if not self.chunked:
            return []
        frames = range(latents.start * self.factor, latents.stop * self.factor)
        period = H3_CHUNK + H3_BLACK
        late = [i for i in frames if i >= period and i % period < H3_BLACK]
        return [i - frames.start for i in late]

    def decoded(self, latents: int) -> int:
        """Returns the number of frames that `latents` latents are decoded to."""
        later = len(self.dropped_later(range(latents)))
        return latents * self.factor - self.dropped(latents) - later

    def needed(self, frames: int) -> int:
        """Returns the number of latents needed to decode `frames` frames.

        That is :meth:`latent_frames`, plus what is missing where dropping frames would leave too
        few; the extra latents encode the last frame, repeated.
        """
        if self.chunked:
            return self.latent_frames(frames + H3_CHUNK - _H3_SHOWN)
        latents = self.latent_frames(frames)
        while self.decoded(latents) < frames:
            latents += 1
        return latents

    def filled(self, frames: int) -> int:
        """Returns the frames to encode for :meth:`needed` latents, the last one repeated."""
        needed = self.needed(frames)
        if self.chunked:
            return self.decoded(needed)  # the rest of the last chunk only gives dropped latents
        return needed * self.factor

    def target(self, video_BTHWC: jax.Array) -> jax.Array:
        """Returns the frames that a decoded clip should equal: frame i for decoded frame i."""
        filled = self.pad_time(video_BTHWC)
        return filled[:, : self.decoded(self.latent_frames(video_BTHWC.shape[1]))]

    def same_frames(self, frames: int, factor: int) -> bool:
        """Whether latents stand for the same frames as those of a causal autoencoder.

        Args:
            frames: number of frames of a clip.
            factor: the other autoencoder encodes `factor` n + 1 of them as n + 1 latents.
        """
        latents = self.latent_frames(frames)
        theirs = 1 + (frames - 1) // factor
        return (theirs, 1 + factor * (theirs - 1)) == (latents, self.decoded(latents))

    def nearest_with_same_frames(self, frames: int, factor: int) -> int:
        """Returns the number of frames nearest to `frames` for which :meth:`same_frames` holds."""
        around = (frames + sign * n for n in range(frames + 32) for sign in (-1, 1))
        return next(n for n in around if n > 0 and self.same_frames(n, factor))

    def unused(self, frames: int) -> list[str]:
        """Says how many frames of a clip no decoded frame is compared with; nothing if none."""
        compared = self.decoded(self.latent_frames(frames))
        if compared >= frames:
            return []
        above = next(n for n in itertools.count(frames) if self._is_used(n))
        below = next((n for n in range(frames, 0, -1) if self._is_used(n)), None)
        other = f"{above}" if below is None else f"{below} or {above}"
        return [
            f"model.frames={frames}: the loss compares the first {compared} frames of a clip; of "
            f"{other} it compares all"
        ]

    def _is_used(self, frames: int) -> bool:
        return self.decoded(self.latent_frames(frames)) == frames

    def check_clip(self, frames: int) -> None:
        """Checks that no decoded frame of a clip is past its end."""
        if not self.chunked or frames >= self.decoded(self.latent_frames(frames)):
            return
        above = self.decoded(self.latent_frames(frames))
        below = frames - frames % H3_CHUNK
        nearest = f"{below} or {above}" if below else f"{above}"
        raise InputError(
            f"model.frames={frames}: model.trim=h3 decodes {above} frames of {frames}; the nearest "
            f"that work are 17 n + 5 to 17 n + 17: use {nearest}",
            about=("model.frames", "model.trim"),
        )


def without(frames_BTHWC: jax.Array, dropped: Sequence[int]) -> jax.Array:
    """Returns the frames except those with these numbers."""
    if not dropped:
        return frames_BTHWC
    kept = np.delete(np.arange(frames_BTHWC.shape[1]), dropped)
    return frames_BTHWC[:, kept]
