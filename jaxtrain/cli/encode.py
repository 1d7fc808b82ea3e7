"""Encodes a video to latents: an array `latents` [L, h, w, C] in a .safetensors file.

SOURCE is a checkpoint, a run directory, a weights file, or hf:ORG/MODEL on the
Hugging Face Hub. The metadata of OUT records the model, and the number of
frames, the size, the padding and the average frame rate of the video; jaxtrain
decode turns OUT back into a video. If the decoder drops its first frames, an
extra latent keeps the last frames.
"""

import argparse
import json
from collections.abc import Iterator

import numpy as np

from jaxtrain import config, terminal
from jaxtrain.cli import command_line, video_flags
from jaxtrain.data.video.reading import Video
from jaxtrain.errors import InputError
from jaxtrain.inference import video as autoencoding
from jaxtrain.interop import hub, weights
from jaxtrain.storage import atomic, tensor_stream

ARRAY = "latents"


def main(arguments: list[str]) -> int:
    """Runs the command.

    Raises:
        InputError: wrong use, or a file that cannot be read or written.
    """
    flags = command_line.parse_all(_parser(), arguments)
    if flags is None:
        return 0
    if flags.target.suffix != ".safetensors":
        raise InputError(
            f"{flags.target} does not end with .safetensors: latents are written in this format"
        )
    atomic.check_writable("OUT", flags.target)
    video = Video(flags.video)
    model = autoencoding.Autoencoder(hub.local(flags.source), flags.precision, command="encode")
    with command_line.cleaning_up():
        _encode(model, video, flags)
    return 0


def _encode(model: autoencoding.Autoencoder, video: Video, flags: argparse.Namespace) -> None:
    padding = model.padding(video.height, video.width)
    about = {
        "fps": str(video.rate),
        "height": str(video.height),
        "width": str(video.width),
        "padding_bottom": str(padding.bottom),
        "padding_right": str(padding.right),
        "pixel_aspect": str(video.pixel_aspect),
        weights.ABOUT: json.dumps(config.to_dict(model.model)),
    }
    told = video_flags.Counter(video.frames)
    frames, first, off_s = 0, 0, 0.0

    def pixels() -> Iterator[np.ndarray]:
        nonlocal frames, first, off_s
        for picture in video.pictures():
            first = first if frames else picture.pts
            at_s = (picture.pts - first) * video.time_base
            off_s = max(off_s, abs(float(at_s - frames / video.rate)))
            frames += 1
            yield picture.pixels
            told.one()

    with tensor_stream.writing(flags.target, ARRAY, flags.dtype, about) as rows:
        for latent in autoencoding.fetched(model.encoded(pixels())):
            rows.add(latent)
            shape = (rows.count, *latent.shape)
        about["frames"] = str(frames)
    if off_s > 0.5 / video.rate:
        terminal.out(
            f"{flags.video} has a variable frame rate: only the average of {float(video.rate):.5g} "
            f"frames per second is kept, so jaxtrain decode shifts frames by up to {off_s:.2g} s"
        )
    terminal.out(f"{told.line()} to {ARRAY} {'x'.join(map(str, shape))} in {flags.target}")


def _parser() -> argparse.ArgumentParser:
    usage = "jaxtrain encode SOURCE IN OUT.safetensors [--dtype TYPE] [--precision TYPE]"
    parser = command_line.bare_parser("encode", usage, __doc__)
    add = parser.add_argument
    add(
        "source",
        metavar="SOURCE",
        type=command_line.named_file,
        help="the autoencoder: a checkpoint, run, weights file, or hf:ORG/MODEL",
    )
    add("video", metavar="IN", type=command_line.named_file, help="the video to encode")
    add(
        "target", metavar="OUT", type=command_line.named_file, help="the .safetensors file to write"
    )
    add(
        "--dtype",
        choices=tuple(tensor_stream.DTYPES),
        default="float32",
        help="type in which the latents are stored (default: float32)",
    )
    command_line.add_precision(parser)
    return parser
