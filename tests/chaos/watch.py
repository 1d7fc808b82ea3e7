"""Tracks a run's progress through its log, metrics and checkpoints."""

import json
import re
from pathlib import Path

# In the order of a run. "start" is before the log says anything; "commit" is from the appearance of
# a checkpoint's folder to its manifest; "end" is after the last update.
PHASES = (
    *("start", "data", "restore", "compile", "first step"),
    *("steps", "evaluation", "save", "commit", "end"),
)
MANIFEST = "manifest.json"
_TEMPORARY = "orbax-checkpoint-tmp"
_STARTED = b" run directory "


class Tail:
    """Reads the lines of a growing file. A truncated or replaced file is read from the start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] = (0, 0)  # inode, bytes
        self.lines: list[bytes] = []

    def refresh(self) -> bool:
        """Reads new lines; returns whether there were any."""
        try:
            found = self._path.stat()
            if (found.st_ino, found.st_size) == self._seen:
                return False
            content = self._path.read_bytes()
        except OSError:  # not there yet, or the run is replacing it
            return False
        self._seen = (found.st_ino, len(content))
        self.lines = content[: content.rfind(b"\n") + 1].splitlines()
        return True


class Watch:
    """What a run's directory says about the run.

    Args:
        directory: of the run.
        steps: of the whole run.
        eval_every: steps between evaluations.
    """

    def __init__(self, directory: Path, steps: int, eval_every: int) -> None:
        self.directory = directory
        self.checkpoints = directory / "checkpoints"
        self._steps, self._eval_every = steps, eval_every
        self._log, self._metrics = Tail(directory / "log.txt"), Tail(directory / "metrics.jsonl")
        self._validated = False
        self.starts = 0
        self.step = 0
        self._said: list[bytes] = []

    def look(self) -> None:
        """Reads new lines."""
        if self._log.refresh():
            starts = [n for n, line in enumerate(self._log.lines) if _STARTED in line]
            self.starts = len(starts)
            self._said = self._log.lines[starts[-1] :] if starts else []
        if self._metrics.refresh():
            self.step, self._validated = 0, False
            for line in self._metrics.lines:
                record = json.loads(line)
                self.step = max(self.step, record["step"])
            for line in self._metrics.lines[-2:]:
                record = json.loads(line)
                if record["step"] == self.step:
                    self._validated = "val/loss" in record

    def phase(self) -> str:
        """One of :data:`PHASES`, of the start that the log told of last."""
        if not self._said:
            return "start"
        if not self._has(rb" parameters; "):
            return "data"
        if not self._has(rb" compiled in "):
            waits = self.complete() and not self._has(rb" resumed from ")
            return "restore" if waits else "compile"
        if not self.steps_again():
            return "first step"
        if self.step >= self._steps:
            return "end"
        if self.step % self._eval_every == 0 and not self._validated:
            return "evaluation"
        if any(_TEMPORARY in name for name in self._names()):
            return "save"
        return "commit" if set(self.folders()) - set(self.complete()) else "steps"

    def folders(self) -> list[int]:
        """Steps that have a folder under their final name, ascending."""
        return sorted(int(name) for name in self._names() if name.isdigit())

    def complete(self) -> list[int]:
        """Those of them that have a manifest."""
        return [
            step for step in self.folders() if (self.checkpoints / str(step) / MANIFEST).is_file()
        ]

    def steps_again(self) -> bool:
        """Whether the newest start has completed a step."""
        return self._has(rb" step \d+/")

    def resumed_from(self) -> int:
        """Returns the checkpoint that the newest start resumed from; 0 for a fresh start."""
        found = [re.search(rb" resumed from \S*/(\d+):", line) for line in self._said]
        return max((int(match[1]) for match in found if match), default=0)

    def log_tail(self, count: int = 12) -> str:
        """Returns the last lines of the log."""
        return "\n".join(line.decode(errors="replace") for line in self._log.lines[-count:])

    def size(self) -> tuple[int, int]:
        """Changes whenever the run prints or records anything."""
        return len(self._log.lines), len(self._metrics.lines)

    def _has(self, pattern: bytes) -> bool:
        return any(re.search(pattern, line) for line in self._said)

    def _names(self) -> list[str]:
        try:
            return [path.name for path in self.checkpoints.iterdir()]
        except OSError:
            return []
