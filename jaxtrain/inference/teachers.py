"""Autoencoders whose latents serve as targets (:class:`jaxtrain.data.video.latents.Teacher`).

A teacher is given by a path: a checkpoint, run, or weights file of jaxtrain, or a folder with
an autoencoder in diffusers' format.

Shapes: B clips, T frames, H height, W width; latents L in time, h x w in space, C channels.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtrain import versions
from jaxtrain.data.video.latents import Teacher
from jaxtrain.errors import InputError, first_line
from jaxtrain.inference import load as models
from jaxtrain.interop import hub
from jaxtrain.models import wan_vae
from jaxtrain.storage.atomic import read_json

_DIGITS = 12  # hex digits of the digest in a teacher's name
_ENCODER = "encoder."


def load(
    spec: str,
    *,
    scaling: float | None,
    sample_seed: int | None,
    say: Callable[[str], None],
) -> Teacher:
    """Loads the teacher at a path.

    Args:
        spec: the path.
        scaling: factor on the latents; None is that of the teacher's folder, or 1 for jaxtrain's.
        sample_seed: seed to sample from diffusers' latent distribution; None takes its mode.
        say: prints messages on the console.

    Raises:
        InputError: no teacher there, or it does not support these arguments.
    """
    path = hub.local(spec).absolute()
    if not path.exists():
        raise InputError(
            f"--teacher {spec}: no such file or folder; pass a checkpoint, a run directory, a "
            "weights file, or a local diffusers folder"
        )
    if _class_name(path) is not None:
        teacher: Teacher = Diffusers(path, scaling=scaling, sample_seed=sample_seed)
    else:
        if sample_seed is not None:
            raise InputError(
                f"--teacher-sample {sample_seed}: {spec} has no latent distribution to sample "
                "from; drop this flag"
            )
        teacher = Own(path, 1.0 if scaling is None else scaling)
    say(f"teacher {teacher.name}: {teacher.about}")
    return teacher


class Own:
    """A checkpoint or weights file of jaxtrain, on all devices."""

    def __init__(self, path: Path, scaling: float) -> None:
        trained = models.load(path, "prepare latents", "decode")
        definition, params = trained.definition, trained.params
        encoder = {name: array for name, array in params.items() if name.startswith(_ENCODER)}
        parts = [json.dumps([scaling, trained.config.patch_size]).encode()]
        for name in sorted(encoder):
            parts += [f"{name} {encoder[name].shape}".encode(), encoder[name].tobytes()]
        self.name = _name(path, parts)
        self.about = f"encoder of {trained.source}, latents times {scaling:g}"
        devices = jax.devices()
        mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,))
        self._rows = NamedSharding(mesh, PartitionSpec("data"))
        whole = NamedSharding(mesh, PartitionSpec())
        self._params = jax.device_put(params, whole)

        def encode(params: Any, video_BTHW3: jax.Array) -> jax.Array:
            module: Any = definition.module(params, {})
            return scaling * module.encode(video_BTHW3)

        self._encode = jax.jit(encode, out_shardings=self._rows)

    def encode(self, video_BTHW3: np.ndarray) -> np.ndarray:
        """See :class:`jaxtrain.data.video.latents.Teacher`; B is a multiple of the devices."""
        placed = jax.device_put(video_BTHW3, self._rows)
        return np.asarray(self._encode(self._params, placed), np.float32)


class Diffusers:
    """An autoencoder in diffusers' format, run by PyTorch on one GPU or the CPU."""

    def __init__(self, folder: Path, *, scaling: float | None, sample_seed: int | None) -> None:
        try:
            import diffusers
            import torch
        except ImportError as error:
            raise InputError(
                f"--teacher {folder} needs {error.name}: {versions.install('interop')}"
            ) from error
        kind = str(_class_name(folder))
        made = {
            "AutoencoderKLCogVideoX": diffusers.AutoencoderKLCogVideoX,
            wan_vae.CLASS: diffusers.AutoencoderKLWan,
        }
        if kind not in made:
            raise InputError(
                f"--teacher {folder} holds the class {kind[:60]}; use {' or '.join(made)}"
            )
        self._torch, self._seed, self._kind = torch, sample_seed, kind
        try:
            model = made[kind].from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(f"--teacher {folder} cannot be loaded: {first_line(error)}") from error
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model.eval().requires_grad_(False).to(self._device)
        self._shift, self._scale, words = _normalization(folder, model.config, scaling)
        chosen = "mode" if sample_seed is None else f"sample with seed {sample_seed}"
        held = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
        settings = json.dumps([kind, self._shift.tolist(), self._scale.tolist(), chosen]).encode()
        self.name = _name(folder, [settings, *map(_file_digest, held)])
        self.about = f"{kind} of {folder}, {chosen}, {words}, by PyTorch on {self._device}"

    def encode(self, video_BTHW3: np.ndarray) -> np.ndarray:
        """See :class:`jaxtrain.data.video.latents.Teacher`."""
        torch = self._torch
        if self._kind == wan_vae.CLASS:  # it would drop the others without a message
            video_BTHW3 = video_BTHW3[:, : wan_vae.encoded_frames(video_BTHW3.shape[1])]
        video_BCTHW = np.ascontiguousarray(video_BTHW3.transpose(0, 4, 1, 2, 3))
        found = []
        with torch.inference_mode():
            for clip_CTHW in (
                video_BCTHW
            ):  # diffusers samples a batch at once, which would make clips depend on it
                x = torch.from_numpy(clip_CTHW)[None].to(self._device) * 2 - 1
                distribution = self._model.encode(x).latent_dist
                found.append(self._pick(distribution).float().cpu().numpy()[0])
        latents_BLHWC = np.stack(found).transpose(0, 2, 3, 4, 1)
        return np.asarray((latents_BLHWC - self._shift) * self._scale, np.float32)

    def _pick(self, distribution: Any) -> Any:
        if self._seed is None:
            return distribution.mode()
        # The same noise for each clip, so that latents depend on the clip, not on its position.
        generator = self._torch.Generator(self._device).manual_seed(self._seed)
        return distribution.sample(generator)


def _normalization(
    folder: Path, settings: Any, scaling: float | None
) -> tuple[np.ndarray, np.ndarray, str]:
    """Returns the shift to subtract from the latents, the factor, and a description of both.

    Raises:
        InputError: neither the caller nor the folder has a factor.
    """
    nothing = np.zeros(1, np.float32)
    if scaling is not None:
        return nothing, np.array([scaling], np.float32), f"times {scaling:g} (as given)"
    means, deviations = settings.get("latents_mean"), settings.get("latents_std")
    if means and deviations:
        words = "normalized by latents_mean and latents_std (its config)"
        return np.array(means, np.float32), 1 / np.array(deviations, np.float32), words
    factor = settings.get("scaling_factor")
    if factor is None:
        raise InputError(f"--teacher {folder} has no scaling_factor: set it with --teacher-scaling")
    return nothing, np.array([factor], np.float32), f"times {factor:g} (its scaling_factor)"


def _class_name(path: Path) -> str | None:
    """The class of the diffusers model in a folder, or None."""
    try:
        found = read_json(path / "config.json").get("_class_name")
    except (OSError, ValueError):
        return None
    return None if found is None else str(found)


def _name(path: Path, parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", path.stem).strip("-") or "teacher"
    return f"{stem[:40]}-{digest.hexdigest()[:_DIGITS]}"


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
