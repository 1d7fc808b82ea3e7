"""Reads a complete video frame by frame, and optionally its audio packets.

It serves commands that process complete files; :mod:`jaxtrain.data.video.decode` decodes.
"""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from jaxtrain.data.video import decode, frames, packets
from jaxtrain.errors import BadExample, InputError

_DEFAULT_RATE = Fraction(25)  # frames per second of a file with an unknown frame rate
_TICKS = 90_000  # per second, for frames without time stamps


class Frame(NamedTuple):
    """One frame.

    Attributes:
        pixels: uint8 [H, W, 3], upright.
        pts: display time in ticks of :attr:`Video.time_base`; strictly increasing.
    """

    pixels: np.ndarray
    pts: int


class Video:
    """A video file that can be read any number of times.

    Attributes:
        height, width: size of an upright frame, in pixels.
        rate: average number of frames per second.
        time_base: seconds per tick.
        pixel_aspect: width of a pixel of an upright frame divided by its height.
        frames: number of packets with a frame; decoding may yield a few fewer.

    Raises:
        InputError: the file is missing, has no video, or is shorter than its headers declare.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._info = packets.scan(str(path))
        except BadExample as bad:
            raise InputError(f"{bad}: pass an intact video file") from bad
        self.path = path
        info = self._info
        turned = info.rotation % 180 == 90
        self.height, self.width = (info.width, info.height) if turned else (info.height, info.width)
        with packets.open_input(str(path)) as container:
            stream = container.streams[info.stream]
            assert isinstance(stream, VideoStream)
            rate = stream.average_rate or stream.guessed_rate or _DEFAULT_RATE
            aspect = stream.sample_aspect_ratio or Fraction(1)
            base = stream.time_base
        self.rate = Fraction(rate)
        self.pixel_aspect = 1 / Fraction(aspect) if turned else Fraction(aspect)
        self.frames = info.frames
        # Without keyframes in the scan, time stamps do not determine the display order.
        self._stamped = bool(info.keyframes) and base is not None
        self.time_base = Fraction(base) if self._stamped and base else Fraction(1, _TICKS)

    def images(self) -> Iterator[Frame]:
        """Yields all frames, in order.

        Raises:
            InputError: a frame is broken, or too few frames can be decoded.
        """
        for item in self.items(sound=False):
            assert isinstance(item, Frame)
            yield item

    def count(self) -> int:
        """Returns the number of decodable frames, by decoding all of them.

        Raises:
            InputError: as :meth:`images`.
        """
        return sum(1 for _ in self._decoded(audio=False))

    def items(self, *, sound: bool) -> Iterator[Frame | av.Packet]:
        """Yields all frames, and with ``sound`` the audio packets in the order of the file.

        Raises:
            InputError: as :meth:`images`.
        """
        convert = frames.FullFrames(self._info.rotation)
        number, last = 0, -1
        for item in self._decoded(audio=sound):
            if isinstance(item, VideoFrame):
                last = self._stamp(item, number, last)
                number += 1
                yield Frame(self._converted(convert, item), last)
            else:
                yield item

    def _decoded(self, *, audio: bool) -> Iterator[VideoFrame | av.Packet]:
        try:
            yield from decode.items(str(self.path), self._info, audio=audio, threads="AUTO")
        except BadExample as bad:
            raise InputError(f"{bad}: repair or replace the file") from bad

    def _converted(self, convert: frames.FullFrames, frame: VideoFrame) -> np.ndarray:
        try:
            return convert(frame)
        except (av.FFmpegError, MemoryError) as error:
            raise InputError(
                f"{self.path}: a frame of {frame.width}x{frame.height} {frame.format.name} cannot "
                f"be converted to RGB ({packets.reason(error)}): convert the file with FFmpeg"
            ) from error

    def _stamp(self, frame: VideoFrame, number: int, last: int) -> int:
        if not self._stamped or frame.pts is None:
            ticks = round(number / self.rate / self.time_base)
        else:
            ticks = frame.pts
        return ticks if number == 0 else max(ticks, last + 1)
