"""A video to its latents: an array `latents` [L, h, w, C] in a .safetensors file.

SOURCE is a checkpoint, a run's directory or a weights file. The file also says the video's frames,
size and average frame rate, what was added to the size, and which model it needs; jaxtrain decode
reads it, and writes frames at that rate without sound.
Where the decoder drops its first frames, one more latent may follow for the last frames' sake.
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
from jaxtrain.interop import weights
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
        raise InputError(f"{flags.target}: latents are written as .safetensors")
    atomic.check_writable("OUT", flags.target)
    video = Video(flags.video)
    model = autoencoding.Autoencoder(flags.source, flags.precision, command="encode")
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
            f"{flags.video} has uneven times: the file keeps the average rate alone, so jaxtrain "
            f"decode shows frames up to {off_s:.2g} s earlier or later ({float(video.rate):.5g} a "
            "second)"
        )
    terminal.out(f"{told.line()} to {ARRAY} {'x'.join(map(str, shape))}, written to {flags.target}")


def _parser() -> argparse.ArgumentParser:
    usage = "jaxtrain encode SOURCE IN OUT.safetensors [--dtype TYPE] [--precision TYPE]"
    parser = command_line.bare_parser("encode", usage, __doc__)
    add = parser.add_argument
    add("source", metavar="SOURCE", type=command_line.named_file, help="the autoencoder")
    add("video", metavar="IN", type=command_line.named_file, help="a video")
    add("target", metavar="OUT", type=command_line.named_file, help="where latents are written")
    add(
        "--dtype",
        choices=tuple(tensor_stream.DTYPES),
        default="float32",
        help="what the latents are stored as (float32)",
    )
    command_line.add_precision(parser)
    return parser
