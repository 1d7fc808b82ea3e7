"""Decodes the latents that jaxtrain encode wrote to a video.

SOURCE is a checkpoint, a run directory, a weights file, or hf:ORG/MODEL on the
Hugging Face Hub: the model that encoded the video, or one with the same
latents. The video has the average frame rate of the original, and no sound.
"""

import argparse
import re
from fractions import Fraction
from pathlib import Path

from jaxtrain import terminal
from jaxtrain.cli import command_line, encode, video_flags
from jaxtrain.config import invocation
from jaxtrain.data.video import writing
from jaxtrain.data.video.reading import Picture
from jaxtrain.errors import InputError
from jaxtrain.inference import video
from jaxtrain.interop import hub
from jaxtrain.storage import tensor_stream

_LARGEST = 2**31 - 1  # largest number of frames, and of pixels per side
_MOST_DIGITS = 40  # int() has its own limit, and is slow below it


def main(arguments: list[str]) -> int:
    """Runs the command.

    Raises:
        InputError: wrong use, or a file that cannot be read or written.
    """
    flags = command_line.parse_all(_parser(), arguments)
    if flags is None:
        return 0
    writing.check_path(flags.target)
    video_flags.check_crf(flags.crf)
    shape, about, rows = tensor_stream.read(flags.latents, encode.ARRAY)
    told = _told(about, flags.latents)
    model = video.Autoencoder(
        hub.local(flags.source), flags.precision, command="decode", preview=flags.preview
    )
    _check(model, shape, told, flags.latents)
    timing = model.model.timing
    wanted = timing.shown(told["frames"])
    rate = _ratio(about["fps"]) * timing.growth / timing.factor
    progress = video_flags.Counter(wanted)
    with (
        command_line.cleaning_up(),
        writing.writing(
            flags.target,
            rate=rate,
            time_base=1 / rate,
            pixel_aspect=_ratio(about["pixel_aspect"]),
            crf=flags.crf,
        ) as writer,
    ):
        pictures = model.decoded(rows, height=told["height"], width=told["width"], count=shape[0])
        for number, pixels in zip(range(wanted), pictures, strict=False):
            padded = video.even(*pixels.shape[:2])(pixels)
            writer.add(Picture(padded, number))
            progress.one()
    size = f"{padded.shape[1]}x{padded.shape[0]}"
    if padded.shape != pixels.shape:
        terminal.out(
            f"padded {pixels.shape[1]}x{pixels.shape[0]} to {size} by repeating the edges: "
            "H.264 requires even sizes"
        )
    terminal.out(f"wrote {progress.line()} of {size} to {flags.target}")
    return 0


def _preview(text: str) -> tuple[int, int]:
    """Parses ``--preview``."""
    if not re.fullmatch(r"[0-9]{1,3}x[0-9]{1,3}", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"{text!r}: use two numbers such as 1x2: frames per latent, divisor of height and width"
        )
    frames, shrink = text.split("x")
    return int(frames), int(shrink)


def _told(about: dict[str, str], path: Path) -> dict[str, int]:
    """Reads the numbers in the metadata of a latents file."""
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
        told = {name: _number(name, about[name]) for name in names}
        if min(told[name] for name in names[:3]) < 1:
            raise ValueError("frames, height and width must be above 0")
        if min(told[name] for name in names[3:]) < 0:
            raise ValueError("padding_bottom and padding_right must not be below 0")
    except (ValueError, ZeroDivisionError) as error:
        raise InputError(
            f"{path}: its video metadata is invalid: {error}: encode the video again"
        ) from error
    return told


def _number(name: str, text: str) -> int:
    if len(text) > _MOST_DIGITS or int(text) > _LARGEST:
        shown = text[:20] + "..." * (len(text) > 20)
        raise ValueError(f"{name} is {shown!a}, and the limit is {_LARGEST:,}")
    return int(text)


def _ratio(text: str) -> Fraction:
    """Parses a ratio, such as 30000/1001."""
    # Fraction itself would compute the digits of "1e999999999".
    if not re.fullmatch(r"\d{1,10}(/\d{1,10})?", text, re.ASCII):
        raise ValueError(f"{text[:40]!r} is not a ratio such as 30000/1001")
    return Fraction(text)


def _check(
    model: video.Autoencoder, shape: tuple[int, ...], told: dict[str, int], path: Path
) -> None:
    """Refuses latents of another model, or too few of them."""
    factor = model.model.space_factor
    height, width = (
        told["height"] + told["padding_bottom"],
        told["width"] + told["padding_right"],
    )
    wanted = (height // factor, width // factor, model.model.latent_channels)
    if shape[1:] != wanted or height % factor or width % factor:
        raise InputError(
            f"{path} has latents {list(shape)} of a {width}x{height} video, but "
            f"{model.source} uses {model.model.latent_channels} channels per {factor}x{factor} "
            "pixels: pass the model that encoded the video"
        )
    if shape[0]:
        try:
            model.model.timing.check_latents(shape[0])
        except InputError as error:
            raise InputError(f"{path}: {error}") from error
    if shape[0] == 0 or model.model.timing.decoded(shape[0]) < model.model.timing.shown(
        told["frames"]
    ):
        raise InputError(
            f"{path} has {shape[0]} latents, too few for {told['frames']} frames of "
            f"{model.source} (model.trim={model.model.trim}): pass the model that encoded the video"
        )


def _parser() -> argparse.ArgumentParser:
    usage = "jaxtrain decode SOURCE IN.safetensors OUT.mp4 [--preview FxS] [--crf N]"
    parser = command_line.bare_parser("decode", usage, __doc__)
    add = parser.add_argument
    add(
        "source",
        metavar="SOURCE",
        type=command_line.named_file,
        help="the autoencoder: a checkpoint, run, weights file or hf:ORG/MODEL",
    )
    add(
        "latents",
        metavar="IN",
        type=command_line.named_file,
        help="latents that jaxtrain encode wrote",
    )
    add("target", metavar="OUT", type=command_line.named_file, help="the video to write")
    add(
        "--preview",
        metavar="FxS",
        type=_preview,
        help="F frames per latent, 1/S of height and width: 1x2 is a small, fast preview",
    )
    video_flags.add_crf(parser)
    command_line.add_precision(parser)
    return parser
