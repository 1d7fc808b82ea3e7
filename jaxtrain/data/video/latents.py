"""A teacher's latents of fixed windows: computed once, kept in the cache, read with the clips.

Each video has one file in the cache, float16 [windows, L, h, w, C]; its name is the digest of what
the video is, not of where it lies. A window that cannot be decoded is a row of NaN.

Shapes: B clips, T frames, H height, W width; latents L in time, h x w in space, C channels.
"""

import collections
import concurrent.futures
import dataclasses
import io
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxtrain.config import invocation
from jaxtrain.data import cache
from jaxtrain.data.video.index import Entry
from jaxtrain.errors import BadExample, InputError
from jaxtrain.storage import atomic

ABOUT = "about.json"
_DTYPE = np.dtype(np.float16)
_SAY_EVERY_S = 10.0

Shape = tuple[int, ...]


class Teacher(Protocol):
    """An encoder whose latents are learned from.

    Attributes:
        name: says which parameters and settings it has; fit for a folder's name.
        about: what it is, in words, for the cache.
    """

    name: str
    about: str

    def encode(self, video_BTHW3: np.ndarray) -> np.ndarray:
        """Float32 clips, colours in [0, 1] -> float32 latents [B, L, h, w, C]."""


class Windows(Protocol):
    """Fixed windows of one split, as :class:`jaxtrain.data.video.clips.Clips` has them."""

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The files."""

    def windows(self, entry: Entry) -> int:
        """How many a file has."""

    def pixels(self, entry: Entry, window: int) -> np.ndarray:
        """One of them, uint8 [T, H, W, 3]; raises BadExample where it cannot be decoded."""


@dataclasses.dataclass(frozen=True)
class LatentStore:
    """The latents of one teacher for clips of one size.

    Attributes:
        folder: in the cache.
        shape: of a clip's latents, [L, h, w, C].
    """

    folder: Path
    shape: Shape

    @property
    def teacher(self) -> str:
        """The name of the teacher."""
        return self.folder.name

    def file(self, entry: Entry) -> Path:
        """Where the latents of a video lie."""
        digest = cache.digest(entry.name, entry.size, entry.scanned.frames)
        return self.folder / digest[:2] / f"{digest[2:]}.npy"

    def has(self, entry: Entry, windows: int) -> bool:
        """Whether the latents of all windows of a video are there."""
        try:
            found = np.load(self.file(entry), mmap_mode="r")
        except (OSError, ValueError, EOFError):
            return False
        return bool(found.shape == (windows, *self.shape) and found.dtype == _DTYPE)

    def load(self, entry: Entry, window: int) -> np.ndarray:
        """The latents of a window, float32 [L, h, w, C].

        Raises:
            BadExample: they are gone, or there are none as the window could not be decoded.
        """
        file = self.file(entry)
        try:
            found = np.asarray(np.load(file, mmap_mode="r")[window], np.float32)
        except (OSError, ValueError, EOFError, IndexError) as error:
            raise BadExample(entry.path, f"its latents cannot be read: {file}: {error}") from error
        if np.isnan(found[0, 0, 0, 0]):
            raise BadExample(entry.path, f"window {window} has no latents: it was not decoded")
        return found

    def save(self, entry: Entry, latents: np.ndarray) -> None:
        """Writes the latents of all windows of a video; the file appears whole."""
        held = io.BytesIO()
        np.save(held, latents)
        file = self.file(entry)
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_whole(file, held.getvalue())


def place(root: Path, model: Any) -> Path:
    """The folder of all teachers' latents for clips of a model's size."""
    return root / "latents" / f"{model.frames}x{model.height}x{model.width}"


def store(root: Path, model: Any, teacher: str) -> LatentStore:
    """Where the latents of a teacher for clips of a model's size lie, or will."""
    return LatentStore(place(root, model) / teacher, tuple(model.latent_shape))


def find(root: Path, model: Any, teacher: str | None, splits: Iterable[Windows]) -> LatentStore:
    """The latents that a training needs, all of them.

    Args:
        root: of the cache.
        model: says the size of clips and latents.
        teacher: its name; None takes the only one there is.
        splits: the windows.

    Raises:
        InputError: there are none, those of several teachers, of another shape, or not all.
    """
    size = f"clips of {model.frames}x{model.height}x{model.width}"
    cure = (
        f"`{invocation.program()} prepare latents` makes them; it takes this run's --config, its "
        "--data and --model fields, and --teacher SPEC"
    )
    there = sorted(path.parent.name for path in place(root, model).glob(f"*/{ABOUT}"))
    if teacher is None and len(there) > 1:
        raise InputError(
            f"there are latents of {len(there)} teachers for {size} in the cache: name one with "
            f"--data.teacher ({', '.join(there)})"
        )
    if not there or (teacher is not None and teacher not in there):
        wanted = "no teacher's latents" if teacher is None else f"no latents of teacher {teacher}"
        others = sorted(
            f"{path.parent.name} at {path.parent.parent.name}"
            for path in (root / "latents").glob(f"*/*/{ABOUT}")
        )
        known = f" (there are: {', '.join(others)})" if others else ""
        raise InputError(f"{wanted} for {size} in {root}{known}; {cure}")
    found = store(root, model, teacher or there[0])
    shape = tuple(json.loads((found.folder / ABOUT).read_text(encoding="utf-8"))["shape"])
    if shape != found.shape:
        raise InputError(
            f"the latents of teacher {found.teacher} have shape {shape} (time, height, width, "
            f"channels) and the model's {found.shape}: they must be alike; see "
            "model.latent_channels and model.patch_size"
        )
    files_ = [(entry, split.windows(entry)) for split in splits for entry in split.entries]
    missing = [entry for entry, windows in files_ if not found.has(entry, windows)]
    if missing:
        raise InputError(
            f"the latents of teacher {found.teacher} are missing for {len(missing):,} of "
            f"{len(files_):,} videos, as {missing[0].name}; {cure}"
        )
    return found


class Made(NamedTuple):
    """What a preparation did.

    Attributes:
        videos: of both splits.
        fresh: of them, whose latents were not there yet.
        windows: whose latents are new.
        bad: windows that could not be decoded, one example each.
    """

    videos: int
    fresh: int
    windows: int
    bad: tuple[BadExample, ...]


class _Job:
    """A video whose latents are being made."""

    def __init__(self, split: Windows, entry: Entry, shape: Shape) -> None:
        self.split, self.entry = split, entry
        self.left = split.windows(entry)
        self.latents = np.full((self.left, *shape), np.nan, _DTYPE)


_Decoded = tuple[_Job, int, np.ndarray | BadExample]


def prepare(
    splits: Iterable[Windows],
    teacher: Teacher,
    target: LatentStore,
    *,
    batch_size: int,
    threads: int,
    say: Callable[[str], None],
) -> Made:
    """Compute and keep the latents of all windows that have none yet.

    Args:
        splits: the windows.
        teacher: encodes them.
        target: where they are kept.
        batch_size: clips that the teacher gets at once; the last batch is filled up.
        threads: that decode.
        say: takes messages for the console.

    Raises:
        InputError: the teacher's latents have another shape or are no finite numbers.
        OSError: they cannot be written. What is finished stays.
    """
    everything = [(split, entry) for split in splits for entry in split.entries]
    todo = [one for one in everything if not target.has(one[1], one[0].windows(one[1]))]
    total = sum(split.windows(entry) for split, entry in todo)
    say(f"{len(everything) - len(todo):,} of {len(everything):,} videos have their latents already")
    bad: list[BadExample] = []
    began = told = time.monotonic()
    done = 0
    decoded = _decode(todo, target.shape, threads, batch_size + threads)
    described = False
    while rows := list(itertools.islice(decoded, batch_size)):
        clips = [(job, window, clip) for job, window, clip in rows if isinstance(clip, np.ndarray)]
        bad += [clip for _, _, clip in rows if isinstance(clip, BadExample)]
        if clips:
            found = _encode(teacher, [clip for _, _, clip in clips], batch_size, target.shape)
            for (job, window, _), latents in zip(clips, found, strict=True):
                job.latents[window] = latents
        if not described:  # only once the teacher's latents are known to fit
            target.folder.mkdir(parents=True, exist_ok=True)
            about = {"teacher": teacher.about, "shape": list(target.shape)}
            atomic.write_whole(target.folder / ABOUT, json.dumps(about, indent=1) + "\n")
            described = True
        for job, _, _ in rows:
            job.left -= 1
            if not job.left:
                target.save(job.entry, job.latents)
        done += len(rows)
        if time.monotonic() - told > _SAY_EVERY_S:
            told = time.monotonic()
            left_s = (told - began) / done * (total - done)
            say(f"latents of {done:,} of {total:,} windows, about {left_s / 60:.0f} min to go")
    return Made(len(everything), len(todo), total, tuple(bad))


def _decode(
    todo: Iterable[tuple[Windows, Entry]], shape: Shape, threads: int, ahead: int
) -> Iterator[_Decoded]:
    """All windows of the videos in order, decoded a little ahead by threads."""

    def one(job: _Job, window: int) -> _Decoded:
        try:
            return job, window, job.split.pixels(job.entry, window)
        except BadExample as bad:
            return job, window, bad

    jobs = (_Job(split, entry, shape) for split, entry in todo)
    windows = ((job, window) for job in jobs for window in range(job.left))
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        running = collections.deque(
            pool.submit(one, *each) for each in itertools.islice(windows, ahead)
        )
        while running:
            yield running.popleft().result()
            running.extend(pool.submit(one, *each) for each in itertools.islice(windows, 1))


def _encode(teacher: Teacher, clips: list[np.ndarray], batch_size: int, shape: Shape) -> np.ndarray:
    """The latents of some clips, float16 [B, L, h, w, C]; the teacher gets a whole batch."""
    filled = clips + clips[-1:] * (batch_size - len(clips))  # so that one program does for all
    video = np.stack(filled).astype(np.float32) / 255
    found = np.asarray(teacher.encode(video))[: len(clips)]
    if found.shape[1:] != shape:
        raise InputError(
            f"teacher {teacher.name} gives latents of shape {found.shape[1:]} (time, height, "
            f"width, channels) and the model's are {shape}: they must be alike; see "
            "model.latent_channels, model.patch_size and model.frames"
        )
    with np.errstate(over="ignore"):
        small = found.astype(_DTYPE)
    if not np.isfinite(small).all():
        raise InputError(
            f"teacher {teacher.name} gives latents that are not finite or above 65504 (the largest "
            f"is {np.abs(found).max():.3g}): its scaling or its weights are wrong"
        )
    return small
