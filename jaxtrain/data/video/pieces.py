"""Cuts one video into short pieces at training size, from which clips are cheap to decode.

A piece is MPEG-4 part 2 in MP4: short closed groups of pictures, no audio, square pixels,
upright, deinterlaced, 8 bits, BT.709. It has the uncropped frames, shrunk until they just cover the
largest crop that training uses. A piece ends at a hard cut.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import av
import av.filter
import numpy as np
from av.video.frame import VideoFrame

from jaxtrain.data.video import decode
from jaxtrain.data.video import frames as video_frames
from jaxtrain.data.video.packets import INTERLACED, Scan, Span, scan
from jaxtrain.errors import BadExample, InputError

_TICK = Fraction(1, 90_000)  # required by filters; nothing here depends on time
_SIDES = 8  # all autoencoders here require multiples of it
_MIN_RATE = Fraction(1, 1001)  # smallest frame rate that is written to a piece
_MAX_TICKS = 65535  # most ticks per second in MPEG-4 part 2
_FPS = 25  # for a file of unknown frame rate; nothing in training depends on it
_TURNS: dict[int, tuple[tuple[str, ...], ...]] = {
    90: (("transpose", "cclock"),),
    180: (("hflip",), ("vflip",)),
    270: (("transpose", "clock"),),
}

# A hard cut: the mean change in brightness (0 to 255) is large, and many times the running mean.
_CUT_STEP = 24.0
_CUT_TIMES = 5.0
_CUT_GRID = 16  # pixels between those compared
_CUT_MEMORY = 0.8  # weight of the past in the running mean


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of pieces.

    Attributes:
        height, width: size of a training clip, in pixels.
        min_crop_scale: the config's ``data.min_crop_scale``; pieces are large enough for its crops.
        frames: largest number of frames per piece.
        min_frames: smallest number of frames per piece; shorter pieces are discarded.
        min_side: videos whose shorter side is below this are skipped, in pixels.
        gop: frames from one keyframe to the next.
        quantizer: quality, 1 (best) to 31.
        split_at_cuts: whether a piece ends at a hard cut.
    """

    height: int = 480
    width: int = 720
    min_crop_scale: float = 0.8
    frames: int = 96
    min_frames: int = 24
    min_side: int = 64
    gop: int = 8
    quantizer: int = 3
    split_at_cuts: bool = True

    def __post_init__(self) -> None:
        for name in ("height", "width", "frames", "min_frames", "min_side", "gop"):
            if getattr(self, name) < 1:
                raise InputError(f"{_flag(name)} {getattr(self, name)}: use at least 1")
        for name in ("height", "width"):
            size = getattr(self, name)
            if size % _SIDES:
                raise InputError(
                    f"{_flag(name)} {size}: must be a multiple of {_SIDES}; the nearest is "
                    f"{max(_SIDES, round(size / _SIDES) * _SIDES)}"
                )
        if self.min_frames > self.frames:
            raise InputError(
                f"--min-frames {self.min_frames} must be at most --frames {self.frames}, the "
                "maximum length of a piece"
            )
        if not 0 < self.min_crop_scale <= 1:
            raise InputError(f"--min-crop-scale {self.min_crop_scale}: use above 0 and at most 1")
        if not 1 <= self.quantizer <= 31:
            raise InputError(f"--quantizer {self.quantizer}: use 1 (best) to 31")

    def size(self, shown_height: float, shown_width: float) -> tuple[int, int]:
        """Returns the even height and width of a video's pieces; small videos are not enlarged."""
        least_height, least_width = (
            side / self.min_crop_scale for side in (self.height, self.width)
        )
        factor = min(1.0, max(least_height / shown_height, least_width / shown_width))
        return _even(shown_height * factor), _even(shown_width * factor)


class Cut(NamedTuple):
    """The result of cutting a video.

    Attributes:
        pieces: number of frames of each piece; piece n is the file ``n.mp4``, with five digits.
        left_out: number of unused frames, in discarded pieces between two cuts or at the end.
        traits: of the video; see :data:`jaxtrain.data.video.packets.TRAITS`.
    """

    pieces: tuple[int, ...]
    left_out: int
    traits: tuple[str, ...] = ()


def cut(path: str, span: Span | None, folder: Path, settings: Settings) -> Cut:
    """Writes the pieces of a video to an empty folder.

    Args:
        path: the video; only used in messages if ``span`` is set.
        span: the video's place in another file; None for a separate file.
        folder: the output folder.
        settings: settings of the pieces.

    Raises:
        BadExample: the video is broken or too short. The folder may contain some pieces.
        OSError: the pieces cannot be written.
    """
    info = scan(path, span)
    if min(info.height, info.width * info.pixel_aspect) < settings.min_side:
        text = f"is {info.width}x{info.height}, smaller than --min-side {settings.min_side}"
        raise BadExample(path, text)
    pieces: list[int] = []
    left_out = 0
    writer: _Writer | None = None
    shrink = shrinking(info, settings)
    cuts = _CutDetector()

    def close(piece: "_Writer") -> int:
        """Ends a piece; returns the number of its frames if it is discarded, or else 0."""
        piece.close()
        if piece.frames >= settings.min_frames:
            pieces.append(piece.frames)
            return 0
        piece.path.unlink()
        return piece.frames

    try:
        decoded = decode.frames(path, info, span)
        if INTERLACED in info.traits:
            decoded = deinterlaced(decoded)
        for stored in decoded:
            frame = shrink(stored)
            size = (frame.height, frame.width)
            ends = settings.split_at_cuts and cuts.is_cut(frame)
            if writer is not None and (
                ends or writer.frames == settings.frames or writer.size != size
            ):
                left_out += close(writer)
                writer = None
            if writer is None:
                writer = _Writer(folder / f"{len(pieces):05}.mp4", size, info.fps, settings)
            writer.add(frame)
        if writer is not None:
            left_out += close(writer)
            writer = None
    finally:
        if writer is not None:
            writer.abandon()
    if not pieces:
        text = f"{settings.min_frames} frames (--min-frames) in a row without a cut"
        raise BadExample(path, f"is too short: none of its {left_out} frames begins {text}")
    return Cut(tuple(pieces), left_out, info.traits)


def deinterlaced(decoded: Iterable[VideoFrame]) -> Iterator[VideoFrame]:
    """Yields as many frames, with the lines of one field interpolated where they are interlaced."""
    graph: av.filter.Graph | None = None
    for frame in decoded:
        if graph is None:
            graph = av.filter.Graph()
            graph.threads = 1
            source = graph.add_buffer(
                width=frame.width, height=frame.height, format=frame.format, time_base=_TICK
            )
            filters = [graph.add("bwdif", "mode=send_frame:deint=interlaced")]
            graph.link_nodes(source, *filters, graph.add("buffersink")).configure()
        graph.push(frame)
        yield from _filtered(graph)
    if graph is not None:
        graph.push(None)
        yield from _filtered(graph)


def _filtered(graph: av.filter.Graph) -> Iterator[VideoFrame]:
    """Yields what a filter has finished: it looks ahead by a frame."""
    with contextlib.suppress(BlockingIOError, EOFError):
        while True:
            yield graph.vpull()


def shrinking(info: Scan, settings: Settings) -> Callable[[VideoFrame], VideoFrame]:
    """Returns what shrinks a frame, turns it upright, and converts it to yuv420p, BT.709."""
    graph = video_frames.FilterGraph()

    def filters(frame: VideoFrame) -> list[tuple[str, ...]]:
        high, wide = settings.size(*_shown(frame, info))
        if info.rotation % 180 == 90:  # frames are shrunk before they are turned
            high, wide = wide, high
        options = f"{wide}:{high}:flags=bicubic+accurate_rnd+bitexact"
        options += video_frames.color_options(frame) + video_frames.LIMITED_BT709
        turns = ((("hflip",),) if info.mirror else ()) + _TURNS.get(info.rotation, ())
        gray = video_frames.gray_as_yuv(frame)
        return [*gray, ("scale", options), ("format", "yuv420p"), *turns, ("setsar", "1")]

    return lambda frame: graph(frame, filters)


def _shown(frame: VideoFrame, info: Scan) -> tuple[float, float]:
    """Returns the height and width of a frame as displayed: upright, with square pixels."""
    high, wide = float(frame.height), frame.width * info.pixel_aspect
    return (wide, high) if info.rotation % 180 == 90 else (high, wide)


class _CutDetector:
    """Detects hard cuts by comparing a frame's change with the running mean."""

    def __init__(self) -> None:
        self._last: np.ndarray | None = None
        self._change: float | None = None

    def is_cut(self, frame: VideoFrame) -> bool:
        """Returns whether the frame begins a new shot."""
        plane = frame.planes[0]
        luma_HW = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
        luma_HW = luma_HW[: frame.height : _CUT_GRID, : frame.width : _CUT_GRID].astype(np.int16)
        last, self._last = self._last, luma_HW
        if last is None or last.shape != luma_HW.shape:
            return False
        change = float(np.abs(luma_HW - last).mean())
        usual = self._change
        if usual is not None and change > max(_CUT_STEP, _CUT_TIMES * usual):
            self._change = None  # a new shot needs a new running mean
            return True
        self._change = change if usual is None else usual + (1 - _CUT_MEMORY) * (change - usual)
        return False


class _Writer:
    """Encodes one piece."""

    def __init__(self, path: Path, size: tuple[int, int], fps: float, settings: Settings) -> None:
        self.path, self.size, self.frames = path, size, 0
        # limit_denominator rounds smaller rates to 0 or 1/1001.
        rate = max(Fraction(fps or _FPS).limit_denominator(1001), _MIN_RATE)
        if rate.numerator > _MAX_TICKS:
            rate = Fraction(min(round(rate), _MAX_TICKS))
        self._time_base = 1 / rate
        self._container = av.open(str(path), "w", options={"movflags": "+faststart"})
        add: Any = self._container.add_stream
        # It opens and decodes in half the time of H.264, with a quarter more bytes at the same PSNR
        # (benchmarks/LOG.md).
        self._stream = add("mpeg4", rate=rate, options=_options(settings))
        self._stream.height, self._stream.width = size
        self._stream.pix_fmt = "yuv420p"
        context = self._stream.codec_context
        context.time_base = self._time_base
        context.thread_count = 1
        context.color_range, context.colorspace = 1, 1  # limited, BT.709
        context.color_primaries, context.color_trc = 1, 1  # MP4 stores all four or none

    def add(self, frame: VideoFrame) -> None:
        frame.pts, frame.time_base = self.frames, self._time_base
        frame.pict_type = 0  # type: ignore[assignment]  # the encoder chooses the type, not the source
        self.frames += 1
        self._container.mux(self._stream.encode(frame))

    def close(self) -> None:
        self._container.mux(self._stream.encode())
        self._container.close()

    def abandon(self) -> None:
        """Closes the file after an error; the piece is incomplete."""
        self._container.close()


def _options(settings: Settings) -> dict[str, str]:
    """Returns the options of the encoder."""
    return {
        "g": str(settings.gop),
        "bf": "2" if settings.gop > 3 else "0",  # successive B frames, which a decoder can skip
        "qmin": str(settings.quantizer),
        "qmax": str(settings.quantizer),
        # bitexact makes the bytes the same on every processor.
        "flags": "+cgop+bitexact",
        "sc_threshold": "1000000000",  # off; closed groups require it
    }


def _even(length: float) -> int:
    return max(2, round(length / 2) * 2)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
