"""Decoding a whole video file to see whether it is sound, and decoding a few of its frames.

Decoders do not always raise on broken files. The rule here: a file is broken if a frame carries
FFmpeg's corrupt flag, if decoding raises, or if too few frames come out.
"""

from collections.abc import Sequence
from typing import NamedTuple

import av
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from jaxtrain.data.video_packets import (
    Keyframe,
    Scan,
    Span,
    flag_corrupt,
    open_input,
    reason,
    shows_frame,
    single_threaded,
    too_few,
)
from jaxtrain.errors import BadExample

_LOOKAHEAD = 32  # packets; H.264 and HEVC reorder over 16 frames at most


class Verdict(NamedTuple):
    """What decoding a whole file showed.

    Attributes:
        missing: numbers of the frames that have a packet but do not come out of the decoder.
        broken: why the file is broken; None for a good one.
    """

    missing: tuple[int, ...]
    broken: str | None


def verify(path: str, info: Scan, span: Span | None = None) -> Verdict:
    """Decode a whole file and say whether it is sound."""
    delivered: list[int | None] = []
    stamps: list[int | None] = []
    try:
        with open_input(path, span) as container:
            stream = _open_stream(container, info)
            flag_corrupt(stream)
            for packet in container.demux(stream):
                if packet.size and shows_frame(packet, stream):
                    stamps.append(packet.pts)
                for frame in stream.codec_context.decode(packet if packet.size else None):
                    if frame.is_corrupt:
                        return Verdict((), f"frame {len(delivered)} is corrupt")
                    delivered.append(frame.pts)
    except (av.FFmpegError, OSError) as error:
        text = f"decoding fails after {len(delivered)} of {info.frames} frames: {reason(error)}"
        return Verdict((), text)
    missing = _missing(delivered, stamps, info)
    if too_few(len(missing), info.frames):
        found = info.frames - len(missing)
        return Verdict((), f"only {found} of {info.frames} frames can be decoded")
    return Verdict(missing, None)


def _missing(delivered: list[int | None], stamps: list[int | None], info: Scan) -> tuple[int, ...]:
    if not info.keyframes:  # frames are numbered as they come
        return tuple(range(len(delivered), info.frames))
    came = set(delivered)
    ordered = sorted(pts for pts in stamps if pts is not None)
    return tuple(number for number, pts in enumerate(ordered) if pts not in came)


def read(
    path: str, info: Scan, numbers: Sequence[int], span: Span | None = None
) -> list[VideoFrame]:
    """Decode the frames with these numbers, ascending, and as few others as can be.

    Decoding starts at the keyframe before. Frames on the way that no other frame refers to are
    not decoded; that changes nothing in the others.

    Raises:
        BadExample: a frame does not come out whole.
    """
    before = [key for key in info.keyframes if key.frame <= numbers[0]]
    # After a seek some decoders need more than the keyframe (open groups of pictures, gradual
    # refresh): then the keyframe before is tried, then the start of the file.
    starts: list[Keyframe | None] = [*reversed(before[-2:])]
    attempts = [key for key in starts if key is not None and key.frame > 0] + [None]
    found: dict[int, VideoFrame] = {}
    failure = ""
    for start in attempts:
        try:
            with open_input(path, span) as container:
                found = _read_from(container, info, numbers, start)
        except (av.FFmpegError, OSError) as error:
            failure = f": {reason(error)}"
        if len(found) == len(numbers):
            return [found[number] for number in numbers]
    lacking = next(number for number in numbers if number not in found)
    raise BadExample(path, f"frame {lacking} of {info.frames} cannot be decoded{failure}")


def _read_from(
    container: InputContainer, info: Scan, numbers: Sequence[int], start: Keyframe | None
) -> dict[int, VideoFrame]:
    stream = _open_stream(container, info)
    stream.codec_context.open(strict=False)  # AV1's decoder takes skip_frame for good when it opens
    if not info.keyframes:
        return _read_in_order(container, stream, numbers)
    if start is not None:
        container.seek(start.pts, stream=stream)
    first = start.frame if start else 0
    packets: list[av.Packet] = []
    stamps: list[int] = []
    for packet in container.demux(stream):
        if not packet.size or packet.pts is None:
            break
        here = start is None or (packet.pts == start.pts and packet.is_keyframe)
        if not packets and not here:
            continue  # seeking is inexact in some containers
        packets.append(packet)
        if shows_frame(packet, stream) and (start is None or packet.pts >= start.pts):
            stamps.append(packet.pts)
            if len(stamps) > numbers[-1] - first + _LOOKAHEAD:
                break
    stamps.sort()
    wanted = {stamps[n - first]: n for n in numbers if n - first < len(stamps)}
    last = max((i for i, p in enumerate(packets) if p.pts in wanted), default=-1)
    found = {}
    fed: list[av.Packet | None] = [*packets[: last + 1], None]
    for one in fed:
        skip = one is not None and one.pts not in wanted
        stream.codec_context.skip_frame = "NONREF" if skip else "DEFAULT"
        for frame in stream.codec_context.decode(one):
            if frame.pts in wanted and not frame.is_corrupt:
                found[wanted[frame.pts]] = frame
        if len(found) == len(wanted):
            break
    return found


def _read_in_order(
    container: InputContainer, stream: VideoStream, numbers: Sequence[int]
) -> dict[int, VideoFrame]:
    found = {}
    for number, frame in enumerate(container.decode(stream)):
        if number in numbers and not frame.is_corrupt:
            found[number] = frame
        if number >= numbers[-1]:
            break
    return found


def _open_stream(container: InputContainer, info: Scan) -> VideoStream:
    stream = container.streams[info.stream]
    assert isinstance(stream, VideoStream)
    return single_threaded(stream)
