"""The list of broken inputs of a run: ``quarantine.jsonl`` in its directory."""

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path

from jaxtrain.errors import BadExample

_NAME = "quarantine.jsonl"


@dataclasses.dataclass(frozen=True)
class Quarantine:
    """Appends one JSON line a broken input; the workers of a process share its file.

    A line is written by one ``write`` to a descriptor opened for appending, so lines of several
    workers do not mix. Each process has a file of its own: on a network file system lines of
    several hosts would. The same input can stand there more than once, found by several workers.

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
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, (line + "\n").encode())
        finally:
            os.close(descriptor)

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


def _paths(path: Path, start: int) -> frozenset[str]:
    """Inputs named after byte ``start``; a last line that is still being written is left out."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return frozenset()
    return frozenset(json.loads(line)["path"] for line in lines if line)
