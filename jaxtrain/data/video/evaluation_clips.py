"""Chooses a few clips of a folder of videos, the same every time, for measurements.

Shapes: T frames, H height, W width.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxtrain.data.video import index
from jaxtrain.data.video.clips import unaugmented
from jaxtrain.data.video.index import Entry
from jaxtrain.errors import BadExample, InputError
from jaxtrain.jobs import cache
from jaxtrain.storage import addresses, disks


@dataclasses.dataclass(frozen=True)
class Clip:
    """A clip of a video: some frames, in the largest center crop with the target's aspect.

    Attributes:
        entry: the file.
        place: place of the first frame within the possible range, 0 to 1.
        frames, height, width: size of the clip.
        chosen: which of the intact frames, which may repeat; () takes `frames` consecutive ones
            from `place` on.
    """

    entry: Entry
    place: float
    frames: int
    height: int
    width: int
    chosen: tuple[int, ...] = ()

    def read(self) -> np.ndarray:
        """Decodes the clip, uint8 [T, H, W, 3].

        Raises:
            BadExample: the file is too short, or a frame is damaged.
        """
        return disks.when_readable(lambda: index.with_frames(self.entry, self._read))

    def _read(self, present: np.ndarray) -> np.ndarray:
        needed = max(self.chosen) + 1 if self.chosen else self.frames
        last = len(present) - needed
        if last < 0:
            text = f"is too short: it has {len(present)} frames, a clip needs {needed}"
            raise BadExample(self.entry.path, text)
        first = round(self.place * last)
        chosen = self.chosen or tuple(range(first, first + self.frames))
        different = sorted(set(chosen))
        images = unaugmented(self.entry, present[different].tolist(), self.height, self.width)
        return images[np.searchsorted(different, chosen)]


def choose(
    path: str,
    flag: str,
    *,
    frames: int,
    height: int,
    width: int,
    clips: int | None,
    say: Callable[[str], None],
    entries: Sequence[Entry] | None = None,
) -> list[Clip]:
    """Returns clips that are evenly spread over the videos at a path, the same every time.

    Args:
        path: a folder, a video or a list of videos.
        flag: the option that set the path, for messages.
        frames, height, width: size of a clip.
        clips: number of clips; None takes one per video. If there are fewer clips than videos, the
            videos are evenly chosen; if there are more, a video has several evenly spaced clips.
        say: prints a message.
        entries: the videos; None takes all at the path.

    Raises:
        InputError: there are no videos, or none can be used.
    """
    usable = _usable(path, flag, frames, say, entries)
    count = clips or len(usable)
    if count < len(usable):
        usable = [usable[place * len(usable) // count] for place in range(count)]
    shares = [
        count * (place + 1) // len(usable) - count * place // len(usable)
        for place in range(len(usable))
    ]
    return [
        Clip(entry, (number + 0.5) / share, frames, height, width)
        for entry, share in zip(usable, shares, strict=True)
        for number in range(share)
    ]


def from_the_start(
    path: str,
    flag: str,
    *,
    frames: int,
    height: int,
    width: int,
    fps: float | None,
    complete: bool,
    say: Callable[[str], None],
) -> list[Clip]:
    """Returns the clips of a published protocol (:mod:`jaxtrain.inference.protocols`).

    Args:
        path: a folder, a video or a list of videos.
        flag: the option that set the path, for messages.
        frames, height, width: size of a clip.
        fps: frame rate of the clips: takes every n-th frame, n = round(a video's rate / fps); None
            takes every frame.
        complete: whether to divide the complete video into clips, and to fill the last one by
            repeating its last frame; otherwise only the first clip is taken.
        say: prints a message.

    Raises:
        InputError: there are no videos, or none can be used.
    """
    usable = _usable(path, flag, 1 if complete else frames, say)
    clips = []
    for entry in usable:
        info = entry.scanned
        every = max(1, round(info.fps / fps)) if fps else 1
        taken = list(range(0, info.frames, every))
        for first in range(0, len(taken) if complete else 1, frames):
            some = taken[first : first + frames]
            some += some[-1:] * (frames - len(some))
            place = some[0] / info.frames
            clips.append(Clip(entry, place, frames, height, width, tuple(some)))
    return clips


def _usable(
    path: str,
    flag: str,
    frames: int,
    say: Callable[[str], None],
    entries: Sequence[Entry] | None = None,
) -> list[Entry]:
    """Returns the videos with enough frames."""
    if entries is None:
        root = cache.root(None)
        entries = index.of_path(path, flag, root, decode_all=False, say=say)
    usable, bad = index.usable(entries, frames)
    for excluded in bad:
        say(f"skipped: {excluded}")
    if not usable:
        raise InputError(
            f"{flag} {addresses.public(path)}: none of {len(entries):,} videos can be used (the "
            f"reasons are above): fix or replace them, or pass other videos with {flag}"
        )
    return usable
