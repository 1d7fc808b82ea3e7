"""Processes a folder of files on all devices; a killed run resumes where it stopped.

Each worker is a thread that takes the next file and writes its result, which appears when it is
complete. Worker i uses device i modulo the number of devices. A result does not depend on the
worker, or on what else is processed. OUT/manifest.jsonl has a line with the settings, and a line
for each file: its result with size and SHA-256, or why it failed. Lines are added as files are
done, and sorted by name at the end.

Several commands may share a folder. Each then adds its lines to a file of its own in OUT/.manifest,
and reads those of the others; a lock on one byte claims a file. On a Ray cluster, workers on all
nodes process the files, and only the command writes the manifest.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.data import engine
from jaxtrain.errors import InputError
from jaxtrain.storage import atomic, listing, lock, shared_folder

MANIFEST = "manifest.jsonl"
_PARTS = ".manifest"  # folder with the lines and claims of commands that share OUT
_MOST_MANIFEST = 2**30

Record = dict[str, Any]
Work = Callable[[int, Path, Path, Callable[[], None]], Record]
"""(worker, source, target, stop check) -> what the manifest states about the result."""
Load = Callable[[int], Callable[[Path, Path], Record]]
"""CPUs of a worker of a cluster -> what processes a file there: (source, target) -> as above."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A file to process.

    Attributes:
        name: its path in the folder.
        source: the file.
        target: the file to write.
    """

    name: str
    source: Path
    target: Path


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What happened to the files of a folder.

    Attributes:
        done: files that were processed.
        skipped: files that an earlier run had processed.
        failed: name -> reason.
    """

    done: int
    skipped: int
    failed: dict[str, str]


class _StoppedError(Exception):
    """Another worker failed, or the user stopped the command."""


def jobs(
    source: Path,
    out: Path,
    suffixes: frozenset[str],
    target_suffix: str,
    say: Callable[[str], None],
) -> list[Job]:
    """Lists the files below a folder, and creates the folders of their results.

    Args:
        source: the folder.
        out: the folder of the results.
        suffixes: of the files to process, in lower case.
        target_suffix: of the results.
        say: receives a line about skipped links.

    Raises:
        InputError: there are none, two have the same result, or OUT is inside the source.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"OUT {out} is a file, but IN {source} is a folder: choose a folder")
    if out.suffix.lower() in suffixes | {target_suffix} and not out.is_dir():
        raise InputError(
            f"IN {source} is a folder, but OUT {out} is named like a file: use a folder"
        )
    if out.absolute().resolve().is_relative_to(source.resolve()):
        is_in = "is" if out.resolve() == source.resolve() else "is inside"
        raise InputError(f"OUT {out} {is_in} IN {source}: choose a folder outside")
    found: dict[Path, Job] = {}
    for path in listing.files(source, say):
        if path.suffix.lower() not in suffixes:
            continue
        inside = path.relative_to(source)
        target = (out / inside).with_suffix(target_suffix)
        if target in found:
            raise InputError(
                f"{path} and {found[target].source} would both become {target}: rename one"
            )
        found[target] = Job(inside.as_posix(), path, target)
    if not found:
        raise InputError(f"{source} has no files that end with {', '.join(sorted(suffixes))}")
    try:
        for target in found:
            target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"OUT {error.filename} cannot be created: {error.strerror}") from error
    return sorted(found.values(), key=lambda job: job.name)


def run(
    todo: Sequence[Job],
    out: Path,
    settings: Mapping[str, Any],
    work: Work,
    *,
    workers: int,
    say: Callable[[str], None],
    each_file: Callable[[int], None] = lambda expected: None,
    share: str | None = None,
) -> Outcome:
    """Processes files, except those that an earlier run with the same settings has done.

    Args:
        todo: the files, from :func:`jobs`.
        out: the folder of the results.
        settings: all that a result depends on, for JSON.
        work: processes one file; calls its last argument often. An `InputError` is recorded, and
            the other files are processed.
        workers: number of threads.
        say: receives a line for each file that failed.
        each_file: called after each file, with how many there are to process.
        share: a text that differs from that of all other commands that process the same folder at
            the same time, on other machines; None if there are none. Each takes the files in an
            order of its own, skips those that others have done or are processing, and returns when
            all are done.

    Raises:
        InputError: OUT has results with other settings.
        RunAgain: another process is using OUT, or its disk is full.
    """
    lock.hold(out, say, shared=share is not None)
    path = out / MANIFEST
    atomic.remove_leftovers(out, (MANIFEST,), alone=share is None)
    others = _Others(out / _PARTS, settings)
    if share is not None:
        others.folder.mkdir(exist_ok=True)
        atomic.create_whole(path, f"{json.dumps(_settings_line(settings))}\n")
    records, open_jobs = _open_jobs(todo, path, settings, others)
    if share is None:
        _remove_left(open_jobs)
    else:
        open_jobs.sort(key=lambda job: lock.order(share, job.name))
    stopped, numbers, local = threading.Event(), iter(range(workers)), threading.local()
    guard = threading.Lock()

    def check() -> None:
        if stopped.is_set():
            raise _StoppedError

    def start() -> None:
        with guard:
            local.number = next(numbers)

    def claimed_one(job: Job) -> tuple[Record, bool] | None:
        """Returns the record, and whether it is new; None if another command has the file."""
        check()
        if share is None:
            return one(job), True
        with lock.claimed(others.folder / "claims", job.name) as mine:
            if mine is False:
                return None
            with guard:
                others.read()
            if job.name in others.records:
                return others.records[job.name], False
            if mine:  # without locks, another command may be writing it now
                _remove_left([job])
            return one(job), True

    def one(job: Job) -> Record:
        check()
        try:
            return _processed(job, out, lambda a, b: work(local.number, a, b, check))
        except BaseException:
            stopped.set()  # at once, before the main thread sees the error
            raise

    def results() -> Generator[tuple[Record, bool]]:
        pool = concurrent.futures.ThreadPoolExecutor(workers, initializer=start)
        try:
            left, waits = open_jobs, False
            while left:
                waiting = {pool.submit(claimed_one, job): job for job in left}
                left = []
                for future in concurrent.futures.as_completed(waiting):
                    try:
                        result = future.result()
                    except _StoppedError:  # the error of the other worker follows
                        continue
                    if result is None:
                        left.append(waiting[future])
                        continue
                    yield result
                if left and not waits:
                    waits = True
                    say(
                        f"waiting for {len(left):,} file{'s'[: len(left) != 1]} that other commands"
                        f" are processing, such as {left[0].source}"
                    )
                if left:
                    time.sleep(lock.POLL_S)
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)

    own = path if share is None else others.folder / f"{secrets.token_hex(8)}.jsonl"
    fresh = not records or not own.exists()
    with _appending(own, settings, fresh=fresh) as add, contextlib.closing(results()) as found:
        outcome = _record(found, records, todo, open_jobs, add, say, each_file)
    _sort(path, settings, records)
    if share is None:
        shutil.rmtree(others.folder, ignore_errors=True)
    return outcome


def run_on_cluster(
    cluster: engine.Ray,
    todo: Sequence[Job],
    out: Path,
    settings: Mapping[str, Any],
    load: Load,
    *,
    at_once: int | None,
    say: Callable[[str], None],
    each_file: Callable[[int], None] = lambda expected: None,
) -> Outcome:
    """Does the same as :func:`run` on a Ray cluster.

    Args:
        cluster: runs the work.
        todo, out, settings, say, each_file: see :func:`run`.
        load: called once in each worker; can be pickled.
        at_once: files that a worker processes at once; None is one per CPU.

    Raises:
        InputError: see :func:`run`; or a node does not see the files or OUT.
        RunAgain: another process is using OUT, or the cluster failed.
    """
    lock.hold(out, say, shared=False)
    path = out / MANIFEST
    atomic.remove_leftovers(out, (MANIFEST,), alone=True)
    others = _Others(out / _PARTS, settings)
    records, open_jobs = _open_jobs(todo, path, settings, others)
    _remove_left(open_jobs)
    others.folder.mkdir(exist_ok=True)
    mark = shared_folder.mark(others.folder.absolute() / "token", f"OUT {out}")

    def results() -> Generator[tuple[Record, bool]]:
        if not open_jobs:
            return
        # Workers have other working directories.
        away = (
            dataclasses.replace(job, source=job.source.absolute(), target=job.target.absolute())
            for job in open_jobs
        )
        here = {job.name: job for job in open_jobs}
        fixed = (load, out.absolute(), mark)
        found = cluster.with_models(_begin, away, *fixed, died=_died, at_once=at_once)
        for job, result in found:
            shared_folder.check_seen(result)
            if isinstance(result, shared_folder.Unseen):
                result = _failed(job, _unreadable(job.source, errno.ENOENT))
            if "error" in result:
                for typed, full in zip(_paths(here[job.name]), _paths(job), strict=True):
                    result["error"] = result["error"].replace(full, typed)
            yield result, True

    fresh = not records
    with _appending(path, settings, fresh=fresh) as add, contextlib.closing(results()) as found:
        outcome = _record(found, records, todo, open_jobs, add, say, each_file)
    _remove_left(open_jobs)  # of workers that were lost
    _sort(path, settings, records)
    shutil.rmtree(others.folder, ignore_errors=True)
    return outcome


def _begin(
    cpus: int, load: Load, out: Path, mark: shared_folder.Mark
) -> Callable[[Job], Record | shared_folder.Unseen]:
    """Loads the model in a worker of a cluster; returns what processes a file."""
    mark.check()
    work = load(cpus)
    return lambda job: shared_folder.unseen(job.source) or _processed(job, out, work)


def _died(job: Job) -> Record:
    return _failed(job, InputError(f"{job.source} {engine.KILLS}"))


def _failed(job: Job, error: InputError) -> Record:
    return {"source": job.name, "error": str(error)}


def _paths(job: Job) -> tuple[str, str]:
    return str(job.source), str(job.target)


def _processed(job: Job, out: Path, work: Callable[[Path, Path], Record]) -> Record:
    """Processes a file; returns its line of the manifest."""
    try:
        identity = _readable_identity(job.source)
        found = work(job.source, job.target)
        if _readable_identity(job.source) != identity:
            raise InputError(f"{job.source} changed while it was read: run the command again")
    except InputError as error:
        return _failed(job, error)
    return {
        "source": job.name,
        "target": job.target.relative_to(out).as_posix(),
        **identity,
        **found,
        "bytes": job.target.stat().st_size,
        "sha256": _digest(job.target),
    }


def _open_jobs(
    todo: Sequence[Job], path: Path, settings: Mapping[str, Any], others: "_Others"
) -> tuple[dict[str, Record], list[Job]]:
    """Returns the lines of earlier commands, and the files that they have not done."""
    others.read()
    # Lines of an earlier command that shared OUT may be older or newer than the manifest's.
    records, open_jobs = others.records | _records(path, settings), []
    for job in todo:
        if _is_done(job, records.get(job.name)):
            continue
        if _is_done(job, others.records.get(job.name)):
            records[job.name] = others.records[job.name]
        else:
            open_jobs.append(job)
    others.records = {}
    return records, open_jobs


def _record(
    results: Iterable[tuple[Record, bool]],
    records: dict[str, Record],
    todo: Sequence[Job],
    open_jobs: Sequence[Job],
    add: Callable[[Record], None],
    say: Callable[[str], None],
    each_file: Callable[[int], None],
) -> Outcome:
    """Records the results of files, each with whether this command made it."""
    done, failed = 0, dict[str, str]()
    for record, fresh in results:
        records[record["source"]] = record
        if fresh:
            add(record)
            done += "error" not in record
        if "error" in record:
            failed[record["source"]] = record["error"]
            say(f"failed: {record['error']}")
        elif fresh and "note" in record:
            say(record["note"])
        each_file(len(open_jobs))
    return Outcome(done, len(todo) - done - len(failed), failed)


def _sort(path: Path, settings: Mapping[str, Any], records: Mapping[str, Record]) -> None:
    """Writes the manifest again, sorted by name."""
    lines = [_settings_line(settings), *(records[name] for name in sorted(records))]
    atomic.write_whole(path, "".join(f"{json.dumps(line)}\n" for line in lines))


class _Others:
    """The lines of commands that share the folder.

    Args:
        folder: has one file for each command.
        settings: must be those of the lines.
        names: pattern of the files' names.

    Attributes:
        records: those read since the object was made.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], names: str = "*.jsonl") -> None:
        self.folder, self._settings, self._names = folder, settings, names
        self.records: dict[str, Record] = {}
        self._ends: dict[Path, int] = {}  # how much of each file was read

    def read(self) -> None:
        """Reads the lines that are new.

        Raises:
            InputError: a file has other settings, or is damaged.
        """
        # Lines of newer commands replace those of older ones.
        for path in sorted(self.folder.glob(self._names), key=lambda one: one.stat().st_mtime_ns):
            start = self._ends.get(path, 0)
            try:
                if path.stat().st_size <= start:
                    continue
                with atomic.open_regular(path) as file:
                    file.seek(start)
                    content = file.read(_MOST_MANIFEST)
            except (OSError, ValueError) as error:
                raise _damaged(path, error) from error
            end = content.rfind(b"\n") + 1  # the last line may be half written
            self.records |= _parsed(path, content[:end], self._settings)
            self._ends[path] = start + end


def _settings_line(settings: Mapping[str, Any]) -> Record:
    return {"settings": dict(settings)}


def _records(path: Path, settings: Mapping[str, Any]) -> dict[str, Record]:
    """Reads the manifest of an earlier run; {} if there is none.

    Raises:
        InputError: it has other settings, or is damaged.
    """
    try:
        if not path.exists():
            return {}
        atomic.drop_torn_line(path)
        content = atomic.read_regular(path, _MOST_MANIFEST)
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    return _parsed(path, content, settings)


def _parsed(path: Path, content: bytes, settings: Mapping[str, Any]) -> dict[str, Record]:
    """Parses lines of a manifest: results, and settings, which must be those given."""
    try:
        lines = [atomic.parse_json(line) for line in content.decode().splitlines()]
        found = {str(line["source"]): line for line in lines if "settings" not in line}
        befores = [dict(line["settings"]) for line in lines if "settings" in line]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error
    for before in befores:
        differ = [
            f"{name} {before.get(name)}, not {value}"
            for name, value in settings.items()
            if before.get(name) != value
        ]
        if differ:
            raise InputError(
                f"{path.parent} has results with other settings ({'; '.join(differ)}): use the "
                "same settings, or another OUT"
            )
    return found


def _damaged(path: Path, error: Exception) -> InputError:
    return InputError(f"{path} is damaged ({error}): choose another OUT, or remove it")


def _remove_left(jobs: Sequence[Job]) -> None:
    """Removes what killed processes left of files; lists each folder only once."""
    names = collections.defaultdict[Path, set[str]](set)
    for job in jobs:
        names[job.target.parent].add(job.target.name)
    for place, targets in names.items():
        atomic.remove_leftovers(place, targets, alone=True)


@contextlib.contextmanager
def _appending(
    path: Path, settings: Mapping[str, Any], *, fresh: bool
) -> Iterator[Callable[[Record], None]]:
    """Yields a function that appends a record to the manifest."""
    if fresh:
        atomic.write_whole(path, f"{json.dumps(_settings_line(settings))}\n")
    with open(atomic.open_own(path, os.O_WRONLY | os.O_APPEND), "a", encoding="utf-8") as file:

        def add(record: Record) -> None:
            file.write(f"{json.dumps(record)}\n")
            file.flush()

        yield add


def _is_done(job: Job, record: Record | None) -> bool:
    """Whether the result exists with the recorded size, and the source is unchanged."""
    if record is None or "error" in record:
        return False
    try:
        same = all(record.get(name) == value for name, value in _identity(job.source).items())
        return same and job.target.stat().st_size == record.get("bytes")
    except OSError:
        return False


def _identity(source: Path) -> Record:
    status = source.stat()
    return {"source_bytes": status.st_size, "source_mtime_ns": status.st_mtime_ns}


def _readable_identity(source: Path) -> Record:
    try:
        return _identity(source)
    except OSError as error:
        raise _unreadable(source, error.errno or errno.EIO) from error


def _unreadable(source: Path, number: int) -> InputError:
    return InputError(f"{source} cannot be read: {os.strerror(number)}")


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
