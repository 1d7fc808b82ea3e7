"""Autoencoders whose latents are targets (:class:`jaxtrain.data.video.encode_latents.Teacher`).

A teacher is given by a path: a checkpoint, run, or weights file of jaxtrain, a folder with an
autoencoder in diffusers' format, or one with the two files of TAESD.

Shapes: B clips, T frames, H height, W width; latents L in time, h x w in space, C channels.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxtrain import config, versions
from jaxtrain.checkpoint import pointer
from jaxtrain.errors import InputError, first_line
from jaxtrain.inference import load as models
from jaxtrain.inference import taesd_network
from jaxtrain.interop import hub
from jaxtrain.models import from_file
from jaxtrain.models.reconstruction.timing import Timing, Trim
from jaxtrain.models.video_ae import network
from jaxtrain.models.wan import network as wan_network
from jaxtrain.sharding import batch_sharding, make_mesh, replicated
from jaxtrain.storage import tensor_files
from jaxtrain.storage.atomic import read_json

_DIGITS = 12  # hex digits of the digest in a teacher's name
_ENCODER = "encoder."


class Teacher:
    """An autoencoder whose latents are targets.

    Attributes:
        frames, pixels, channels: frames per latent, pixels along its side, and its channels.
        trim: the only ``model.trim`` that it fits; None if others may.
    """

    trim: Trim | None = None
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

    def check(self, subject: str, model: Any, frames: int, flag: str) -> None:
        """Checks that the latents stand for the same frames and pixels as those of a model.

        Args:
            frames: of a clip.
        """
        ours = (model.timing.factor, model.space_factor, model.latent_channels)
        theirs = (self.frames, self.pixels, self.channels)
        if ours != theirs:
            raise InputError(
                f"{subject}: {self.kind} makes {_described(*theirs)}, but the model makes "
                f"{_described(*ours)}: {_fitting(ours, theirs)}"
            )
        if (covered := self.covered(frames)) is not None and not self.fits(model.timing, frames):
            latents, decoded = _covered(model.timing, frames)
            cure = f"use {flag} {self.nearest_fitting(model.timing, frames)}"
            if self.trim not in (None, model.timing.trim):
                cure = f"set --model.trim {self.trim}"
            raise InputError(
                f"{subject}: {self.kind} makes {covered[0]} latents of {flag.lstrip('-')}={frames} "
                f"frames, which cover {covered[1]}, but the model's {latents} cover {decoded} "
                f"(model.trim): {cure}",
                about=("model.frames", "model.trim"),
            )


def _covered(timing: Timing, frames: int) -> tuple[int, int]:
    latents = timing.latent_frames(frames)
    return latents, timing.decoded(latents)


def load(
    spec: str,
    *,
    scaling: float | None,
    say: Callable[[str], None],
    command: str = "prepare latents",
) -> Teacher:
    """Loads the teacher at a path.

    Args:
        scaling: factor on the latents; None is that of the teacher's folder, or 1 for jaxtrain's.
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
        teacher: Teacher = Diffusers(path, scaling)
    elif files is not None:
        teacher = Taesd(path, files, factor, devices)
    else:
        teacher = Own(path, factor, devices, command)
    say(f"teacher {teacher.name}: {teacher.about}")
    return teacher


class _OnDevices(Teacher):
    """A teacher that jax runs.

    Args:
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
        contents = [json.dumps([scaling, model.space_factor, settings]).encode()]
        for name in sorted(encoder):
            contents += [f"{name} {encoder[name].shape}".encode(), encoder[name].tobytes()]
        self.name = _name(path, contents)
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


_HALF = ((0.5,), (0.5,))  # mean and deviation of colors in [0, 1]
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_H3_LEAST = 7  # latents; diffusers decodes no fewer


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A class of diffusers, and what differs between classes.

    Attributes:
        frames, pixels: map a model to the frames per latent of its videos, and to the pixels along
            the side of a latent.
        trim: which frames latents stand for. always: n + 1 latents for 4 n + 1 frames, or 8 n + 1;
            odd_latents: it depends on the clip; h3: as MiniMax H3.
        image: dimensions of the images that it encodes; None if it encodes videos.
        more_colors: field with its number of colors; those after RGB are 1 (opaque).
    """

    of: Any
    frames: Callable[[Any], int] = lambda model: int(model.temporal_compression_ratio)
    pixels: Callable[[Any], int] = lambda model: int(model.spatial_compression_ratio)
    trim: Trim = "always"
    image: Literal["CHW", "CTHW"] | None = None
    colors: tuple[tuple[float, ...], tuple[float, ...]] = _HALF
    more_colors: str | None = None


def _kinds(diffusers: Any) -> dict[str, _Kind]:

    def halved(model: Any) -> int:
        return int(2 ** (len(model.config.block_out_channels) - 1))

    def of_wan(model: Any) -> int:
        return wan_network.Architecture(patch_size=model.config.patch_size or 1).space_factor

    def four(model: Any) -> int:
        return wan_network.TIME_FACTOR

    kinds = [
        _Kind(
            diffusers.AutoencoderKLCogVideoX,
            lambda model: int(model.config.temporal_compression_ratio),
            halved,
            trim="odd_latents",
        ),
        _Kind(diffusers.AutoencoderKLFlux2, pixels=halved, image="CHW"),
        _Kind(
            diffusers.AutoencoderKLHunyuanImage,
            pixels=lambda model: int(model.config.spatial_compression_ratio),
            image="CHW",
        ),
        _Kind(diffusers.AutoencoderKLHunyuanVideo),
        _Kind(diffusers.AutoencoderKLHunyuanVideo15),
        _Kind(diffusers.AutoencoderKLLTXVideo),
        _Kind(diffusers.AutoencoderKLLTX2Video),
        _Kind(diffusers.AutoencoderKLMiniMaxH3, trim="h3", colors=_IMAGENET),
        _Kind(diffusers.AutoencoderKLQwenImage, four, more_colors="input_channels"),
        _Kind(diffusers.AutoencoderKLQwenImage21, image="CTHW", more_colors="in_channels"),
        _Kind(diffusers.AutoencoderKLWan, four, of_wan),
    ]
    return {kind.of.__name__: kind for kind in kinds}


class Diffusers(Teacher):
    """An autoencoder in diffusers' format, run by PyTorch on one GPU or the CPU."""

    def __init__(self, folder: Path, scaling: float | None) -> None:
        try:
            import diffusers
            import torch
        except ImportError as error:
            raise InputError(
                f"--teacher {folder} needs {error.name}: {versions.install('interop')}"
            ) from error
        self.kind = name = str(_class_name(folder))
        kinds = _kinds(diffusers)
        if name not in kinds:
            *others, last = kinds
            raise InputError(
                f"--teacher {folder} holds the class {name[:60]}; use {', '.join(others)}, or "
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
            tensor_files.shards(index)
        self._torch, self._kind = torch, kinds[name]
        # All parameters are float32; for a class that asks for it, diffusers requires accelerate.
        float32: Any = type(name, (self._kind.of,), {"_keep_in_fp32_modules": None})
        try:
            model, loaded = float32.from_pretrained(
                folder, local_files_only=True, output_loading_info=True, use_safetensors=True
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(f"--teacher {folder} cannot be loaded: {first_line(error)}") from error
        if missing := sorted(loaded["missing_keys"]):  # diffusers would use random ones
            raise InputError(
                f"--teacher {folder}: its weights lack {len(missing):,} arrays of {name}, such as "
                f"{missing[0]}: download the folder again"
            )
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model.eval().requires_grad_(False).to(self._device)
        kind, fields = self._kind, model.config
        self.frames, self.pixels, self.channels = _sizes(kind, model)
        self.trim = "h3" if kind.trim == "h3" else None
        self._opaque = 0 if kind.more_colors is None else fields[kind.more_colors] - 3
        shift, scale, description = _normalization(folder, model, scaling)
        settings = [name, shift.ravel().tolist(), scale.ravel().tolist(), "mode"]
        # A shift and a factor for each channel, and for each place in squares of latents.
        self._shift, self._scale = (
            np.atleast_2d(array)[None] if array.ndim < 3 else array for array in (shift, scale)
        )
        tiles = ""
        if model.use_tiling:  # MiniMax H3 was released with it, and larger frames depend on it
            tiles = f"tiles{model.tile_sample_min_height}"
            settings += [tiles, model.tile_sample_min_overlap_height]
            description += f", in tiles of {model.tile_sample_min_height} pixels"
        contents = [json.dumps(settings).encode(), *map(_file_digest, files)]
        self.name = _name(folder, contents, tiles)
        self.about = f"{name} of {folder}, mode, {description}, by PyTorch on {self._device}"

    def covered(self, frames: int) -> tuple[int, int] | None:
        """Implements :meth:`Teacher.covered`."""
        if self._kind.trim == "odd_latents":
            return None
        if self._kind.trim == "h3":
            return _covered(Timing(self.frames, "h3"), frames)
        encoded = frames - (frames - 1) % self.frames
        return 1 + (encoded - 1) // self.frames, encoded

    def encode(self, video_BTHW3: np.ndarray) -> np.ndarray:
        """Implements :meth:`Teacher.encode`."""
        if (covered := self.covered(video_BTHW3.shape[1])) is not None:
            # Wan would drop the others without a message. LTX cannot take some, and elsewhere they
            # would change the statistics of the normalization layers.
            video_BTHW3 = video_BTHW3[:, : covered[1]]
        mean, deviation = self._colors()
        latents = []
        for clip in video_BTHW3:
            clip_THWC = np.pad(clip, ((0, 0),) * 3 + ((0, self._opaque),), constant_values=1)
            normalized = (clip_THWC - mean) / deviation
            latents.append(
                self._each(lambda x: self._model.encode(x).latent_dist.mode(), normalized)
            )
        raw_BLHWC = np.stack(latents)
        shift, scale = self._laid_out(raw_BLHWC)
        return np.asarray((raw_BLHWC - shift) * scale, np.float32)

    def decode(self, latents_BLHWC: np.ndarray) -> np.ndarray:
        """Implements :meth:`Teacher.decode`."""
        if self._kind.trim == "h3" and latents_BLHWC.shape[1] < _H3_LEAST:
            minimum = Timing(self.frames, "h3").decoded(_H3_LEAST)
            raise InputError(
                f"{self.kind} decodes {_H3_LEAST} latents or more, not {latents_BLHWC.shape[1]}: "
                f"use at least {minimum} frames (--frames {minimum})"
            )
        shift, scale = self._laid_out(latents_BLHWC)
        raw_BLHWC = np.asarray(latents_BLHWC / scale + shift, np.float32)
        frames = [self._each(lambda x: self._model.decode(x).sample, clip) for clip in raw_BLHWC]
        mean, deviation = self._colors()
        return np.stack(frames)[..., :3] * deviation + mean

    def _each(self, function: Callable[[Any], Any], clip_THWC: np.ndarray) -> np.ndarray:
        """Calls a function of tensors [1, C, T, H, W] for a clip, or for each image of one."""
        torch, image = self._torch, self._kind.image
        x = np.ascontiguousarray(clip_THWC.transpose(3, 0, 1, 2)[None])
        x_1CTHW = torch.from_numpy(x).to(self._device)
        with torch.inference_mode():
            if image is None:
                y_1CTHW = function(x_1CTHW)
            elif image == "CTHW":
                y_1CTHW = torch.cat(
                    [function(image_or_clip) for image_or_clip in x_1CTHW.split(1, 2)], 2
                )
            else:
                y_1CTHW = torch.stack(
                    [function(image_or_clip) for image_or_clip in x_1CTHW.unbind(2)], 2
                )
        y: np.ndarray = y_1CTHW[0].permute(1, 2, 3, 0).float().cpu().numpy()
        return y

    def _colors(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the mean and the deviation of colors, [C] or [1]."""
        mean, deviation = (np.array(values, np.float32) for values in self._kind.colors)
        return mean, deviation

    def _laid_out(self, latents_BLHWC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the shift and the factor of each latent, [h, w, C] or [h, w, 1]."""
        rows, columns = (np.arange(side) for side in latents_BLHWC.shape[2:4])
        shift, scale = (
            array[rows[:, None] % array.shape[0], columns % array.shape[1]]
            for array in (self._shift, self._scale)
        )
        return shift, scale


def _sizes(kind: _Kind, model: Any) -> tuple[int, int, int]:
    channels = model.config.get("latent_channels") or model.config.z_dim
    return kind.frames(model) if kind.image is None else 1, kind.pixels(model), channels


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
    """Returns the shift to subtract from the latents, the factor, and a description of both."""
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
        description = "normalized by latents_mean and latents_std (its weights)"
        return (
            mean,
            np.asarray((1.0 if factor is None else factor) / deviation, np.float32),
            description,
        )
    if "bn.running_mean" in buffers:  # FLUX.2 packs squares of latents into channels first
        variance = buffers["bn.running_var"] + settings.batch_norm_eps
        high, wide = settings.patch_size
        mean, deviation = (
            array.float().cpu().numpy().reshape(-1, high, wide).transpose(1, 2, 0)
            for array in (buffers["bn.running_mean"], variance.sqrt())
        )
        return mean, 1 / deviation, f"normalized by batch norm of {high}x{wide} latents"
    means, deviations = settings.get("latents_mean"), settings.get("latents_std")
    if means and deviations:
        description = "normalized by latents_mean and latents_std (its config)"
        return np.array(means, np.float32), 1 / np.array(deviations, np.float32), description
    if factor is None:
        raise InputError(f"--teacher {folder} has no scaling_factor: set it with --teacher-scaling")
    return nothing, np.array([factor], np.float32), f"times {factor:g} (its scaling_factor)"


def _class_name(path: Path) -> str | None:
    try:
        class_name = read_json(path / "config.json").get("_class_name")
    except (OSError, ValueError):
        return None
    return None if class_name is None else str(class_name)


def _name(path: Path, contents: Iterable[bytes], note: str = "") -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(hashlib.sha256(content).digest())
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", path.stem).strip("-") or "teacher"
    return "-".join(filter(None, [stem[:40], note, digest.hexdigest()[:_DIGITS]]))


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
