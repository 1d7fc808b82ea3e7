"""Cuts one video into short pieces at training size, from which clips are cheap to decode.

A piece is MPEG-4 part 2 in MP4: short closed groups of pictures, no audio, square pixels,
upright, deinterlaced, 8 bits, BT.709. It has the uncropped frames, shrunk until they just cover the
largest crop that training uses. A piece ends at a hard cut.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import av
import av.filter
import numpy as np
from av.video.frame import VideoFrame

from jaxtrain.data.video import frames as video_frames
from jaxtrain.data.video.reader import (
    HDR,
    Frame,
    Look,
    Reader,
    Span,
    open_input,
    prepare_decoder,
    reason,
)
from jaxtrain.errors import BadExample, InputError

_SIDES = 8  # all autoencoders here require multiples of it
_MIN_RATE = Fraction(1, 1001)  # smallest frame rate that is written to a piece
_MAX_TICKS = 65535  # most ticks per second in MPEG-4 part 2
_FPS = 25  # for a file of unknown frame rate; nothing in training depends on it

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
        frames: frames per piece. A last one has up to ``min_frames - 1`` more.
        min_frames: smallest number of frames per piece; shorter pieces are discarded.
        min_side: videos whose shorter side is below this are skipped, in pixels.
        gop: frames from one keyframe to the next.
        quantizer: quality, 1 (best) to 31.
    """

    height: int = 480
    width: int = 720
    min_crop_scale: float = 0.8
    frames: int = 96
    min_frames: int = 24
    min_side: int = 64
    gop: int = 8
    quantizer: int = 2
    split_at_cuts: bool = True

    unit: ClassVar[int] = _SIDES
    """Height and width are multiples of it."""

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

    def covers(self, other: "Settings") -> bool:
        """Returns whether pieces with these settings have all that those with others have."""
        return (
            self.height / self.min_crop_scale >= other.height / other.min_crop_scale
            and self.width / self.min_crop_scale >= other.width / other.min_crop_scale
            and self.frames >= other.frames
            and self.min_frames <= other.min_frames
            and self.min_side <= other.min_side
            and self.quantizer <= other.quantizer
            and self.split_at_cuts == other.split_at_cuts
        )

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
        left_out: number of intact frames that are not used, because fewer than
            :attr:`Settings.min_frames` are in a row.
        lost: number of frames that were decoded and are not intact, or depend on such frames.
        damage: what is wrong with the file; () if it is intact.
        rate: frames per second of the video; 0 if unknown.
        traits: kinds of :data:`jaxtrain.data.video.reader.HDR`.
    """

    pieces: tuple[int, ...]
    left_out: int
    lost: int = 0
    damage: tuple[str, ...] = ()
    traits: tuple[str, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    rate: Fraction = Fraction(0)


def cut(path: str, span: Span | None, folder: Path, settings: Settings) -> Cut:
    """Writes the pieces of a video to an empty folder.

    Args:
        path: the video; only used in messages if ``span`` is set.

    Raises:
        BadExample: no piece can be made of the video. The folder may contain some files.
    """
    video = Reader(path, span)
    damage, traits, lost = dict[str, None](), dict[str, None](), 0
    with contextlib.closing(_Pieces(folder, settings, video)) as pieces:
        for item in video:
            assert not isinstance(item, av.Packet), "only with sound"
            if isinstance(item, Frame):
                traits[HDR.get(item.look.colors[-1], "")] = None
                if not pieces.seen and min(item.look.display_size) < settings.min_side:
                    text = f"is {item.look.width}x{item.look.height}, smaller than --min-side"
                    raise BadExample(path, f"{text} {settings.min_side}")
                pieces.add(item)
            else:
                pieces.end()
                lost += item.lost
                damage.update(dict.fromkeys(filter(None, [item.reason])))
        pieces.end()
    if not pieces.made:
        text = f"{settings.min_frames} frames (--min-frames) in a row without a cut"
        also = f"; it {'; '.join(damage)}" if damage else ""
        raise BadExample(
            path, f"is too short: none of its {pieces.seen:,} frames begins {text}{also}"
        )
    return Cut(
        tuple(pieces.made),
        pieces.left_out,
        lost,
        tuple(damage),
        tuple(filter(None, traits)),
        tuple(pieces.sizes),
        video.rate,
    )


class _Pieces:
    """Writes frames to one piece after the other.

    A piece ends with the shot, or when it is long enough and as many frames follow as a piece needs
    at least: so the rest of a shot is not too short.
    """

    def __init__(self, folder: Path, settings: Settings, video: Reader) -> None:
        self.made, self.sizes = list[int](), list[tuple[int, int]]()
        self.left_out = self.seen = 0
        self._folder, self._settings, self._video = folder, settings, video
        self._writer: _Writer | None = None
        self._next: list[VideoFrame] = []  # of the shot, which begin the next piece if there is one
        self._look: Look | None = None
        self._size = (0, 0)
        self._cuts = _CutDetector()
        self._shrink: Callable[[VideoFrame], VideoFrame] | None = None

    def add(self, frame: Frame) -> None:
        self.seen += 1
        if frame.look != self._look or self._shrink is None:
            self.end()
            self._look, self._shrink = frame.look, shrinking(frame.look, self._settings)
        picture = self._shrink(frame.picture)
        if self._settings.split_at_cuts and self._cuts.is_cut(picture):
            self.end()
        self._size = (picture.height, picture.width)
        full = self._writer is not None and self._writer.frames >= self._settings.frames
        if self._writer is not None and not full:
            self._writer.add(picture)
            return
        self._next.append(picture)
        if len(self._next) >= self._settings.min_frames:
            self._begin()

    def _begin(self) -> None:
        self._finish()
        name = f"{len(self.made):05}.mp4"
        rate = self._video.rate
        self._writer = _Writer(self._folder / name, self._size, rate, self._settings)
        self._write_next(self._writer)

    def _write_next(self, writer: "_Writer") -> None:
        for picture in self._next:
            writer.add(picture)
        self._next.clear()

    def end(self) -> None:
        """Ends the shot."""
        if self._writer is not None:
            self._write_next(self._writer)
            self._finish()
        self.left_out += len(self._next)
        self._next.clear()

    def _finish(self) -> None:
        if self._writer is not None:
            self._writer.finish()
            self.made.append(self._writer.frames)
            self.sizes.append(self._writer.size)
            self._writer = None

    def close(self) -> None:
        """Closes a file that an error left open; its piece is incomplete."""
        if self._writer is not None:
            self._writer.container.close()


def shrinking(look: Look, settings: Settings) -> Callable[[VideoFrame], VideoFrame]:
    """Returns what shrinks a frame, and converts it to yuv420p, BT.709."""
    graph = video_frames.FilterGraph()

    def filters(frame: VideoFrame) -> list[tuple[str, ...]]:
        high, wide = settings.size(*look.display_size)
        options = f"{wide}:{high}:flags=bicubic+accurate_rnd+bitexact"
        options += video_frames.color_options(frame) + video_frames.LIMITED_BT709
        gray = video_frames.gray_as_yuv(frame)
        return [*gray, ("scale", options), ("format", "yuv420p"), ("setsar", "1")]

    return lambda frame: graph(frame, filters)


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

    def __init__(
        self, path: Path, size: tuple[int, int], rate: Fraction, settings: Settings
    ) -> None:
        self.path, self.size, self.frames = path, size, 0
        # limit_denominator rounds smaller rates to 0 or 1/1001.
        rate = max(Fraction(rate or _FPS).limit_denominator(1001), _MIN_RATE)
        if rate.numerator > _MAX_TICKS:
            rate = Fraction(min(round(rate), _MAX_TICKS))
        self._time_base = 1 / rate
        self.container = av.open(str(path), "w", options={"movflags": "+faststart"})
        add: Any = self.container.add_stream
        options = {
            "g": str(settings.gop),
            "bf": "0",
            "qmin": str(settings.quantizer),
            "qmax": str(settings.quantizer),
            # bitexact makes the bytes the same on every processor.
            "flags": "+cgop+bitexact",
            "sc_threshold": "1000000000",  # off; closed groups require it
        }
        # It opens and decodes in half the time of H.264, with a quarter more bytes at the same PSNR
        # (benchmarks/LOG.md).
        self._stream = add("mpeg4", rate=rate, options=options)
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
        self.container.mux(self._stream.encode(frame))

    def finish(self) -> None:
        self.container.mux(self._stream.encode())
        self.container.close()


def _even(length: float) -> int:
    return max(2, round(length / 2) * 2)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def read(
    path: str, span: Span, numbers: Sequence[int], take: Callable[[int, VideoFrame], None]
) -> None:
    """Decodes frames of a piece, from the keyframe before the first one on.

    Args:
        take: called with a frame's position in ``numbers`` and the frame.

    Raises:
        BadExample: a frame is damaged, or the piece cannot be read.
        DiskAway: its disk is temporarily unavailable.
    """
    positions = {number: position for position, number in enumerate(numbers)}
    try:
        with open_input(path, span) as container:
            stream = container.streams.video[0]
            prepare_decoder(stream)
            assert stream.average_rate is not None
            assert stream.time_base is not None
            tick = float(1 / (stream.average_rate * stream.time_base))  # a Fraction is slow
            container.seek(round(numbers[0] * tick), stream=stream)
            for frame in container.decode(stream):
                number = round((frame.pts or 0) / tick)
                if frame.is_corrupt:
                    raise BadExample(path, f"frame {number} is corrupt")
                if (position := positions.pop(number, None)) is not None:
                    take(position, frame)
                if not positions:
                    return
    except (av.FFmpegError, IndexError) as error:
        raise BadExample(path, f"cannot be decoded: {reason(error)}") from error
    raise BadExample(path, f"frame {min(positions)} is missing")
