"""``jaxtrain prepare clips``: cuts every raw video of a source into pieces, in worker processes.

The pieces of ``a/b.mp4`` are ``OUT/a/b.mp4.pieces/00000.mp4`` and so on; their names keep them in
one split (:func:`jaxtrain.data.video.files.split`). A video's pieces appear all at once. Records of
finished videos let a killed command resume.
"""

import concurrent.futures
import dataclasses
import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from jaxtrain.data import cache
from jaxtrain.data.video import files, pieces
from jaxtrain.data.video.files import PIECES, Found
from jaxtrain.data.video.pieces import Settings
from jaxtrain.errors import BadExample, InputError, first_line
from jaxtrain.storage import lock
from jaxtrain.storage.atomic import expanded, read_json, sync, write_whole

REPORT = "report.json"
WORK = ".prepare"  # in OUT; hidden, so that its files are not read as data
_REPORT_EVERY_S = 10.0

Say = Callable[[str], None]
Record = dict[str, Any]


def run(source: str, out: Path, settings: Settings, *, workers: int, say: Say) -> Record:
    """Cuts all videos that have not been cut yet.

    Args:
        source: a folder, a video, or a list of videos.
        out: the output folder; created if missing.
        settings: settings of the pieces, the same for all pieces of a folder.
        workers: number of worker processes.
        say: prints a message.

    Returns:
        The content of ``report.json``.

    Raises:
        InputError: there are no videos, or ``out`` cannot be written or has pieces with other
            settings.
        RunAgain: another process is working in ``out``.
    """
    found = files.find(source, "SOURCE", cache.root(None), say)
    out = expanded(out).absolute()
    top = expanded(source).absolute()
    if os.path.isdir(top) and out.is_relative_to(top):
        raise InputError(
            f"OUT {out} is inside SOURCE {top}, so its pieces would be cut again: choose another "
            "folder"
        )
    try:
        (out / WORK).mkdir(parents=True, exist_ok=True)
        lock.hold(out / WORK, say)
        _keep_settings(out, settings)
        _remove_half_done(out)
        jobs = [_Job(one, out / folder_of(one.name), out) for one in found]
        _check_distinct(jobs)
        return _run(jobs, out, settings, workers, say)
    except OSError as error:
        _remove_half_done(out)
        raise InputError(
            f"cannot write to {out} ({error.strerror or error}): free space there or choose "
            "another folder, and start again; finished videos are kept"
        ) from error


def folder_of(name: str) -> str:
    """Returns the folder of a video's pieces, relative to OUT."""
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    # Hidden folders would not be read as data.
    parts = ["_" + part[1:] if part.startswith(".") else part for part in parts]
    return "/".join(parts) + PIECES


@dataclasses.dataclass(frozen=True)
class _Job:
    """A video and the folder for its pieces."""

    found: Found
    folder: Path
    out: Path

    @property
    def _digest(self) -> str:
        return hashlib.sha256(self.found.name.encode("utf-8", "surrogateescape")).hexdigest()

    @property
    def record(self) -> Path:
        """Returns the path of this video's record, which exists once the video is done."""
        return self.out / WORK / "records" / self._digest[:2] / f"{self._digest[2:]}.json"

    @property
    def work(self) -> Path:
        """Returns the folder in which its pieces are encoded."""
        return self.out / WORK / f"half-{self._digest[:16]}"

    def done(self) -> Record | None:
        """Returns the record, unless the video has changed since or its pieces are gone."""
        record = _read_record(self.record)
        if record is None:
            return None
        fresh = record["video"] == _identity(self.found)
        return record if fresh and (not record["pieces"] or os.path.isdir(self.folder)) else None


def _run(jobs: list[_Job], out: Path, settings: Settings, workers: int, say: Say) -> Record:
    began = reported = time.monotonic()
    records = {job.found.name: record for job in jobs if (record := job.done()) is not None}
    todo = [job for job in jobs if job.found.name not in records]
    if records:
        say(f"{len(records):,} of {len(jobs):,} videos are already done")
    for count, (job, record) in enumerate(_in_processes(todo, settings, workers), 1):
        records[job.found.name] = record
        if record["dropped"] is not None:
            say(f"skipped: {job.found.path}: {record['dropped']}")
        if time.monotonic() - reported > _REPORT_EVERY_S:
            reported = time.monotonic()
            left_min = (reported - began) / count * (len(todo) - count) / 60
            say(f"{len(records):,} of {len(jobs):,} videos, about {left_min:.1f} min left")
    gone = _gone(jobs, out)
    if gone:
        videos = "video" if len(gone) == 1 else "videos"
        say(
            f"{out} also contains pieces of {len(gone):,} {videos} not in SOURCE "
            f"({gone[0]['source']}{', ...' if len(gone) > 1 else ''}), and training "
            f"uses them: {REPORT} lists their folders; remove those you do not need"
        )
    report = _report([records[job.found.name] for job in jobs], gone, settings)
    write_whole(out / REPORT, json.dumps(report, indent=1) + "\n")
    return report


def _in_processes(
    jobs: Sequence[_Job], settings: Settings, workers: int
) -> Iterator[tuple[_Job, Record]]:
    """Yields the records in the order in which videos are finished.

    If a video kills its worker, the worker pool is lost. Then the videos that were in progress are
    retried one at a time.
    """
    waiting = iter(jobs)
    while True:
        suspects: list[_Job] = []
        yield from _together(waiting, suspects, settings, workers)
        if not suspects:
            return
        for job in suspects:
            yield job, _alone(job, settings)


def _together(
    waiting: Iterator[_Job], suspects: list[_Job], settings: Settings, workers: int
) -> Iterator[tuple[_Job, Record]]:
    """Yields the records from one worker pool, until all jobs are done or a worker dies.

    Args:
        waiting: jobs; every job taken becomes either a record or a suspect.
        suspects: receives the jobs that were in progress or being submitted when a worker died.
        settings: settings of the pieces.
        workers: number of workers.
    """
    with _pool(workers) as pool:
        running: dict[concurrent.futures.Future[Record], _Job] = {}

        def fill() -> None:
            while not suspects and len(running) < workers:
                job = next(waiting, None)
                if job is None:
                    return
                try:
                    running[pool.submit(_cut, job, settings)] = job
                except BrokenProcessPool:  # a worker died in the meantime
                    suspects.append(job)

        fill()
        while running:
            done, _ = concurrent.futures.wait(
                running, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
                job = running.pop(future)
                try:
                    record = future.result()
                except BrokenProcessPool:
                    suspects.append(job)
                    continue
                yield job, record
                fill()


def _alone(job: _Job, settings: Settings) -> Record:
    with _pool(1) as pool:
        try:
            return pool.submit(_cut, job, settings).result()
        except BrokenProcessPool:
            return _finish(job, _record(job, dropped="kills the worker that reads it"))


def _pool(workers: int) -> concurrent.futures.ProcessPoolExecutor:
    return concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn")
    )


def _cut(job: _Job, settings: Settings) -> Record:
    """Writes the pieces of a video and then its record; runs in a worker."""
    shutil.rmtree(job.work, ignore_errors=True)
    job.work.mkdir()
    try:
        made = pieces.cut(job.found.path, job.found.span, job.work, settings)
        for path in (*job.work.iterdir(), job.work):
            sync(path)
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(job.folder, ignore_errors=True)
        os.rename(job.work, job.folder)
        sync(job.folder.parent)
    except BadExample as bad:
        return _dropped(job, bad.reason)
    except Exception as error:  # from FFmpeg's filters and encoder, or unexpected
        # Reading a broken video raises BadExample. Other OSErrors come from the output disk, and
        # end the command.
        if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
            raise
        return _dropped(job, f"cannot be cut: {type(error).__name__}: {first_line(error)}")
    return _finish(job, _record(job, pieces=list(made.pieces), left_out=made.left_out))


def _dropped(job: _Job, why: str) -> Record:
    shutil.rmtree(job.work, ignore_errors=True)
    shutil.rmtree(job.folder, ignore_errors=True)  # pieces of an earlier version of the video
    return _finish(job, _record(job, dropped=why))


def _record(
    job: _Job, *, pieces: Sequence[int] = (), left_out: int = 0, dropped: str | None = None
) -> Record:
    return {
        "source": job.found.name,
        "video": _identity(job.found),
        "folder": job.folder.relative_to(job.out).as_posix(),
        "pieces": list(pieces),
        "left_out": left_out,
        "dropped": dropped,
    }


def _finish(job: _Job, record: Record) -> Record:
    job.record.parent.mkdir(parents=True, exist_ok=True)
    write_whole(job.record, json.dumps(record))
    return record


def _read_record(path: Path) -> Record | None:
    """Reads a record written by :func:`_finish`; returns None if it is missing or damaged."""
    try:  # not atomic.read_json, which rejects names that are not UTF-8
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
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
    return record if intact else None


def _identity(found: Found) -> list[int] | None:
    """Returns size, modification time, and place in a tar of a video; None if it is gone."""
    try:
        status = os.stat(found.file)
    except (OSError, ValueError):  # a NUL in the name, from a list
        return None
    span = found.span
    return [status.st_size, status.st_mtime_ns, *((span.offset, span.size) if span else ())]


def _gone(jobs: list[_Job], out: Path) -> list[Record]:
    """Returns the records of videos that have pieces in ``out`` but are not among the jobs."""
    named = {job.found.name for job in jobs}
    folders = {job.folder for job in jobs}
    found = []
    for path in (out / WORK / "records").glob("*/*.json"):
        record = _read_record(path)
        if record is None:  # damaged, so its video is unknown
            continue
        folder = out / record["folder"]
        if record["source"] not in named and folder not in folders and os.path.isdir(folder):
            found.append(record)
    return sorted(found, key=lambda record: str(record["source"]))


def _report(records: list[Record], gone: list[Record], settings: Settings) -> Record:
    kept = [record for record in records if record["pieces"]]
    return {
        "settings": dataclasses.asdict(settings),
        "videos": len(records),
        "cut": len(kept),
        "pieces": sum(len(record["pieces"]) for record in kept),
        "frames": sum(sum(record["pieces"]) for record in kept),
        "frames_left_out": sum(record["left_out"] for record in records),
        "dropped": [
            {"source": record["source"], "reason": record["dropped"]}
            for record in records
            if record["dropped"] is not None
        ],
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
    path, now = out / WORK / "settings.json", dataclasses.asdict(settings)
    try:
        before = read_json(path)
    except FileNotFoundError:
        write_whole(path, json.dumps(now))
        return
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
            f"OUT {out} contains pieces with other settings ({'; '.join(differ)}): use the same "
            "settings, or another folder"
        )


def _remove_half_done(out: Path) -> None:
    for left in (out / WORK).glob("half-*"):
        shutil.rmtree(left, ignore_errors=True)


def _check_distinct(jobs: list[_Job]) -> None:
    seen: dict[Path, str] = {}
    for job in jobs:
        other = seen.setdefault(job.folder, job.found.name)
        if other != job.found.name:
            raise InputError(
                f"the pieces of {other} and {job.found.name} would be in the same folder "
                f"({job.folder}): rename one, or prepare them in separate folders"
            )
