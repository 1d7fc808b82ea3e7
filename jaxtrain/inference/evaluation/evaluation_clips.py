"""Chooses a few clips of a folder of videos, the same every time, for measurements.

Clips are of the videos themselves, or of the pieces of a set.

Shapes: T frames, H height, W width.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import threading
from collections.abc import Collection, Iterator, Sequence
from fractions import Fraction

import numpy as np

from jaxtrain import machine
from jaxtrain.data.video import files, frames, pieces, sets
from jaxtrain.data.video.reader import Frame, Look, Reader, Span
from jaxtrain.errors import BadExample, InputError
from jaxtrain.storage import addresses, cache, disks
from jaxtrain.terminal import Say


@dataclasses.dataclass(frozen=True)
class FrameRange:
    """Frames in a row: a piece, or a part of a video in which none is missing.

    Attributes:
        span: place in another file; None for a video that is a file.
        first: number of frames before it, as a reader yields them.
        rate: frames per second; 0 if unknown.
        is_piece: whether it is a piece, which is read from any frame on.
    """

    name: str
    path: str
    span: Span | None
    first: int
    count: int
    rate: Fraction
    look: Look
    is_piece: bool = False

    def read(self, numbers: Sequence[int], height: int, width: int) -> np.ndarray:
        """Decodes frames with ascending numbers: the largest center crop, uint8 [T, H, W, 3].

        Raises:
            BadExample: a frame is damaged, or the file has changed.
        """
        crop = frames.Crop(
            self.look,
            frames=len(numbers),
            height=height,
            width=width,
            position=frames.CropPosition(),
        )
        if self.is_piece:
            assert self.span is not None, "pieces are in tars"
            pieces.read(self.path, self.span, numbers, crop.put)
            return crop.out_THWC
        wanted = {self.first + number: place for place, number in enumerate(numbers)}
        for number, frame in _READ.frames(self.path, self.span, min(wanted)):
            if number in wanted:
                crop.put(wanted.pop(number), frame.picture)
            if not wanted:
                return crop.out_THWC
        raise BadExample(self.path, f"changed: its frame {min(wanted):,} is missing")


class _LastRead(threading.local):
    """Where a thread is in a video, which is read in order: the next clip is mostly behind."""

    def __init__(self) -> None:
        self._of: tuple[str, Span | None] | None = None
        self._next = 0
        self._items: Iterator[Frame] = iter(())

    def frames(self, path: str, span: Span | None, start: int) -> Iterator[tuple[int, Frame]]:
        """Yields the frames from some number on, with their numbers."""
        if self._of != (path, span) or self._next > start:
            self._of, self._next = (path, span), 0
            self._items = (item for item in Reader(path, span) if isinstance(item, Frame))
        try:
            for frame in self._items:
                self._next += 1
                yield self._next - 1, frame
        except Exception:  # such as DiskAway, after which reading begins again
            self._of = None
            raise
        self._of = None


_READ = _LastRead()


@dataclasses.dataclass(frozen=True)
class Clip:
    """A clip of a video, in the largest center crop with the target's aspect.

    Attributes:
        place: of the clip within the video, 0 to 1.
        chosen: numbers of the frames in the range, ascending; the last may repeat.
    """

    frame_range: FrameRange
    place: float
    chosen: tuple[int, ...]
    height: int
    width: int

    def read(self) -> np.ndarray:
        """Decodes the clip, uint8 [T, H, W, 3]."""
        different = sorted(set(self.chosen))
        images = disks.when_readable(
            lambda: self.frame_range.read(different, self.height, self.width),
        )
        return images[np.searchsorted(different, self.chosen)]


def choose(
    path: str,
    flag: str,
    *,
    frames: int,
    height: int,
    width: int,
    clips: int | None,
    say: Say,
    only: Collection[str] | None = None,
) -> list[Clip]:
    """Returns clips that are evenly spread over the videos at a path, the same every time.

    Args:
        path: a set of pieces; or a folder, a video or a list of videos.
        clips: number of clips; None takes one per video. If there are fewer clips than videos, the
            videos are evenly chosen; if there are more, a video has several evenly spaced clips.
        only: names of the videos to use; None uses all.

    Raises:
        InputError: there are no videos, or none can be used.
    """
    usable = _usable(path, flag, frames, say, only)
    count = clips or len(usable)
    share, more = divmod(count, len(usable))  # as Clips.validated
    with_more = {place * len(usable) // more for place in range(more)}
    shares = [share + (place in with_more) for place in range(len(usable))]
    return [
        _at(ranges, (number + 0.5) / share, frames, height, width)
        for ranges, share in zip(usable, shares, strict=True)
        for number in range(share)
    ]


def _at(ranges: Sequence[FrameRange], place: float, frames: int, height: int, width: int) -> Clip:
    """Returns the clip at a place, 0 to 1, of all that are inside of a range."""
    counts = sets.clips_in(np.array([frame_range.count for frame_range in ranges]), frames, 1)
    number, first = sets.located(counts, round(place * (int(counts.sum()) - 1)))
    return Clip(ranges[number], place, tuple(range(first, first + frames)), height, width)


def from_the_start(
    path: str,
    flag: str,
    *,
    frames: int,
    height: int,
    width: int,
    fps: float | None,
    complete: bool,
    say: Say,
) -> list[Clip]:
    """Returns the clips of a published protocol (:mod:`jaxtrain.inference.evaluation.protocols`).

    Args:
        fps: frame rate of the clips: takes every n-th frame, n = round(a video's rate / fps); None
            takes every frame.
        complete: whether to divide the complete video into clips, and to fill the last one by
            repeating its last frame; otherwise only the first clip is taken.
    """
    clips = []
    for ranges in _usable(path, flag, 1 if complete else frames, say, None):
        for frame_range in ranges if complete else ranges[:1]:
            stride = max(1, round(frame_range.rate / Fraction(fps))) if fps else 1
            taken = list(range(0, frame_range.count, stride))
            for first in range(0, len(taken) if complete else 1, frames):
                some = taken[first : first + frames]
                some += some[-1:] * (frames - len(some))
                place = (frame_range.first + some[0]) / (ranges[-1].first + ranges[-1].count)
                clips.append(Clip(frame_range, place, tuple(some), height, width))
    return clips


def _usable(
    path: str, flag: str, frames: int, say: Say, only: Collection[str] | None
) -> list[list[FrameRange]]:
    """Returns the ranges with enough frames of each video that has one."""
    root = cache.root(None)
    bad = list[BadExample]()
    videos: list[tuple[str, list[FrameRange]]]
    if sets.is_set(path):
        opened = sets.opened_at(path, flag, root, say)
        videos = [
            (video.path, _of_pieces(video))
            for video in map(opened.table.video, range(opened.table.length))
        ]
    else:
        with concurrent.futures.ThreadPoolExecutor(machine.cores()) as pool:
            videos = []
            for result in pool.map(_of_video, files.find(path, flag, root, say)):
                if isinstance(result, BadExample):
                    bad.append(result)
                else:
                    videos.append(result)
    usable = []
    for path_of_video, ranges in videos:
        if only is not None and ranges and ranges[0].name not in only:
            continue
        if long_enough := [frame_range for frame_range in ranges if frame_range.count >= frames]:
            usable.append(long_enough)
        else:
            longest = max((frame_range.count for frame_range in ranges), default=0)
            text = f"is too short: it has {longest} frames in a row, a clip needs {frames}"
            bad.append(BadExample(path_of_video, text))
    for excluded in bad:
        say(f"skipped: {excluded}")
    if not usable:
        raise InputError(
            f"{flag} {addresses.public(path)}: none of {len(bad):,} videos can be used (the "
            f"reasons are above): fix or replace them, or pass other videos with {flag}"
        )
    return usable


def _of_pieces(video: sets.Video) -> list[FrameRange]:
    firsts = itertools.accumulate((piece.frames for piece in video.pieces), initial=0)
    return [
        FrameRange(
            video.name, piece.path, piece.span, first, piece.frames, video.rate, piece.look, True
        )
        for first, piece in zip(firsts, video.pieces, strict=False)
    ]


def _of_video(video: files.VideoFile) -> tuple[str, list[FrameRange]] | BadExample:
    """Decodes a video to find its ranges."""
    try:
        return video.path, disks.when_readable(functools.partial(_ranges_in, video))
    except BadExample as bad:
        return bad


def _ranges_in(video: files.VideoFile) -> list[FrameRange]:
    reader = Reader(video.path, video.span)
    ranges, number, new = list[FrameRange](), 0, True
    for item in reader:
        if not isinstance(item, Frame):
            new = True
            continue
        if new or item.look != ranges[-1].look:
            source = (video.name, video.path, video.span)
            ranges.append(FrameRange(*source, number, 0, reader.rate, item.look))
        ranges[-1] = dataclasses.replace(ranges[-1], count=ranges[-1].count + 1)
        number, new = number + 1, False
    return ranges
