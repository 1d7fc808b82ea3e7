"""Reading a video from its first to its last frame, with the memory of a few, and its sound beside.

Clips for training are cut by :mod:`jaxtrain.data.video.decode`; this serves the tools that take a
whole file. The same rule decides what is broken: a frame with FFmpeg's corrupt flag, a decoder
that raises, or too few frames.
"""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from jaxtrain.data.video import frames, packets
from jaxtrain.errors import BadExample, InputError

_USUAL_RATE = Fraction(25)  # frames a second where a file does not tell
_COUNTED = 90_000  # ticks a second where frames carry no time


class Picture(NamedTuple):
    """One frame.

    Attributes:
        pixels: uint8 [H, W, 3], upright.
        pts: when it is shown, in ticks of :attr:`Video.time_base`; each later than the one before.
    """

    pixels: np.ndarray
    pts: int


class Video:
    """A video file that can be read from the beginning, as often as one likes.

    Args:
        path: of the file.

    Attributes:
        height, width: of a picture, upright, in pixels.
        rate: frames a second, on average.
        time_base: seconds a tick.
        pixel_aspect: width of a pixel over its height, upright.
        frames: as the packets promise; decoding may give a few fewer.

    Raises:
        InputError: there is no such file, no video in it, or it is shorter than it promises.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._info = packets.scan(str(path))
        except BadExample as bad:
            raise InputError(f"{bad}; name a whole video file") from bad
        self.path = path
        info = self._info
        turned = info.rotation % 180 == 90
        self.height, self.width = (info.width, info.height) if turned else (info.height, info.width)
        with packets.open_input(str(path)) as container:
            stream = self._stream(container)
            rate = stream.average_rate or stream.guessed_rate or _USUAL_RATE
            aspect = stream.sample_aspect_ratio or Fraction(1)
            base = stream.time_base
        self.rate = Fraction(rate)
        self.pixel_aspect = 1 / Fraction(aspect) if turned else Fraction(aspect)
        self.frames = info.frames
        # Without keyframes in the index, time stamps do not tell the order of display.
        self._stamped = bool(info.keyframes) and base is not None
        self.time_base = Fraction(base) if self._stamped and base else Fraction(1, _COUNTED)

    def pictures(self) -> Iterator[Picture]:
        """All frames, in order.

        Raises:
            InputError: a frame is broken, or too few come.
        """
        for item in self.items(sound=False):
            assert isinstance(item, Picture)
            yield item

    def count(self) -> int:
        """Frames that decoding gives; decodes all of them.

        Raises:
            InputError: as :meth:`pictures`.
        """
        with packets.open_input(str(self.path)) as container:
            return sum(1 for _ in self._decoded(container, [self._stream(container)]))

    def items(self, *, sound: bool) -> Iterator[Picture | av.Packet]:
        """All frames, and between them the packets of the sound as they lie in the file.

        Raises:
            InputError: as :meth:`pictures`.
        """
        convert = frames.WholeFrames(self._info.rotation)
        number, last = 0, -1
        with packets.open_input(str(self.path)) as container:
            streams: list[Any] = [self._stream(container)]
            streams += container.streams.audio if sound else []
            for item in self._decoded(container, streams):
                if not isinstance(item, VideoFrame):
                    yield item
                    continue
                last = self._stamp(item, number, last)
                number += 1
                yield Picture(self._converted(convert, item), last)

    def _converted(self, convert: frames.WholeFrames, frame: VideoFrame) -> np.ndarray:
        try:
            return convert(frame)
        except (av.FFmpegError, MemoryError) as error:
            raise InputError(
                f"{self.path}: a frame of {frame.width}x{frame.height} {frame.format.name} cannot "
                f"be converted to RGB ({packets.reason(error)}): convert the file with FFmpeg"
            ) from error

    def _stream(self, container: av.container.InputContainer) -> VideoStream:
        stream = container.streams[self._info.stream]
        assert isinstance(stream, VideoStream)
        stream.thread_type = "AUTO"
        return packets.limit_pixels(stream)

    def _stamp(self, frame: VideoFrame, number: int, last: int) -> int:
        if not self._stamped or frame.pts is None:
            ticks = round(number / self.rate / self.time_base)
        else:
            ticks = frame.pts
        return ticks if number == 0 else max(ticks, last + 1)

    def _decoded(
        self, container: av.container.InputContainer, streams: list[Any]
    ) -> Iterator[VideoFrame | av.Packet]:
        """Frames, and packets of the other streams."""
        video = streams[0]
        packets.flag_corrupt(video)
        came = 0
        try:
            for packet in container.demux(streams):
                if packet.stream_index != video.index:
                    if packet.size and packet.dts is not None:
                        yield packet
                    continue
                for frame in video.codec_context.decode(packet) if packet.size else ():
                    came = self._counted(frame, came)
                    yield frame
            for frame in video.codec_context.decode(None):  # those that it held back
                came = self._counted(frame, came)
                yield frame
        except (av.FFmpegError, OSError) as error:
            raise InputError(
                f"{self.path}: decoding fails after {came} of {self.frames} frames "
                f"({packets.reason(error)}); mend the file"
            ) from error
        if came == 0 or packets.too_few(self.frames - came, self.frames):
            raise InputError(
                f"{self.path}: only {came} of {self.frames} frames can be decoded; mend the file"
            )

    def _counted(self, frame: VideoFrame, came: int) -> int:
        if frame.is_corrupt:
            raise InputError(f"{self.path}: frame {came} is corrupt; mend the file")
        return came + 1
