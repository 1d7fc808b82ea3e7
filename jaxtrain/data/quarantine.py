"""The list of a run's broken inputs: ``quarantine.jsonl`` in the run directory."""

import dataclasses
import errno
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from jaxtrain import terminal
from jaxtrain.errors import BadExample, InputError

_NAME = "quarantine.jsonl"
_NAMED = 5  # broken files that the console lists


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

    def add(self, bad: BadExample, *, found: str, position: int | None = None) -> None:
        """Records one broken input.

        Args:
            bad: the file and the reason.
            found: where it was found: ``"index"``, ``"training"`` or ``"validation"``.
            position: the example's position in the order, if it has one.
        """
        line = json.dumps(
            {"path": bad.path, "reason": bad.reason, "found": found, "position": position}
        )
        try:
            _append(self.path, (line + "\n").encode())
        except OSError as error:
            terminal.warn(f"warning: cannot write {self.path} ({error.strerror}); the line: {line}")

    def add_all(self, bad: Iterable[BadExample], *, found: str) -> None:
        """Records the inputs that the file does not list yet, from this run or an earlier one."""
        known = _paths(self.path, 0)
        for example in bad:
            if example.path not in known:
                self.add(example, found=found)

    def found(self) -> frozenset[str]:
        """Returns the distinct inputs that all processes of this run have recorded."""
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
