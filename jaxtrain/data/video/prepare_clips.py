"""``jaxtrain prepare clips``: cuts every raw video of a source into pieces.

The pieces of ``a/b.mp4`` are ``OUT/a/b.mp4.pieces/00000.mp4`` and so on; their names keep them in
one split (:mod:`jaxtrain.data.video.split`). A video's pieces appear all at once, and then
its record, which lets a killed command resume. Cutting a video twice, also at the same time, gives
the same files: each attempt works in a folder of its own and renames it.

An engine (:mod:`jaxtrain.data.engine`) runs the cutting, in processes or on a cluster. Several
commands may also share the work without one, see ``run``.

OUT may be a folder of a bucket: :class:`_BucketDestination` writes objects with the same names and
contents.
"""

import contextlib
import dataclasses
import errno
import functools
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from jaxtrain.data import cache
from jaxtrain.data.engine import KILLS, Engine
from jaxtrain.data.video import files, frames, pieces
from jaxtrain.data.video.files import PIECES, Found
from jaxtrain.data.video.pieces import Settings
from jaxtrain.errors import BadExample, InputError, first_line
from jaxtrain.storage import (
    addresses,
    bucket_output,
    disks,
    lock,
    shared_folder,
    temporary_folders,
)
from jaxtrain.storage import bucket as buckets
from jaxtrain.storage.atomic import (
    create_whole,
    expanded,
    parse_json,
    read_json,
    remove_leftovers,
    sync,
    write_whole,
)
from jaxtrain.storage.bucket_output import BucketOutput
from jaxtrain.storage.disks import disk_trouble
from jaxtrain.storage.shared_folder import Mark, Unseen
from jaxtrain.telemetry import progress_bar
from jaxtrain.telemetry.progress_bar import Say

REPORT = "report.json"
WORK = ".prepare"  # in OUT; hidden, so that its files are not read as data
_SETTINGS = "settings.json"  # in WORK
_RECORDS = f"{WORK}/records"
_READERS = 32  # threads that read records from a bucket
_READ_AHEAD = 1000  # records in memory: those of a million videos take gigabytes
_LONGEST_KEY = 1024  # bytes of the name of an object; the limit of S3 and Google Cloud Storage
_PUBLISH_TRIES = 10
# Before a video is cut that another command no longer cuts: an NFS client may take 60 s (acdirmax)
# to see its record, and the last video of a job would be cut twice.
_LATE_S = 75.0
_NAMED = 20  # skipped videos that the console lists
_SHOWN = 200  # characters of an entry in an error
_CLAIM = 16  # characters of a digest that name a claim and a half-done folder
_MISSING = "No such file or directory"
_BY_OTHERS = "by others"  # in a record that another command wrote, which also reported it

_CHANGED = "changed while it was cut"

Record = dict[str, Any]
_Identity = list[int | str] | None


def run(
    source: str,
    out: Path | str,
    settings: Settings,
    *,
    engine: Engine,
    say: Say,
    share: str | None = None,
) -> Record:
    """Cuts all videos that have not been cut yet.

    Args:
        source: a folder, a video, or a list of videos.
        out: the output folder, created if missing, or the URL of a folder in a bucket.
        settings: settings of the pieces, the same for all pieces of a folder.
        engine: cuts the videos.
        say: prints a message.
        share: None works alone in ``out``. Otherwise, other commands with the same source may work
            in ``out`` at the same time, each with a different text here. Each takes the videos in
            an order of its own, skips those that others have cut or are cutting, and returns when
            all are done.

    Returns:
        The content of ``report.json``.

    Raises:
        InputError: there are no videos, or ``out`` cannot be written or has pieces with other
            settings.
        RunAgain: another process is working in ``out`` and does not share it, or a bucket or the
            disk of the videos is unavailable.
    """
    url = _url(source, out)
    if url is not None:
        return _run_to_bucket(source, url, settings, engine, say, share)
    found = _find(source, say)
    out = expanded(out).absolute()
    alone = share is None
    jobs = [_Job(one, out) for one in found]
    _check_distinct(jobs)
    _check_no_links(jobs, out)
    try:
        (out / WORK).mkdir(parents=True, exist_ok=True)
        lock.hold(out / WORK, say, shared=not alone, shown=out)
        _keep_settings(out, settings)
        _remove_half_done(out, alone)
        try:
            return _run(jobs, _FolderDestination(out), settings, engine, say, share)
        finally:
            _remove_half_done(out, alone)  # of lost nodes, and on a full disk
    except OSError as error:
        raise disk_trouble(
            error,
            f"cannot write to {out}",
            "choose another folder, and start again"
            + ("; finished videos are kept" if _has_records(out) else ""),
        ) from error


def _has_records(out: Path) -> bool:
    """Returns whether a video is finished."""
    return any(names for _, _, names in os.walk(out / _RECORDS))  # without errors


def _url(source: str, out: Path | str) -> str | None:
    """Returns the URL of OUT; None for a folder on disk.

    Raises:
        InputError: OUT is inside SOURCE, or another kind of URL.
    """
    url = None
    if not (buckets.is_bucket(str(out)) or addresses.is_address(str(out))):
        there, top = str(expanded(out).absolute()), str(expanded(source).absolute())
        inside = os.path.isdir(top) and Path(there).is_relative_to(top)
    else:
        there = url = buckets.normalized(str(out), "OUT")
        top = re.sub(r"^(gs|gcs):/+", "gs://", re.sub(r"^s3:/+", "s3://", source.strip()))
        inside = addresses.is_address(top) and f"{url}/".startswith(f"{top.rstrip('/')}/")
    if inside:
        is_in = "is" if there == top.rstrip("/") else "is inside"
        raise InputError(
            f"OUT {there} {is_in} SOURCE {top}, so its clips would be cut again: choose another "
            "folder"
        )
    return url


def _run_to_bucket(
    source: str, url: str, settings: Settings, engine: Engine, say: Say, share: str | None
) -> Record:
    """Does what :func:`run` does for the URL of a folder in a bucket."""
    output = BucketOutput(url)
    with bucket_output.admitted(url, say, shared=share is not None):
        jobs = [_Job(one, Path(url)) for one in _find(source, say)]
        _check_distinct(jobs)
        _check_keys(jobs, url)
        destination = _BucketDestination(output)
        destination.keep_settings(settings)
        try:
            return _run(jobs, destination, settings, engine, say, share)
        finally:
            temporary_folders.clean(cache.root(None))  # of workers that were lost


def _find(source: str, say: Say) -> list[Found]:
    found = files.find(source, "SOURCE", cache.root(None), say, fetch_folders=False)
    if os.path.splitext(source)[1].lower() in files.LISTS and not any(map(_exists, found)):
        raise InputError(
            f"SOURCE {source}: none of its {len(found):,} entries exists on this machine, such as "
            f"{found[0].path[:_SHOWN]}: is it a list of videos? With --engine ray, this "
            "machine must see them, too"
        )
    return found


def _exists(found: Found) -> bool:
    try:
        return not found.path or os.path.lexists(found.file)
    except ValueError:  # a NUL character
        return False


def largest_crop(out: Path) -> tuple[int, int] | None:
    """Returns the height and width of the largest crop that the pieces of a folder were made for.

    Returns None if this command did not write the folder, or its settings cannot be read.
    """
    try:
        kept = read_json(out / WORK / _SETTINGS)
        settings = Settings(**{name: kept[name] for name in ("height", "width", "min_crop_scale")})
    except (OSError, ValueError, KeyError, TypeError, InputError):
        return None
    return frames.room(settings.height, settings.width, settings.min_crop_scale)


def folder_of(name: str) -> str:
    """Returns the folder of a video's pieces, relative to OUT."""
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    # Hidden folders would not be read as data.
    parts = ["_" + part[1:] if part.startswith(".") else part for part in parts]
    return "/".join(parts) + PIECES


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """A video and the output folder.

    Attributes:
        found: the video.
        out: the folder. For a bucket it is its URL, and only a worker has a folder, a temporary
            one.
    """

    found: Found
    out: Path

    @property
    def folder(self) -> Path:
        """Returns the folder for its pieces."""
        return self.out / folder_of(self.found.name)

    @property
    def digest(self) -> str:
        """Returns a digest of its name."""
        return hashlib.sha256(self.found.name.encode("utf-8", "surrogateescape")).hexdigest()

    @property
    def record(self) -> Path:
        """Returns the path of this video's record, which exists once the video is done."""
        return self.out / self.record_name

    @property
    def record_name(self) -> str:
        """Returns the path of the record relative to OUT."""
        digest = self.digest
        return f"{_RECORDS}/{digest[:2]}/{digest[2:]}.json"

    def done(self) -> Record | None:
        """Returns the record, unless the video or its pieces have changed since."""
        record = _read_record(self.record)
        if record is None:
            return None
        fresh = record["video"] == _identity(self.found)
        return record if fresh and self._has_pieces(record) else None

    def _has_pieces(self, record: Record) -> bool:
        """Returns whether the pieces of a record exist, with the sizes that they had."""
        if not record["pieces"]:
            return True
        sizes = record.get("bytes")
        if sizes is None:  # written before records had sizes
            return os.path.isdir(self.folder)
        try:
            return bool(_sizes(self.folder) == sizes)
        except OSError:
            return False


@dataclasses.dataclass
class _Tally:
    """What the report says about all videos.

    Memory grows with the dropped videos only.
    """

    done: int = 0
    cut: int = 0
    pieces: int = 0
    frames: int = 0
    left_out: int = 0
    dropped: list[Record] = dataclasses.field(default_factory=list)

    def add(self, record: Record) -> None:
        self.done += 1
        self.cut += bool(record["pieces"])
        self.pieces += len(record["pieces"])
        self.frames += sum(record["pieces"])
        self.left_out += record["left_out"]
        if record["dropped"] is not None:
            self.dropped.append({"source": record["source"], "reason": record["dropped"]})


class _Destination(Protocol):
    """Where clips and records are written."""

    @property
    def where(self) -> str:
        """Returns the folder or URL, for messages."""

    def done(self, jobs: Sequence[_Job]) -> Iterator[Record | None]:
        """Yields for each video its record, or None if the video must be cut."""

    def cut_all(
        self, jobs: Iterable[_Job], settings: Settings, engine: Engine, shared: bool
    ) -> Iterator[tuple[_Job, Record | None]]:
        """Yields the records as videos are finished; None for one that another command is cutting.

        Raises:
            InputError: a node does not see SOURCE or OUT.
        """

    def is_free(self, job: _Job) -> bool:
        """Returns whether no other command is cutting a video."""

    def gone(self, jobs: Sequence[_Job]) -> list[Record]:
        """Returns the records of videos that have clips here but are not among the jobs."""

    def write_report(self, text: str) -> None:
        """Writes ``report.json``."""


def _run(
    jobs: list[_Job],
    destination: _Destination,
    settings: Settings,
    engine: Engine,
    say: Say,
    share: str | None,
) -> Record:
    tally, todo, again, skipped = _Tally(), [], [], 0
    for job, record in zip(jobs, destination.done(jobs), strict=True):
        if record is None:
            todo.append(job)
        elif record["dropped"] == KILLS and share is None:  # perhaps there is more memory now
            again.append(job)
        else:
            tally.add(record)
    if tally.done:
        say(f"{tally.done:,} of {len(jobs):,} videos are already done")
    if share is not None:
        todo.sort(key=lambda job: lock.order(share, job.digest))
    if again:
        say(f"trying {_videos(len(again))} again after all others: each killed its worker before")
        todo += again
    with progress_bar.counted("cutting", "videos", len(jobs), tally.done, say, "dropped") as show:
        busy: list[_Job] = []
        while todo:
            for job, record in destination.cut_all(todo, settings, engine, share is not None):
                if record is None:
                    busy.append(job)
                    continue
                fresh = record.pop(_BY_OTHERS, None) is None
                tally.add(record)
                if fresh and record["dropped"] is not None:
                    skipped += 1
                    if skipped <= _NAMED:
                        say(f"skipped: {job.found.path or job.found.url}: {record['dropped']}")
                show(tally.done, len(tally.dropped))
            # Without the engine, whose start takes seconds.
            todo, free = [], dict[str, float]()  # since when a video is not being cut
            if busy:
                say(
                    f"waiting for {_videos(len(busy))} that other commands are cutting, such as "
                    f"{busy[0].found.path or busy[0].found.url}"
                )
            while busy and not todo:
                time.sleep(lock.POLL_S)
                waiting, busy = busy, []
                for job, record in zip(waiting, destination.done(waiting), strict=True):
                    if record is not None:
                        tally.add(record)
                        show(tally.done, len(tally.dropped))
                    elif not destination.is_free(job):
                        free.pop(job.digest, None)
                        busy.append(job)
                    else:
                        now = time.monotonic()
                        left = now - free.setdefault(job.digest, now) >= _LATE_S
                        (todo if left else busy).append(job)
    if skipped > _NAMED:
        say(f"skipped: {skipped - _NAMED:,} more, all in {REPORT}")
    gone = destination.gone(jobs)
    if gone:
        say(
            f"{destination.where} also contains clips of {_videos(len(gone))} not in SOURCE "
            f"({gone[0]['source']}{', ...' if len(gone) > 1 else ''}), and training "
            f"uses them: {REPORT} lists their folders; remove those you do not need"
        )
    report = _report(tally, gone, settings)
    destination.write_report(json.dumps(report, indent=1) + "\n")
    return report


def _videos(count: int) -> str:
    return f"{count:,} video{'' if count == 1 else 's'}"


@dataclasses.dataclass(frozen=True)
class _FolderDestination:
    """A local or shared folder."""

    out: Path

    @property
    def where(self) -> str:
        return str(self.out)

    def done(self, jobs: Sequence[_Job]) -> Iterator[Record | None]:
        return (job.done() for job in jobs)

    def cut_all(
        self, jobs: Iterable[_Job], settings: Settings, engine: Engine, shared: bool
    ) -> Iterator[tuple[_Job, Record | None]]:
        mark = shared_folder.mark(self.out / WORK / "token", f"OUT {self.out}")
        for job, result in engine.as_finished(_cut_here, jobs, settings, mark, shared, died=_died):
            if isinstance(result, Unseen):
                shared_folder.check_seen(result)
                result = _dropped(job, _MISSING, None)
            yield job, result

    def is_free(self, job: _Job) -> bool:
        with _claimed(self.out, job.digest[:_CLAIM]) as mine:
            return mine is not False

    def gone(self, jobs: Sequence[_Job]) -> list[Record]:
        known = {job.digest for job in jobs}
        others = (
            path
            for path in (self.out / _RECORDS).glob("*/*.json")
            if path.parent.name + path.stem not in known
        )
        return _gone(
            jobs, map(_read_record, others), lambda folder: os.path.isdir(self.out / folder)
        )

    def write_report(self, text: str) -> None:
        write_whole(self.out / REPORT, text)


@dataclasses.dataclass(frozen=True)
class _BucketDestination:
    """A folder of a bucket, which is listed once, at the start.

    Commands that share the work claim nothing: each takes the videos in an order of its own, and
    looks for a video's record before it cuts the video. With n videos in progress and N in total,
    about n ln N are cut twice, with the same bytes. Claims would have to outlive a killed holder.

    Attributes:
        output: the folder.
    """

    output: BucketOutput

    @property
    def where(self) -> str:
        return self.output.url

    @functools.cached_property
    def _sizes(self) -> dict[str, int]:
        """Bytes of all objects at the start."""
        return self.output.bucket.sizes()

    def _records(self, names: Iterable[str]) -> Iterator[Record | None]:
        """Yields records in order; None for one that did not exist at the start, or is damaged."""
        coming = iter(names)
        with ThreadPoolExecutor(_READERS) as pool:
            while some := list(itertools.islice(coming, _READ_AHEAD)):
                yield from pool.map(self._read, some)

    def _read(self, name: str) -> Record | None:
        return _record_in(self.output, name) if name in self._sizes else None

    def done(self, jobs: Sequence[_Job]) -> Iterator[Record | None]:
        for job, record in zip(jobs, self._records(job.record_name for job in jobs), strict=True):
            if record is None or record["video"] != _identity(job.found):
                yield None
            else:
                yield record if _has_clips(record, self._sizes) else None

    def cut_all(
        self, jobs: Iterable[_Job], settings: Settings, engine: Engine, shared: bool
    ) -> Iterator[tuple[_Job, Record | None]]:
        for job, result in engine.as_finished(
            _cut_to_bucket, jobs, settings, self.output, shared, died=self._died
        ):
            if isinstance(result, Unseen):
                shared_folder.check_seen(result)
                result = self._lost(job, _MISSING, None)
            self.output.check()
            yield job, result

    def _died(self, job: _Job) -> Record:
        return self._lost(job, KILLS, _identity(job.found))

    def _lost(self, job: _Job, why: str, video: _Identity) -> Record:
        record = _record(job, video, dropped=why)
        self.output.replace(record["folder"], [])  # clips of an earlier version of the video
        self.output.put(job.record_name, json.dumps(record).encode())
        return record

    def is_free(self, job: _Job) -> bool:
        return True

    def gone(self, jobs: Sequence[_Job]) -> list[Record]:
        known = {job.record_name for job in jobs}
        there = {name.rpartition("/")[0] for name in self._sizes}
        others = (
            name for name in self._sizes if name.startswith(f"{_RECORDS}/") and name not in known
        )
        return _gone(jobs, self._records(others), lambda folder: folder in there)

    def write_report(self, text: str) -> None:
        self.output.put(REPORT, text.encode())

    def keep_settings(self, settings: Settings) -> None:
        """Raises InputError if the folder has clips with other settings; stores new settings."""
        bucket, name = self.output.bucket, f"{WORK}/{_SETTINGS}"
        kept = bucket.get(name)
        if kept is None:
            bucket.put_if(name, json.dumps(dataclasses.asdict(settings)).encode(), None)
            kept = bucket.get(name)
        data = b"" if kept is None else kept.data
        _check_settings(lambda: parse_json(data), settings, f"{self.where}/{name}", self.where)


def _has_clips(record: Record, sizes: Mapping[str, int]) -> bool:
    """Whether a bucket with these objects has all clips of a record, with the right sizes."""
    found = [
        sizes.get(f"{record['folder']}/{number:05}.mp4") for number in range(len(record["pieces"]))
    ]
    return found == record.get("bytes", [])


def _record_in(output: BucketOutput, name: str) -> Record | None:
    """Reads a record from a bucket; returns None if it is missing or damaged."""
    found = output.bucket.get(name)
    return None if found is None else _parsed_record(found.data)


def _cut_to_bucket(
    job: _Job, settings: Settings, output: BucketOutput, shared: bool
) -> Record | Unseen:
    """Cuts a video in a temporary folder, and uploads its clips and then its record.

    Args:
        job: the video.
        settings: settings of the pieces.
        output: the bucket.
        shared: whether other commands may have cut the video in the meantime.

    Raises:
        RunAgain, InputError: the bucket or the disk fails.
    """
    if job.found.version is None and (missing := shared_folder.unseen(job.found.file)):
        return missing
    if shared:
        record = _record_in(output, job.record_name)
        if record is not None and record["video"] == _identity(job.found):
            sizes = output.bucket.sizes(folder_of(job.found.name))
            if _has_clips(record, sizes):
                return {**record, _BY_OTHERS: True}
    with (
        temporary_folders.temporary_folder(cache.root(None)) as work,
        temporary_folders.explained(work.parent),
    ):
        here = dataclasses.replace(job, out=work)
        (work / WORK).mkdir()
        record = _cut(here, settings)
        if here.record.exists():  # otherwise the disk was at fault
            earlier = _record_in(output, job.record_name)
            # It would describe other clips while these are uploaded. One of the same video is of
            # another node, to which Ray has moved this work, and stays valid.
            if earlier is not None and earlier["video"] != record["video"]:
                output.bucket.delete([job.record_name])
            output.replace(
                record["folder"], sorted(here.folder.iterdir()) if record["pieces"] else []
            )
            output.put(job.record_name, here.record)
    return record


def _cut_here(job: _Job, settings: Settings, mark: Mark, shared: bool) -> Record | Unseen | None:
    """Cuts a video unless another process is cutting it; runs in a worker, maybe elsewhere.

    Args:
        job: the video.
        settings: settings of the pieces.
        mark: of ``out``.
        shared: whether other commands may have cut the video in the meantime.

    Returns:
        The record, marked if another command wrote it; None if another process is cutting the
        video.

    Raises:
        InputError: this host does not see ``out``.
    """
    mark.check()
    if job.found.version is None and (missing := shared_folder.unseen(job.found.file)):
        return missing
    with _claimed(job.out, job.digest[:_CLAIM]) as mine:
        if mine is False and shared:
            return None
        record = job.done() if shared else None
        return _cut(job, settings) if record is None else {**record, _BY_OTHERS: True}


def _claimed(out: Path, name: str) -> contextlib.AbstractContextManager[bool | None]:
    return lock.claimed(out / WORK / "claims", name)


def _died(job: _Job) -> Record:
    return _dropped(job, KILLS, _identity(job.found))


def _cut(job: _Job, settings: Settings) -> Record:
    """Writes the pieces of a video and then its record.

    Raises:
        OSError: the output disk fails.
        RunAgain, InputError: the video cannot be read now, or it is in a bucket and cannot be
            fetched.
    """
    with contextlib.ExitStack() as stack:
        found, work = job.found, stack.enter_context(_half_done(job))
        if found.version is not None:
            found = files.fetched(found, stack.enter_context(_half_done(job)), "SOURCE")
        return _cut_found(job, found, work, settings)


def _cut_found(job: _Job, found: Found, work: Path, settings: Settings) -> Record:
    """Does so with a video on disk.

    Args:
        job: the video.
        found: the same, on disk.
        work: an empty folder in OUT for its pieces.
        settings: settings of the pieces.
    """
    video = _identity(job.found)
    try:

        def cut() -> pieces.Cut:
            for left in work.iterdir():
                left.unlink()
            return pieces.cut(found.path, found.span, work, settings)

        made = disks.when_readable(cut)
        if _identity(job.found) != video:
            raise BadExample(found.path, _CHANGED)
        sizes = _sizes(work)
        for path in (*work.iterdir(), work):
            sync(path)
        # Another node, to which Ray has moved this work. Its clips must not disappear.
        if (other := job.done()) is not None and other["pieces"]:
            return other
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        _publish(work, job.folder, job.out)
        sync(job.folder.parent)
    except BadExample as bad:
        reason = bad.reason if _identity(job.found) == video else _CHANGED
        # The video is not at fault, so the next command tries it again.
        if reason == _CHANGED or isinstance(bad.__cause__, PermissionError):
            return _record(job, video, dropped=reason)
        return _dropped(job, reason, video)
    except disks.DiskAway:
        raise
    except Exception as error:  # from FFmpeg's filters and encoder, or unexpected
        # Reading a broken video raises BadExample. Other OSErrors come from the output disk, and
        # end the command.
        if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
            raise
        return _dropped(job, f"cannot be cut: {type(error).__name__}: {first_line(error)}", video)
    record = _record(job, video, pieces=list(made.pieces), left_out=made.left_out)
    return _finish(job, {**record, "bytes": sizes})


def _publish(work: Path, folder: Path, out: Path) -> None:
    """Renames a complete folder, after moving an older one out of the way.

    At any time the folder is missing or complete, also if another process publishes the same one,
    for example a node that a cluster has given up.
    """
    for last in range(_PUBLISH_TRIES):
        _discard(folder, out)
        try:
            os.rename(work, folder)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY) or last == _PUBLISH_TRIES - 1:
                raise


def _discard(folder: Path, out: Path) -> None:
    """Removes a folder; to other processes it disappears at once."""
    aside = out / WORK / f"old-{secrets.token_hex(8)}"
    try:
        os.rename(folder, aside)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # so it does not exist
            return
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _dropped(job: _Job, why: str, video: _Identity) -> Record:
    _discard(job.folder, job.out)  # pieces of an earlier version of the video
    return _finish(job, _record(job, video, dropped=why))


def _record(
    job: _Job,
    video: _Identity,
    *,
    pieces: Sequence[int] = (),
    left_out: int = 0,
    dropped: str | None = None,
) -> Record:
    return {
        "source": job.found.name,
        "video": video,
        "folder": folder_of(job.found.name),
        "pieces": list(pieces),
        "left_out": left_out,
        "dropped": dropped,
    }


def _finish(job: _Job, record: Record) -> Record:
    job.record.parent.mkdir(parents=True, exist_ok=True)
    # If this process is killed, the file is found there without a list of all records.
    with _half_done(job) as work:
        write_whole(work / job.record.name, json.dumps(record))
        os.replace(work / job.record.name, job.record)
    sync(job.record.parent)
    return record


@contextlib.contextmanager
def _half_done(job: _Job) -> Iterator[Path]:
    """Makes a folder in OUT for what is written for a video, and removes it at the end."""
    work = job.out / WORK / f"half-{job.digest[:_CLAIM]}-{secrets.token_hex(4)}"
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _read_record(path: Path) -> Record | None:
    """Reads a record written by :func:`_finish`; returns None if it is missing or damaged."""
    try:
        return _parsed_record(path.read_bytes())
    except OSError:
        return None


def _parsed_record(data: bytes) -> Record | None:
    try:  # not atomic.read_json, which rejects names that are not UTF-8
        record = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    kinds = {
        "source": str,
        "video": list | None,
        "folder": str,
        "pieces": list,
        "left_out": int,
        "dropped": str | None,
    }
    intact = isinstance(record, dict) and all(
        name in record and isinstance(record[name], kinds[name]) for name in kinds
    )
    intact = intact and all(isinstance(frames, int) for frames in record["pieces"])
    intact = intact and isinstance(record.get("bytes", []), list)
    return record if intact else None


def _sizes(folder: str | Path) -> list[int]:
    """Returns the sizes of the pieces in a folder, in order."""
    with os.scandir(folder) as entries:
        found = sorted(
            (entry.name, entry.stat().st_size) for entry in entries if entry.name.endswith(".mp4")
        )
    return [size for _, size in found]


def _identity(found: Found) -> _Identity:
    """Returns what changes when a video does; None if it is gone.

    These are its size, modification time, and place in a tar; in a bucket, its size and ETag.
    """
    if found.version is not None:
        return list(found.version)
    try:
        status = os.stat(found.file)
    except (OSError, ValueError):  # a NUL in the name, from a list
        return None
    span = found.span
    return [status.st_size, status.st_mtime_ns, *((span.offset, span.size) if span else ())]


def _gone(
    jobs: Sequence[_Job], records: Iterable[Record | None], exists: Callable[[str], bool]
) -> list[Record]:
    """Returns the records of videos that have pieces in OUT but are not among the jobs.

    Args:
        jobs: the videos.
        records: of videos that are not among the jobs; None for a damaged one, whose video is
            unknown.
        exists: whether a folder of OUT exists.
    """
    folders: set[str] | None = None  # most often not needed
    found = []
    for record in records:
        if record is None:
            continue
        if folders is None:
            folders = {folder_of(job.found.name) for job in jobs}
        if record["folder"] not in folders and exists(record["folder"]):
            found.append(record)
    return sorted(found, key=lambda record: str(record["source"]))


def _report(tally: _Tally, gone: list[Record], settings: Settings) -> Record:
    return {
        "settings": dataclasses.asdict(settings),
        "videos": tally.done,
        "cut": tally.cut,
        "pieces": tally.pieces,
        "frames": tally.frames,
        "frames_left_out": tally.left_out,
        "dropped": sorted(tally.dropped, key=lambda one: str(one["source"])),
        "not_in_source": [
            {
                "source": record["source"],
                "folder": record["folder"],
                "pieces": len(record["pieces"]),
            }
            for record in gone
        ],
    }


def _keep_settings(out: Path, settings: Settings) -> None:
    """Raises InputError if the folder has pieces with other settings; stores new settings."""
    path = out / WORK / _SETTINGS
    if not path.exists():
        create_whole(path, json.dumps(dataclasses.asdict(settings)))
    _check_settings(lambda: read_json(path), settings, str(path), str(out))


def _check_settings(read: Callable[[], Any], settings: Settings, path: str, out: str) -> None:
    now = dataclasses.asdict(settings)
    try:
        before = read()
        if not isinstance(before, dict):
            raise ValueError("it is not a JSON object")
    except ValueError as error:
        raise InputError(
            f"{path} is damaged ({error}): choose another OUT, or remove it"
        ) from error
    before = {**now, "codec": "h264", **before}  # older folders have H.264 and no such fields
    differ = [
        f"{name} {before.get(name)}, not {value}"
        for name, value in now.items()
        if value != before.get(name)
    ]
    if differ:
        raise InputError(
            f"OUT {out} contains clips with other settings ({'; '.join(differ)}): use the same "
            "settings, or another folder"
        )


def _remove_half_done(out: Path, alone: bool) -> None:
    """Removes folders and files that killed processes left.

    Args:
        out: the output folder.
        alone: whether no other command works in it. Processes of a cluster may still do.
    """
    with contextlib.suppress(OSError):
        for left in (out / WORK).glob("half-*"):
            with _claimed(out, left.name.removeprefix("half-")[:_CLAIM]) as mine:
                if mine or (mine is None and alone):
                    _discard(left, out)
        for left in (out / WORK).glob("old-*"):
            shutil.rmtree(left, ignore_errors=True)
    remove_leftovers(out, (REPORT,), alone=alone)
    remove_leftovers(out / WORK, alone=alone)


def _check_no_links(jobs: list[_Job], out: Path) -> None:
    """Raises InputError if a folder of ``out`` that this command writes to is a symbolic link.

    In another person's folder, it could lead to your files.
    """
    folders = {job.folder.parent for job in jobs} | {job.record.parent for job in jobs}
    inside = {above for one in folders for above in (one, *one.parents) if out in above.parents}
    for folder in sorted(inside):
        if folder.is_symlink():
            raise InputError(
                f"{folder} is a symbolic link, and prepare clips does not write outside of {out}: "
                "remove the link"
            )


def _check_keys(jobs: list[_Job], url: str) -> None:
    """Raises InputError if a video's clips cannot be objects of a bucket because of their names."""
    above = addresses.split(url).path.strip("/")
    for job in jobs:
        key = f"{above}/{folder_of(job.found.name)}/00000.mp4"
        if len(key.encode("utf-8", "surrogateescape")) > _LONGEST_KEY:
            problem = f"is too long for an object in a bucket (more than {_LONGEST_KEY:,} bytes)"
        elif re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", key):
            problem = "contains a control character, or a byte that is not UTF-8"
        else:
            continue
        raise InputError(f"the name of the video {job.found.name!a} {problem}: rename it")


def _check_distinct(jobs: list[_Job]) -> None:
    seen: dict[str, str] = {}
    for job in jobs:
        name = job.found.name
        other = seen.setdefault(folder_of(name), name)
        if other != name:
            raise InputError(
                f"the clips of {other} and {name} would be in the same folder "
                f"({folder_of(name)}): rename one, or prepare them in separate folders"
            )
