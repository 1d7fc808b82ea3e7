"""The list of a run's broken inputs: ``quarantine.jsonl`` in the run directory."""

import contextlib
import errno
import fcntl
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxtrain import terminal
from jaxtrain.data.source import Sources
from jaxtrain.errors import BadExample

_NAME = "quarantine.jsonl"
_NAMED = 5  # broken files that the console lists
# The run directory may be on a network file system, so it is not read at every step.
_CHECK_EVERY_S = 5.0


def name_first(bad: Sequence[BadExample], say: Callable[[str], None]) -> None:
    """Prints the first broken input files, and how many more there are."""
    for excluded in bad[:_NAMED]:
        say(f"skipped: {excluded}")
    if len(bad) > _NAMED:
        say(f"skipped: {len(bad) - _NAMED:,} more")


class Quarantine:
    """Lists the broken inputs in JSON lines; the workers of a process share its file.

    An input has one line for each start of the run, whichever worker finds it, and however often.
    Lines of several workers do not mix: a worker locks the file. On a network file system, lines of
    several hosts would, so each process has its own file. If a line cannot be written, it is
    printed to stderr, and training continues.

    Args:
        earlier: name and length of each quarantine file when this run opened it. Inputs listed
            before that length were found by an earlier run and may have been fixed since.
    """

    def __init__(self, path: Path, earlier: tuple[tuple[str, int], ...] = ()) -> None:
        self.path, self._earlier = path, earlier
        self._lock = threading.Lock()
        self._lists: dict[str, _List] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self._earlier)

    @classmethod
    def open(cls, directory: Path, process: int) -> "Quarantine":
        """Opens the quarantine of one process of a run, in the run directory."""
        earlier = tuple((path.name, path.stat().st_size) for path in _files(directory))
        return cls(directory / (f"quarantine.{process}.jsonl" if process else _NAME), earlier)

    def add(self, bad: BadExample, *, during: str, position: int | None = None) -> None:
        """Records a broken input, unless this start of the run has already recorded it.

        Args:
            during: when it was found: ``"index"``, ``"training"`` or ``"validation"``.
            position: the example's position in the order, if it has one.
        """
        line = json.dumps(
            {"path": bad.path, "reason": bad.reason, "found": during, "position": position}
        )
        with self._lock:
            listed = self._list(self.path)
            if bad.path in listed.paths:
                return
            try:
                with open(self.path, "a+b", buffering=0) as file, _locked(file):
                    if bad.path not in listed.update(file):  # another worker may have added it
                        _append(file, (line + "\n").encode())
            except OSError as error:
                reason = error.strerror
                terminal.warn(f"warning: cannot write {self.path} ({reason}); the line: {line}")

    def add_all(self, bad: Iterable[BadExample], *, during: str) -> None:
        """Records the inputs that the file does not list yet, from this run or an earlier one."""
        known = _List(0)
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            known.update(file)
        for example in bad:
            if example.path not in known.paths:
                self.add(example, during=during)

    def recorded(self) -> set[str]:
        """Returns the distinct inputs that all processes of this run have recorded.

        Reads what was added since the last call. If each host has a disk of its own, only those of
        this process's.

        Raises:
            OSError: the disk does not respond.
        """
        with self._lock:
            for path in _files(self.path.parent):
                with open(path, "rb") as file:
                    self._list(path).update(file)
            return set[str]().union(*(listed.paths for listed in self._lists.values()))

    def _list(self, path: Path) -> "_List":
        return self._lists.setdefault(path.name, _List(dict(self._earlier).get(path.name, 0)))


class _List:
    """The inputs that a file lists, read from where the last reading ended."""

    def __init__(self, start: int) -> None:
        self._offset = start
        self.paths = set[str]()

    def update(self, file: BinaryIO) -> set[str]:
        """Reads the lines that are new and complete; returns all inputs."""
        if file.seek(0, os.SEEK_END) < self._offset:  # the user has deleted it
            self._offset = 0
        file.seek(self._offset)
        new, end, _ = file.read().rpartition(b"\n")
        self._offset += len(new) + len(end)
        self.paths.update(name for line in new.split(b"\n") if (name := _path_of(line)))
        return self.paths


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("quarantine*.jsonl"))


@contextlib.contextmanager
def _locked(file: BinaryIO) -> Iterator[None]:
    """Locks a file in the block; not on a file system without locks, where a line may be twice."""
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_UN)


def _append(file: BinaryIO, line: bytes) -> None:
    """Appends a line; if a full disk truncated the previous line, ends that one first."""
    size = os.fstat(file.fileno()).st_size
    if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
        line = b"\n" + line
    if file.write(line) < len(line):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)


def _path_of(line: bytes) -> str | None:
    """Returns the input that a line names, or None if a full disk truncated the line."""
    try:
        return str(json.loads(line)["path"])
    except (ValueError, KeyError, TypeError):
        return None


def too_many(bad: int, total: int, largest: float, what: str = "input files") -> str | None:
    """Returns an error text, without the fix, if too many input files are broken; else None.

    Args:
        largest: largest tolerated fraction, ``data.max_bad_share``.
        what: what is counted.
    """
    if bad <= largest * total:
        return None
    return (
        f"{bad} of {total} {what} are broken ({bad / total:.1%}), more than "
        f"data.max_bad_share ({largest:.1%})"
    )


class BrokenFileLimit:
    """Limits the fraction of input files that are broken."""

    def __init__(
        self,
        sources: Sources,
        quarantine: Quarantine,
        largest: float,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._sources = sources
        self._say = say
        self._reported = {bad.path for bad in sources.bad}
        self._quarantine = quarantine
        self._largest = largest
        self._clock = clock
        self._stop_reason: str | None = None
        self._checked_at = -math.inf

    def stop_reason(self) -> str | None:
        """Returns why the run should stop, or None; reads the quarantine every few seconds."""
        now = self._clock()
        if now - self._checked_at < _CHECK_EVERY_S:
            return self._stop_reason
        self._checked_at = now
        with contextlib.suppress(OSError):  # its disk is unavailable: try again at the next call
            self._stop_reason = self._check()
        return self._stop_reason

    def _check(self) -> str | None:
        at_start = {file.path for file in self._sources.bad}
        bad = self._quarantine.recorded() | at_start
        if new := sorted(bad - self._reported):
            more = f" and {len(new) - 1} more" if len(new) > 1 else ""
            self._say(f"broken input: {new[0]}{more}; see {self._quarantine.path} for the reason")
            self._reported = bad
        if self._sources.pieces is None:
            complaint = too_many(len(bad), self._sources.files, self._largest)
        else:
            complaint = too_many(len(at_start), self._sources.files, self._largest) or too_many(
                len(bad - at_start), self._sources.pieces, self._largest, "pieces of videos"
            )
        return complaint and (
            f"{complaint}: fix or remove the files listed in {self._quarantine.path}, or raise "
            "--data.max_bad_share"
        )
