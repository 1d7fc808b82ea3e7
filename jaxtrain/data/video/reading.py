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
_PRIMING_S = 0.07  # of hidden packets that are kept; AAC at 16 kHz needs 0.064
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
        start_s: when the first frame is shown or the first sound begins, in seconds.
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
            aspect = stream.sample_aspect_ratio or Fraction(1)
            base = stream.time_base
            starts = {
                track.index: track.start_time * track.time_base
                for track in (stream, *container.streams.audio)
                if track.start_time is not None and track.time_base is not None
            }
        self.rate = Fraction(info.fps).limit_denominator(1001) or _DEFAULT_RATE
        # Before 0 is what an edit list hides, such as the first samples of AAC.
        self.start_s = max(Fraction(0), min(starts.values(), default=Fraction(0)))
        self._first_s = max(Fraction(0), starts.get(info.stream, self.start_s) - self.start_s)
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

        Time starts at 0: a transport stream has the clock of its sender, such as 20 hours. If that
        clock jumps back, because two recordings were joined, the second one follows the first.

        Raises:
            InputError: as :meth:`images`.
        """
        convert = frames.FullFrames(self._info)
        clocks: dict[int, _Clock] = {}
        number, last = 0, -1
        for item in self._decoded(audio=sound):
            if isinstance(item, VideoFrame):
                last = self._stamp(item, number, last)
                number += 1
                yield Frame(self._converted(convert, item), last)
            else:
                clocks.setdefault(item.stream_index, _Clock(item, self.start_s)).set(item)
                if not _is_hidden(item):
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
            ticks = round((self._first_s + number / self.rate) / self.time_base)
        else:
            ticks = frame.pts - round(self.start_s / self.time_base)
        return ticks if number == 0 else max(ticks, last + 1)


def _is_hidden(packet: av.Packet) -> bool:
    """Returns whether an edit list hides a packet, except those just before the first that is
    heard, which AAC's decoder needs. Matroska would play it.
    """
    if not packet.is_discard or packet.pts is None or packet.time_base is None:
        return False
    if int(av.__version__.split(".")[0]) >= 19:  # its FFmpeg tells Matroska what to skip
        return False
    return float((packet.pts + (packet.duration or 0)) * packet.time_base) < -_PRIMING_S


class _Clock:
    """Shifts the time stamps of an audio stream, which must not jump back."""

    def __init__(self, first: av.Packet, start_s: Fraction) -> None:
        self._shift = -round(start_s / (first.time_base or 1))
        self._last: int | None = None
        self._end = 0

    def set(self, packet: av.Packet) -> None:
        """Changes the time stamps of the next packet."""
        assert packet.dts is not None, "packets without time stamps are skipped"
        if self._last is not None and packet.dts < self._last:
            self._shift = self._end - packet.dts
        self._last = packet.dts
        packet.dts += self._shift
        if packet.pts is not None:
            packet.pts += self._shift
        self._end = packet.dts + (packet.duration or 0)
