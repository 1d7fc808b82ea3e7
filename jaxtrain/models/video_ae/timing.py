"""Frames and latents: how many become how many, and which of them belong together.

T frames are filled up to a multiple of 4 by repeating the last one and become L = ceil(T / 4)
latents. A decoder makes ``growth`` frames of each (4 in training), and the first ``growth - 1`` of
all are dropped, because the first latent has no past: decoded frame i then reconstructs frame i of
the filled-up clip. The reference (TAEHV) keeps them in one case, see :data:`Trim`.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

from jaxtrain.errors import InputError

TIME_FACTOR = 4
"""Frames that a latent stands for."""

Trim = Literal["always", "odd_latents"]
"""When the first decoded frames are dropped: always, or, as for the latents of CogVideoX, only if
the number of latents is odd. Those models encode 4 n + 1 frames as n + 1 latents."""


def latent_frames(frames: int) -> int:
    """Latents that `frames` frames become: the last group is filled with the last frame."""
    return math.ceil(frames / TIME_FACTOR)


def pad_time(video_BTHWC: jax.Array) -> jax.Array:
    """Repeats the last frame until T is a multiple of 4."""
    missing = -video_BTHWC.shape[1] % TIME_FACTOR
    return jnp.pad(video_BTHWC, ((0, 0), (0, missing), (0, 0), (0, 0), (0, 0)), mode="edge")


@dataclasses.dataclass(frozen=True)
class Timing:
    """How a decoder counts.

    Attributes:
        growth: frames that it makes of a latent: 4, 2 or 1.
        trim: when it drops the first ones.
    """

    growth: int = TIME_FACTOR
    trim: Trim = "always"

    def dropped(self, latents: int | None) -> int:
        """Frames that are dropped in front.

        Args:
            latents: of the complete video; None if not known yet.

        Raises:
            InputError: it depends on the number of latents, which is unknown.
        """
        if self.trim == "odd_latents":
            if latents is None:
                raise InputError(
                    "model.trim=odd_latents: which frames are dropped depends on the number of "
                    "latents of the whole video; give it before the first one is decoded",
                    about="model.trim",
                )
            if latents % 2 == 0:
                return 0
        return self.growth - 1

    def decoded(self, latents: int) -> int:
        """Frames that so many latents become."""
        return latents * self.growth - self.dropped(latents)

    def shown(self, frames: int) -> int:
        """Frames that a video of so many frames is to have when it has been decoded."""
        return math.ceil(frames * self.growth / TIME_FACTOR)

    def needed(self, frames: int) -> int:
        """Latents from which :meth:`shown` frames can be decoded, at least one for each four.

        One more than :func:`latent_frames` where dropping would take frames from the end; it
        stands for the last frame, repeated.
        """
        latents = latent_frames(frames)
        while self.decoded(latents) < self.shown(frames):
            latents += 1
        return latents

    def target(self, video_BTHWC: jax.Array) -> jax.Array:
        """The frames that a decoded clip is to equal: frame i for decoded frame i.

        Raises:
            InputError: this decoder gives fewer frames than went in.
        """
        if self.growth != TIME_FACTOR:
            raise InputError(
                f"a decoder that makes {self.growth} frames of a latent (model.time_upscale) has "
                f"no frame for each of the {TIME_FACTOR} that went in: use both switches to train "
                "and to compare"
            )
        filled = pad_time(video_BTHWC)
        return filled[:, : self.decoded(filled.shape[1] // TIME_FACTOR)]
