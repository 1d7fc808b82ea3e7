"""``jaxtrain reconstruct``: encodes and decodes a video."""

import collections
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import av
import numpy as np

from jaxtrain import terminal
from jaxtrain.cli import command_line, commands, video_flags
from jaxtrain.data.video import writing
from jaxtrain.data.video.reading import Frame, Video
from jaxtrain.data.video.writing import Writer

if TYPE_CHECKING:
    from jaxtrain.inference.video import Autoencoder


def main(flags: commands.Reconstruct) -> int:
    """Runs the command.

    Raises:
        InputError: wrong use, or a file that cannot be read or written.
    """
    video_flags.check_present(flags.video, "a video")
    writing.check_path(flags.target)
    video_flags.check_apart(flags.video, flags.target)
    video = Video(flags.video)
    model = video_flags.autoencoder(flags, "reconstruct")
    with command_line.cleaning_up():
        _reconstruct(model, video, flags.target, flags)
    return 0


def _reconstruct(
    model: "Autoencoder", video: Video, target: Path, flags: commands.Reconstruct
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
