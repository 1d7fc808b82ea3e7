"""Reads a complete video frame by frame, and optionally its audio packets.

It serves commands that process complete files, which must be intact;
:mod:`jaxtrain.data.video.reader` decodes.
"""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import av
import numpy as np
from av.video.frame import VideoFrame

from jaxtrain.data.video import frames
from jaxtrain.data.video.reader import Break, Reader, reason
from jaxtrain.data.video.reader import Frame as Stored
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
        height, width: size of the first upright frame, in pixels.
        rate: number of frames per second, as declared or as the first ones come.
        start_s: when the first frame is shown or the first sound begins, in seconds.
        pixel_aspect: width of a pixel of an upright frame divided by its height.
        frames: number of frames that the headers let expect.

    Raises:
        InputError: the file is missing, or has no video.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        video = Reader(str(path))
        try:
            look = next(item.look for item in video if isinstance(item, Stored))
        except BadExample as bad:
            raise InputError(f"{bad}: pass an intact video file") from bad
        self.height, self.width, self.pixel_aspect = look.height, look.width, look.pixel_aspect
        self.rate = video.rate or _DEFAULT_RATE
        self.start_s, self._first_s = video.start_s, video.first_s
        self.frames = video.frames
        self._shift = 0  # of the time stamps, in ticks
        self._stamped = video.time_base is not None
        self.time_base = video.time_base or Fraction(1, _TICKS)

    def images(self) -> Iterator[Frame]:
        """Yields all frames, in order.

        Raises:
            InputError: a frame is broken, or too few frames can be decoded.
        """
        for item in self.items(sound=False):
            assert isinstance(item, Frame)
            yield item

    def count(self) -> int:
        """Returns the number of decodable frames, by decoding all of them."""
        return sum(1 for _ in self._decoded(sound=False))

    def items(self, *, sound: bool) -> Iterator[Frame | av.Packet]:
        """Yields all frames, and with ``sound`` the audio packets in the order of the file.

        Time starts at 0: a transport stream has the clock of its sender, such as 20 hours. If that
        clock jumps back, because two recordings were joined, the second one follows the first.
        """
        graph = frames.FilterGraph()
        clocks: dict[int, _Clock] = {}
        number, last, self._shift = 0, -1, 0
        for item in self._decoded(sound=sound):
            if isinstance(item, Stored):
                last = self._stamp(item, number, last)
                number += 1
                yield Frame(self._converted(graph, item.picture), last)
            else:
                clocks.setdefault(item.stream_index, _Clock(item, self.start_s)).set(item)
                if not _is_hidden(item):
                    yield item

    def _decoded(self, *, sound: bool) -> Iterator[Stored | av.Packet]:
        number = 0
        try:
            for item in Reader(str(self.path), sound=sound, threads="AUTO"):
                if not isinstance(item, Break):
                    number += isinstance(item, Stored)
                    yield item
                elif item.reason and number:
                    raise BadExample(str(self.path), f"{item.reason}, behind frame {number - 1:,}")
        except BadExample as bad:
            raise InputError(f"{bad}: repair or replace the file") from bad

    def _converted(self, graph: frames.FilterGraph, frame: VideoFrame) -> np.ndarray:
        """Returns a frame as RGB, in the size of the first one."""
        size = self.height, self.width
        try:
            return graph(frame, lambda frame: frames.complete(frame, *size)).to_ndarray()
        except (av.FFmpegError, MemoryError) as error:
            raise InputError(
                f"{self.path}: a frame of {frame.width}x{frame.height} {frame.format.name} cannot "
                f"be converted to RGB ({reason(error)}): convert the file with FFmpeg"
            ) from error

    def _stamp(self, frame: Stored, number: int, last: int) -> int:
        usual = round(1 / (self.rate * self.time_base))
        if not self._stamped or frame.pts is None:
            ticks = round((self._first_s + number / self.rate) / self.time_base)
        else:
            ticks = frame.pts - round(self.start_s / self.time_base) + self._shift
            if number and ticks < last - 2 * usual:  # another recording
                self._shift += last + usual - ticks
                ticks = last + usual
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
