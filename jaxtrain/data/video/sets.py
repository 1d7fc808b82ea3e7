"""Sets of pieces: what training reads, made once from videos (``jaxtrain prepare clips``).

A set is a folder, or a folder of a bucket, that :mod:`jaxtrain.jobs.resumable` fills:

* ``BITS.tar``: uncompressed tars with the pieces of some videos each. Videos are grouped by the
  hashes of their names (:mod:`jaxtrain.data.grouping`), so that a video that is added or changed
  makes one tar again.
* ``table/``: all videos and pieces, written when all tars are made. A run starts from it without
  opening a tar, and workers read single rows of it.

A set is identified by its videos (names, sizes, and both ends), its settings, and the version of
this program's rules, never by the bytes of its pieces.
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
import shlex
import shutil
import tarfile
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np

from jaxtrain import formats, machine
from jaxtrain.config import invocation
from jaxtrain.data import grouping, remote
from jaxtrain.data.contract import MOST_PREPARATION_S, Estimate
from jaxtrain.data.number_file import NumberFile, numbers_of
from jaxtrain.data.video import files, pieces
from jaxtrain.data.video.files import VideoFile
from jaxtrain.data.video.pieces import Settings
from jaxtrain.data.video.reader import Frame, Look, Reader, Span
from jaxtrain.errors import BadExample, InputError, first_line
from jaxtrain.jobs import resumable
from jaxtrain.jobs.engines import Engine, Processes, Threads, Worker
from jaxtrain.storage import addresses, cache, disks, file_ends, record
from jaxtrain.storage.atomic import expanded
from jaxtrain.terminal import Say

LEAST_GROUP_BYTES, GROUP_BYTES = 2**21, 2**27
"""Size of the videos of a tar, unless it has only one: a 64th of all, so that all cores have work,
between these. Their pieces take about four times as much if they are compressed well."""
VERSION = 2
"""Of the reader, and of the rules by which it cuts."""
_VIDEO = np.dtype(
    [
        *(("name", "u8", 2), ("first", "u8"), ("pieces", "u4"), ("frames", "u8")),
        *(("size", "i8"), ("ends", "S16"), ("rate", "u4", 2)),
    ]
)
_PIECE = np.dtype(
    [
        *(("tar", "u4"), ("frames", "u4"), ("offset", "u8"), ("size", "u8")),
        *(("height", "u2"), ("width", "u2")),
    ]
)
_VIDEOS, _PIECES, _NAMES, _ABOUT = "videos", "pieces", "names", "about.json"
_USED = ".source"  # in a set of the cache: what it was made of, and when it was used last
_SAMPLED = 64  # videos whose headers are read for an estimate
_SOURCE_S, _OUT_S = 3e-9, 6e-9  # of a core for a pixel: to decode it, and to scale and encode it
_OUT_BYTES = 0.06  # per pixel of a piece
_USUAL_FRAME_BYTES = 20_000  # of a video at a URL
_SMALL_BYTES = 2**26


def prepare(
    videos: Sequence[VideoFile],
    out: Path | str,
    settings: Settings,
    *,
    engine: Engine,
    say: Say,
    part: resumable.Part = resumable.ALL,
) -> resumable.Outcome:
    """Makes the tars and the table that do not exist yet; see :func:`resumable.run`.

    The totals of the outcome are ``pieces``, ``frames``, ``frames_left_out`` and ``frames_lost``.
    """
    sizes = {video: _size(video) for video in videos}
    share = 2 ** (sum(sizes.values()) // 64).bit_length()  # changes when the size doubles
    max_bytes = min(GROUP_BYTES, max(LEAST_GROUP_BYTES, share))
    groups = grouping.divided(videos, lambda video: video.name, sizes.__getitem__, max_bytes)
    described = {**dataclasses.asdict(settings), "version": VERSION}
    return resumable.run(
        (_item(bits, group) for bits, group in groups),
        functools.partial(_begin, settings),
        out,
        described,
        engine=engine,
        say=say,
        part=part,
        doing="cutting",
        things="videos",
        finish=functools.partial(_write_table, described),
    )


class Opened(NamedTuple):
    """A set that a run reads.

    Attributes:
        inputs: number of videos that it was made of, good and bad.
        bad: those of which it has no piece.
    """

    table: "Table"
    inputs: int
    bad: tuple[BadExample, ...]


def is_set(path: str) -> bool:
    """Returns whether a folder, or a folder of a bucket, is a set, complete or not."""
    try:
        return "gop" in (resumable.settings_of(path) or {})
    except InputError:  # a URL, but not of a folder in a bucket
        return False


def opened_at(path: str, flag: str, root: Path, say: Say) -> Opened:
    """Opens the set at a path or URL, of which the cache at ``root`` gets a copy.

    Raises:
        InputError: the set is incomplete, or has no piece.
        RunAgain: a disk or a bucket is unavailable, or full.
    """
    return disks.when_readable(lambda: _opened_at(path, flag, root, say))


@dataclasses.dataclass(frozen=True)
class CachedSet:
    """A set in the cache, made or not, of the videos at a path.

    Attributes:
        path: a folder, a video, or a list of videos.
        folder: of the set, on disk or in a bucket.
        prepare_long: whether to make it if that takes more than half an hour or the free disk.
    """

    path: str
    flag: str
    videos: list[VideoFile]
    settings: Settings
    root: Path
    folder: str
    prepare_long: bool

    @classmethod
    def of(
        cls,
        path: str,
        flag: str,
        needed: Settings,
        root: Path,
        say: Say,
        *,
        prepare_long: bool = False,
        bucket: str | None = None,
    ) -> "CachedSet":
        """Returns the set that a run uses, made or not.

        That is a complete set on disk that is made of the same videos and has pieces of enough
        size, length, and quality. Of several, it is the one with just the settings that are needed,
        or else the oldest, so that sets that are made later do not change a run that resumes.

        Args:
            bucket: URL of the cache, if it is in a bucket.

        Raises:
            InputError: no videos, or a URL that runs do not read.
        """
        videos = files.find(path, flag, root, say, fetch_videos=False)
        sources = cache.digest(sorted((video.name, *_identity(video)) for video in videos))[:20]
        folders = folder_in(root)
        name = f"{sources}-{cache.digest(dataclasses.asdict(needed), VERSION)[:12]}"
        wanted = folders / name
        candidates = folders.glob(f"{sources}-*")
        for other in sorted(
            candidates, key=lambda entry: (entry != wanted, _finished_ns(entry), entry.name)
        ):
            settings = settings_of(other)
            if settings is not None and settings.covers(needed) and _is_complete(other):
                return cls(path, flag, videos, settings, root, str(other), prepare_long)
        folder = str(wanted) if bucket is None else f"{bucket}/{folders.name}/{name}"
        return cls(path, flag, videos, needed, root, folder, prepare_long)

    def is_complete(self) -> bool:
        """Returns whether the set is made, where all processes see it."""
        if addresses.is_address(self.folder):
            return settings_of(self.folder) is not None and _is_finished(self.folder)
        return _is_complete(Path(self.folder))

    def made(self, say: Say) -> Opened:
        """Opens the set, which is made if it does not exist, or fetched.

        Raises:
            InputError: none of the videos can be used, or it takes long.
            RunAgain: a disk or a bucket is unavailable, or full.
        """
        if addresses.is_address(self.folder):
            copy = _copy_of(self.folder, self.root)
            if _is_fetched(copy):  # the name says all, so that the bucket need not be asked
                return _opened(copy, self.path, self.flag, self.settings)
        if not self.is_complete():
            self.begin()
            self.make(say)
        folder = _local(self.folder, self.flag, self.root, say)
        if not addresses.is_address(self.folder):
            _mark_used(folder, addresses.public(self.path))
        return _opened(folder, self.path, self.flag, self.settings)

    @functools.cached_property
    def plan(self) -> "Plan":
        """Returns what it takes to make it."""
        return Plan.of(self.videos, self.settings)

    @property
    def estimate(self) -> Estimate:
        """Implements :attr:`jaxtrain.data.contract.Preparation.estimate`."""
        plan = self.plan
        frames = f"{plan.frames:,.0f} frames"
        subject = f"{formats.counted(plan.videos, 'video')} ({frames})"
        return Estimate(subject, plan.core_s, plan.out_bytes)

    def begin(self, processes: int = 1) -> None:
        """Makes the folder, on disk with the tars of an earlier set of the same source.

        Args:
            processes: how many make parts of it, each with as many cores as this one.

        Raises:
            InputError: it takes more than half an hour, or more than the free disk.
        """
        if not self.prepare_long:
            self._check_short(processes)
        if addresses.is_address(self.folder):
            return
        folder, source = Path(self.folder), addresses.public(self.path)
        if not folder.exists():
            _link_tars_of_same_source(source, self.settings, self.root, folder)
        _mark_used(folder, source)

    def make(self, say: Say, part: resumable.Part = resumable.ALL, sharing: int = 1) -> None:
        """Makes it, or a part.

        Args:
            sharing: number of processes that share the cores of this host for this.
        """
        public_path, plan = addresses.public(self.path), self.plan
        if part.index == 0:
            say(
                f"{self.flag} {public_path}: cutting {plan} into {addresses.public(self.folder)} "
                "(once)"
            )
        small = plan.source_bytes < _SMALL_BYTES  # processes take a second to start
        cores = max(1, machine.cores() // sharing)
        engine = Threads(cores) if small else Processes(cores, say)
        prepare(self.videos, self.folder, self.settings, engine=engine, say=say, part=part)

    def _check_short(self, processes: int) -> None:
        """Raises InputError if it takes more than half an hour, or more than the free disk."""
        above, free = "", math.inf
        if not addresses.is_address(self.folder):
            above = str(next(place for place in Path(self.folder).parents if place.exists()))
            free = shutil.disk_usage(above).free
        if self.plan.seconds / processes <= MOST_PREPARATION_S and self.plan.out_bytes <= free:
            return
        why = f"more than {MOST_PREPARATION_S // 60} minutes"
        if self.plan.out_bytes > free:
            why = f"more than the {formats.size(free)} that are free at {above}"
        public_path, settings = addresses.public(self.path), self.settings
        raise InputError(
            f"{self.flag} {public_path}: cutting {self.plan} takes {why}: prepare the clips first "
            f"with `{invocation.program()} prepare clips {shlex.quote(public_path)} OUT --height "
            f"{settings.height} --width {settings.width} --frames {settings.frames} --min-frames "
            f"{settings.min_frames} --min-crop-scale {settings.min_crop_scale:g} --min-side "
            f"{settings.min_side}`, and pass {self.flag} OUT; or set --data.prepare True"
        )


def _link_tars_of_same_source(source: str, needed: Settings, root: Path, folder: Path) -> None:
    """Gives a set the tars of the last one of the same source, of which some videos have changed.

    Those of other videos are then made already. What is made again replaces the link alone.
    """
    others = (place for place in cached(root) if place.source == source)
    last = next((place for place in others if settings_of(place.folder) == needed), None)
    if last is None:
        return
    work = folder.with_name(f"{folder.name}.linking")
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(last.folder / resumable.RECORDS, work / resumable.RECORDS)
    for tar in last.folder.glob("*.tar"):
        os.link(tar, work / tar.name)
    os.replace(work, folder)


class Cached(NamedTuple):
    """A set in the cache.

    Attributes:
        source: what it was made of, as a run named it.
        videos: number of videos with pieces; None if it is incomplete.
        used_s: when a run last used it, in seconds since the epoch.
    """

    folder: Path
    source: str
    videos: int | None
    used_s: float


def folder_in(root: Path) -> Path:
    """Returns the folder of the sets in a cache."""
    return root / "sets"


def cached(root: Path) -> Iterator[Cached]:
    """Yields the sets in a cache, those that were used last first."""
    kept = []
    for mark in folder_in(root).glob(f"*/{_USED}"):
        source = mark.read_text(encoding="utf-8", errors="surrogateescape")
        videos = Table.of(mark.parent).length if _is_complete(mark.parent) else None
        kept.append(Cached(mark.parent, source, videos, mark.stat().st_mtime))
    yield from sorted(kept, key=lambda entry: -entry.used_s)


def _mark_used(folder: Path, source: str) -> None:
    """Notes that a run uses a set of the cache."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _USED).write_text(source, encoding="utf-8", errors="surrogateescape")


def settings_of(folder: Path | str) -> Settings | None:
    """Returns the settings of a set; None for other folders, and sets of other versions."""
    kept = resumable.settings_of(folder) or {}
    names = {field.name for field in dataclasses.fields(Settings)}
    if kept.pop("version", None) != VERSION or names != kept.keys():
        return None
    try:
        return Settings(**kept)
    except (TypeError, InputError):
        return None


def _finished_ns(folder: Path) -> int:
    try:
        return (folder / resumable.FINISHED / record.NAME).stat().st_mtime_ns
    except OSError:
        return 0  # it is incomplete


def _is_complete(folder: Path) -> bool:
    return _is_finished(folder) and record.read(folder / resumable.FINISHED) is not None


def _is_finished(folder: Path | str) -> bool:
    try:
        resumable.check_complete(folder)
    except InputError:
        return False
    return True


def _opened_at(path: str, flag: str, root: Path, say: Say) -> Opened:
    resumable.check_complete(path)
    opened = _opened(_local(path, flag, root, say), path, flag, settings_of(path))
    if opened.bad:  # `prepare clips` has named them, and ended with 1
        say(
            f"{flag} {addresses.public(path)}: made of {opened.inputs:,} videos, of which "
            f"{len(opened.bad):,} could not be used: see its {resumable.REPORT}"
        )
    return Opened(opened.table, opened.table.length, ())


def _opened(folder: Path, path: str, flag: str, settings: Settings | None) -> Opened:
    public_path, finished = addresses.public(path), folder / resumable.FINISHED
    if settings is None or record.read(finished) is None:
        with contextlib.suppress(FileNotFoundError):  # its disk may be away
            _bytes_of(finished / record.NAME)
        raise InputError(
            f"{flag} {public_path} was made by another version of jaxtrain: prepare its videos "
            "again, into another folder"
        )
    try:
        report = json.loads(_bytes_of(folder / resumable.REPORT))
        inputs = int(report["inputs"])
        bad = tuple(BadExample(item["name"], item["reason"]) for item in report["failed"])
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{flag} {public_path}: its {resumable.REPORT} is damaged: prepare its videos again"
        ) from error
    table = Table.of(folder)
    if not table.length:
        reason = f" ({bad[0]})" if bad else ""
        raise InputError(
            f"{flag} {public_path}: none of {inputs:,} videos can be used{reason}: fix or replace "
            f"them, or pass other videos with {flag}"
        )
    return Opened(table, inputs, bad)


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise disks.disk_trouble(error, f"cannot read {file}", "prepare it again") from error


def _local(path: str, flag: str, root: Path, say: Say) -> Path:
    """Returns the folder of a set on disk, of a bucket's after fetching it."""
    if not addresses.is_address(path):
        return expanded(path).absolute()
    folder = _copy_of(path, root)
    remote.copy_folder(path, folder, root, flag, say)
    return folder


def _copy_of(url: str, root: Path) -> Path:
    return root / "fetched-sets" / cache.digest(addresses.identity(url))[:20]


def _is_fetched(copy: Path) -> bool:
    if record.read(copy / resumable.FINISHED) is None:
        return False
    return all((copy / tar).exists() for tar in Table.of(copy).about["tars"])


@dataclasses.dataclass(frozen=True)
class Plan:
    """What it takes to make a set; estimated from the headers of some videos."""

    videos: int
    source_bytes: int
    frames: float
    core_s: float
    out_bytes: float

    @classmethod
    def of(cls, videos: Sequence[VideoFile], settings: Settings) -> "Plan":
        """Estimates what a set takes."""
        sizes = [_size(video) for video in videos]
        step = max(1, len(videos) // _SAMPLED)
        frames = core_s = out_bytes = sampled = 0.0
        for video, size in list(zip(videos, sizes, strict=True))[::step]:
            if video.url or not size:
                continue
            header = Reader(video.path, video.span)
            look = None
            with contextlib.suppress(BadExample):
                look = next((item.look for item in header if isinstance(item, Frame)), None)
            if look is None or not header.frames:
                continue
            out = math.prod(settings.size(*look.display_size))
            sampled += size
            frames += header.frames
            core_s += header.frames * (look.width * look.height * _SOURCE_S + out * _OUT_S)
            out_bytes += header.frames * out * _OUT_BYTES
        total = sum(sizes)
        if not sampled:  # at URLs
            frames, sampled = total / _USUAL_FRAME_BYTES, max(1.0, total)
            pixels = frames * settings.height * settings.width / settings.min_crop_scale**2
            core_s, out_bytes = pixels * (_SOURCE_S + _OUT_S), pixels * _OUT_BYTES
        scale = total / sampled
        return cls(len(videos), total, frames * scale, core_s * scale, out_bytes * scale)

    @property
    def seconds(self) -> float:
        """Returns how long it takes on the cores of this host."""
        return self.core_s / machine.cores()

    def __str__(self) -> str:
        minutes = f"about {formats.counted(round(self.seconds / 60), 'minute')}"
        return (
            f"{formats.counted(self.videos, 'video')} ({self.frames:,.0f} frames, "
            f"{minutes if self.seconds >= 60 else 'less than a minute'} on "
            f"{formats.counted(machine.cores(), 'core')}, {formats.size(self.out_bytes)})"
        )


def _size(video: VideoFile) -> int:
    if video.span is not None:
        return video.span.size
    if video.url:
        return 0 if video.version is None else video.version[0]
    try:
        return os.stat(video.file).st_size
    except (OSError, ValueError):  # gone, or a NUL in the name: the worker reports it
        return 0


def _item(bits: str, group: Sequence[VideoFile]) -> resumable.Item:
    singles = [
        resumable.Item(
            video.name,
            _identity(video),
            f"one-{grouping.hash_of(video.name).hex()[:16]}.tar",
            (video,),
        )
        for video in group
    ]
    output = f"{bits or 'all'}.tar"
    if len(group) == 1:
        return dataclasses.replace(singles[0], output=output)
    return resumable.Item(
        f"{group[0].name} and {len(group) - 1:,} more videos",
        tuple(itertools.chain.from_iterable((single.name, *single.identity) for single in singles)),
        output,
        tuple(group),
        singles=tuple(singles),
    )


def _identity(video: VideoFile) -> resumable.Identity:
    """Returns the size and both ends of a video; of an object in a bucket, its size and ETag."""
    if video.url:  # without a version, it is assumed not to change
        return video.version or (cache.digest(addresses.identity(video.url)),)
    start = 0 if video.span is None else video.span.offset
    try:
        size = _size(video)
        return size, disks.when_readable(lambda: file_ends.digest(video.file, start, size))
    except (OSError, ValueError):
        return ()


def _begin(settings: Settings, worker: Worker) -> resumable.Make:
    del worker
    return functools.partial(_make, settings)


def _make(settings: Settings, item: resumable.Item, path: Path) -> dict[str, Any]:
    """Writes a tar; returns where its pieces are."""
    failed, notes = dict[str, str](), list[str]()
    totals = collections.Counter(pieces=0, frames=0, frames_left_out=0, frames_lost=0)
    known = {single.name: single.identity for single in item.singles or (item,)}
    rows, again, absent = [], False, ""
    work = path.with_name("work")
    with open(path, "wb") as tar:
        for video in item.value:
            try:
                cut, row = _cut(video, settings, work, tar)
            except BadExample as bad:
                if isinstance(bad.__cause__, OSError):
                    # It may be readable the next time; if it never was, its identity changes then.
                    again |= bool(known[video.name])
                    if isinstance(bad.__cause__, FileNotFoundError):
                        absent = bad.path
                failed[video.name] = bad.reason
                continue
            except InputError as error:  # of this URL: it is gone, or a web page
                failed[video.name] = str(error)
                continue
            except av.FFmpegError as error:  # such as of an encoder that refuses its size
                if isinstance(error, OSError):
                    raise
                failed[video.name] = f"{type(error).__name__}: {first_line(error)}"
                continue
            notes += _notes(video.name, cut)
            totals.update(pieces=len(cut.pieces), frames=sum(cut.pieces))
            totals.update(frames_left_out=cut.left_out, frames_lost=cut.lost)
            rows.append([video.name, *row])
        tar.write(bytes(2 * tarfile.BLOCKSIZE))
    members = [video.name for video in item.value]
    about = {"members": members, "inputs": len(members), "failed": failed, "notes": notes}
    return about | totals | {"videos": rows, "again": again, "absent": absent}


def _cut(
    video: VideoFile, settings: Settings, work: Path, tar: Any
) -> tuple[pieces.Cut, list[Any]]:
    """Appends the pieces of a video to a tar; returns how it was cut, and its row of the table."""
    name = video.name
    try:
        if video.url:  # from here on, a file, whose content counts
            video = files.fetched(video, work.with_name("fetched"), "SOURCE")._replace(url="")
        before = _identity(video)

        def cut() -> pieces.Cut:
            shutil.rmtree(work, ignore_errors=True)  # of a try that the disk of the video ended
            work.mkdir()
            return pieces.cut(video.path, video.span, work, settings)

        result = disks.when_readable(cut)
        if _identity(video) != before:
            raise BadExample(video.path, "changed while it was processed")
        rows = []
        for number, frames in enumerate(result.pieces):
            data = (work / f"{number:05}.mp4").read_bytes()
            header = tarfile.TarInfo(f"{folder_of(name)}/{number:05}.mp4")
            header.size = len(data)
            tar.write(header.tobuf(tarfile.GNU_FORMAT))
            rows.append([tar.tell(), len(data), frames, *result.sizes[number]])
            tar.write(data + bytes(-len(data) % tarfile.BLOCKSIZE))
        rate = result.rate.limit_denominator(1001)
        return result, [list(before), [rate.numerator, rate.denominator], rows]
    finally:
        shutil.rmtree(work, ignore_errors=True)
        shutil.rmtree(work.with_name("fetched"), ignore_errors=True)


def _notes(name: str, cut: pieces.Cut) -> list[str]:
    notes = [f"{name} is {trait}: colors are not tone-mapped" for trait in cut.traits]
    if cut.damage:
        damage, used = "; it ".join(cut.damage), sum(cut.pieces)
        notes.append(f"{name} {damage}: {cut.lost:,} frames are lost, {used:,} are used")
    return notes


def folder_of(name: str) -> str:
    """Returns the folder of a video's pieces in a tar."""
    names = [component for component in name.split("/") if component not in ("", ".", "..")]
    return "/".join(names)


def _write_table(settings: dict[str, Any], folder: Path, records: list[resumable.Record]) -> None:
    """Writes the table of all tars."""
    folder.mkdir()
    tars = sorted(record["output"] for record in records)
    place = {name: number for number, name in enumerate(tars)}
    listed = sorted(
        (video, place[record["output"]])
        for record in records
        for video in record["details"]["videos"]
    )
    videos, rows, names = np.zeros(len(listed), _VIDEO), list[tuple[int, ...]](), bytearray()
    for number, ((name, identity, rate, of_video), tar) in enumerate(listed):
        encoded = os.fsencode(name)
        size, ends = (identity[0], str(identity[1])[:16]) if len(identity) == 2 else (-1, "")
        videos[number] = (
            (len(names), len(names) + len(encoded)),
            len(rows),
            len(of_video),
            sum(row[2] for row in of_video),
            size,
            ends.encode("ascii", "replace"),
            tuple(rate),
        )
        names += encoded
        rows += [
            (tar, frames, offset, size, height, width)
            for offset, size, frames, height, width in of_video
        ]
    videos.tofile(folder / _VIDEOS)
    np.array(rows, _PIECE).tofile(folder / _PIECES)
    (folder / _NAMES).write_bytes(names)
    (folder / _ABOUT).write_text(json.dumps({"tars": tars, "settings": settings}))


class Piece(NamedTuple):
    """A piece of a video.

    Attributes:
        path: for messages.
        span: its place in a tar.
    """

    path: str
    span: Span
    frames: int
    look: Look


class Video(NamedTuple):
    """A video of a set.

    Attributes:
        name: path relative to the folder or list that the set was made of.
        rate: frames per second; 0 if unknown.
        digest: of the name, the content, and the lengths of the pieces.
    """

    name: str
    rate: Fraction
    pieces: tuple[Piece, ...]
    digest: str

    @property
    def path(self) -> str:
        """Returns the tar, and the video's folder in it, for messages."""
        return self.pieces[0].path.rpartition("/")[0]


@dataclasses.dataclass(frozen=True)
class Table:
    """The table of a set. Cheap to pickle: opens its files at first use."""

    folder: str
    length: int

    @classmethod
    def of(cls, folder: Path) -> "Table":
        """Opens the table of a complete set."""
        rows = numbers_of(str(folder / resumable.FINISHED / _VIDEOS), _VIDEO)
        return cls(str(folder), len(rows))

    def _path(self, name: str) -> str:
        return f"{self.folder}/{resumable.FINISHED}/{name}"

    @property
    def rows(self) -> np.ndarray:
        """Returns all rows of videos."""
        return numbers_of(self._path(_VIDEOS), _VIDEO)

    @property
    def pieces(self) -> int:
        """Returns the number of pieces of all videos."""
        return len(numbers_of(self._path(_PIECES), _PIECE))

    @functools.cached_property
    def names(self) -> list[str]:
        """Returns the names of all videos."""
        names = numbers_of(self._path(_NAMES), "uint8").tobytes()
        return [os.fsdecode(names[start:stop]) for start, stop in self.rows["name"].tolist()]

    def clips(self, frames: int, stride: int) -> np.ndarray:
        """Returns the number of clips of each video that begin at every n-th frame of a piece."""
        if not self.length:
            return np.zeros(0, np.int64)
        lengths = numbers_of(self._path(_PIECES), _PIECE)["frames"].astype(np.int64)
        counts = clips_in(lengths, frames, stride)
        result: np.ndarray = np.add.reduceat(counts, self.rows["first"].astype(np.int64))
        return result

    def video(self, number: int) -> Video:
        """Returns a video.

        Raises:
            DiskAway, BadExample: it cannot be read, now or at all.
        """
        (row,) = self._videos.read(number, number + 1)
        start, stop = map(int, row["name"])
        name = os.fsdecode(self._names.read(start, stop).tobytes())
        first, count = int(row["first"]), int(row["pieces"])
        pieces, tars = [], self.about["tars"]
        for at, piece in enumerate(self._pieces.read(first, first + count)):
            tar = f"{self.folder}/{tars[int(piece['tar'])]}"
            pieces.append(
                Piece(
                    f"{tar}/{folder_of(name)}/{at:05}.mp4",
                    Span(tar, int(piece["offset"]), int(piece["size"])),
                    int(piece["frames"]),
                    Look(int(piece["width"]), int(piece["height"]), Fraction(1)),
                )
            )
        top, bottom = map(int, row["rate"])
        content = (name, int(row["size"]), row["ends"].decode())
        lengths = [piece.frames for piece in pieces]
        digest = cache.digest(content, lengths, self.about["settings"])
        return Video(name, Fraction(top, bottom or 1), tuple(pieces), digest)

    @functools.cached_property
    def _videos(self) -> NumberFile:
        return NumberFile(self._path(_VIDEOS), _VIDEO)

    @functools.cached_property
    def _pieces(self) -> NumberFile:
        return NumberFile(self._path(_PIECES), _PIECE)

    @functools.cached_property
    def _names(self) -> NumberFile:
        return NumberFile(self._path(_NAMES), "uint8")

    @functools.cached_property
    def about(self) -> dict[str, Any]:
        """Returns the names of the tars, and the settings of the pieces."""
        return dict(json.loads(Path(self._path(_ABOUT)).read_text(encoding="utf-8")))

    def __reduce__(self) -> tuple[type["Table"], tuple[str, int]]:
        """Pickles the fields, without the open files."""
        return Table, (self.folder, self.length)


@dataclasses.dataclass(frozen=True, eq=False)
class Videos:
    """Some videos of a set, such as one split.

    Attributes:
        chosen: their numbers in the table, int64: 8 MB for a million.
        content: digest of the videos and of their pieces.
    """

    table: Table
    chosen: np.ndarray
    content: str

    @classmethod
    def of(cls, table: Table, chosen: np.ndarray) -> "Videos":
        """Returns the videos with these numbers."""
        rows, names = table.rows[chosen], table.names
        described = [
            (names[number], int(row["size"]), row["ends"].decode(), int(row["frames"]))
            for number, row in zip(chosen.tolist(), rows, strict=True)
        ]
        return cls(table, chosen, cache.digest(sorted(described), table.about["settings"]))

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, number: int) -> Video:
        return self.table.video(int(self.chosen[number]))

    def __iter__(self) -> Iterator[Video]:
        return (self[number] for number in range(len(self)))

    def clips(self, frames: int, stride: int) -> np.ndarray:
        """Returns :meth:`Table.clips` of these videos."""
        clips: np.ndarray = self.table.clips(frames, stride)[self.chosen]
        return clips


def clips_in(length: Any, frames: int, stride: int) -> Any:
    """Returns how many clips of some frames in a row begin at every n-th of ``length`` frames."""
    return np.maximum((length - frames) // stride + 1, 0)


def located(counts: Sequence[int] | np.ndarray, place: int) -> tuple[int, int]:
    """Returns in which of several rows a place is, by the rows' lengths, and its place there.

    Raises:
        IndexError: the rows are shorter.
    """
    ends = np.cumsum(counts)
    number = int(np.searchsorted(ends, place, side="right"))
    return number, place - int(ends[number] - counts[number])
