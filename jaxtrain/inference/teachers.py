"""Autoencoders whose latents are targets (:class:`jaxtrain.data.video.encode_latents.Teacher`).

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

from jaxtrain import config, versions
from jaxtrain.checkpoint import pointer
from jaxtrain.data.video.encode_latents import Teacher
from jaxtrain.errors import InputError, first_line
from jaxtrain.inference import load as models
from jaxtrain.interop import hub
from jaxtrain.models import wan_network
from jaxtrain.models.video_ae import network
from jaxtrain.sharding import batch_sharding, make_mesh, replicated
from jaxtrain.storage import tensor_files
from jaxtrain.storage.atomic import read_json

_COGVIDEOX = "AutoencoderKLCogVideoX"
_DIGITS = 12  # hex digits of the digest in a teacher's name
_ENCODER = "encoder."


def load(
    spec: str,
    *,
    scaling: float | None,
    sample_seed: int | None,
    model: Any,
    say: Callable[[str], None],
) -> Teacher:
    """Loads the teacher at a path.

    Args:
        spec: the path.
        scaling: factor on the latents; None is that of the teacher's folder, or 1 for jaxtrain's.
        sample_seed: seed to sample from diffusers' latent distribution; None takes its mode.
        model: config of the video autoencoder to teach.
        say: prints messages on the console.

    Raises:
        InputError: no teacher there, it does not support these arguments, or it makes other latents
            than the model.
    """
    path = hub.local(spec).absolute()
    if not path.exists() and not pointer.is_checkpoint(path):
        raise InputError(
            f"--teacher {spec}: no such file or folder; pass a checkpoint, a run directory, a "
            "weights file, or a local diffusers folder"
        )
    if _class_name(path) is not None:
        theirs = Diffusers(path, scaling=scaling, sample_seed=sample_seed)
        theirs.check(model)
        teacher: Teacher = theirs
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
        trained = models.load(path, "prepare latents", "reconstruct")
        definition, params = trained.definition, trained.params
        encoder = {name: array for name, array in params.items() if name.startswith(_ENCODER)}
        parts = [json.dumps([scaling, trained.config.patch_size]).encode()]
        for name in sorted(encoder):
            parts += [f"{name} {encoder[name].shape}".encode(), encoder[name].tobytes()]
        self.name = _name(path, parts)
        self.about = f"encoder of {trained.source}, latents times {scaling:g}"
        mesh = make_mesh(config.Mesh(data=jax.device_count(), fsdp=1, shard="none"))
        self._rows = batch_sharding(mesh)
        self._params = jax.device_put(params, replicated(mesh))

        def encode(params: Any, video_BTHW3: jax.Array) -> jax.Array:
            module: Any = definition.module(params, {})
            return scaling * module.encode(video_BTHW3)

        self._encode = jax.jit(encode, out_shardings=self._rows)

    def encode(self, video_BTHW3: np.ndarray) -> np.ndarray:
        """Implements :meth:`Teacher.encode`; B is a multiple of the devices."""
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
        classes = {
            _COGVIDEOX: diffusers.AutoencoderKLCogVideoX,
            "AutoencoderKLHunyuanVideo": diffusers.AutoencoderKLHunyuanVideo,
            "AutoencoderKLLTXVideo": diffusers.AutoencoderKLLTXVideo,
            "AutoencoderKLLTX2Video": diffusers.AutoencoderKLLTX2Video,
            wan_network.CLASS: diffusers.AutoencoderKLWan,
        }
        if kind not in classes:
            *others, last = classes
            raise InputError(
                f"--teacher {folder} holds the class {kind[:60]}; use {', '.join(others)}, or "
                f"{last}"
            )
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise InputError(
                f"--teacher {folder} has no weights: it lacks {wan_network.ARRAYS}; download the "
                "complete folder (pickled files, such as .bin, are not read)"
            )
        index = folder / f"{wan_network.ARRAYS}{tensor_files.INDEX}"
        if index.is_file():  # diffusers would also unpickle files that it lists
            tensor_files.parts(index)
        self._torch, self._seed, self._folder, self._kind = torch, sample_seed, folder, kind
        try:
            model, loaded = classes[kind].from_pretrained(
                folder, local_files_only=True, output_loading_info=True, use_safetensors=True
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(f"--teacher {folder} cannot be loaded: {first_line(error)}") from error
        if missing := sorted(loaded["missing_keys"]):  # diffusers would use random ones
            raise InputError(
                f"--teacher {folder}: its weights lack {len(missing):,} arrays of {kind}, such as "
                f"{missing[0]}: download the folder again"
            )
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model.eval().requires_grad_(False).to(self._device)
        self._frames, self._pixels, self._channels = _sizes(kind, model)
        self._shift, self._scale, words = _normalization(folder, model, scaling)
        chosen = "mode" if sample_seed is None else f"sample with seed {sample_seed}"
        settings = json.dumps([kind, self._shift.tolist(), self._scale.tolist(), chosen]).encode()
        self.name = _name(folder, [settings, *map(_file_digest, files)])
        self.about = f"{kind} of {folder}, {chosen}, {words}, by PyTorch on {self._device}"

    def check(self, model: Any) -> None:
        """Checks that the latents stand for the same frames and pixels as those of a model.

        Raises:
            InputError: they do not; names the fields that fit, or the nearest number of frames.
        """
        what = f"--teacher {self._folder}"
        ours = (model.timing.factor, model.space_factor, model.latent_channels)
        theirs = (self._frames, self._pixels, self._channels)
        if ours != theirs:
            raise InputError(
                f"{what}: {self._kind} makes {_described(*theirs)}, but the model makes "
                f"{_described(*ours)}: {_fitting(ours, theirs)}"
            )
        frames = model.frames
        if self._causal and not model.timing.same_frames(frames, self._frames):
            latents = model.timing.latent_frames(frames)
            raise InputError(
                f"{what}: {self._kind} encodes {self._encoded(frames)} of model.frames={frames} "
                f"frames ({self._frames} n + 1), but the model's {latents} latents cover "
                f"{model.timing.decoded(latents)} (model.trim): use --model.frames "
                f"{model.timing.nearest_with_same_frames(frames, self._frames)}",
                about=("model.frames", "model.trim"),
            )

    def encode(self, video_BTHW3: np.ndarray) -> np.ndarray:
        """Implements :meth:`Teacher.encode`."""
        torch = self._torch
        if self._causal:
            # Wan would drop the others without a message. LTX cannot take some, and elsewhere they
            # would change the statistics of the normalization layers.
            video_BTHW3 = video_BTHW3[:, : self._encoded(video_BTHW3.shape[1])]
        video_BCTHW = np.ascontiguousarray(video_BTHW3.transpose(0, 4, 1, 2, 3))
        latents = []
        with torch.inference_mode():
            for clip_CTHW in (
                video_BCTHW
            ):  # diffusers samples a batch at once, which would make clips depend on it
                x = torch.from_numpy(clip_CTHW)[None].to(self._device) * 2 - 1
                distribution = self._model.encode(x).latent_dist
                latents.append(self._pick(distribution).float().cpu().numpy()[0])
        latents_BLHWC = np.stack(latents).transpose(0, 2, 3, 4, 1)
        return np.asarray((latents_BLHWC - self._shift) * self._scale, np.float32)

    @property
    def _causal(self) -> bool:
        """Whether the first frame has a latent of its own, in all clips."""
        return self._kind != _COGVIDEOX

    def _encoded(self, frames: int) -> int:
        return frames - (frames - 1) % self._frames

    def _pick(self, distribution: Any) -> Any:
        if self._seed is None:
            return distribution.mode()
        # The same noise for each clip, so that latents depend on the clip, not on its position.
        generator = self._torch.Generator(self._device).manual_seed(self._seed)
        return distribution.sample(generator)


def _sizes(kind: str, model: Any) -> tuple[int, int, int]:
    """Returns the frames per latent, the pixels along its side, and its channels."""
    settings = model.config
    if kind == wan_network.CLASS:
        sizes = wan_network.Architecture(patch_size=settings.patch_size or 1)
        return wan_network.TIME_FACTOR, sizes.space_factor, settings.z_dim
    if kind == _COGVIDEOX:
        halvings = len(settings.block_out_channels) - 1
        return int(settings.temporal_compression_ratio), 2**halvings, settings.latent_channels
    return (
        model.temporal_compression_ratio,
        model.spatial_compression_ratio,
        settings.latent_channels,
    )


def _described(frames: int, pixels: int, channels: int) -> str:
    return f"latents of {frames} frames and {pixels}x{pixels} pixels with {channels} channels"


def _fitting(ours: tuple[int, int, int], theirs: tuple[int, int, int]) -> str:
    """Returns the flags that give a model the latents of a teacher."""
    frames, pixels, channels = theirs
    halvings = frames.bit_length() - 1
    if frames != 2**halvings or halvings > 3 or pixels % network.SPACE_FACTOR:
        return "no model has such latents; pass another teacher"
    flags = []
    if channels != ours[2]:
        flags.append(f"--model.latent_channels {channels}")
    if pixels != ours[1]:
        flags.append(f"--model.patch_size {pixels // network.SPACE_FACTOR}")
    if frames != ours[0]:
        down = [str(number < halvings) for number in range(3)]
        flags.append(f"--model.time_downscale {' '.join(down)}")
    return f"set {' '.join(flags)}"


def _normalization(
    folder: Path, model: Any, scaling: float | None
) -> tuple[np.ndarray, np.ndarray, str]:
    """Returns the shift to subtract from the latents, the factor, and a description of both.

    Raises:
        InputError: neither the caller nor the folder has a factor.
    """
    settings = model.config
    nothing = np.zeros(1, np.float32)
    if scaling is not None:
        return nothing, np.array([scaling], np.float32), f"times {scaling:g} (as given)"
    factor = settings.get("scaling_factor")
    buffers = dict(model.named_buffers())
    if "latents_mean" in buffers:  # LTX's are in its weights
        mean, deviation = (
            buffers[name].float().cpu().numpy() for name in ("latents_mean", "latents_std")
        )
        words = "normalized by latents_mean and latents_std (its weights)"
        return mean, np.asarray((1.0 if factor is None else factor) / deviation, np.float32), words
    means, deviations = settings.get("latents_mean"), settings.get("latents_std")
    if means and deviations:
        words = "normalized by latents_mean and latents_std (its config)"
        return np.array(means, np.float32), 1 / np.array(deviations, np.float32), words
    if factor is None:
        raise InputError(f"--teacher {folder} has no scaling_factor: set it with --teacher-scaling")
    return nothing, np.array([factor], np.float32), f"times {factor:g} (its scaling_factor)"


def _class_name(path: Path) -> str | None:
    """The class of the diffusers model in a folder, or None."""
    try:
        class_name = read_json(path / "config.json").get("_class_name")
    except (OSError, ValueError):
        return None
    return None if class_name is None else str(class_name)


def _name(path: Path, parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", path.stem).strip("-") or "teacher"
    return f"{stem[:40]}-{digest.hexdigest()[:_DIGITS]}"


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
