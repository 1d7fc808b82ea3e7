"""Scans the packets of a video file and decodes only its first frame.

A file is broken if more than two frames *and* more than 2% of the frames that its headers declare
are missing. Intact files may lack a frame or two.
"""

import bisect
import contextlib
import os
import stat
from collections.abc import Iterator
from typing import Any, NamedTuple

import av
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from jaxtrain.errors import BadExample
from jaxtrain.storage import disks

SLACK_FRAMES = 2
SLACK_SHARE = 0.02
_CONSTANT_RATE = 0.95  # least fraction of regular gaps between frames at a constant frame rate
_ANY_TEXT: Any = {"metadata_errors": "ignore"} if int(av.__version__.split(".")[0]) < 19 else {}
MAX_PIXELS = 139_264 * 256
"""Largest number of pixels per frame: the limit of H.264 (table A-1), HEVC and AV1 up to level 6.2,
somewhat above 8K (7680x4320). A few kilobytes of PNG can declare billions."""
FORMATS = (
    *("asf", "avi", "flv", "live_flv", "matroska", "mov", "mpeg", "mpegts", "mxf", "ogg"),
    *("dv", "gif", "h264", "hevc", "ivf", "m4v", "mpegvideo", "yuv4mpegpipe"),
    *("jpeg_pipe", "png_pipe", "webp_pipe"),  # one image
)
"""FFmpeg's names of the formats that are read, whatever the suffix; none refers to other files."""
OPTIONS = {
    # Without it, decoders would decode frames of any size to guess a stream's parameters.
    "max_pixels": str(MAX_PIXELS),
    # A file of another format, such as a playlist (ffconcat), could open other files. 220 kB can
    # name one of them 20,000 times, whose scan takes minutes.
    "format_whitelist": ",".join(FORMATS),
    "protocol_whitelist": "file",
    # While a file is opened, each video stream has a decoder, which holds three frames of the
    # largest size (measured: 80 MiB for a PNG stream). Movies have up to about 30 streams,
    # including audio and subtitles.
    "max_streams": "32",
}
_MAX_ASPECT = 16  # of a pixel, either way; anamorphic video has up to 2
_FIRST_FRAME = 128  # packets from which an intact file yields its first frame
_VP8_SHOWN = 0x10  # bit in a VP8 packet's first byte (RFC 6386, 9.1), unset for hidden frames


class Keyframe(NamedTuple):
    """A frame at which decoding can start.

    Attributes:
        pts: time stamp in the stream's time base.
        frame: number of the frame in display order.
    """

    pts: int
    frame: int


class Span(NamedTuple):
    """A video that is part of another file.

    Attributes:
        file: the other file, such as a tar.
        offset: start of the video, in bytes.
        size: size of the video, in bytes.
    """

    file: str
    offset: int
    size: int


class Scan(NamedTuple):
    """Properties of a video from its packets and its first frame.

    Attributes:
        stream: index of the selected video stream.
        frames: number of packets that show a frame.
        width, height: size of a stored frame, before rotation, in pixels.
        rotation: degrees counterclockwise by which stored frames must be turned: 0, 90, 180 or 270.
        pixel_aspect: width of a stored pixel divided by its height.
        fps: frames per second; 0 if unknown.
        keyframes: the keyframes in display order; empty if packets lack distinct time stamps, in
            which case decoding starts at the beginning.
    """

    stream: int
    frames: int
    width: int
    height: int
    rotation: int
    pixel_aspect: float
    fps: float
    keyframes: tuple[Keyframe, ...]


class _Packets:
    """Statistics of a file's packets; ``video`` is the selected stream."""

    def __init__(self, video: VideoStream) -> None:
        self.video = video
        self.total = 0  # all packets of the stream, which is the count that containers declare
        self.shown: list[int | None] = []  # time stamps of packets that show a frame
        self.keys: list[int | None] = []
        self.end_s = 0.0  # of the last packet of the stream
        self.any_end_s = 0.0  # of the last packet of any stream

    def add(self, packet: av.Packet) -> None:
        end_s = 0.0
        if packet.pts is not None and packet.time_base is not None:
            end_s = float((packet.pts + (packet.duration or 0)) * packet.time_base)
        self.any_end_s = max(self.any_end_s, end_s)
        if packet.stream_index != self.video.index:
            return
        self.total += 1
        self.end_s = max(self.end_s, end_s)
        if shows_frame(packet, self.video):
            self.shown.append(packet.pts)
        if packet.is_keyframe:
            self.keys.append(packet.pts)


def shows_frame(packet: av.Packet, stream: VideoStream) -> bool:
    """Returns whether the packet has a visible frame, neither hidden nor before an edit's start."""
    if packet.is_discard:
        return False
    return stream.codec_context.name != "vp8" or bool(bytes(packet)[0] & _VP8_SHOWN)


@contextlib.contextmanager
def open_input(path: str, span: Span | None = None) -> Iterator[InputContainer]:
    """Opens a file, or part of one, for reading; its metadata may be in any encoding.

    Raises:
        DiskAway, BadExample: the system cannot read the file, now or at all; at the end of the
            block at the latest.
    """
    source = _Source(path, span)
    try:
        # By default, PyAV 18 raises on metadata that is not UTF-8; PyAV 19 has no such setting.
        with av.open(source, options=OPTIONS, **_ANY_TEXT) as container:
            yield container
    finally:
        source.close()
        if source.error is not None:
            raise source.error


class _Source:
    """Reads a file, or part of one, for FFmpeg, which takes some errors for the end of the file.

    Attributes:
        name: for FFmpeg.
        error: the first error of the system.
    """

    def __init__(self, path: str, span: Span | None) -> None:
        self.name = local(path)
        self.error: Exception | None = None
        self._path = path
        self._file = path if span is None else span.file
        try:
            self._descriptor = os.open(self._file, os.O_RDONLY)
            size = os.fstat(self._descriptor).st_size
        except OSError as error:
            raise disks.unreadable(path, error, existed=True) from error
        self._begin, self._size = (0, size) if span is None else (span.offset, span.size)
        self._at = 0

    def read(self, size: int) -> bytes:
        """Returns the next bytes; none at the end."""
        size = max(0, min(size, self._size - self._at))
        try:
            data = os.pread(self._descriptor, size, self._begin + self._at)
        except OSError as error:
            self.error = self.error or disks.unreadable(self._path, error, existed=True)
            raise self.error from error
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Moves to a byte, and returns its number."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        """Returns the number of the next byte."""
        return self._at

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def local(path: str) -> str:
    """Returns a path for FFmpeg, to which ``12:30.mp4`` or ``concat:a|b`` would be a URL."""
    return f"file:{os.path.abspath(path)}"


def scan(path: str, span: Span | None = None) -> Scan:
    """Reads all packets of a file and decodes its first frame.

    Args:
        path: the file; only used in messages if ``span`` is set.
        span: the place of the video in another file.

    Raises:
        BadExample: the file is missing, has no video, or is shorter than its headers declare.
        DiskAway: its disk is temporarily unavailable.
    """
    if span is None:
        _check_file(path)
    elif span.size == 0:
        raise BadExample(path, "is empty")
    try:
        with open_input(path, span) as container:
            return _scan(path, container)
    except MemoryError as error:  # FFmpeg also raises it for too many streams
        streams = OPTIONS["max_streams"]
        text = f"cannot be read: it has more than {streams} streams, or needs too much memory"
        raise BadExample(path, text) from error
    except av.ArgumentError as error:  # of FFmpeg, for a format that is not in FORMATS
        text = "cannot be read: its format is damaged or not supported: convert it to .mp4"
        raise BadExample(path, text) from error
    except av.FFmpegError as error:
        raise BadExample(path, f"cannot be read: {reason(error)}") from error


def _check_file(path: str) -> None:
    try:
        status = os.stat(path)
    except OSError as error:
        raise disks.unreadable(path, error) from error
    except ValueError as error:  # a NUL in the name, from a list
        raise BadExample(path, f"is not a valid file name: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise BadExample(path, "is not a file")
    if status.st_size == 0:
        raise BadExample(path, "is empty")


def _scan(path: str, container: InputContainer) -> Scan:
    stream = _best(path, container)
    check_size(path, stream.width, stream.height)
    declared = stream.frames or 0
    # Without a declared count, the container's duration is checked, which any stream may fill.
    others = [s for s in container.streams if s.type in ("video", "audio")]
    streams = [stream] if declared else others
    packets, first, decoded = _Packets(stream), None, 0
    for packet in container.demux(streams):
        if not packet.size:
            continue  # marks the end of a stream
        packets.add(packet)
        if first is None and packet.stream_index == stream.index and decoded < _FIRST_FRAME:
            decoded += 1
            first = _first_frame(path, stream, packet)
    if not packets.shown:
        raise BadExample(path, "has no video packets")
    if first is None:
        first = _first_frame(path, stream, None)
    if first is None:
        raise BadExample(path, f"has {packets.total} video packets, but none yields a frame")
    check_size(path, first.width, first.height)
    fps = float(stream.average_rate or stream.guessed_rate or 0)
    _check_length(path, container, packets, declared, fps)
    aspect = float(stream.sample_aspect_ratio or 1)
    if not 1 / _MAX_ASPECT <= aspect <= _MAX_ASPECT:
        raise BadExample(path, f"has pixels {aspect:.4g} times as wide as high")
    return Scan(
        stream=stream.index,
        frames=len(packets.shown),
        width=first.width,
        height=first.height,
        rotation=round(first.rotation / 90) * 90 % 360,
        pixel_aspect=aspect,
        fps=fps,
        keyframes=_keyframes(packets, container.format.name),
    )


def _first_frame(path: str, stream: VideoStream, packet: av.Packet | None) -> VideoFrame | None:
    """Returns the first frame decoded from a packet, if there is one."""
    try:
        return next(iter(stream.codec_context.decode(packet)), None)
    except av.ArgumentError as error:  # FFmpeg raises it for a frame above the limit
        text = f"its frames are damaged, or have more than {MAX_PIXELS:,} pixels"
        raise BadExample(path, f"cannot be decoded: {text}") from error


def _check_length(
    path: str, container: InputContainer, packets: _Packets, declared: int, fps: float
) -> None:
    """Raises BadExample if the packets end well before the length that the headers declare.

    A declared frame count is compared with the packets. Edit lists make intact files shorter than
    that, so the declared duration must be missing as well. Without a count, the duration is
    compared, and the time stamps are checked for gaps.
    """
    stream = packets.video
    start = float((stream.start_time or 0) * (stream.time_base or 0))
    if stream.duration and stream.time_base:
        declared_s, end_s = start + float(stream.duration * stream.time_base), packets.end_s
    elif container.duration:
        declared_s, end_s = container.duration / av.time_base, packets.any_end_s
    else:
        declared_s, end_s = 0.0, 0.0
    checks = []
    if declared:
        text = f"{packets.total} of {declared} declared frames"
        checks.append((too_few(declared - packets.total, declared), text))
    if declared_s and fps:
        missing, expected = round((declared_s - end_s) * fps), round(declared_s * fps)
        text = f"{end_s:.2f} of {declared_s:.2f} declared seconds"
        checks.append((too_few(missing, expected), text))
    if checks and all(short for short, _ in checks):
        raise BadExample(path, f"is truncated: it has {checks[0][1]}")
    expected = 0 if declared else _expected(packets.shown)
    if too_few(expected - len(packets.shown), expected):
        raise BadExample(path, f"has gaps: it has {len(packets.shown)} of {expected} frames")


def _expected(shown: list[int | None]) -> int:
    """Returns the frames expected from the time stamps; 0 if the frame rate is not constant.

    The Matroska and Flash demuxers silently continue after a damaged part, and the VP decoders do
    not notice missing frames.
    """
    stamps = np.sort([pts for pts in shown if pts is not None])
    gaps = np.diff(stamps)
    if len(gaps) < 2 or np.median(gaps) <= 0:
        return 0
    usual = gaps[np.abs(gaps / np.median(gaps) - 1) < 0.5]  # time stamps may be rounded to ms
    if len(usual) < _CONSTANT_RATE * len(gaps):
        return 0
    return round(float(stamps[-1] - stamps[0]) / float(usual.mean())) + 1


def too_few(missing: int, promised: int) -> bool:
    """Returns whether so many frames are missing that the file is broken."""
    return missing > SLACK_FRAMES and missing > SLACK_SHARE * promised


def _keyframes(packets: _Packets, container: str) -> tuple[Keyframe, ...]:
    """Returns the keyframes; none if time stamps do not determine the display order."""
    stamps = [pts for pts in packets.shown if pts is not None]
    reordered = packets.video.codec_context.has_b_frames
    if container == "avi" and reordered and stamps == sorted(stamps):
        return ()  # AVI has no time stamps: FFmpeg guesses them in decoding order
    keys = [pts for pts in packets.keys if pts is not None]
    if len(set(stamps)) < len(packets.shown) or len(keys) < len(packets.keys):
        return ()
    stamps.sort()
    return tuple(Keyframe(pts, bisect.bisect_left(stamps, pts)) for pts in sorted(keys))


def _best(path: str, container: InputContainer) -> VideoStream:
    """Returns the video stream with the largest frames, not counting cover images."""
    cover = av.stream.Disposition.attached_pic
    streams = [stream for stream in container.streams.video if not stream.disposition & cover]
    if not streams:
        raise BadExample(path, "has no video stream")
    streams = [stream for stream in streams if stream.codec_context is not None]
    if not streams:
        raise BadExample(path, "has no video stream with a supported codec")
    return single_threaded(max(streams, key=lambda stream: stream.width * stream.height))


def check_size(path: str, width: int, height: int) -> None:
    """Checks the frame size against :data:`MAX_PIXELS`.

    Raises:
        BadExample: the frames are larger.
    """
    if width * height > MAX_PIXELS:
        raise BadExample(path, f"is {width}x{height}: more than {MAX_PIXELS:,} pixels per frame")


def limit_pixels(stream: VideoStream) -> VideoStream:
    """Makes the decoder reject frames above :data:`MAX_PIXELS` anywhere in the stream."""
    limit = {"max_pixels": str(MAX_PIXELS)}
    stream.codec_context.options = {**stream.codec_context.options, **limit}
    return stream


def single_threaded(stream: VideoStream) -> VideoStream:
    """Limits a decoder to one thread, because workers use all cores, and to :data:`MAX_PIXELS`."""
    stream.thread_type = "NONE"
    stream.codec_context.thread_count = 1
    return limit_pixels(stream)


def flag_corrupt(stream: VideoStream) -> None:
    """Makes damage visible: HEVC's decoder does not flag corrupt frames, so it must raise.

    It also compares frames with their checksums, if the stream has any.
    """
    if stream.codec_context.name == "hevc":
        options = {**stream.codec_context.options, "err_detect": "crccheck+explode"}
        stream.codec_context.options = options


def reason(error: Exception) -> str:
    """Returns the text of an error from PyAV or the system, without the path."""
    return getattr(error, "strerror", None) or str(error)
