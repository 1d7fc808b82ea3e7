"""Encodes a video, or all videos in a folder, to latents.

SOURCE is a checkpoint, a run directory, a weights file, s3://BUCKET/PATH, or
hf:ORG/MODEL. The file also stores the model and the video's size, frame count,
padding, and average frame rate, for jaxtrain decode. A folder is encoded on all
devices, to a folder with report.json; to resume, repeat the command.
"""

import argparse
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrain import terminal
from jaxtrain.cli import command_line, job_flags, video_flags
from jaxtrain.data.video import files
from jaxtrain.data.video.reading import Video
from jaxtrain.errors import InputError
from jaxtrain.inference import latent_files
from jaxtrain.storage import atomic, tensor_stream

if TYPE_CHECKING:
    from jaxtrain.inference.video import Autoencoder


def main(arguments: list[str]) -> int:
    """Runs the command.

    Raises:
        InputError: wrong use, or a file that cannot be read or written.
    """
    flags = command_line.parse_all(_parser(), arguments)
    if flags is None:
        return 0
    storage = latent_files.Storage(flags.dtype, flags.layout, flags.scale, flags.shift)
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
    flags: argparse.Namespace,
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


def _folder(flags: argparse.Namespace, storage: latent_files.Storage) -> int:
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


def _numbers(text: str) -> tuple[float, ...]:
    """Parses one number, or one for each channel, separated by commas."""
    try:
        found = tuple(map(float, text.split(",")))
    except ValueError:
        found = (math.nan,)
    with np.errstate(over="ignore"):
        stored = np.asarray(found, np.float32)
    if not np.isfinite(stored).all():
        raise argparse.ArgumentTypeError(f"{text!r}: use numbers such as 0.5 or 0.5,0.25")
    return found


def _scales(text: str) -> tuple[float, ...]:
    found = _numbers(text)
    if not np.asarray(found, np.float32).all():
        raise argparse.ArgumentTypeError(f"{text!r}: use numbers other than 0, also in float32")
    return found


def _parser() -> argparse.ArgumentParser:
    usage = "jaxtrain encode SOURCE IN OUT [--layout NAME] [--dtype TYPE] [--workers N]"
    parser = command_line.bare_parser("encode", usage, __doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", type=command_line.named_file, help="the autoencoder")
    add("video", metavar="IN", type=command_line.named_file, help="the video, or a folder")
    add("target", metavar="OUT", type=command_line.named_file, help="the file or folder to write")
    add(
        "--layout",
        choices=latent_files.LAYOUTS,
        default="lhwc",
        metavar="NAME",
        help="lhwc, ncthw (diffusers), ntchw (its CogVideoX), or comfyui (default: lhwc)",
    )
    for name, kind, default in (("scale", _scales, (1.0,)), ("shift", _numbers, (0.0,))):
        add(
            f"--{name}",
            metavar="X",
            type=kind,
            default=default,
            help="multiply channels by X, or by X,X,... (default: 1)"
            if name == "scale"
            else "add X, or X,X,..., after --scale (default: 0)",
        )
    add(
        "--dtype",
        choices=tuple(tensor_stream.DTYPES),
        default="float32",
        metavar="TYPE",
        help="float32, bfloat16, or float16 (default: float32)",
    )
    video_flags.add_workers(parser)
    command_line.add_precision(parser)
    command_line.add_config(parser)
    return parser
