"""The list of broken inputs of a run: ``quarantine.jsonl`` in its directory."""

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path

from jaxtrain.errors import BadExample


@dataclasses.dataclass(frozen=True)
class Quarantine:
    """Appends one JSON line a broken input; worker processes share the file.

    A line is written by one ``write`` to a descriptor opened for appending, so lines of several
    processes do not mix. The same input can stand there more than once, found by several workers.

    Args:
        path: of the file.
    """

    path: Path

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
        """Records those that the file does not hold yet."""
        known = self.paths()
        for one in bad:
            if one.path not in known:
                self.add(one, found=found)

    def paths(self) -> frozenset[str]:
        """The distinct inputs recorded so far."""
        try:
            lines = self.path.read_text().splitlines()
        except FileNotFoundError:
            return frozenset()
        return frozenset(json.loads(line)["path"] for line in lines)
