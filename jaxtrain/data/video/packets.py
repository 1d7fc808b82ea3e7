"""Scans the packets of a video file and decodes only its first frame.

A file is broken if more than two frames *and* more than 2% of the frames that its headers declare
are missing. Intact files may lack a frame or two.
"""

import bisect
import io
import itertools
from fractions import Fraction
from typing import Any, NamedTuple

import av
import numpy as np
import PIL.Image
from av.container import InputContainer
from av.video.frame import PictureType, VideoFrame
from av.video.stream import VideoStream

from jaxtrain.data.video.reader import (
    EXIF_ORIENTATION,
    MATRICES_WITHOUT_FILTER,
    MAX_PIXELS,
    OF_EXIF,
    OPTIONS,
    Span,
    check_file,
    check_size,
    open_input,
    reason,
    traits_of,
    turn_of,
)
from jaxtrain.errors import BadExample

SLACK_FRAMES = 2
SLACK_SHARE = 0.02
_CONSTANT_RATE = 0.95  # least fraction of regular gaps between frames at a constant frame rate
_MAX_ASPECT = 16  # of a pixel, either way; anamorphic video has up to 2
_FIRST_FRAME = 128  # packets from which an intact file yields its first frame
_VP8_SHOWN = 0x10  # bit in a VP8 packet's first byte (RFC 6386, 9.1), unset for hidden frames
_ORDER_FRAMES = 24  # decoded to see whether time stamps are those of the display
_OVERHEAD = 2048  # bytes between packets that count as headers, besides an eighth of their size
_REORDERED = 16  # frames; H.264 and HEVC reorder no more
# Decoders of these codecs do not notice that a frame is missing from which others are predicted.
_UNNOTICED = ("vp8", "vp9", "av1")
_STANDARD_RATES = tuple(Fraction(rate) for rate in ("24000/1001", "30000/1001", "60000/1001"))
_RATE_SLACK = 1e-4  # of these and of whole numbers, besides the rounding of time stamps


class Keyframe(NamedTuple):
    """A frame at which decoding can start.

    Attributes:
        pts: time stamp in the stream's time base.
        frame: number of the frame in display order.
    """

    pts: int
    frame: int


class Scan(NamedTuple):
    """Properties of a video from its packets and its first frame.

    Attributes:
        stream: index of the selected video stream.
        frames: number of packets that show a frame.
        width, height: size of a stored frame, before rotation, in pixels.
        rotation: degrees counterclockwise by which stored frames must be turned: 0, 90, 180 or 270.
        mirror: whether left and right must be swapped before that.
        skipped: packets before the first keyframe, which are not decoded: a capture of a stream
            may start anywhere.
        traits: keys of :data:`TRAITS`.
        pixel_aspect: width of a stored pixel divided by its height.
        fps: frames per second; 0 if unknown.
        keyframes: the keyframes in display order; empty if time stamps do not determine that
            order, in which case decoding starts at the beginning.
    """

    stream: int
    frames: int
    width: int
    height: int
    rotation: int
    mirror: bool
    skipped: int
    traits: tuple[str, ...]
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
        self.doubtful: list[bool] = []  # whether frames may be missing that each depends on
        self.before_key = (0, 0)  # packets before the first keyframe, and those that show a frame
        self.jumps_back = False  # the clock of the stream restarts within the file
        self.end_s = 0.0  # of the last packet of the stream
        self.any_end_s = 0.0  # of the last packet of any stream
        self._dts: int | None = None
        self._next_byte: int | None = None  # where the next packet would begin without overhead
        self._bytes = 0  # of all packets since the last one of the stream
        self._doubts = 0  # packets for which doubts still last
        self._frame_s = float(1 / video.average_rate) if video.average_rate else 0.0

    def add(self, packet: av.Packet) -> None:
        is_video, end_s = packet.stream_index == self.video.index, 0.0
        if packet.time_base is not None:
            duration_s = float((packet.duration or 0) * packet.time_base)
            if packet.pts is not None:
                end_s = float(packet.pts * packet.time_base) + duration_s
            elif is_video:  # in a program stream, only the first frame of several has a time stamp
                end_s = self.end_s + (duration_s or self._frame_s)
        self.any_end_s = max(self.any_end_s, end_s)
        if not is_video:
            self._bytes += packet.size
            return
        self._doubt(packet)
        if packet.is_keyframe and not self.keys:
            self.before_key = (self.total, len(self.shown))
        self.total += 1
        self.end_s = max(self.end_s, end_s)
        if packet.dts is not None:
            self.jumps_back |= self._dts is not None and packet.dts < self._dts
            self._dts = packet.dts
        if shows_frame(packet, self.video):
            self.shown.append(packet.pts)
            self.doubtful.append(self._doubts > 0)
        if packet.is_keyframe:
            self.keys.append(packet.pts)

    def _doubt(self, packet: av.Packet) -> None:
        """Notes whether the file has bytes before the packet that belong to no other one."""
        lost = False
        if packet.pos is not None and self._next_byte is not None:
            lost = packet.pos - self._next_byte - self._bytes > _OVERHEAD + self._bytes / 8
        # A recorder's pause has no such bytes. The VP and AV1 decoders do not notice lost frames.
        unnoticed = self.video.codec_context.name in _UNNOTICED and not packet.is_keyframe
        damaged = packet.is_corrupt and not packet.is_keyframe  # in joined streams, a keyframe is
        if lost or damaged or unnoticed:
            self._doubts = _REORDERED
        else:
            self._doubts = 0 if packet.is_keyframe else max(0, self._doubts - 1)
        self._next_byte = None if packet.pos is None else packet.pos + packet.size * 9 // 8
        self._bytes = 0

    def skip_to_key(self) -> int:
        """Forgets the frames before the first keyframe; returns the number of their packets."""
        packets, shown = self.before_key
        del self.shown[:shown], self.doubtful[:shown]
        return packets


def shows_frame(packet: av.Packet, stream: VideoStream) -> bool:
    """Returns whether the packet has a visible frame, neither hidden nor before an edit's start."""
    if packet.is_discard:
        return False
    if stream.codec_context.name == "vp8":
        return bool(bytes(packet)[0] & _VP8_SHOWN)
    return stream.codec_context.name != "vp9" or _vp9_shows_frame(bytes(packet))


def _vp9_shows_frame(data: bytes) -> bool:
    """Returns whether a VP9 packet shows a frame: its uncompressed header (VP9 specification, 6.2),
    or a superframe (annex B), of which the last frame is shown.
    """
    first, last = data[0], data[-1]
    index_size = 2 + ((last >> 3 & 3) + 1) * ((last & 7) + 1)
    is_superframe = last >> 5 == 0b110 and data[-index_size:][:1] == data[-1:]
    if is_superframe or first >> 6 != 0b10:  # without its marker, it is damage for the decoder
        return True
    reserved = 1 if first & 0b0011_0000 == 0b0011_0000 else 0  # a bit that only profile 3 has
    show_existing_frame = first >> (3 - reserved) & 1
    show_frame = first >> (1 - reserved) & 1
    return bool(show_existing_frame or show_frame)


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
        check_file(path)
    elif span.size == 0:
        raise BadExample(path, "is empty")
    try:
        with open_input(path, span) as container:
            return _scan(path, container, span)
    except MemoryError as error:  # FFmpeg also raises it for too many streams
        streams = OPTIONS["max_streams"]
        text = f"cannot be read: it has more than {streams} streams, or needs too much memory"
        raise BadExample(path, text) from error
    except av.ArgumentError as error:  # of FFmpeg, for a format that is not in FORMATS
        text = "cannot be read: its format is damaged or not supported: convert it to .mp4"
        raise BadExample(path, text) from error
    except av.FFmpegError as error:
        raise BadExample(path, f"cannot be read: {reason(error)}") from error


def _scan(path: str, container: InputContainer, span: Span | None) -> Scan:
    stream = _best(path, container)
    check_size(path, stream.width, stream.height)
    declared = stream.frames or 0
    # Without a declared count, the container's duration is checked, which any stream may fill.
    streams: list[Any] = [stream] if declared else list(container.streams)
    packets, first, decoded, image = _Packets(stream), None, 0, b""
    for packet in container.demux(streams):
        if not packet.size:
            continue  # marks the end of a stream
        packets.add(packet)
        if first is None and packet.stream_index == stream.index and decoded < _FIRST_FRAME:
            decoded += 1
            image = image or bytes(packet)
            first = _first_frame(path, stream, packet)
    if not packets.shown:
        raise BadExample(path, "has no video packets")
    if first is None:
        first = _first_frame(path, stream, None)
    if first is None:
        raise BadExample(path, f"has {packets.total} video packets, but none yields a frame")
    check_size(path, first.width, first.height)
    if first.colorspace in MATRICES_WITHOUT_FILTER and not first.format.is_rgb:
        matrix = MATRICES_WITHOUT_FILTER[first.colorspace]
        raise BadExample(
            path, f"has {matrix} colors, which cannot be converted: encode it again in BT.709"
        )
    skipped = packets.skip_to_key() if _starts_late(packets, first) else 0
    keyframes = _keyframes(path, packets, container.format.name, span)
    fps = _rate(packets, ordered=bool(keyframes))
    _check_length(path, container, packets, declared, fps)
    aspect = float(stream.sample_aspect_ratio or 1)
    if not 1 / _MAX_ASPECT <= aspect <= _MAX_ASPECT:
        raise BadExample(path, f"has pixels {aspect:.4g} times as wide as high")
    rotation, mirror = _orientation(first, image)
    return Scan(
        stream=stream.index,
        frames=len(packets.shown),
        width=first.width,
        height=first.height,
        rotation=rotation,
        mirror=mirror,
        skipped=skipped,
        traits=traits_of(first),
        pixel_aspect=aspect,
        fps=fps,
        keyframes=keyframes,
    )


def _starts_late(packets: _Packets, first: VideoFrame) -> bool:
    """Returns whether a stream starts with frames that are predicted from others before the file.

    Some intact files do not mark their first keyframe: its frame is intra.
    """
    if not packets.keys or not packets.before_key[0]:
        return False
    key = packets.keys[0]
    is_before = first.pts is not None and key is not None and first.pts < key
    return not (is_before and first.pict_type == PictureType.I and not first.is_corrupt)


def _rate(packets: _Packets, *, ordered: bool) -> float:
    """Returns the frames per second, from their time stamps if those are `ordered`; 0 if unknown.

    FFmpeg guesses the rate of formats that do not declare one: "1000" of a Matroska file with 30.
    """
    stream = packets.video
    declared = stream.average_rate or stream.guessed_rate
    stamps = [pts for pts in packets.shown if pts is not None]
    if not ordered or len(stamps) < 2 or stream.time_base is None:
        return float(declared or 0)
    span_s = float((max(stamps) - min(stamps)) * stream.time_base)
    measured = (len(stamps) - 1) / span_s
    slack = 1.5 * float(stream.time_base) / span_s + _RATE_SLACK
    usual = (declared, Fraction(round(measured)), *_STANDARD_RATES)
    near = [rate for rate in usual if rate and abs(rate / measured - 1) <= slack]
    return float(near[0]) if near else measured


def _orientation(frame: VideoFrame, image: bytes) -> tuple[int, bool]:
    """Returns degrees counterclockwise by which a frame must be turned, and whether its left and
    right must be swapped before that.

    Args:
        frame: the first frame.
        image: its packet, a complete file if it is a JPEG image.
    """
    try:
        matrix: Any = frame.side_data.get("DISPLAYMATRIX")
    except ValueError:  # PyAV 18 does not know Exif's type
        with PIL.Image.open(io.BytesIO(image)) as opened:
            return OF_EXIF.get(opened.getexif().get(EXIF_ORIENTATION, 1), (0, False))
    return (0, False) if matrix is None else turn_of(matrix)


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
    if not declared:
        missing = _missing_before(packets)
        expected = len(packets.shown) + missing
        if too_few(missing, expected):
            raise BadExample(path, f"has gaps: it has {len(packets.shown)} of {expected} frames")


def _missing_before(packets: _Packets) -> int:
    """Returns how many frames are missing from which others are predicted, by the time stamps; 0 if
    the frame rate is not constant.

    The Matroska and Flash demuxers silently continue after a damaged part. A pause of the recorder
    looks alike, but the file has no other bytes between its frames.
    """
    shown = zip(packets.shown, packets.doubtful, strict=True)
    known = sorted((pts, doubt) for pts, doubt in shown if pts is not None)
    gaps = np.diff([pts for pts, _ in known])
    if len(gaps) < 2 or np.median(gaps) <= 0:
        return 0
    usual = gaps[np.abs(gaps / np.median(gaps) - 1) < 0.5]  # time stamps may be rounded to ms
    if len(usual) < _CONSTANT_RATE * len(gaps):
        return 0
    lost = np.round(gaps / usual.mean()).astype(int) - 1
    return int(lost[np.array([doubt for _, doubt in known[1:]])].sum())


def too_few(missing: int, promised: int) -> bool:
    """Returns whether so many frames are missing that the file is broken."""
    return missing > SLACK_FRAMES and missing > SLACK_SHARE * promised


def _keyframes(
    path: str, packets: _Packets, container: str, span: Span | None
) -> tuple[Keyframe, ...]:
    """Returns the keyframes; none if time stamps do not determine the display order."""
    stamps = [pts for pts in packets.shown if pts is not None]
    if packets.jumps_back:  # two recordings in one file
        return ()
    # AVI has no time stamps, and ASF only those of decoding: FFmpeg takes them in that order.
    doubtful = packets.video.codec_context.has_b_frames and stamps == sorted(stamps)
    if doubtful and (container == "avi" or not _comes_in_order(path, packets.video.index, span)):
        return ()
    keys = [pts for pts in packets.keys if pts is not None]
    if len(set(stamps)) < len(packets.shown) or len(keys) < len(packets.keys):
        return ()
    stamps.sort()
    return tuple(Keyframe(pts, bisect.bisect_left(stamps, pts)) for pts in sorted(keys))


def _comes_in_order(path: str, index: int, span: Span | None) -> bool:
    """Returns whether the time stamps of the first frames ascend as the decoder outputs them."""
    with open_input(path, span) as container:
        stream = container.streams[index]
        assert isinstance(stream, VideoStream)
        frames = itertools.islice(container.decode(single_threaded(stream)), _ORDER_FRAMES)
        try:
            stamps = [frame.pts for frame in frames]
        except av.FFmpegError:
            return False
    known = [pts for pts in stamps if pts is not None]
    return len(known) == len(stamps) and known == sorted(known)


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
