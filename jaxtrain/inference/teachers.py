"""Autoencoders whose latents are targets (:class:`jaxtrain.data.video.encode_latents.Teacher`).

A teacher is given by a path: a checkpoint, run, or weights file of jaxtrain, a folder with an
autoencoder in diffusers' format, or one with the two files of TAESD.

Shapes: B clips, T frames, H height, W width; latents L in time, h x w in space, C channels.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain import config, versions
from jaxtrain.checkpoint import pointer
from jaxtrain.errors import InputError, first_line
from jaxtrain.inference import load as models
from jaxtrain.interop import hub
from jaxtrain.models import from_file, taesd_network, wan_network
from jaxtrain.models.video_ae import network
from jaxtrain.models.video_ae.timing import Timing
from jaxtrain.sharding import batch_sharding, make_mesh, replicated
from jaxtrain.storage import tensor_files
from jaxtrain.storage.atomic import read_json

_COGVIDEOX = "AutoencoderKLCogVideoX"
_DIGITS = 12  # hex digits of the digest in a teacher's name
_ENCODER = "encoder."


class Teacher:
    """An autoencoder whose latents are targets.

    Attributes:
        name: identifies its parameters and settings; valid as a folder name.
        about: a description of it.
        kind: what it is, for messages.
        frames, pixels, channels: frames per latent, pixels along its side, and its channels.
    """

    name: str
    about: str
    kind: str
    frames: int
    pixels: int
    channels: int

    def encode(self, video_BTHW3: np.ndarray) -> np.ndarray:
        """Encodes float32 clips with values in [0, 1] to float32 latents [B, L, h, w, C]."""
        raise NotImplementedError

    def decode(self, latents_BLHWC: np.ndarray) -> np.ndarray:
        """Decodes latents to float32 frames [B, T, H, W, 3], not clamped."""
        raise NotImplementedError

    def covered(self, frames: int) -> tuple[int, int] | None:
        """Returns the number of latents of `frames` frames, and how many frames they stand for.

        None if that depends on the clip.
        """
        raise NotImplementedError

    def fits(self, timing: Timing, frames: int) -> bool:
        """Returns whether the latents of a clip stand for the same frames as a model's."""
        return self.covered(frames) in (None, _covered(timing, frames))

    def nearest_fitting(self, timing: Timing, frames: int) -> int:
        """Returns the number of frames nearest to `frames` for which :meth:`fits` holds."""
        around = (frames + sign * n for n in range(frames + 32) for sign in (-1, 1))
        return next(n for n in around if n > 0 and self.fits(timing, n))

    def check(self, what: str, model: Any, frames: int, flag: str) -> None:
        """Checks that the latents stand for the same frames and pixels as those of a model.

        Args:
            what: the teacher, for messages.
            model: config of the model.
            frames: of a clip.
            flag: that sets them.

        Raises:
            InputError: they do not; names the fields that fit, or the nearest number of frames.
        """
        ours = (model.timing.factor, model.space_factor, model.latent_channels)
        theirs = (self.frames, self.pixels, self.channels)
        if ours != theirs:
            raise InputError(
                f"{what}: {self.kind} makes {_described(*theirs)}, but the model makes "
                f"{_described(*ours)}: {_fitting(ours, theirs)}"
            )
        if (made := self.covered(frames)) is not None and not self.fits(model.timing, frames):
            latents, decoded = _covered(model.timing, frames)
            raise InputError(
                f"{what}: {self.kind} makes {made[0]} latents of {flag.lstrip('-')}={frames} "
                f"frames, which cover {made[1]}, but the model's {latents} cover {decoded} "
                f"(model.trim): use {flag} {self.nearest_fitting(model.timing, frames)}",
                about=("model.frames", "model.trim"),
            )


def _covered(timing: Timing, frames: int) -> tuple[int, int]:
    latents = timing.latent_frames(frames)
    return latents, timing.decoded(latents)


def load(
    spec: str,
    *,
    scaling: float | None,
    sample_seed: int | None,
    say: Callable[[str], None],
    command: str = "prepare latents",
) -> Teacher:
    """Loads the teacher at a path.

    Args:
        spec: the path.
        scaling: factor on the latents; None is that of the teacher's folder, or 1 for jaxtrain's.
        sample_seed: seed to sample from diffusers' latent distribution; None takes its mode.
        say: prints messages on the console.
        command: the command that uses it, for messages.

    Raises:
        InputError: no teacher there, or it does not support these arguments.
    """
    if scaling is not None and not (math.isfinite(scaling) and scaling):
        raise InputError(f"--teacher-scaling {scaling:g}: use a finite factor other than 0")
    path = hub.local(spec).absolute()
    if not path.exists() and not pointer.is_checkpoint(path):
        raise InputError(
            f"--teacher {spec}: no such file or folder; pass a checkpoint, a run directory, a "
            "weights file, or a local diffusers folder"
        )
    kind, files = _class_name(path), taesd_network.files_of(path)
    evaluates = command == "evaluate"  # a clip at a time, and Wan without PyTorch
    devices, factor = jax.devices()[: 1 if evaluates else None], 1.0 if scaling is None else scaling
    if kind is not None and not (kind == wan_network.CLASS and evaluates):
        teacher: Teacher = Diffusers(path, scaling=scaling, sample_seed=sample_seed)
    elif sample_seed is not None:
        raise InputError(
            f"--teacher-sample {sample_seed}: {spec} has no latent distribution to sample "
            "from; drop this flag"
        )
    elif files is not None:
        teacher = Taesd(path, files, factor, devices)
    else:
        teacher = Own(path, factor, devices, command)
    say(f"teacher {teacher.name}: {teacher.about}")
    return teacher


class _OnDevices(Teacher):
    """A teacher that jax runs.

    Args:
        arrays: its parameters, in any structure.
        encode, decode: functions of the parameters, and of frames or latents.
        devices: share the clips of a batch, so their number must divide that of the clips.
    """

    def __init__(
        self,
        arrays: Any,
        encode: Callable[[Any, jax.Array], jax.Array],
        decode: Callable[[Any, jax.Array], jax.Array],
        devices: Sequence[jax.Device],
    ) -> None:
        mesh = make_mesh(config.Mesh(data=len(devices), fsdp=1, shard="none"), devices)
        self._rows = batch_sharding(mesh)
        self._arrays = jax.device_put(arrays, replicated(mesh))
        self._encode, self._decode = (
            jax.jit(function, out_shardings=self._rows) for function in (encode, decode)
        )

    def encode(self, video_BTHW3: np.ndarray) -> np.ndarray:
        """Implements :meth:`Teacher.encode`."""
        placed = jax.device_put(video_BTHW3, self._rows)
        return np.asarray(self._encode(self._arrays, placed), np.float32)

    def decode(self, latents_BLHWC: np.ndarray) -> np.ndarray:
        """Implements :meth:`Teacher.decode`."""
        placed = jax.device_put(latents_BLHWC, self._rows)
        return np.asarray(self._decode(self._arrays, placed), np.float32)


class Own(_OnDevices):
    """A checkpoint or weights file of jaxtrain."""

    def __init__(
        self, path: Path, scaling: float, devices: Sequence[jax.Device], command: str
    ) -> None:
        trained = models.load(path, command, "reconstruct")
        definition, params, model = trained.definition, trained.params, trained.config
        encoder = {name: array for name, array in params.items() if name.startswith(_ENCODER)}
        settings = [getattr(model, attribute) for _, attribute in model.not_in_weights]
        parts = [json.dumps([scaling, model.space_factor, settings]).encode()]
        for name in sorted(encoder):
            parts += [f"{name} {encoder[name].shape}".encode(), encoder[name].tobytes()]
        self.name = _name(path, parts)
        self.kind = f"the model {from_file.name_of(model)}"
        self.about = f"{trained.source}, latents times {scaling:g}"
        self._timing = model.timing
        self.frames, self.pixels = model.timing.factor, model.space_factor
        self.channels = model.latent_channels
        super().__init__(
            params,
            lambda params, video: scaling * definition.module(params, {}).encode(video),
            lambda params, latents: definition.module(params, {}).decode(latents / scaling),
            devices,
        )

    def covered(self, frames: int) -> tuple[int, int]:
        """Implements :meth:`Teacher.covered`."""
        return _covered(self._timing, frames)


class Taesd(_OnDevices):
    """An autoencoder of images, for each frame of a clip."""

    kind = "TAESD"
    frames, pixels = 1, taesd_network.SPACE_FACTOR

    def __init__(
        self,
        folder: Path,
        files: taesd_network.Files,
        scaling: float,
        devices: Sequence[jax.Device],
    ) -> None:
        layers, self.channels = taesd_network.read(files)
        self.name = _name(folder, [str(scaling).encode(), _file_digest(files["encoder"])])
        names = " and ".join(file.name for file in files.values())
        self.about = f"{names} of {folder}, latents times {scaling:g}"
        super().__init__(
            layers,
            lambda layers, video: (
                scaling * _by_frame(taesd_network.encode, layers["encoder"], video)
            ),
            lambda layers, latents: _by_frame(
                taesd_network.decode, layers["decoder"], latents / scaling
            ),
            devices,
        )

    def covered(self, frames: int) -> tuple[int, int]:
        """Implements :meth:`Teacher.covered`."""
        return frames, frames


def _by_frame(
    function: Callable[[Any, jax.Array], jax.Array], layers: Any, x_BTHWC: jax.Array
) -> jax.Array:
    b, t, *hwc = x_BTHWC.shape
    y = function(layers, x_BTHWC.reshape(b * t, *hwc))
    return y.reshape(b, t, *y.shape[1:])


class Diffusers(Teacher):
    """An autoencoder in diffusers' format, run by PyTorch on one GPU or the CPU."""

    def __init__(self, folder: Path, *, scaling: float | None, sample_seed: int | None) -> None:
        try:
            import diffusers
            import torch
        except ImportError as error:
            raise InputError(
                f"--teacher {folder} needs {error.name}: {versions.install('interop')}"
            ) from error
        self.kind = kind = str(_class_name(folder))
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
        self._torch, self._seed = torch, sample_seed
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
        self.frames, self.pixels, self.channels = _sizes(kind, model)
        self._shift, self._scale, words = _normalization(folder, model, scaling)
        chosen = "mode" if sample_seed is None else f"sample with seed {sample_seed}"
        settings = json.dumps([kind, self._shift.tolist(), self._scale.tolist(), chosen]).encode()
        self.name = _name(folder, [settings, *map(_file_digest, files)])
        self.about = f"{kind} of {folder}, {chosen}, {words}, by PyTorch on {self._device}"

    def covered(self, frames: int) -> tuple[int, int] | None:
        """Implements :meth:`Teacher.covered`."""
        if not self._causal:
            return None
        encoded = self._encoded(frames)
        return 1 + (encoded - 1) // self.frames, encoded

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

    def decode(self, latents_BLHWC: np.ndarray) -> np.ndarray:
        """Implements :meth:`Teacher.decode`."""
        torch = self._torch
        latents = np.asarray(latents_BLHWC / self._scale + self._shift, np.float32)
        frames = []
        with torch.inference_mode():
            for clip_CLHW in np.ascontiguousarray(latents.transpose(0, 4, 1, 2, 3)):
                decoded = self._model.decode(torch.from_numpy(clip_CLHW)[None].to(self._device))
                frames.append(decoded.sample.float().cpu().numpy()[0])
        return (np.stack(frames).transpose(0, 2, 3, 4, 1) + 1) / 2

    @property
    def _causal(self) -> bool:
        """Whether the first frame has a latent of its own, in all clips."""
        return self.kind != _COGVIDEOX

    def _encoded(self, frames: int) -> int:
        return frames - (frames - 1) % self.frames

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
