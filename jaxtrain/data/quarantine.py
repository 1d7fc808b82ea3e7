"""The list of broken inputs of a run: ``quarantine.jsonl`` in its directory."""

import dataclasses
import errno
import json
import os
from collections.abc import Iterable
from pathlib import Path

from jaxtrain import terminal
from jaxtrain.errors import BadExample
from jaxtrain.storage import atomic

_NAME = "quarantine.jsonl"


@dataclasses.dataclass(frozen=True)
class Quarantine:
    """Appends one JSON line a broken input; the workers of a process share its file.

    A line is written by one ``write`` to a descriptor opened for appending, so lines of several
    workers do not mix. Each process has a file of its own: on a network file system lines of
    several hosts would. The same input can stand there more than once, found by several workers.
    Where the disk takes no line, it goes to stderr, and the training goes on.

    Attributes:
        path: of this process's file.
        earlier: length of each file of the folder when this run opened it. What stands there was
            found by an earlier run, and may have been mended since.
    """

    path: Path
    earlier: tuple[tuple[str, int], ...] = ()

    @classmethod
    def open(cls, directory: Path, process: int) -> "Quarantine":
        """The quarantine of one process of a run, in the run's directory."""
        earlier = tuple((path.name, path.stat().st_size) for path in _files(directory))
        return cls(directory / (f"quarantine.{process}.jsonl" if process else _NAME), earlier)

    def add(self, bad: BadExample, *, found: str, position: int | None = None) -> None:
        """Records one broken input.

        Args:
            bad: the file and the reason.
            found: ``"index"``, ``"training"`` or ``"validation"``.
            position: of the example in the order, where there is one.
        """
        line = json.dumps(
            {"path": bad.path, "reason": bad.reason, "found": found, "position": position}
        )
        try:
            _append(self.path, (line + "\n").encode())
        except OSError as error:
            terminal.warn(f"warning: cannot write {self.path} ({error.strerror}), so here: {line}")

    def add_all(self, bad: Iterable[BadExample], *, found: str) -> None:
        """Records those that the file does not hold yet, also from an earlier run."""
        known = _paths(self.path, 0)
        for one in bad:
            if one.path not in known:
                self.add(one, found=found)

    def found(self) -> frozenset[str]:
        """The distinct inputs that all processes of this run have recorded."""
        earlier = dict(self.earlier)
        files = _files(self.path.parent)
        return frozenset().union(*(_paths(path, earlier.get(path.name, 0)) for path in files))

    def size(self) -> int:
        """Bytes of all files: cheap to ask for, and it grows with each line."""
        return sum(path.stat().st_size for path in _files(self.path.parent))


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("quarantine*.jsonl"))


def _append(path: Path, line: bytes) -> None:
    """Writes a line; one that a full disk has cut off before it is ended first."""
    descriptor = atomic.open_own(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def _path_of(line: bytes) -> str | None:
    """The input that a line names; None of one that a full disk has cut off."""
    try:
        return str(json.loads(line)["path"])
    except (ValueError, KeyError, TypeError):
        return None


def _paths(path: Path, start: int) -> frozenset[str]:
    """Inputs named after byte ``start``; a line that is not whole is left out."""
    try:
        with open(atomic.open_own(path, os.O_RDONLY), "rb") as file:
            file.seek(start)
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return frozenset()
    return frozenset(found for line in lines if (found := _path_of(line)) is not None)


def too_many(bad: int, files: int, largest: float) -> str | None:
    """What is wrong where more than this share of the input files is broken; without a cure.

    Args:
        bad: files that are broken.
        files: all of them.
        largest: ``data.max_bad_share``.
    """
    if bad <= largest * files:
        return None
    return (
        f"{bad} of {files} input files are broken ({bad / files:.1%}), more than "
        f"data.max_bad_share ({largest:.1%})"
    )
