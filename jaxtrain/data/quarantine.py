"""The list of a run's broken inputs: ``quarantine.jsonl`` in the run directory."""

import dataclasses
import errno
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from jaxtrain import terminal
from jaxtrain.data.source import Sources
from jaxtrain.errors import BadExample, InputError

_NAME = "quarantine.jsonl"
_NAMED = 5  # broken files that the console lists
# The run directory may be on a network file system, so it is not read at every step.
_CHECK_EVERY_S = 5.0


class TooManyBroken(InputError):
    """More input files are broken than ``data.max_bad_share`` allows.

    Args:
        complaint: the result of :func:`too_many`.
        bad: the broken files.
    """

    def __init__(self, complaint: str, bad: tuple[BadExample, ...]) -> None:
        super().__init__(f"{complaint}: fix or remove them, or raise --data.max_bad_share")
        self.complaint, self.bad = complaint, bad


def skip(bad: Sequence[BadExample], files: int, largest: float, say: Callable[[str], None]) -> None:
    """Lists the first broken input files on the console.

    Args:
        bad: the broken input files.
        files, largest: see :func:`too_many`.
        say: prints a line.

    Raises:
        TooManyBroken: more are broken than the config tolerates.
    """
    name_first(bad, say)
    if complaint := too_many(len(bad), files, largest):
        raise TooManyBroken(complaint, tuple(bad))


def name_first(bad: Sequence[BadExample], say: Callable[[str], None]) -> None:
    """Prints the first broken input files, and how many more there are."""
    for excluded in bad[:_NAMED]:
        say(f"skipped: {excluded}")
    if len(bad) > _NAMED:
        say(f"skipped: {len(bad) - _NAMED:,} more")


@dataclasses.dataclass(frozen=True)
class Quarantine:
    """Appends one JSON line per broken input; the workers of a process share its file.

    A line is written by one ``write`` to a descriptor opened for appending, so lines of several
    workers do not mix. On a network file system, lines of several hosts would, so each process has
    its own file. The same input can be listed more than once, found by several workers. If a line
    cannot be written, it is printed to stderr, and training continues.

    Attributes:
        path: this process's file.
        earlier: name and length of each quarantine file when this run opened it. Inputs listed
            before that length were found by an earlier run and may have been fixed since.
    """

    path: Path
    earlier: tuple[tuple[str, int], ...] = ()

    @classmethod
    def open(cls, directory: Path, process: int) -> "Quarantine":
        """Opens the quarantine of one process of a run, in the run directory."""
        earlier = tuple((path.name, path.stat().st_size) for path in _files(directory))
        return cls(directory / (f"quarantine.{process}.jsonl" if process else _NAME), earlier)

    def add(self, bad: BadExample, *, during: str, position: int | None = None) -> None:
        """Records one broken input.

        Args:
            bad: the file and the reason.
            during: when it was found: ``"index"``, ``"training"`` or ``"validation"``.
            position: the example's position in the order, if it has one.
        """
        line = json.dumps(
            {"path": bad.path, "reason": bad.reason, "found": during, "position": position}
        )
        try:
            _append(self.path, (line + "\n").encode())
        except OSError as error:
            terminal.warn(f"warning: cannot write {self.path} ({error.strerror}); the line: {line}")

    def add_all(self, bad: Iterable[BadExample], *, during: str) -> None:
        """Records the inputs that the file does not list yet, from this run or an earlier one."""
        known = _paths(self.path, 0)
        for example in bad:
            if example.path not in known:
                self.add(example, during=during)

    def found(self) -> frozenset[str]:
        """Returns the distinct inputs that all processes of this run have recorded.

        If each host has a disk of its own, only those of this process's.
        """
        earlier = dict(self.earlier)
        files = _files(self.path.parent)
        return frozenset().union(*(_paths(path, earlier.get(path.name, 0)) for path in files))

    def size(self) -> int:
        """Returns the total size of all files in bytes: cheap to read, and grows with each line."""
        return sum(path.stat().st_size for path in _files(self.path.parent))


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("quarantine*.jsonl"))


def _append(path: Path, line: bytes) -> None:
    """Appends a line; if a full disk truncated the previous line, ends that one first."""
    with open(path, "a+b", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            line = b"\n" + line
        if file.write(line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _path_of(line: bytes) -> str | None:
    """Returns the input that a line names, or None if a full disk truncated the line."""
    try:
        return str(json.loads(line)["path"])
    except (ValueError, KeyError, TypeError):
        return None


def _paths(path: Path, start: int) -> frozenset[str]:
    """Returns the inputs listed after byte ``start``; skips incomplete lines."""
    try:
        lines = path.read_bytes()[start:].split(b"\n")[:-1]
    except FileNotFoundError:
        return frozenset()
    return frozenset(name for line in lines if (name := _path_of(line)) is not None)


def too_many(bad: int, files: int, largest: float) -> str | None:
    """Returns an error text, without the fix, if too many input files are broken; else None.

    Args:
        bad: number of broken input files.
        files: number of input files.
        largest: largest tolerated fraction, ``data.max_bad_share``.
    """
    if bad <= largest * files:
        return None
    return (
        f"{bad} of {files} input files are broken ({bad / files:.1%}), more than "
        f"data.max_bad_share ({largest:.1%})"
    )


class BrokenFileLimit:
    """Limits the fraction of input files that are broken.

    Args:
        sources: the opened data, with the files found broken at that time.
        quarantine: lists the files found broken since then.
        largest: largest tolerated fraction of broken input files.
        clock: monotonic time in seconds.
        say: prints a line about files found broken since the data was opened.
    """

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
        self._reported = frozenset(bad.path for bad in sources.bad)
        self._quarantine = quarantine
        self._largest = largest
        self._clock = clock
        self._size: int | None = None
        self._stop_reason: str | None = None
        self._checked_at = -math.inf

    def stop_reason(self) -> str | None:
        """Returns why the run should stop, or None; rereads the quarantine every few seconds."""
        now = self._clock()
        if now - self._checked_at < _CHECK_EVERY_S:
            return self._stop_reason
        self._checked_at = now
        try:
            size = self._quarantine.size()
            if size != self._size:
                self._size, self._stop_reason = size, self._check()
        except OSError:  # the run directory's disk is unavailable: try again at the next call
            pass
        return self._stop_reason

    def _check(self) -> str | None:
        bad = self._quarantine.found() | {file.path for file in self._sources.bad}
        if new := sorted(bad - self._reported):
            more = f" and {len(new) - 1} more" if len(new) > 1 else ""
            self._say(f"broken input: {new[0]}{more}; see {self._quarantine.path} for the reason")
            self._reported = bad
        complaint = too_many(len(bad), self._sources.files, self._largest)
        return complaint and (
            f"{complaint}: fix or remove the files listed in {self._quarantine.path}, or raise "
            "--data.max_bad_share"
        )
