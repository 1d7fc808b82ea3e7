"""Encodes and decodes a video of any length, with only a few frames in memory.

SOURCE is a checkpoint, a run directory, a weights file, a run in a bucket
(s3://BUCKET/PATH), or hf:ORG/MODEL on the Hugging Face Hub. The result has the
frames, timestamps, and size of the original; the audio is copied unchanged.
"""

import argparse
import collections
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import av
import numpy as np

from jaxtrain import terminal
from jaxtrain.cli import command_line, video_flags
from jaxtrain.data.video import writing
from jaxtrain.data.video.reading import Frame, Video
from jaxtrain.data.video.writing import Writer

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
    video_flags.check_present(flags.video, "a video")
    writing.check_path(flags.target)
    video_flags.check_apart(flags.video, flags.target)
    video_flags.check_crf(flags.crf)
    video = Video(flags.video)
    model = video_flags.autoencoder(flags, "reconstruct")
    with command_line.cleaning_up():
        _reconstruct(model, video, flags.target, flags)
    return 0


def _reconstruct(
    model: "Autoencoder", video: Video, target: Path, flags: argparse.Namespace
) -> None:
    from jaxtrain.inference import video as autoencoding

    # Only this rule depends on the number of latents.
    exact = model.model.trim == "odd_latents"
    latents = model.model.timing.needed(video.count()) if exact else None
    originals: collections.deque[Frame] = collections.deque()
    sound = None if flags.no_audio else video
    counter = video_flags.Counter(video.frames)
    with writing.writing(
        target,
        rate=video.rate,
        time_base=video.time_base,
        pixel_aspect=video.pixel_aspect,
        crf=flags.crf,
        sound_of=sound,
    ) as writer:
        images = _images(video, originals, writer, sound=sound is not None)
        height, width = video.height, video.width
        found = model.decoded(model.encoded(images), height=height, width=width, count=latents)
        for pixels in found:
            if not originals:
                break  # the last latent may decode to more frames than were encoded
            original = originals.popleft()
            shown = _beside(original.pixels, pixels) if flags.side_by_side else pixels
            padding = autoencoding.even(*shown.shape[:2])
            writer.add(Frame(padding(shown), original.pts))
            counter.one()
    out_height, out_width = shown.shape[0] + padding.bottom, shown.shape[1] + padding.right
    if padding != autoencoding.Padding(0, 0):
        terminal.out(
            f"padded {shown.shape[1]}x{shown.shape[0]} to {out_width}x{out_height} by repeating "
            "the edges: H.264 requires even sizes"
        )
    terminal.out(f"wrote {counter.line()} of {out_width}x{out_height} to {target}")


def _images(
    video: Video, originals: collections.deque[Frame], writer: Writer, *, sound: bool
) -> Iterator[np.ndarray]:
    """Yields the pixels of each frame; queues the frames, and copies the audio to the writer."""
    for item in video.items(sound=sound):
        if isinstance(item, av.Packet):
            writer.copy(item)
        else:
            originals.append(item)
            yield item.pixels


def _beside(original: np.ndarray, reconstruction: np.ndarray) -> np.ndarray:
    return np.concatenate([original, reconstruction], axis=1)


def _parser() -> argparse.ArgumentParser:
    usage = "jaxtrain reconstruct SOURCE IN OUT.mp4 [--side-by-side] [flags]"
    parser = command_line.bare_parser("reconstruct", usage, __doc__)
    add = parser.add_argument
    add(
        "source",
        metavar="SOURCE",
        type=command_line.named_file,
        help="the autoencoder: a checkpoint, run, weights file, or hf:ORG/MODEL",
    )
    add("video", metavar="IN", type=command_line.named_file, help="the video to reconstruct")
    add("target", metavar="OUT", type=command_line.named_file, help="the video to write")
    add("--side-by-side", action="store_true", help="put the original on the left")
    add("--no-audio", action="store_true", help="do not copy the audio")
    video_flags.add_crf(parser)
    command_line.add_precision(parser)
    command_line.add_config(parser)
    return parser
