"""The losses beside the squared error, each with its weight and what it needs.

A section of a config is None where its loss is off, so that no weight stands without its input.
"""

import dataclasses
import math

from jaxtrain.config import bounds
from jaxtrain.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """Latents of another autoencoder, computed once by `jaxtrain prepare latents`."""

    encoder_weight: float = 0.1
    """The loss has this times the mean squared difference of our latents and the teacher's."""
    decode: bool = False
    """Whether the decoder is trained on the teacher's latents instead of our encoder's."""

    def __post_init__(self) -> None:
        if not 0 <= self.encoder_weight < math.inf:
            raise InputError(
                f"model.teacher.encoder_weight={self.encoder_weight}: use 0 or more",
                about="model.teacher.encoder_weight",
            )
        if not (self.encoder_weight or self.decode):
            raise InputError(
                f"model.teacher.encoder_weight={self.encoder_weight} and model.teacher.decode="
                f"{self.decode}: nothing is learned from the teacher; set model.teacher None",
                about=("model.teacher.encoder_weight", "model.teacher.decode", "model.teacher"),
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Perceptual:
    """LPIPS (Zhang et al. 2018): distance of two frames in the features of an AlexNet."""

    weights: str
    """File with the state dict of `lpips.LPIPS(net="alex")`, or of its linear layers alone."""
    backbone: str | None = None
    """With linear layers alone: file with the state dict of torchvision's AlexNet."""
    weight: float = 0.1
    """The loss has this times the mean distance of a frame and its reconstruction."""

    def __post_init__(self) -> None:
        if not 0 <= self.weight < math.inf:
            raise InputError(
                f"model.perceptual.weight={self.weight}: use 0 (only measure) or more",
                about="model.perceptual.weight",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adversary:
    """Seraena (github.com/madebyollin/seraena): a discriminator that says how to correct a frame.

    It is trained beside the autoencoder, with an optimizer group and a clip of its own.
    """

    weight: float = 0.5
    """The loss has this times the mean squared distance of frames and their corrections."""
    frames: int = 3
    """Successive frames that the discriminator sees together."""
    crop: int | None = None
    """Side of the random square that it sees (pixels); None is the whole frame."""
    replay: int = 1152
    """Reconstructions of earlier updates that are kept, to be told from real frames again (windows
    of `frames`). A multiple of a microbatch's windows uses all places, and sends none of them."""
    peak_lr: float = 3e-4
    """Learning rate of the discriminator, throughout."""
    b1: float = 0.9
    """AdamW of the discriminator: decay of the mean of gradients, per update."""
    b2: float = 0.99
    """AdamW of the discriminator: decay of the mean of squared gradients, per update."""
    weight_decay: float = 0.01
    """AdamW of the discriminator: decay per update, times its learning rate."""
    max_grad_norm: float | None = 1.0
    """The discriminator's gradients with a larger norm are scaled down to it. None is off."""

    def __post_init__(self) -> None:
        for name in ("weight", "frames", "replay", "peak_lr"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(
                    f"model.adversary.{name}={getattr(self, name)}: use more than 0, or set "
                    "model.adversary None",
                    about=(f"model.adversary.{name}", "model.adversary"),
                )
        for name, most in (("frames", 2**10), ("replay", 2**20)):
            bounds.whole(f"model.adversary.{name}", getattr(self, name), most)
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(
                    f"model.adversary.{name}={getattr(self, name)}: use 0 to below 1",
                    about=f"model.adversary.{name}",
                )
        if not 0 <= self.weight_decay < math.inf:
            raise InputError(
                f"model.adversary.weight_decay={self.weight_decay}: use 0 or more",
                about="model.adversary.weight_decay",
            )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise InputError(
                f"model.adversary.max_grad_norm={self.max_grad_norm}: use more than 0, or None",
                about="model.adversary.max_grad_norm",
            )
