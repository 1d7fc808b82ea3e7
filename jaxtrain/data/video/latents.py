"""A teacher's latents of fixed windows: computed once, cached, and read with the clips.

Each video has one file in the cache, float16 [windows, L, h, w, C]. The file name is a digest of
the video's name, size and length, not of its location. A window that cannot be decoded is all NaN,
and a second file, DIGEST.lacking.json, has the reason.
If the cache is in a bucket, the latents are written there, and :func:`find` fetches them.

Shapes: B clips, T frames, H height, W width; latents L in time, h x w in space, C channels.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import errno
import functools
import io
import itertools
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from jaxtrain.config import invocation
from jaxtrain.data import cache, engine
from jaxtrain.data.video.index import Entry
from jaxtrain.errors import BadExample, InputError, RunAgain
from jaxtrain.storage import atomic, disks, lock, shared_folder
from jaxtrain.storage.bucket_output import BucketOutput
from jaxtrain.telemetry import progress_bar

ABOUT = "about.json"
_RECORD = ".lacking.json"
_DTYPE = np.dtype(np.float16)
_FETCHES = 8  # files at once
_LARGEST_ABOUT = 2**20  # bytes; also of the record of a video's windows without latents
_BATCHES = 4  # that a group of videos fills at least, for a worker of a cluster

Shape = tuple[int, ...]


class Teacher(Protocol):
    """An encoder whose latents are training targets.

    Attributes:
        name: identifies its parameters and settings; valid as a folder name.
        about: a description for the cache.
    """

    name: str
    about: str

    def encode(self, video_BTHW3: np.ndarray) -> np.ndarray:
        """Encodes float32 clips with values in [0, 1] to float32 latents [B, L, h, w, C]."""


class Windows(Protocol):
    """The fixed windows of one split; see :class:`jaxtrain.data.video.clips.Clips`."""

    @property
    def entries(self) -> Sequence[Entry]:
        """Returns the files."""

    def windows(self, entry: Entry) -> int:
        """Returns the number of windows of a file."""

    def pixels(self, entry: Entry, window: int) -> np.ndarray:
        """Returns a window, uint8 [T, H, W, 3]; raises BadExample if it cannot be decoded."""


@dataclasses.dataclass(frozen=True)
class Lacking:
    """A video with windows that could not be decoded.

    Attributes:
        path: the video.
        reason: of the first such window.
        windows: their number.
        of: the number of the video's windows.
    """

    path: str
    reason: str
    windows: int
    of: int

    def __str__(self) -> str:
        return f"no latents for {self.windows:,} of {self.of:,} clips of {self.path}: {self.reason}"


@dataclasses.dataclass(frozen=True)
class LatentStore:
    """The latents of one teacher for clips of one size.

    Attributes:
        folder: the teacher's folder in the cache.
        shape: shape of a clip's latents, [L, h, w, C].
        bucket: the bucket and the name of the folder in it; None if the cache is on disk.
    """

    folder: Path
    shape: Shape
    bucket: tuple[BucketOutput, str] | None = None

    @property
    def teacher(self) -> str:
        """Returns the name of the teacher."""
        return self.folder.name

    @property
    def where(self) -> str:
        """Returns where latents are written, for messages."""
        if self.bucket is None:
            return str(self.folder)
        output, name = self.bucket
        return f"{output.url}/{name}"

    def file(self, entry: Entry) -> Path:
        """Returns the path of a video's latents."""
        return self.folder / self._name(entry)

    def listed(self) -> dict[str, int]:
        """Returns the bytes of each file where latents are written."""
        if self.bucket is None:
            return self.on_disk()
        output, folder = self.bucket
        there = output.bucket.sizes(folder)
        return {name.removeprefix(f"{folder}/"): size for name, size in there.items()}

    def on_disk(self) -> dict[str, int]:
        """Returns the bytes of each file on this disk.

        Lists the folders: to open a million files on a network disk takes minutes.
        """
        sizes = {}
        for folder in self.folder.glob("[0-9a-f][0-9a-f]"):
            with os.scandir(folder) as files:
                for file in files:
                    with contextlib.suppress(FileNotFoundError):  # another command's, unfinished
                        sizes[f"{folder.name}/{file.name}"] = file.stat().st_size
        return sizes

    def finished(self, entry: Entry, windows: int, listed: dict[str, int] | None = None) -> bool:
        """Returns whether the latents of all windows of a video exist where they are written.

        Args:
            entry: the video.
            windows: the number of its windows.
            listed: from :meth:`listed` or :meth:`on_disk`; None looks for this video only.
        """
        name = self._name(entry)
        if listed is not None:
            return listed.get(name) == self._bytes(windows)
        if self.bucket is None:
            return self.has(entry, windows)
        output, folder = self.bucket
        found = output.bucket.about(f"{folder}/{name}")
        return found is not None and found[0] == self._bytes(windows)

    def fetch(self, videos: Iterable[tuple[Entry, int]], say: Callable[[str], None]) -> None:
        """Fetches latents that exist in the bucket and not on this disk.

        Args:
            videos: with the number of windows of each.
            say: prints a message.

        Raises:
            RunAgain, InputError: the bucket or the disk fails.
        """
        if self.bucket is None:
            return
        output, folder = self.bucket
        here, listed = self.on_disk(), self.listed()
        wanted = [
            entry
            for entry, windows in videos
            if not self.finished(entry, windows, here) and self.finished(entry, windows, listed)
        ]
        if wanted:
            self.folder.mkdir(parents=True, exist_ok=True)
            disks.check_room(
                self.folder,
                sum(listed[self._name(entry)] for entry in wanted),
                f"{output.url}/{folder}",
                cache.CURE,
            )
            say(f"fetching latents of {len(wanted):,} videos from {output.url}/{folder} (once)")

        def fetch(entry: Entry) -> None:
            file = self.file(entry)
            file.parent.mkdir(parents=True, exist_ok=True)
            name = f"{folder}/{self._name(entry)}"
            if not output.bucket.fetch(name, file):
                raise RunAgain(f"{output.url}/{name} was deleted while it was fetched: start again")

        with concurrent.futures.ThreadPoolExecutor(_FETCHES) as pool:
            list(pool.map(fetch, wanted))

    def _name(self, entry: Entry) -> str:
        digest = cache.digest(entry.name, entry.size, entry.scanned.frames)
        return f"{digest[:2]}/{digest[2:]}.npy"

    def record(self, entry: Entry) -> str:
        """Returns the name of the file that records a video's windows without latents."""
        return self._name(entry).removesuffix(".npy") + _RECORD

    def _bytes(self, windows: int) -> int:
        """Returns the size of a video's file."""
        header, shape = io.BytesIO(), (windows, *self.shape)
        about = {"descr": _DTYPE.str, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, about)
        return len(header.getvalue()) + math.prod(shape) * _DTYPE.itemsize

    def has(self, entry: Entry, windows: int) -> bool:
        """Returns whether the latents of all windows of a video exist on this disk."""
        try:
            found = np.load(self.file(entry), mmap_mode="r")
        except (OSError, ValueError, EOFError):
            return False
        return bool(found.shape == (windows, *self.shape) and found.dtype == _DTYPE)

    def load(self, entry: Entry, window: int) -> np.ndarray:
        """Loads the latents of a window, float32 [L, h, w, C].

        Raises:
            BadExample: they cannot be read, or do not exist because the window is broken.
            DiskAway: they cannot be read now.
        """
        file = self.file(entry)
        try:
            # Without a memory map, which would end the process if the disk fails (SIGBUS).
            with open(file, "rb") as opened:
                found = _window(opened, window)
        except OSError as error:
            failure = disks.unreadable(str(file), error, existed=True)
            if isinstance(failure, disks.DiskAway):
                raise failure from error
            raise BadExample(entry.path, f"its latents cannot be read: {failure}") from error
        except (ValueError, EOFError, IndexError) as error:
            raise BadExample(entry.path, f"its latents cannot be read: {file}: {error}") from error
        if np.isnan(found[0, 0, 0, 0]):
            raise BadExample(entry.path, f"window {window} has no latents: it could not be decoded")
        return found

    def save(self, entry: Entry, latents: np.ndarray, lacking: Lacking | None) -> None:
        """Writes the latents of all windows of a video, and then which it lacks, atomically."""
        held = io.BytesIO()
        np.save(held, latents)
        self._write(self._name(entry), held.getvalue())
        if lacking is not None:
            data = json.dumps({"windows": lacking.windows, "reason": lacking.reason}).encode()
            self._write(self.record(entry), data)

    def recorded(self, listed: dict[str, int]) -> set[str]:
        """Returns the names of the files that record windows without latents.

        Args:
            listed: from :meth:`listed`.
        """
        return {name for name in listed if name.endswith(_RECORD)}

    def lacking(self, entry: Entry, windows: int) -> Lacking | None:
        """Returns which windows of a finished video have no latents; None if it is not recorded."""
        try:
            if self.bucket is None:
                found = atomic.read_json(self.folder / self.record(entry))
            else:
                output, folder = self.bucket
                there = output.bucket.get(f"{folder}/{self.record(entry)}")
                found = atomic.parse_json(there.data) if there else {}
            return Lacking(entry.path, str(found["reason"]), int(found["windows"]), windows)
        except (OSError, ValueError, KeyError, TypeError):  # the record is only for messages
            return None

    def forget(self, entry: Entry) -> None:
        """Deletes the record of a video's windows without latents."""
        if self.bucket is not None:
            output, folder = self.bucket
            output.bucket.delete([f"{folder}/{self.record(entry)}"])
        else:
            (self.folder / self.record(entry)).unlink(missing_ok=True)

    def describe(self, teacher: str) -> None:
        """Writes the description of the teacher, unless it is there."""
        about = {"teacher": teacher, "shape": list(self.shape)}
        data = (json.dumps(about, indent=1) + "\n").encode()
        if self.bucket is not None:
            output, folder = self.bucket
            found = output.bucket.get(f"{folder}/{ABOUT}")
            if found is None or found.data != data:
                self._write(ABOUT, data)
            return
        with self.claimed(ABOUT) as mine:  # otherwise another command is writing it now
            file = self.folder / ABOUT
            if mine is not False and not (file.exists() and file.read_bytes() == data):
                self._write(ABOUT, data)

    def check(self) -> None:
        """Checks that this command may still write; see :meth:`BucketOutput.check`."""
        if self.bucket is not None:
            self.bucket[0].check()

    def claimed(self, name: str) -> contextlib.AbstractContextManager[bool | None]:
        """Claims a file of the folder on disk; see :func:`jaxtrain.storage.lock.claimed`."""
        return lock.claimed(self.folder / ".claims", name)

    @contextlib.contextmanager
    def only(self, say: Callable[[str], None], *, shared: bool) -> Iterator[None]:
        """Keeps other commands out of the folder on disk, and removes what killed ones left there.

        Args:
            say: prints a message.
            shared: whether other commands work in the folder, too.

        Raises:
            RunAgain: another command is using the folder, and one of them does not share it.
        """
        if self.bucket is not None:
            yield
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        lock.hold(self.folder, say, shared=shared)
        self._remove_left(shared)
        try:
            yield
        finally:
            self._remove_left(shared)

    def _remove_left(self, shared: bool) -> None:
        with contextlib.suppress(OSError):
            for folder in (self.folder, *self.folder.glob("[0-9a-f][0-9a-f]")):
                for left, name in atomic.leftovers(folder):
                    with self.claimed(name) as mine:
                        if mine or not shared:  # a node that a cluster has given up has no claim
                            left.unlink(missing_ok=True)

    def _write(self, name: str, data: bytes) -> None:
        if self.bucket is not None:
            output, folder = self.bucket
            output.put(f"{folder}/{name}", data)
            return
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_whole(file, data)


def cache_folder(root: Path, model: Any) -> Path:
    """Returns the folder of all teachers' latents for clips of a model's size."""
    return root / "latents" / f"{model.frames}x{model.height}x{model.width}"


def store(
    root: Path, model: Any, teacher: str, bucket: cache.CacheBucket | None = None
) -> LatentStore:
    """Returns a teacher's store for clips of a model's size, whether or not it exists.

    Args:
        root: the cache folder.
        model: the model config, which sets the size of clips and latents.
        teacher: its name.
        bucket: has the cache that ``root`` is a copy of.
    """
    folder = cache_folder(root, model) / teacher
    there = None if bucket is None else (bucket.output, bucket.name(folder))
    return LatentStore(folder, tuple(model.latent_shape), there)


def _teachers(root: Path, model: Any) -> list[str]:
    """Returns the teachers whose latents of a model's size are on this disk."""
    return sorted(path.parent.name for path in cache_folder(root, model).glob(f"*/{ABOUT}"))


def _fetch_descriptions(root: Path, model: Any, bucket: cache.CacheBucket) -> None:
    """Makes the descriptions on this disk those of the teachers that are in a bucket."""
    folder = cache_folder(root, model)
    output, name = bucket.output, bucket.name(folder)
    listed = output.bucket.sizes(name)
    for local in folder.glob(f"*/{ABOUT}"):
        if f"{name}/{local.parent.name}/{ABOUT}" not in listed:  # deleted there
            local.unlink(missing_ok=True)
    for one in listed:
        teacher, _, file = one.removeprefix(f"{name}/").partition("/")
        if file == ABOUT and teacher not in (".", ".."):
            (folder / teacher).mkdir(parents=True, exist_ok=True)
            if not output.bucket.fetch(one, folder / teacher / ABOUT, _LARGEST_ABOUT):
                (folder / teacher / ABOUT).unlink(missing_ok=True)


def find(
    root: Path,
    model: Any,
    teacher: str | None,
    splits: Iterable[Windows],
    say: Callable[[str], None],
    bucket: cache.CacheBucket | None = None,
) -> LatentStore:
    """Returns the store with all latents that a run needs.

    If this disk has them all, the bucket is not asked.

    Args:
        root: the cache folder.
        model: the model config, which sets the size of clips and latents.
        teacher: name of the teacher; None selects the only one in the cache.
        splits: the windows.
        say: prints a message.
        bucket: has the cache that ``root`` is a copy of.

    Raises:
        InputError: there are no latents, several teachers to choose from, latents of the wrong
            shape, or latents missing for some videos.
    """
    size = f"clips of {model.frames}x{model.height}x{model.width}"
    cure = (
        f"compute them with `{invocation.program()} prepare latents`, this run's --config, its "
        "--data and --model fields, and --teacher SPEC"
    )
    files_ = [(entry, split.windows(entry)) for split in splits for entry in split.entries]
    there = _teachers(root, model)
    chosen = teacher or (there[0] if len(there) == 1 else None)
    if bucket is not None and (chosen not in there or _missing(store(root, model, chosen), files_)):
        _fetch_descriptions(root, model, bucket)
        there = _teachers(root, model)
    else:
        bucket = None
    if teacher is None and len(there) > 1:
        raise InputError(
            f"the cache has latents of {len(there)} teachers for {size}: choose one with "
            f"--data.teacher ({', '.join(there)})"
        )
    if not there or (teacher is not None and teacher not in there):
        lacking = "no teacher's latents" if teacher is None else f"no latents of teacher {teacher}"
        others = sorted(
            f"{path.parent.name} at {path.parent.parent.name}"
            for path in (root / "latents").glob(f"*/*/{ABOUT}")
        )
        known = f" (found: {', '.join(others)})" if others else ""
        raise InputError(f"{lacking} for {size} in {root}{known}: {cure}")
    found = store(root, model, teacher or there[0], bucket)
    about = found.folder / ABOUT
    try:
        shape = tuple(atomic.read_json(about)["shape"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{about} is damaged ({disks.reason(error)}): delete it, for a cache in a bucket also "
            "there, and repeat prepare latents"
        ) from error
    if shape != found.shape:
        raise InputError(
            f"the latents of teacher {found.teacher} have shape {shape} (time, height, width, "
            f"channels), but the model's have {found.shape}: change model.latent_channels or "
            "model.patch_size"
        )
    found.fetch(files_, say)
    if missing := _missing(found, files_):
        raise InputError(
            f"the latents of teacher {found.teacher} are missing for {len(missing):,} of "
            f"{len(files_):,} videos, such as {missing[0].name}: {cure}"
        )
    return found


def _missing(there: LatentStore, videos: Iterable[tuple[Entry, int]]) -> list[Entry]:
    """Returns the videos without latents on this disk, given the number of windows of each."""
    here = there.on_disk()
    return [entry for entry, windows in videos if not there.finished(entry, windows, here)]


class Made(NamedTuple):
    """The result of :func:`prepare`.

    Attributes:
        videos: number of videos in both splits.
        fresh: number of videos with new latents.
        windows: number of windows whose latents are new.
        bad: the videos with windows that could not be decoded, now or by an earlier command.
    """

    videos: int
    fresh: int
    windows: int
    bad: tuple[Lacking, ...]

    @property
    def without(self) -> int:
        """Returns the number of videos without any latents."""
        return sum(one.windows == one.of for one in self.bad)

    @property
    def tried(self) -> tuple[int, int]:
        """Returns how many windows this has, and how many of them have no latents."""
        failed = sum(one.windows for one in self.bad)
        return self.windows + failed, failed

    def plus(self, part: "Made") -> "Made":
        """Returns this with what a part of the work added."""
        return Made(
            self.videos + part.videos,
            self.fresh + part.fresh,
            self.windows + part.windows,
            (*self.bad, *part.bad),
        )


class _Job:
    """A video whose latents are being computed."""

    def __init__(self, split: Windows, entry: Entry, shape: Shape) -> None:
        self.split, self.entry = split, entry
        self.left = split.windows(entry)
        self.bad: list[BadExample] = []
        self.latents = np.full((self.left, *shape), np.nan, _DTYPE)

    def lacking(self) -> Lacking | None:
        """Returns the windows that could not be decoded; None if there are none."""
        if not self.bad:
            return None
        of = len(self.latents)
        return Lacking(self.entry.path, self.bad[0].reason, len(self.bad), of)


_Decoded = tuple[_Job, int, np.ndarray | BadExample]


def prepare(
    splits: Iterable[Windows],
    teacher: Teacher,
    target: LatentStore,
    *,
    batch_size: int,
    threads: int,
    say: Callable[[str], None],
    share: str | None = None,
) -> Made:
    """Computes and stores the latents of all videos that have none yet.

    Args:
        splits: the windows.
        teacher: encodes the windows.
        target: stores the latents.
        batch_size: clips per batch of the teacher; the last batch is padded.
        threads: number of decoding threads.
        say: prints a message.
        share: a text that differs from that of all other commands that compute the same latents at
            the same time, on other machines; None if there are none. Each takes the videos in an
            order of its own, skips those that others have finished or are working on, and returns
            when all are done.

    Raises:
        InputError: the teacher's latents have the wrong shape, or are NaN, Inf or too large.
        OSError: the latents cannot be written. Finished files are kept.
    """
    with target.only(say, shared=share is not None):
        everything, todo, known = _open_videos(splits, target, say)
        total = _windows(todo)
        if share is not None:
            todo.sort(key=lambda one: lock.order(share, one[1].name))
        encoder = Encoder(teacher, target, batch_size, threads)
        made = Made(everything, 0, 0, ())
        about = _About(target, teacher.about, everything > len(todo))
        waits = False
        with progress_bar.counted("encoding", "clips", total, 0, say) as show:
            while todo:
                busy: list[tuple[Windows, Entry]] = []
                with _Claims(target, busy) as claims:
                    mine = todo if share is None else claims.of(todo)
                    for part in encoder.videos(mine, claims.release):
                        about.write_after(part)
                        made = made.plus(part)
                        show(*made.tried)
                todo = busy
                if todo and not waits:
                    waits = True
                    say(
                        f"waiting for {len(todo):,} video{'s'[: len(todo) != 1]} that other "
                        f"commands are encoding, such as {todo[0][1].path}"
                    )
                if todo:
                    time.sleep(lock.POLL_S)
        return made.plus(known)


class _About:
    """Describes the teacher once, and only once its latents are known to fit.

    Args:
        target: stores the latents.
        about: the description.
        known: whether there are latents of an earlier command.
    """

    def __init__(self, target: LatentStore, about: str, known: bool) -> None:
        self._target, self._about, self._written = target, about, known
        if known:
            target.describe(about)

    def write_after(self, part: "Made") -> None:
        """Writes the description when the first latents exist."""
        if part.fresh and not self._written:
            self._target.describe(self._about)
            self._written = True


def prepare_on_cluster(
    cluster: engine.Ray,
    splits: Sequence[Windows],
    load: Callable[[], Teacher],
    about: str,
    target: LatentStore,
    *,
    batch_size: int,
    threads: int | None,
    say: Callable[[str], None],
) -> Made:
    """Does the same as :func:`prepare` on a cluster.

    Each worker loads the teacher once, and processes groups of videos that fill several batches.
    Only this process describes the teacher.

    Args:
        cluster: runs the work.
        splits: the windows.
        load: loads the teacher in a worker; can be pickled.
        about: describes the teacher.
        target: stores the latents, in a folder that all nodes share.
        batch_size, say: see :func:`prepare`.
        threads: decoding threads of each worker; None is one for each of its CPUs.

    Raises:
        InputError: see :func:`prepare`; or a node does not see the videos or the target.
        RunAgain: the cluster failed.
        OSError: the latents cannot be written. Finished files are kept.
    """
    with target.only(say, shared=False):
        everything, todo, known = _open_videos(splits, target, say)
        made = Made(everything, 0, 0, ())
        description = _About(target, about, everything > len(todo))
        if not todo:
            return made.plus(known)
        mark = None
        if target.bucket is None:
            mark = shared_folder.mark(target.folder / ".token", f"the cache {target.folder}")
        numbers = {id(split): number for number, split in enumerate(splits)}
        fixed = (splits, load, target, mark, batch_size, threads)
        videos = [(numbers[id(split)], entry) for split, entry in todo]
        groups = _groups(videos, splits, _BATCHES * batch_size)
        with progress_bar.counted("encoding", "clips", _windows(todo), 0, say) as show:
            while groups:
                alone: list[_Group] = []
                for group, result in cluster.with_models(_begin, groups, *fixed, died=_died):
                    if result is None and len(group) > 1:  # one of the videos is at fault
                        alone += [(one,) for one in group]
                        continue
                    target.check()
                    part, unseen = result or (_lost(splits, group[0], engine.KILLS), ())
                    for one in unseen:
                        shared_folder.check_seen(one)
                    description.write_after(part)
                    made = made.plus(part)
                    show(*made.tried)
                groups = alone
        return made.plus(known)


_Group = tuple[tuple[int, Entry], ...]
"""Videos, each with the number of its split."""
_Result = tuple[Made, tuple[shared_folder.Unseen, ...]]


def _groups(videos: list[tuple[int, Entry]], splits: Sequence[Windows], least: int) -> list[_Group]:
    """Groups consecutive videos to at least so many windows."""
    groups, group, windows = [], [], 0
    for number, entry in videos:
        group.append((number, entry))
        windows += splits[number].windows(entry)
        if windows >= least:
            groups.append(tuple(group))
            group, windows = [], 0
    return [*groups, tuple(group)] if group else groups


def _begin(
    cpus: int,
    splits: Sequence[Windows],
    load: Callable[[], Teacher],
    target: LatentStore,
    mark: shared_folder.Mark | None,
    batch_size: int,
    threads: int | None,
) -> Callable[[_Group], _Result]:
    """Loads the teacher in a worker of a cluster; returns what processes a group."""
    if mark is not None:
        mark.check()
    encoder = Encoder(load(), target, batch_size, threads or cpus)

    def process(group: _Group) -> _Result:
        made, todo, unseen = Made(0, 0, 0, ()), [], []
        for number, entry in group:
            split = splits[number]
            missing = shared_folder.unseen(entry.file)
            if missing is not None:
                unseen.append(missing)
                made = made.plus(_lost(splits, (number, entry), os.strerror(errno.ENOENT)))
            elif target.finished(entry, split.windows(entry)):  # by a worker that was lost since
                made = made.plus(Made(0, 1, split.windows(entry), ()))
            else:
                todo.append((split, entry))
        for part in encoder.videos(todo):
            made = made.plus(part)
        return made, tuple(unseen)

    return process


def _lost(splits: Sequence[Windows], video: tuple[int, Entry], reason: str) -> Made:
    """Returns what a video without latents adds."""
    number, entry = video
    windows = splits[number].windows(entry)
    return Made(0, 0, 0, (Lacking(entry.path, reason, windows, windows),))


def _died(group: _Group) -> None:
    return None


def _open_videos(
    splits: Iterable[Windows], target: LatentStore, say: Callable[[str], None]
) -> tuple[int, list[tuple[Windows, Entry]], Made]:
    """Returns the number of videos, those without a file, and what earlier files lack."""
    everything = [(split, entry) for split in splits for entry in split.entries]
    listed = target.listed()
    # A record is written after its file, so one without it is out of date.
    recorded = target.recorded(listed)
    todo, known = [], Made(0, 0, 0, ())
    for split, entry in everything:
        windows = split.windows(entry)
        finished = target.finished(entry, windows, listed)
        if not finished:
            todo.append((split, entry))
        if not recorded or target.record(entry) not in recorded:
            continue
        if not finished:
            target.forget(entry)
        elif (lacking := target.lacking(entry, windows)) is not None:
            known = known.plus(Made(0, 0, 0, (lacking,)))
    have = len(everything) - len(todo) - known.without
    say(f"{have:,} of {len(everything):,} videos already have latents")
    return len(everything), todo, known


def _windows(videos: Iterable[tuple[Windows, Entry]]) -> int:
    return sum(split.windows(entry) for split, entry in videos)


class Encoder:
    """Computes and stores the latents of videos, in batches that videos share."""

    def __init__(
        self, teacher: Teacher, target: LatentStore, batch_size: int, threads: int
    ) -> None:
        self._teacher, self._target = teacher, target
        self._batch_size, self._threads = batch_size, threads

    def videos(
        self,
        todo: Iterable[tuple[Windows, Entry]],
        finished: Callable[[Entry], None] = lambda entry: None,
    ) -> Iterator[Made]:
        """Yields what each batch adds.

        Args:
            todo: the videos.
            finished: called with each video after its latents are stored, or cannot be.
        """
        target, size = self._target, self._batch_size
        decoded = _decode(todo, target.shape, self._threads, size + self._threads)
        while batch := list(itertools.islice(decoded, size)):
            clips = [
                (job, window, clip) for job, window, clip in batch if isinstance(clip, np.ndarray)
            ]
            if clips:
                pixels = [clip for _, _, clip in clips]
                found = _encode(self._teacher, pixels, size, target.shape)
                for (job, window, _), latents in zip(clips, found, strict=True):
                    job.latents[window] = latents
            fresh, lacking = 0, []
            for job, _, clip in batch:
                job.left -= 1
                if isinstance(clip, BadExample):
                    job.bad.append(clip)
                if job.left:
                    continue
                without = job.lacking()
                if without is not None:
                    lacking.append(without)
                target.save(job.entry, job.latents, without)
                fresh += without is None or without.windows < without.of
                finished(job.entry)
            yield Made(0, fresh, len(clips), tuple(lacking))


class _Claims(contextlib.AbstractContextManager["_Claims"]):
    """Claims videos that this process is working on, while the block runs.

    In a bucket, nothing is claimed: a few videos are encoded twice, with the same result.

    Args:
        target: stores the latents.
        busy: receives the videos that another process is working on.
    """

    def __init__(self, target: LatentStore, busy: list[tuple[Windows, Entry]]) -> None:
        self._target, self._busy = target, busy
        # With every claim, the next one takes longer: with 40,000 of them, 12 ms (measured).
        self._held: dict[Path, contextlib.ExitStack] = {}

    def __exit__(self, *_: object) -> None:
        for claim in self._held.values():
            claim.close()

    def of(self, todo: Iterable[tuple[Windows, Entry]]) -> Iterator[tuple[Windows, Entry]]:
        """Yields the videos without latents that this process could claim.

        Args:
            todo: videos without latents a while ago.
        """
        target = self._target
        for split, entry in todo:
            if target.finished(entry, split.windows(entry)):
                continue
            if target.bucket is not None:
                yield split, entry
                continue
            file = target.file(entry)
            claim = self._held[file] = contextlib.ExitStack()
            if claim.enter_context(target.claimed(file.name)) is False:
                self._busy.append((split, entry))
            elif not target.has(entry, split.windows(entry)):  # not finished just before the claim
                yield split, entry
                continue
            self.release(entry)

    def release(self, entry: Entry) -> None:
        """Ends the claim of a video, if there is one."""
        if (claim := self._held.pop(self._target.file(entry), None)) is not None:
            claim.close()


def _window(file: BinaryIO, window: int) -> np.ndarray:
    """Returns the latents of a window from a file of :meth:`LatentStore.save`, as float32."""
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    count = math.prod(shape[1:])
    end = file.tell() + shape[0] * count * dtype.itemsize
    if dtype != _DTYPE or window >= shape[0] or os.fstat(file.fileno()).st_size != end:
        raise ValueError(f"it is damaged, or does not have window {window}")
    file.seek(window * count * dtype.itemsize, os.SEEK_CUR)
    data = file.read(count * dtype.itemsize)
    return np.frombuffer(data, dtype, count).reshape(shape[1:]).astype(np.float32)


def _decode(
    todo: Iterable[tuple[Windows, Entry]], shape: Shape, threads: int, ahead: int
) -> Iterator[_Decoded]:
    """Yields all windows of the videos in order; threads decode a few of them ahead."""

    def one(job: _Job, window: int) -> _Decoded:
        try:
            read = functools.partial(job.split.pixels, job.entry, window)
            return job, window, disks.when_readable(read)
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
    """Returns the latents of some clips, float16 [B, L, h, w, C]; pads the teacher's batch."""
    filled = clips + clips[-1:] * (batch_size - len(clips))  # one batch size compiles once
    video = np.stack(filled).astype(np.float32) / 255
    found = np.asarray(teacher.encode(video))[: len(clips)]
    if found.shape[1:] != shape:
        raise InputError(
            f"teacher {teacher.name} returns latents of shape {found.shape[1:]} (time, height, "
            f"width, channels), but the model's have {shape}: change model.latent_channels, "
            "model.patch_size, or model.frames"
        )
    with np.errstate(over="ignore"):
        small = found.astype(_DTYPE)
    if not np.isfinite(small).all():
        raise InputError(
            f"teacher {teacher.name} returns latents with NaN/Inf or magnitudes above 65504 (the "
            f"largest is {np.abs(found).max():.3g}): check its scaling and its weights"
        )
    return small
