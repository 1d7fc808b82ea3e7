"""``jaxtrain prepare clips``: every video of a source cut into pieces, once, by several processes.

The pieces of ``a/b.mp4`` are ``OUT/a/b.mp4.pieces/00000.mp4`` and so on, by which name they stay on
one side of the split (:func:`jaxtrain.data.video.files.split`). They appear all at once. A record
beside them says that a video is done, so that a run that was killed goes on where it was.
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
_WORK = ".prepare"  # in OUT; hidden, so that nobody takes what lies there for data
_SAY_EVERY_S = 10.0

Say = Callable[[str], None]
Record = dict[str, Any]


def run(source: str, out: Path, settings: Settings, *, workers: int, say: Say) -> Record:
    """Cut all videos that are not cut yet.

    Args:
        source: a folder, a video, or a list of videos.
        out: the folder of the pieces; made if it is not there.
        settings: of the pieces; all pieces of a folder have the same.
        workers: processes.
        say: takes messages for the console.

    Returns:
        What ``report.json`` holds.

    Raises:
        InputError: no video there, or ``out`` cannot be written or has pieces of other settings.
        RunAgain: another run is at work in ``out``.
    """
    found = files.find(source, "SOURCE", cache.root(None), say)
    out = expanded(out).absolute()
    top = expanded(source).absolute()
    if os.path.isdir(top) and out.is_relative_to(top):
        raise InputError(
            f"OUT {out} lies in SOURCE {top}: its pieces would be cut again; name another folder"
        )
    try:
        (out / _WORK).mkdir(parents=True, exist_ok=True)
        lock.hold(out / _WORK, say)
        _keep_settings(out, settings)
        _remove_half_done(out)
        jobs = [_Job(one, out / folder_of(one.name), out) for one in found]
        _check_distinct(jobs)
        return _run(jobs, out, settings, workers, say)
    except OSError as error:
        _remove_half_done(out)
        raise InputError(
            f"cannot write to {out} ({error.strerror or error}): free space there or name another "
            "folder, and start again; what is finished stays"
        ) from error


def folder_of(name: str) -> str:
    """Where the pieces of a video lie in OUT."""
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    # Hidden folders are no data.
    parts = ["_" + part[1:] if part.startswith(".") else part for part in parts]
    return "/".join(parts) + PIECES


@dataclasses.dataclass(frozen=True)
class _Job:
    """A video and where its pieces go."""

    found: Found
    folder: Path
    out: Path

    @property
    def _digest(self) -> str:
        return hashlib.sha256(self.found.name.encode("utf-8", "surrogateescape")).hexdigest()

    @property
    def record(self) -> Path:
        """Of this video; there once it is done."""
        return self.out / _WORK / "records" / self._digest[:2] / f"{self._digest[2:]}.json"

    @property
    def work(self) -> Path:
        """Where its pieces are made."""
        return self.out / _WORK / f"half-{self._digest[:16]}"

    def done(self) -> Record | None:
        """The record, if it is that of the video as it is now."""
        record = _read_record(self.record)
        if record is None:
            return None
        fresh = record["video"] == _identity(self.found)
        return record if fresh and (not record["pieces"] or os.path.isdir(self.folder)) else None


def _run(jobs: list[_Job], out: Path, settings: Settings, workers: int, say: Say) -> Record:
    began = told = time.monotonic()
    records = {job.found.name: record for job in jobs if (record := job.done()) is not None}
    todo = [job for job in jobs if job.found.name not in records]
    if records:
        say(f"{len(records):,} of {len(jobs):,} videos are done already")
    for count, (job, record) in enumerate(_in_processes(todo, settings, workers), 1):
        records[job.found.name] = record
        if record["dropped"] is not None:
            say(f"dropped: {job.found.path}: {record['dropped']}")
        if time.monotonic() - told > _SAY_EVERY_S:
            told = time.monotonic()
            left_min = (told - began) / count * (len(todo) - count) / 60
            say(f"{len(records):,} of {len(jobs):,} videos, about {left_min:.1f} min to go")
    gone = _gone(jobs, out)
    if gone:
        say(
            f"{out} also holds pieces of {len(gone):,} {'video' if len(gone) == 1 else 'videos'} "
            f"that SOURCE does not name ({gone[0]['source']}{', ...' if len(gone) > 1 else ''}), "
            f"and they are trained on: {REPORT} names their folders, remove what is not wanted"
        )
    report = _report([records[job.found.name] for job in jobs], gone, settings)
    write_whole(out / REPORT, json.dumps(report, indent=1) + "\n")
    return report


def _in_processes(
    jobs: Sequence[_Job], settings: Settings, workers: int
) -> Iterator[tuple[_Job, Record]]:
    """The records as they are made.

    A video on which a process dies takes its pool with it; then those that were at work are tried
    again, each alone.
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
    """The records that one pool of processes makes, until none waits or a process dies.

    Args:
        waiting: jobs; of these no more are taken than become records or suspects.
        suspects: takes the jobs that were at work, or about to be, when a process died.
        settings: of the pieces.
        workers: processes.
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
                except BrokenProcessPool:  # one died while nobody was looking
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
            return _finish(job, _record(job, dropped="ends the process that reads it"))


def _pool(workers: int) -> concurrent.futures.ProcessPoolExecutor:
    return concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn")
    )


def _cut(job: _Job, settings: Settings) -> Record:
    """In a worker: make the pieces of a video, then the record of it."""
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
    except Exception as error:  # of FFmpeg's filters and encoder, or not foreseen
        # Reading a broken video raises BadExample; what is left is of the disk, and ends all.
        if isinstance(error, OSError) and error.errno != errno.ENAMETOOLONG:
            raise
        return _dropped(job, f"cannot be cut: {type(error).__name__}: {first_line(error)}")
    return _finish(job, _record(job, pieces=list(made.pieces), left_out=made.left_out))


def _dropped(job: _Job, why: str) -> Record:
    shutil.rmtree(job.work, ignore_errors=True)
    shutil.rmtree(job.folder, ignore_errors=True)  # of the video as it was before
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
    """A record as :func:`_record` makes it; None where there is none or it is damaged."""
    try:  # not files.read_json, which refuses names that are not UTF-8
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
    sound = isinstance(record, dict) and all(
        name in record and isinstance(record[name], kinds[name]) for name in kinds
    )
    sound = sound and all(isinstance(frames, int) for frames in record["pieces"])
    return record if sound else None


def _identity(found: Found) -> list[int] | None:
    """Size and time of change of a video, and where it lies in a tar; None where it is gone."""
    try:
        status = os.stat(found.file)
    except (OSError, ValueError):  # a NUL in the name, from a list
        return None
    span = found.span
    return [status.st_size, status.st_mtime_ns, *((span.offset, span.size) if span else ())]


def _gone(jobs: list[_Job], out: Path) -> list[Record]:
    """The records of videos whose pieces lie in ``out``, and that are not among the jobs."""
    named = {job.found.name for job in jobs}
    folders = {job.folder for job in jobs}
    found = []
    for path in (out / _WORK / "records").glob("*/*.json"):
        record = _read_record(path)
        if record is None:  # a damaged one is of no video
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
    """Raise InputError where the folder's pieces were made with other settings."""
    path, now = out / _WORK / "settings.json", dataclasses.asdict(settings)
    try:
        before = read_json(path)
    except FileNotFoundError:
        write_whole(path, json.dumps(now))
        return
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}): name another OUT, or remove it") from error
    differ = [
        f"{name} {before.get(name)}, not {value}"
        for name, value in now.items()
        if value != before.get(name)
    ]
    if differ:
        raise InputError(
            f"OUT {out} holds pieces of other settings ({'; '.join(differ)}): give the same ones, "
            "or name another folder"
        )


def _remove_half_done(out: Path) -> None:
    for left in (out / _WORK).glob("half-*"):
        shutil.rmtree(left, ignore_errors=True)


def _check_distinct(jobs: list[_Job]) -> None:
    seen: dict[Path, str] = {}
    for job in jobs:
        other = seen.setdefault(job.folder, job.found.name)
        if other != job.found.name:
            raise InputError(
                f"the pieces of {other} and of {job.found.name} would lie in one folder "
                f"({job.folder}): rename one, or prepare them into two folders"
            )
