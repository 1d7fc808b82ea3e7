"""Writes the latents of a video to a file, and decodes such a file to a video.

A file has one array of latents and metadata: the frames, size, padding and average frame rate of
the video, the layout, and the model. A model's latents are scaled as diffusion models see them,
with a standard deviation of about 1. `scale` and `shift` store ``latents * scale + shift`` instead,
for programs that expect what the original autoencoder makes; decoding undoes them.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxtrain import config
from jaxtrain.config import invocation
from jaxtrain.errors import InputError
from jaxtrain.inference.video import tensor_stream, writing
from jaxtrain.inference.video.reading import Frame, Video

if TYPE_CHECKING:
    from jaxtrain.inference.video.autoencoder import (
        Autoencoder,  # takes seconds, because of jax
    )

_LARGEST = 2**31 - 1  # largest number of frames, and of pixels per side
_MOST_DIGITS = 40  # int() has its own limit, and is slow below it
_STORED_AS: dict[str, tuple[str, tuple[str, ...]]] = {
    "lhwc": ("latents", ()),
    "ncthw": ("latents", ()),
    "ntchw": ("latents", ()),
    "comfyui": ("latent_tensor", ("latent_format_version_0",)),  # of its node LoadLatent
}
LAYOUTS = tuple(_STORED_AS)
"""Layouts of a file. lhwc: [L, h, w, C], written while the video is read; ncthw: [1, C, L, h, w],
as most pipelines of diffusers expect; ntchw: [1, L, C, h, w], as that of CogVideoX does; comfyui:
ncthw with the names of ComfyUI's latent files."""


@dataclasses.dataclass(frozen=True)
class Storage:
    """How latents are stored.

    Attributes:
        dtype: one of :data:`tensor_stream.DTYPES`.
        layout: one of :data:`LAYOUTS`.
        scale, shift: one number, or one for each channel; ``latents * scale + shift`` is stored.
    """

    dtype: str = "float32"
    layout: str = "lhwc"
    scale: tuple[float, ...] = (1.0,)
    shift: tuple[float, ...] = (0.0,)

    @property
    def suffix(self) -> str:
        """The suffix of a file in a folder."""
        return ".latent" if self.layout == "comfyui" else ".safetensors"

    def check(self, channels: int) -> None:
        """Checks that there is one number, or one for each channel."""
        for name, values in (("scale", self.scale), ("shift", self.shift)):
            count = len(values)
            if count not in (1, channels):
                raise InputError(
                    f"--{name} has {count} numbers, but the latents have {channels} channels: use "
                    f"1 or {channels}"
                )


@dataclasses.dataclass(frozen=True)
class Encoded:
    """What was encoded."""

    frames: int
    shape: tuple[int, ...]
    off_s: float


def encode(
    model: "Autoencoder",
    source: Video,
    target: Path,
    storage: Storage,
    each_frame: Callable[[], None],
) -> Encoded:
    """Encodes a video.

    Args:
        each_frame: called after each frame was read; may raise to stop.
    """
    from jaxtrain.inference.video import autoencoder
    from jaxtrain.interop import weights

    storage.check(model.model.latent_channels)
    padding = model.padding(source.height, source.width)
    about = {
        "fps": str(source.rate),
        "height": str(source.height),
        "width": str(source.width),
        "padding_bottom": str(padding.bottom),
        "padding_right": str(padding.right),
        "pixel_aspect": str(source.pixel_aspect),
        weights.ABOUT: json.dumps(config.to_dict(model.model)),
    }
    if storage.layout != "lhwc":
        about["layout"] = storage.layout
    for name, values, plain in (("scale", storage.scale, 1.0), ("shift", storage.shift, 0.0)):
        if values != (plain,):
            about[name] = ",".join(map(repr, values))
    frames, first, off_s = 0, 0, 0.0

    def pixels() -> Iterator[np.ndarray]:
        nonlocal frames, first, off_s
        for frame in source.images():
            first = first if frames else frame.pts
            at_s = (frame.pts - first) * source.time_base
            off_s = max(off_s, abs(float(at_s - frames / source.rate)))
            frames += 1
            yield frame.pixels
            each_frame()

    scale, shift = (np.asarray(value, np.float32) for value in (storage.scale, storage.shift))
    changed = storage.scale != (1.0,) or storage.shift != (0.0,)
    latents = (
        latent * scale + shift if changed else latent
        for latent in autoencoder.fetched(model.encoded(pixels()))
    )
    name, markers = _STORED_AS[storage.layout]
    with tensor_stream.writing(target, name, storage.dtype, about, markers) as rows:
        if storage.layout == "lhwc":
            for latent in latents:
                rows.add(latent)
                shape = (rows.count, *latent.shape)
        else:
            all_latents = np.stack(list(latents))
            axes = (0, 3, 1, 2) if storage.layout == "ntchw" else (3, 0, 1, 2)
            row = all_latents.transpose(axes)
            rows.add(row)
            shape = (1, *row.shape)
        about["frames"] = str(frames)
    return Encoded(frames, shape, off_s)


class LatentFile:
    """A file of latents that :func:`encode` wrote.

    Attributes:
        shape: [L, h, w, C], whatever the layout.
        rate: frames per second.
        pixel_aspect: width of a pixel divided by its height.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        stored, self._about, self._rows = _read(path)
        self.numbers = _numbers(self._about, path)
        self._layout = self._about.get("layout", "lhwc")
        if self._layout not in LAYOUTS or len(stored) != (4 if self._layout == "lhwc" else 5):
            raise InputError(
                f"{path}: an array {list(stored)} does not have the layout {self._layout!a}: "
                "encode the video again"
            )
        if self._layout != "lhwc" and stored[0] != 1:
            raise InputError(f"{path} has latents of {stored[0]} clips: write a file for each clip")
        if self._layout == "lhwc":
            self.shape = stored
        elif self._layout == "ntchw":
            self.shape = (stored[1], *stored[3:], stored[2])
        else:
            self.shape = (stored[2], *stored[3:], stored[1])
        self.frames, self.height, self.width = (
            self.numbers[name] for name in ("frames", "height", "width")
        )
        self.rate = _ratio(self._about["fps"])
        self.pixel_aspect = _ratio(self._about["pixel_aspect"])
        self._scale, self._shift = (self._floats(name, plain) for name, plain in _PLAIN)

    def latents(self) -> Iterator[np.ndarray]:
        """Yields the latents as the model made them, float32 [h, w, C]."""
        for row in self._rows:
            if self._layout == "lhwc":
                yield self._plain(row)
                continue
            axes = (0, 2, 3, 1) if self._layout == "ntchw" else (1, 2, 3, 0)
            yield from map(self._plain, row.transpose(axes))

    def _plain(self, latent_hwC: np.ndarray) -> np.ndarray:
        if self._scale == (1.0,) and self._shift == (0.0,):
            return latent_hwC
        shift, scale = (np.asarray(values, np.float32) for values in (self._shift, self._scale))
        return np.asarray((latent_hwC - shift) / scale)

    def _floats(self, name: str, plain: float) -> tuple[float, ...]:
        try:
            numbers = tuple(map(float, self._about.get(name, repr(plain)).split(",")))
        except ValueError:
            numbers = ()
        good = len(numbers) in (1, self.shape[-1]) and all(map(np.isfinite, numbers))
        if not good or (name == "scale" and 0.0 in numbers):
            raise InputError(f"{self.path}: its {name} is invalid: encode the video again")
        return numbers


_PLAIN = (("scale", 1.0), ("shift", 0.0))


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What was decoded.

    Attributes:
        frames: number of frames.
        size: such as "640x480".
        padded_from: the size before padding to even sides; None if it was even.
    """

    frames: int
    size: str
    padded_from: str | None


def decode(
    model: "Autoencoder", source: LatentFile, target: Path, crf: int, each_frame: Callable[[], None]
) -> Decoded:
    """Decodes latents to a video.

    Args:
        crf: H.264 quality.
        each_frame: called after each frame was written; may raise to stop.
    """
    from jaxtrain.inference.video import autoencoder

    _check(model, source)
    wanted, rate = source.frames, source.rate
    with writing.writing(
        target, rate=rate, time_base=1 / rate, pixel_aspect=source.pixel_aspect, crf=crf
    ) as writer:
        images = model.decoded(
            source.latents(), height=source.height, width=source.width, count=source.shape[0]
        )
        for number, pixels in zip(range(wanted), images, strict=False):
            padded = autoencoder.even(*pixels.shape[:2])(pixels)
            writer.add(Frame(padded, number))
            each_frame()
    before = f"{pixels.shape[1]}x{pixels.shape[0]}"
    after = f"{padded.shape[1]}x{padded.shape[0]}"
    return Decoded(wanted, after, None if before == after else before)


def _read(path: Path) -> tuple[tuple[int, ...], dict[str, str], Iterator[np.ndarray]]:
    try:
        return tensor_stream.read(path, _STORED_AS["lhwc"][0])
    except InputError:
        name = _STORED_AS["comfyui"][0]
        if path.suffix != ".latent":
            raise
        return tensor_stream.read(path, name)


def _numbers(about: dict[str, str], path: Path) -> dict[str, int]:
    names = ("frames", "height", "width", "padding_bottom", "padding_right")
    missing = [name for name in (*names, "fps", "pixel_aspect") if name not in about]
    if missing:
        raise InputError(
            f"{path} lacks the metadata {', '.join(missing)}: write it with "
            f"{invocation.program()} encode"
        )
    try:
        if _ratio(about["fps"]) <= 0 or _ratio(about["pixel_aspect"]) <= 0:
            raise ValueError("fps and pixel_aspect must be above 0")
        numbers = {name: _number(name, about[name]) for name in names}
        if min(numbers[name] for name in names[:3]) < 1:
            raise ValueError("frames, height, and width must be above 0")
        if min(numbers[name] for name in names[3:]) < 0:
            raise ValueError("padding_bottom and padding_right must not be below 0")
    except (ValueError, ZeroDivisionError) as error:
        raise InputError(
            f"{path}: its video metadata is invalid: {error}: encode the video again"
        ) from error
    return numbers


def _number(name: str, text: str) -> int:
    if len(text) > _MOST_DIGITS or int(text) > _LARGEST:
        shortened = text[:20] + "..." * (len(text) > 20)
        raise ValueError(f"{name} is {shortened!a}, and the limit is {_LARGEST:,}")
    return int(text)


def _ratio(text: str) -> Fraction:
    # Fraction itself would compute the digits of "1e999999999".
    if not re.fullmatch(r"\d{1,10}(/\d{1,10})?", text, re.ASCII):
        raise ValueError(f"{text[:40]!r} is not a ratio such as 30000/1001")
    return Fraction(text)


def _check(model: "Autoencoder", source: LatentFile) -> None:
    shape, path, numbers = source.shape, source.path, source.numbers
    factor = model.model.space_factor
    height, width = (
        numbers["height"] + numbers["padding_bottom"],
        numbers["width"] + numbers["padding_right"],
    )
    wanted = (height // factor, width // factor, model.model.latent_channels)
    if shape[1:] != wanted or height % factor or width % factor:
        raise InputError(
            f"{path} has latents {list(shape)} of a {width}x{height} video, but "
            f"{model.source} uses {model.model.latent_channels} channels per {factor}x{factor} "
            "pixels: pass the model that encoded the video"
        )
    timing = model.model.timing
    try:
        timing.check_latents(shape[0])
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    if timing.decoded(shape[0]) < source.frames:
        raise InputError(
            f"{path} has {shape[0]} latents, too few for {source.frames} frames of "
            f"{model.source} ({timing.rule}): pass the model that encoded the video"
        )
