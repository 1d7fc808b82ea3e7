"""``jaxtrain encode``: turns videos into latents."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrain import terminal
from jaxtrain.cli import command_line, commands, job_flags, video_flags
from jaxtrain.data.video import files
from jaxtrain.data.video.reading import Video
from jaxtrain.errors import InputError
from jaxtrain.inference import latent_files
from jaxtrain.storage import atomic

if TYPE_CHECKING:
    from jaxtrain.inference.video import Autoencoder


def main(flags: commands.Encode) -> int:
    """Runs the command.

    Raises:
        InputError: wrong use, or a file that cannot be read or written.
    """
    scale, shift = _numbers("--scale", flags.scale), _numbers("--shift", flags.shift)
    if not np.asarray(scale, np.float32).all():
        raise InputError(f"--scale {flags.scale}: use numbers other than 0, also in float32")
    storage = latent_files.Storage(flags.dtype, flags.layout, scale, shift)
    video_flags.check_present(flags.video, "a video, or a folder of videos")
    if flags.video.is_dir():
        return _folder(flags, storage)
    video_flags.check_is_folder(flags, flags.video)
    if flags.target.suffix != storage.suffix:
        raise InputError(
            f"{flags.target} does not end with {storage.suffix}: latents are written in this format"
        )
    atomic.check_writable("OUT", flags.target)
    video = Video(flags.video)
    model = video_flags.autoencoder(flags, "encode")
    with command_line.cleaning_up():
        _encode(model, video, storage, flags)
    return 0


def _encode(
    model: "Autoencoder",
    video: Video,
    storage: latent_files.Storage,
    flags: commands.Encode,
) -> None:
    counter = video_flags.Counter(video.frames)
    found = latent_files.encode(model, video, flags.target, storage, counter.one)
    if note := _note(video, found):
        terminal.out(note)
    shape = "x".join(map(str, found.shape))
    terminal.out(f"{counter.line()} to latents {shape} in {flags.target}")


def _note(video: Video, found: latent_files.Encoded) -> str:
    if found.off_s <= 0.5 / video.rate:
        return ""
    return (
        f"{video.path} has a variable frame rate: only the average of {float(video.rate):.5g} "
        f"frames per second is kept, so jaxtrain decode shifts frames by up to {found.off_s:.2g} s"
    )


def _folder(flags: commands.Encode, storage: latent_files.Storage) -> int:
    from jaxtrain.inference import video_folder

    cluster = job_flags.cluster(flags)
    todo = video_folder.items(
        flags.video, flags.target, files.SUFFIXES, storage.suffix, terminal.out
    )
    model = video_flags.autoencoder(flags, "encode")
    storage.check(model.model.latent_channels)
    settings = {
        "weights": model.digest(),
        "precision": flags.precision,
        "dtype": storage.dtype,
        "layout": storage.layout,
        "scale": list(storage.scale),
        "shift": list(storage.shift),
    }
    work = functools.partial(_encode_file, storage)
    return video_flags.process_folder(model, todo, flags, settings, work, "encoding", cluster)


def _encode_file(
    storage: latent_files.Storage,
    model: "Autoencoder",
    source: Path,
    target: Path,
    check: Callable[[], None],
) -> dict[str, Any]:
    video = Video(source)
    found = latent_files.encode(model, video, target, storage, check)
    about = {"frames": found.frames, "shape": list(found.shape), "off_s": found.off_s}
    note = _note(video, found)
    return about | ({"note": note} if note else {})


def _numbers(flag: str, text: str) -> tuple[float, ...]:
    """Parses one number, or one for each channel, separated by commas.

    Raises:
        InputError: it is something else, or NaN or infinite in float32.
    """
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        found = (math.nan,)
    with np.errstate(over="ignore"):
        stored = np.asarray(found, np.float32)
    if not np.isfinite(stored).all():
        raise InputError(f"{flag} {text}: use numbers such as 0.5 or 0.5,0.25")
    return found
