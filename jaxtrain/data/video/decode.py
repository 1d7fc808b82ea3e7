"""Decodes a complete video file to verify it, or a few of its frames.

Decoders do not always raise on broken files. Here, a file is broken if a frame carries FFmpeg's
corrupt flag, if decoding raises, or if too few frames are decoded. A clip is broken if this is true
of the frames that are decoded for it, which includes those that its frames are predicted from. No
check finds damage that the decoder takes for an image: usual for VP8, VP9, AV1, and flipped bits.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import av
from av.container import InputContainer
from av.video.frame import PictureType, VideoFrame
from av.video.stream import VideoStream

from jaxtrain.data.video.packets import (
    Keyframe,
    Scan,
    flag_corrupt,
    limit_pixels,
    shows_frame,
    single_threaded,
    too_few,
)
from jaxtrain.data.video.reader import Span, open_input, reason
from jaxtrain.errors import BadExample

_LOOKAHEAD = 32  # packets; H.264 and HEVC reorder at most 16 frames
_MAX_HELD_BYTES = 2**28  # of packets; ten seconds of 8K at 200 Mbit/s
_PACKET_BYTES = 512  # memory that a packet takes besides its data
# In streams, damage can merge or remove packets, and only a neighbor is flagged. So all frames are
# decoded. Other formats list their packets.
_STREAMS = ("mpeg", "mpegts")
_PREDICTED = (PictureType.P, PictureType.B, PictureType.S)


class Undecodable(BadExample):
    """A frame cannot be decoded intact."""


class _NotInOrder(Exception):
    """The decoder's output does not ascend, so time stamps do not number the frames."""


class FrameCheck(NamedTuple):
    """The result of decoding a complete file.

    Attributes:
        missing: numbers of the frames that have a packet but are not decoded.
        broken: why the file is broken; None if it is intact.
    """

    missing: tuple[int, ...]
    broken: str | None


def frames(path: str, info: Scan, span: Span | None = None) -> Iterator[VideoFrame]:
    """Yields all frames of a file, in order, in one thread.

    Raises:
        Undecodable: the file is broken: see :func:`items`.
        DiskAway, BadExample: the system cannot read the file, now or at all.
    """
    for item in items(path, info, span):
        assert isinstance(item, VideoFrame)
        yield item


def items(
    path: str,
    info: Scan,
    span: Span | None = None,
    *,
    audio: bool = False,
    threads: str = "NONE",
) -> Iterator[VideoFrame | av.Packet]:
    """Yields all frames of a file, and the packets of its audio, in the order of the file.

    Args:
        path: the file.
        info: the scan of the file.
        span: the file's place in a tar.
        audio: whether to yield the packets of audio streams.
        threads: FFmpeg's ``thread_type`` of the decoder.

    Raises:
        Undecodable: the file is broken: a frame is corrupt, decoding fails, or frames are missing.
        DiskAway, BadExample: the system cannot read the file, now or at all.
    """
    count = 0
    try:
        with open_input(path, span) as container:
            stream = _open_stream(container, info, threads)
            for item in _demuxed(container, stream, info.skipped, audio):
                if isinstance(item, VideoFrame):
                    if item.is_corrupt:
                        raise Undecodable(path, f"frame {count} is corrupt")
                    count += 1
                yield item
    except av.FFmpegError as error:
        text = f"decoding fails after {count} of {info.frames} frames: {reason(error)}"
        raise Undecodable(path, text) from error
    if count == 0 or too_few(info.frames - count, info.frames):
        raise Undecodable(path, f"only {count} of {info.frames} frames can be decoded")


def _demuxed(
    container: InputContainer, video: VideoStream, skipped: int, audio: bool
) -> Iterator[VideoFrame | av.Packet]:
    streams: list[Any] = [video, *(container.streams.audio if audio else ())]
    for packet in container.demux(streams):
        if packet.stream_index == video.index:
            if packet.size and skipped:
                skipped -= 1
            elif packet.size:
                yield from video.codec_context.decode(packet)
        elif packet.size and packet.dts is not None:
            yield packet
    yield from video.codec_context.decode(None)  # frames that the decoder still has


def verify(path: str, info: Scan, span: Span | None = None) -> FrameCheck:
    """Decodes a complete file to find out whether it is intact.

    Raises:
        DiskAway, BadExample: the system cannot read the file, now or at all.
    """
    try:
        delivered = [frame.pts for frame in frames(path, info, span)]
    except Undecodable as bad:
        return FrameCheck((), bad.reason)
    if not info.keyframes:  # frames are numbered as the decoder outputs them
        return FrameCheck(tuple(range(len(delivered), info.frames)), None)
    with open_input(path, span) as container:
        stream = _open_stream(container, info)
        packets = itertools.islice(_with_data(container, stream), info.skipped, None)
        stamps = [packet.pts for packet in packets if shows_frame(packet, stream)]
    decoded = set(delivered)
    ordered = sorted(pts for pts in stamps if pts is not None)
    missing = tuple(number for number, pts in enumerate(ordered) if pts not in decoded)
    if too_few(len(missing), info.frames):
        count = info.frames - len(missing)
        return FrameCheck((), f"only {count} of {info.frames} frames can be decoded")
    return FrameCheck(missing, None)


def read(
    path: str,
    info: Scan,
    numbers: Sequence[int],
    take: Callable[[int, VideoFrame], None],
    span: Span | None = None,
) -> None:
    """Decodes the frames with these numbers, and as few others as possible.

    Decoding starts at the keyframe before the first one. Frames in between that no other frame
    references are not decoded, which does not change the others.

    Args:
        path: the file.
        info: the scan of the file.
        numbers: frame numbers, ascending.
        take: called with a frame's position in ``numbers`` and the frame, possibly more than once
            per frame. No frame is kept here, so the callback determines the memory needed.
        span: the file's place in a tar.

    Raises:
        Undecodable: a frame, or one that it may be predicted from, cannot be decoded intact.
        BadExample: the packets before the clip take too much memory, or the system cannot read the
            file.
        DiskAway: the disk is temporarily unavailable.
    """
    positions = {number: position for position, number in enumerate(numbers)}
    decoded: set[int] = set()
    failure = ""
    for start in _starts(info, numbers[0]):
        came: set[int] = set()

        def give(number: int, frame: VideoFrame, came: set[int] = came) -> None:
            came.add(number)
            take(positions[number], frame)

        try:
            try:
                with open_input(path, span) as container:
                    _read_from(path, container, info, numbers, start, give)
            except _NotInOrder:
                came.clear()
                with open_input(path, span) as container:
                    stream = _open_stream(container, info)
                    _read_in_order(path, container, stream, info.skipped, numbers, give)
            decoded = came
        except Undecodable as bad:
            failure = f": {bad.reason}"
        except av.FFmpegError as error:
            failure = f": {reason(error)}"
        if len(decoded) == len(numbers):
            return
    lacking = next(number for number in numbers if number not in decoded)
    raise Undecodable(path, f"frame {lacking} of {info.frames} cannot be decoded{failure}")


def _starts(info: Scan, number: int) -> list[Keyframe | None]:
    """Returns where to try to begin decoding for a frame, in order; None is the file's start.

    After a seek, some decoders need more than the keyframe (open groups of pictures, gradual
    refresh). Then the previous keyframe is tried, and after it the start of the file.
    """
    before = [key for key in info.keyframes if key.frame <= number]
    return [*(key for key in reversed(before[-2:]) if key.frame > 0), None]


def _read_from(
    path: str,
    container: InputContainer,
    info: Scan,
    numbers: Sequence[int],
    start: Keyframe | None,
    give: Callable[[int, VideoFrame], None],
) -> None:
    """Calls ``give`` with each of the frames that can be decoded; ``numbers`` ascend.

    Raises:
        Undecodable: a frame is damaged.
        BadExample: the packets between the keyframe and the last frame take too much memory.
    """
    stream = _open_stream(container, info)
    stream.codec_context.open(strict=False)  # AV1's decoder fixes skip_frame when it opens
    if not info.keyframes:
        _read_in_order(path, container, stream, info.skipped, numbers, give)
        return
    if start is not None:
        container.seek(start.pts, stream=stream)
    first = start.frame if start else 0
    packets: list[av.Packet] = []
    stamps: list[int] = []
    size = 0
    skipped = 0 if start is not None else info.skipped
    for packet in itertools.islice(_with_data(container, stream), skipped, None):
        if packet.pts is None:
            break
        is_start = start is None or (packet.pts == start.pts and packet.is_keyframe)
        if not packets and not is_start:
            continue  # seeking is inexact in some containers
        packets.append(packet)
        size += packet.size + _PACKET_BYTES
        if size > _MAX_HELD_BYTES:
            raise BadExample(
                path,
                f"the packets between its keyframe at frame {first} and frame {numbers[-1]} take "
                f"more than {_MAX_HELD_BYTES:,} bytes: encode it with a keyframe every few seconds",
            )
        if shows_frame(packet, stream) and (start is None or packet.pts >= start.pts):
            stamps.append(packet.pts)
            if len(stamps) > numbers[-1] - first + _LOOKAHEAD:
                break
    stamps.sort()
    wanted = {stamps[n - first]: n for n in numbers if n - first < len(stamps)}
    last = max((i for i, p in enumerate(packets) if p.pts in wanted), default=-1)
    skips = container.format.name not in _STREAMS
    # Not only until the clip is complete: its frames may be predicted from later ones. A decoder
    # may not notice that the end of a frame is damaged, but it notices that the next one's start
    # is; decoding one more frame takes 4% longer (MPEG-4, a keyframe every 8 frames).
    to_decode: list[av.Packet | None] = [*packets[: last + 2], None]
    # After an entry that is not a keyframe (gradual refresh), the H.264 decoder outputs no frame
    # until it has recovered. It may take itself for recovered too early, because frame numbers
    # repeat every 16 frames.
    drops_entry = stream.codec_context.name == "h264"
    reached = start is None
    previous: int | None = None
    for coded in to_decode:
        skip = skips and coded is not None and coded.pts not in wanted
        stream.codec_context.skip_frame = "NONREF" if skip else "DEFAULT"
        for frame in stream.codec_context.decode(coded):
            # Frames before the keyframe may be predicted from others that were not decoded.
            if frame.is_corrupt and (start is None or frame.pts is None or frame.pts >= start.pts):
                raise Undecodable(path, "it or a frame before it is corrupt")
            if not reached and start is not None and (frame.pts or 0) >= start.pts:
                reached = True
                is_entry = frame.pts == start.pts
                if (drops_entry and not is_entry) or (is_entry and frame.pict_type in _PREDICTED):
                    raise Undecodable(path, f"frame {first} is not a keyframe, but marked as one")
            if previous is not None and (frame.pts is None or frame.pts <= previous):
                raise _NotInOrder
            previous = frame.pts
            if frame.pts in wanted:
                give(wanted[frame.pts], frame)


def _read_in_order(
    path: str,
    container: InputContainer,
    stream: VideoStream,
    skipped: int,
    numbers: Sequence[int],
    give: Callable[[int, VideoFrame], None],
) -> None:
    wanted = frozenset(numbers)
    for number, frame in enumerate(_demuxed(container, stream, skipped, audio=False)):
        assert isinstance(frame, VideoFrame)
        if frame.is_corrupt:
            raise Undecodable(path, f"frame {number} is corrupt")
        if number in wanted:
            give(number, frame)
        if number >= numbers[-1]:
            break


def _with_data(container: InputContainer, stream: VideoStream) -> Iterator[av.Packet]:
    """Yields the packets of a stream; an empty one marks its end."""
    return (packet for packet in container.demux(stream) if packet.size)


def _open_stream(container: InputContainer, info: Scan, threads: str = "NONE") -> VideoStream:
    stream = container.streams[info.stream]
    assert isinstance(stream, VideoStream)
    flag_corrupt(stream)
    if threads == "NONE":
        return single_threaded(stream)
    stream.thread_type = threads  # type: ignore[assignment]  # an enum's name
    return limit_pixels(stream)
