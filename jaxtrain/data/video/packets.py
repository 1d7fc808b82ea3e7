"""What the packets of a video file tell, without decoding more than its first frame.

A file is broken if more than two frames *and* more than 2% of them are missing against what it
promises: good files fall a frame or two short.
"""

import bisect
import os
import stat
from typing import Any, NamedTuple

import av
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from jaxtrain.errors import BadExample

SLACK_FRAMES = 2
SLACK_SHARE = 0.02
_CONSTANT_RATE = 0.95  # share of usual gaps between frames from which a frame rate is constant
_ANY_TEXT: Any = {"metadata_errors": "ignore"} if int(av.__version__.split(".")[0]) < 19 else {}
MAX_PIXELS = 139_264 * 256
"""Of a frame: the most that H.264 (table A-1), HEVC and AV1 allow up to level 6.2, somewhat above
8K (7680x4320). A few kilobytes of PNG can declare billions."""
_OPTIONS = {
    # Without it the decoders that guess a stream's parameters would decode frames of any size.
    "max_pixels": str(MAX_PIXELS),
    # A file may be a playlist: it must not open a connection. subfile reads a part of a file.
    "protocol_whitelist": "file,subfile",
    # Each video stream has a decoder while the file is opened, which holds three such frames
    # (measured: 80 MiB for one of PNG). Films have up to about 30, sound and subtitles included.
    "max_streams": "32",
}
_MAX_ASPECT = 16  # of a pixel, either way; anamorphic films have up to 2
_FIRST_FRAME = 128  # packets within which a good file gives its first frame
_VP8_SHOWN = 0x10  # bit of a VP8 packet's first byte (RFC 6386, 9.1): hidden frames have it unset


class Keyframe(NamedTuple):
    """Where decoding can start.

    Attributes:
        pts: time stamp, in the stream's time base.
        frame: number of the frame in order of display.
    """

    pts: int
    frame: int


class Span(NamedTuple):
    """A video that is a part of another file.

    Attributes:
        file: the whole file, as a tar.
        offset: where the video begins, in bytes.
        size: of the video, in bytes.
    """

    file: str
    offset: int
    size: int


class Scan(NamedTuple):
    """What the packets and the first frame of a file tell.

    Attributes:
        stream: index of the best video stream.
        frames: packets that show a frame.
        width, height: of a stored frame, before rotation, in pixels.
        rotation: degrees counter-clockwise by which a stored frame is to be turned: 0, 90, 180 or
            270.
        pixel_aspect: width of a stored pixel over its height.
        fps: frames a second; 0 where the file does not tell.
        keyframes: in order of display; empty where packets lack distinct time stamps, and then
            reading starts at the beginning.
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
    """Sums over a file's packets; ``video`` is the index of the stream that counts."""

    def __init__(self, video: VideoStream) -> None:
        self.video = video
        self.total = 0  # every packet of the stream, which is what containers declare
        self.shown: list[int | None] = []  # time stamps of those that show a frame
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
    """Whether a frame to be shown comes of the packet: not before an edit's start, not hidden."""
    if packet.is_discard:
        return False
    return stream.codec_context.name != "vp8" or bool(bytes(packet)[0] & _VP8_SHOWN)


def open_input(path: str, span: Span | None = None) -> InputContainer:
    """Open a file for reading, or a part of one; its titles and tags may be in any encoding."""
    name = local(path)
    if span is not None:
        name = f"subfile,,start,{span.offset},end,{span.offset + span.size},,:{local(span.file)}"
    # PyAV 18 raises on text that is not UTF-8 unless told not to; 19 has no such setting.
    return av.open(name, options=_OPTIONS, **_ANY_TEXT)


def local(path: str) -> str:
    """A path as FFmpeg takes it: ``12:30.mp4`` and ``concat:a|b`` would be addresses to it."""
    return f"file:{os.path.abspath(path)}"


def scan(path: str, span: Span | None = None) -> Scan:
    """Read all packets of a file and decode its first frame.

    Args:
        path: of the file, for messages also where it is part of another one.
        span: of a part of a file.

    Raises:
        BadExample: there is no such file, no video in it, or it is shorter than it promises.
    """
    if span is None:
        _check_file(path)
    elif span.size == 0:
        raise BadExample(path, "is empty")
    try:
        with open_input(path, span) as container:
            return _scan(path, container)
    except MemoryError as error:  # also FFmpeg's answer to too many streams
        streams = _OPTIONS["max_streams"]
        text = f"cannot be read: it has more than {streams} streams, or takes too much memory"
        raise BadExample(path, text) from error
    except (av.FFmpegError, OSError) as error:
        raise BadExample(path, f"cannot be read: {reason(error)}") from error


def _check_file(path: str) -> None:
    try:
        status = os.stat(path)
    except OSError as error:
        raise BadExample(path, str(error.strerror)) from error
    except ValueError as error:  # a NUL in the name, from a list
        raise BadExample(path, f"is not the name of a file: {error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise BadExample(path, "is not a file")
    if status.st_size == 0:
        raise BadExample(path, "is empty")


def _scan(path: str, container: InputContainer) -> Scan:
    stream = _best(path, container)
    check_size(path, stream.width, stream.height)
    declared = stream.frames or 0
    # Without a declared count the promise is the container's duration, which any stream may fill.
    others = [s for s in container.streams if s.type in ("video", "audio")]
    streams = [stream] if declared else others
    packets, first, fed = _Packets(stream), None, 0
    for packet in container.demux(streams):
        if not packet.size:
            continue  # the end, told once a stream
        packets.add(packet)
        if first is None and packet.stream_index == stream.index and fed < _FIRST_FRAME:
            fed += 1
            first = _first_frame(path, stream, packet)
    if not packets.shown:
        raise BadExample(path, "holds no video packet")
    if first is None:
        first = _first_frame(path, stream, None)
    if first is None:
        raise BadExample(path, f"gives no frame, though it holds {packets.total} video packets")
    check_size(path, first.width, first.height)
    fps = float(stream.average_rate or stream.guessed_rate or 0)
    _check_promise(path, container, packets, declared, fps)
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
    """The first frame that comes of a packet, if one does."""
    try:
        return next(iter(stream.codec_context.decode(packet)), None)
    except av.ArgumentError as error:  # FFmpeg's answer to a frame above the limit
        text = f"its frames are damaged, or have more than {MAX_PIXELS:,} pixels"
        raise BadExample(path, f"cannot be decoded: {text}") from error


def _check_promise(
    path: str, container: InputContainer, packets: _Packets, declared: int, fps: float
) -> None:
    """Raise BadExample where the packets end well before what the headers promise.

    A declared count is compared with the packets; as edit lists cut good files short of it, the
    time promised must be missing too. Without a count, the time promised is compared, and holes are
    looked for.
    """
    stream = packets.video
    start = float((stream.start_time or 0) * (stream.time_base or 0))
    if stream.duration and stream.time_base:
        promised_s, end_s = start + float(stream.duration * stream.time_base), packets.end_s
    elif container.duration:
        promised_s, end_s = container.duration / av.time_base, packets.any_end_s
    else:
        promised_s, end_s = 0.0, 0.0
    checks = []
    if declared:
        text = f"{packets.total} of {declared} promised frames"
        checks.append((too_few(declared - packets.total, declared), text))
    if promised_s and fps:
        missing, promised = round((promised_s - end_s) * fps), round(promised_s * fps)
        text = f"{end_s:.2f} s of {promised_s:.2f} promised seconds"
        checks.append((too_few(missing, promised), text))
    if checks and all(short for short, _ in checks):
        raise BadExample(path, f"cut short: it holds {checks[0][1]}")
    expected = 0 if declared else _expected(packets.shown)
    if too_few(expected - len(packets.shown), expected):
        raise BadExample(path, f"has holes: it holds {len(packets.shown)} of {expected} frames")


def _expected(shown: list[int | None]) -> int:
    """Frames from the first to the last time stamp at a constant rate; 0 where it is not constant.

    Demuxers of Matroska and Flash resume after a damaged part without a word, and the VP decoders
    do not notice that frames are gone.
    """
    stamps = np.sort([pts for pts in shown if pts is not None])
    gaps = np.diff(stamps)
    if len(gaps) < 2 or np.median(gaps) <= 0:
        return 0
    usual = gaps[np.abs(gaps / np.median(gaps) - 1) < 0.5]  # time stamps may be in whole ms
    if len(usual) < _CONSTANT_RATE * len(gaps):
        return 0
    return round(float(stamps[-1] - stamps[0]) / float(usual.mean())) + 1


def too_few(missing: int, promised: int) -> bool:
    """Whether so many frames are missing that the file is broken."""
    return missing > SLACK_FRAMES and missing > SLACK_SHARE * promised


def _keyframes(packets: _Packets, container: str) -> tuple[Keyframe, ...]:
    """The keyframes, where time stamps tell the order of display."""
    stamps = [pts for pts in packets.shown if pts is not None]
    reordered = packets.video.codec_context.has_b_frames
    if container == "avi" and reordered and stamps == sorted(stamps):
        return ()  # AVI holds no time stamps: these are FFmpeg's guess, in order of arrival
    keys = [pts for pts in packets.keys if pts is not None]
    if len(set(stamps)) < len(packets.shown) or len(keys) < len(packets.keys):
        return ()
    stamps.sort()
    return tuple(Keyframe(pts, bisect.bisect_left(stamps, pts)) for pts in sorted(keys))


def _best(path: str, container: InputContainer) -> VideoStream:
    """The video stream with the largest picture; a cover picture is none."""
    cover = av.stream.Disposition.attached_pic
    streams = [stream for stream in container.streams.video if not stream.disposition & cover]
    if not streams:
        raise BadExample(path, "holds no video stream")
    streams = [stream for stream in streams if stream.codec_context is not None]
    if not streams:
        raise BadExample(path, "holds no video stream of a codec that is known")
    return single_threaded(max(streams, key=lambda stream: stream.width * stream.height))


def check_size(path: str, width: int, height: int) -> None:
    """Refuses pictures above :data:`MAX_PIXELS`.

    Raises:
        BadExample: with the size.
    """
    if width * height > MAX_PIXELS:
        raise BadExample(path, f"is {width}x{height}: more than {MAX_PIXELS:,} pixels a frame")


def limit_pixels(stream: VideoStream) -> VideoStream:
    """Keeps the decoder from frames above :data:`MAX_PIXELS`, wherever in the stream they come."""
    limit = {"max_pixels": str(MAX_PIXELS)}
    stream.codec_context.options = {**stream.codec_context.options, **limit}
    return stream


def single_threaded(stream: VideoStream) -> VideoStream:
    """One thread a decoder: the machine's cores belong to the workers; and limited frames."""
    stream.thread_type = "NONE"
    stream.codec_context.thread_count = 1
    return limit_pixels(stream)


def flag_corrupt(stream: VideoStream) -> None:
    """Lets no decoder pass over damage: HEVC's flags no corrupt frame, and so has to raise."""
    if stream.codec_context.name == "hevc":
        options = {**stream.codec_context.options, "err_detect": "explode"}
        stream.codec_context.options = options


def reason(error: Exception) -> str:
    """An error of PyAV or the system in words, without the path."""
    return getattr(error, "strerror", None) or str(error)
