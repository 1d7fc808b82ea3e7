"""Converts between numbers of frames and latents, and matches decoded frames to originals.

T frames are padded to a multiple of 4 by repeating the last one and become L = ceil(T / 4) latents.
A decoder makes ``growth`` frames of each latent (4 in training). The first ``growth - 1`` frames
are dropped, because the first latent has no past: decoded frame i then reconstructs frame i of the
padded clip. The reference (TAEHV) keeps these frames in one case, see :data:`Trim`.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from jaxtrain.errors import InputError

TIME_FACTOR = 4
"""Frames per latent."""

Trim = Literal["always", "odd_latents"]
"""When the first decoded frames are dropped: always, or, for the latents of CogVideoX, only if the
number of latents is odd. CogVideoX models encode 4 n + 1 frames as n + 1 latents."""


def latent_frames(frames: int) -> int:
    """Returns the number of latents of `frames` frames; the last group is padded."""
    return math.ceil(frames / TIME_FACTOR)


def pad_time(video_BTHWC: jax.Array) -> jax.Array:
    """Repeats the last frame until T is a multiple of 4."""
    missing = -video_BTHWC.shape[1] % TIME_FACTOR
    return jnp.pad(video_BTHWC, ((0, 0), (0, missing), (0, 0), (0, 0), (0, 0)), mode="edge")


@dataclasses.dataclass(frozen=True)
class Timing:
    """The numbers of frames that a decoder makes and drops.

    Attributes:
        growth: frames that the decoder makes of each latent: 4, 2 or 1.
        trim: when the first decoded frames are dropped.
    """

    growth: int = TIME_FACTOR
    trim: Trim = "always"

    def dropped(self, latents: int | None) -> int:
        """Returns the number of decoded frames that are dropped at the start.

        Args:
            latents: number of latents of the complete video; None if not known yet.

        Raises:
            InputError: the result depends on the number of latents, which is unknown.
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
        return self.growth - 1

    def decoded(self, latents: int) -> int:
        """Returns the number of frames that `latents` latents are decoded to."""
        return latents * self.growth - self.dropped(latents)

    def shown(self, frames: int) -> int:
        """Returns the number of decoded frames to show for a video of `frames` frames."""
        return math.ceil(frames * self.growth / TIME_FACTOR)

    def needed(self, frames: int) -> int:
        """Returns the number of latents needed to decode :meth:`shown` frames.

        That is :func:`latent_frames`, plus one where dropping the first frames would leave too few;
        the extra latent encodes the last frame, repeated.
        """
        latents = latent_frames(frames)
        while self.decoded(latents) < self.shown(frames):
            latents += 1
        return latents

    def target(self, video_BTHWC: jax.Array) -> jax.Array:
        """Returns the frames that a decoded clip should equal: frame i for decoded frame i.

        Raises:
            InputError: this decoder makes fewer frames than were encoded.
        """
        if self.growth != TIME_FACTOR:
            raise InputError(
                f"a decoder that makes {self.growth} frames of a latent (model.time_upscale) has "
                f"no frame for each of the {TIME_FACTOR} that went in: use both switches to train "
                "and to compare"
            )
        filled = pad_time(video_BTHWC)
        return filled[:, : self.decoded(filled.shape[1] // TIME_FACTOR)]
