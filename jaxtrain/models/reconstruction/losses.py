"""Config sections of the losses beside the error of colors.

A section is None if its loss is off, so that no loss has a weight without its inputs.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import jax
import jax.numpy as jnp

from jaxtrain.config import bounds
from jaxtrain.errors import InputError
from jaxtrain.models.wan import network as wan_network
from jaxtrain.storage.atomic import expanded

Channels = Annotated[int, bounds.Bounds(least=1, most=4096)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher(bounds.Section):
    """Latents and frames of another autoencoder as training targets.
    Computed inside the step; latents also once, by `jaxtrain prepare latents`.
    """

    section = "model.teacher"

    encoder_weight: bounds.Weight = 0.1
    """Weight of the mean error of the encoder's latents: their difference from the teacher's."""
    error: Literal["squared", "absolute"] = "squared"
    """Error of a latent, and of a feature of it (encoder_feature_weight): squared or absolute."""
    encoder_feature_weight: bounds.Weight = 0.0
    """Weight of the mean error of what this model's decoder makes of the encoder's latents in its
    first layers, at the size of the latents: its difference from what they make of the teacher's.
    An eighth of each side is not compared. Requires model.freeze decoder, and model.init_from with
    a trained one."""
    decode: bool = False
    """Whether the decoder is trained on the teacher's latents instead of the encoder's."""
    target: Literal["original", "teacher", "both"] = "original"
    """What the errors of colors and LPIPS compare the reconstruction with: the original, the frames
    that the teacher decodes (requires network), or both, each with half the weight."""
    feature_weight: bounds.Weight = 0.0
    """Weight of the mean squared error of features of the decoder: the outputs of its middle and of
    its first larger layers, mapped by a trained matrix that exports lack, compared with those of
    the teacher's decoder, and divided by the mean square of these. Requires network."""
    network: wan_network.Version | None = None
    """Autoencoder that computes the latents inside the step, from the same random clips as the
    model sees: wan2.1 or wan2.2. None uses the latents of fixed clips that `jaxtrain prepare
    latents` computed."""
    weights: str | None = None
    """With network: the local folder of diffusers' AutoencoderKLWan, with a config.json, which has
    the channels of its layers, and .safetensors files. Without it, plans are for the published
    weights."""

    @property
    def prepared(self) -> bool:
        """Returns whether the latents are read with the clips."""
        return self.network is None

    @property
    def decodes(self) -> bool:
        """Returns whether the teacher's decoder runs, at least in part."""
        return self.target != "original" or self.feature_weight > 0

    @property
    def folder(self) -> Path | None:
        """Returns the folder of the network's weights; None if there is none yet."""
        path = None if self.weights is None else expanded(self.weights)
        return path if path is not None and path.exists() else None

    def sizes(self, latent_channels: int) -> wan_network.Architecture | None:
        """Returns the sizes of the network; None without one.

        Without a folder, as in a plan, they are those of the published weights.
        """
        if self.network is None:
            return None
        published = wan_network.VERSIONS[self.network]
        sizes = dataclasses.replace(published, latent_channels=latent_channels)
        if (folder := self.folder) is None:
            return sizes
        return wan_network.of_folder(folder, sizes, field="model.teacher.weights")

    def normalizes(self) -> bool:
        """Returns whether the network normalizes its latents, by the statistics of its folder.

        The published ones do. A folder that is not on this machine counts as one of them.
        """
        settings = None if self.folder is None else self.folder / wan_network.SETTINGS
        if settings is None or not settings.is_file():
            return True
        statistics = wan_network.from_settings(json.loads(settings.read_text()), str(settings))[1]
        return [set(values) for values in statistics] != [{0.0}, {1.0}]

    def assumed(self) -> list[str]:
        """Returns what a plan assumes of a network without a folder."""
        if self.network is None or self.folder is not None:
            return []
        return [
            f"model.teacher.weights has no folder yet: the teacher is the published {self.network}"
        ]

    def check(self) -> None:
        """Checks that each field has an effect."""
        for name, value in (
            ("weights", self.weights),
            ("target", None if self.target == "original" else self.target),
            ("feature_weight", self.feature_weight or None),
        ):
            if self.network is None and value is not None:
                raise InputError(
                    f"model.teacher.{name}={value} has no effect without model.teacher.network: "
                    f"set --model.teacher.network {' or '.join(wan_network.VERSIONS)}",
                    about=(f"model.teacher.{name}", "model.teacher.network"),
                )
        if not (self.encoder_weight or self.encoder_feature_weight or self.decode or self.decodes):
            raise InputError(
                f"model.teacher.encoder_weight={self.encoder_weight} and model.teacher.decode="
                f"{self.decode}: the teacher has no effect; set model.teacher None",
                about=("model.teacher.encoder_weight", "model.teacher.decode", "model.teacher"),
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Later(bounds.Section):
    """A loss that may begin later than the run."""

    start_step: Annotated[int, bounds.Bounds(least=0)] = 0
    """Steps before this loss begins. Until then, it takes no time, and its metrics are 0.
    Validations always have all of its weight."""
    ramp_steps: Annotated[int, bounds.Bounds(least=0)] = 0
    """Steps in which its weight rises linearly; the last of them has all of it."""

    def weight_fraction(self, batch: Mapping[str, jax.Array]) -> jax.Array | None:
        """Returns the fraction of the weight in a step, float32 []; None if that is 1 in all."""
        if "step" not in batch or self.start_step + self.ramp_steps == 0:
            return None
        elapsed = batch["step"][0].astype(jnp.int32) - self.start_step
        return jnp.clip((elapsed + 1) / max(self.ramp_steps, 1), 0, 1)

    def begins(self) -> list[str]:
        """Returns when it begins, if that is not the start of the run."""
        if self.start_step + self.ramp_steps == 0:
            return []
        full = self.start_step + max(self.ramp_steps, 1)
        return [
            f"{self.section} begins in step {self.start_step + 1}, with all of its weight in {full}"
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Perceptual(Later):
    """LPIPS loss: perceptual distance of two frames.
    It compares features of an AlexNet (Zhang et al. 2018, https://arxiv.org/abs/1801.03924).
    """

    section = "model.perceptual"

    weights: str
    """File with the complete state dict of `lpips.LPIPS(net="alex")`."""
    weight: bounds.Weight = 0.1
    """Weight of the mean distance between a frame and its reconstruction; 0 only measures it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adversary(Later):
    """Adversarial loss, with a discriminator.
    The discriminator corrects frames: Seraena (https://github.com/madebyollin/seraena).

    It is trained together with the autoencoder, with its own optimizer.
    """

    section = "model.adversary"
    # Seraena's: frames per window, and the discriminator's AdamW, whose decay is not of norms, and
    # whose gradients are not clipped.
    frames: ClassVar[int] = 3
    b1: ClassVar[float] = 0.9
    b2: ClassVar[float] = 0.99
    weight_decay: ClassVar[float] = 0.01

    weight: bounds.Positive = 0.5
    """Weight of the mean squared distance between frames and corrected frames."""
    crop: int | None = None
    """Side of the random crop that the discriminator sees (pixels); None uses the full frame."""
    replay: Annotated[int, bounds.Bounds(least=1, most=2**20)] = 1024
    """Size of the replay buffer of earlier reconstructions, in windows of three frames. A multiple
    of a microbatch's windows fills the buffer evenly and needs no communication."""
    peak_lr: bounds.Positive = 3e-4
    """Learning rate of the discriminator, which is constant."""
