"""Tracks a run's progress through its log, metrics and checkpoints."""

import json
import re
from collections import Counter
from pathlib import Path

from jaxtrain.checkpoint.pointer import FILES

# In the order of a run. "start" is before the first line of the log; "commit" is from the
# appearance of a checkpoint's arrays to that of its pointer; "end" is after the last step.
PHASES = (
    *("start", "data", "restore", "compile", "first step"),
    *("steps", "evaluation", "save", "commit", "end"),
)
_TEMPORARY = "orbax-checkpoint-tmp"
_STARTED = b" run directory "


class Tail:
    """Reads the lines of a growing file; a truncated or replaced file is read from the start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int] = (0, 0)  # inode, bytes
        self.lines: list[bytes] = []

    def refresh(self) -> bool:
        """Reads new lines; returns whether the file has changed."""
        try:
            found = self._path.stat()
            if (found.st_ino, found.st_size) == self._seen:
                return False
            content = self._path.read_bytes()
        except OSError:  # missing so far, or the run is replacing it
            return False
        self._seen = (found.st_ino, len(content))
        self.lines = content[: content.rfind(b"\n") + 1].splitlines()
        return True


class Watch:
    """Determines a run's progress from its run directory.

    Attributes:
        starts: how often jaxtrain has started, according to the log.
    """

    def __init__(self, directory: Path, steps: int, eval_every: int) -> None:
        self.directory = directory
        self.checkpoints = directory / "checkpoints"
        self._steps, self._eval_every = steps, eval_every
        self._log, self._metrics = Tail(directory / "log.txt"), Tail(directory / "metrics.jsonl")
        self._validated = False
        self._started: Counter[bytes] = Counter()
        self.starts = 0
        self.step = 0
        self._newest: list[bytes] = []  # log lines of the newest start

    def look(self) -> None:
        """Reads new lines of the log and the metrics."""
        if self._log.refresh():
            starts = [n for n, line in enumerate(self._log.lines) if _STARTED in line]
            # Not their number: on a new machine, the log comes from the bucket, without its end.
            self._started |= Counter(bytes(self._log.lines[n]) for n in starts)
            self.starts = self._started.total()
            self._newest = self._log.lines[starts[-1] :] if starts else []
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
        """Returns the phase of the newest start in the log: one of :data:`PHASES`."""
        if not self._newest:
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
        written = self._written()
        if any(_TEMPORARY in name for names in written.values() for name in names):
            return "save"
        return "commit" if set(written) - set(self.complete()) else "steps"

    def complete(self) -> list[int]:
        """Returns the steps of the checkpoints, ascending."""
        names = [Path(name) for name in _names(self.checkpoints)]
        return sorted(int(name.stem) for name in names if name.stem.isdigit())

    def steps_again(self) -> bool:
        """Whether the newest start has completed a step."""
        return self._has(rb" step \d+/")

    def resumed_from(self) -> int:
        """Returns the step that the newest start resumed from; 0 for a new run."""
        found = [re.search(rb" resumed from \S*/(\d+):", line) for line in self._newest]
        return max((int(match[1]) for match in found if match), default=0)

    def log_tail(self, count: int = 12) -> str:
        """Returns the last lines of the log."""
        return "\n".join(line.decode(errors="replace") for line in self._log.lines[-count:])

    def size(self) -> tuple[int, int]:
        """Returns the number of lines in the log and the metrics, to detect progress."""
        return len(self._log.lines), len(self._metrics.lines)

    def _has(self, pattern: bytes) -> bool:
        return any(re.search(pattern, line) for line in self._newest)

    def _written(self) -> dict[int, list[str]]:
        """Returns the names in the newest folder of files; {} before the first save."""
        folders = {name: int(name.partition("-")[0]) for name in _names(self.directory / FILES)}
        newest = max(folders, key=lambda name: folders[name], default=None)
        if newest is None:
            return {}
        return {folders[newest]: _names(self.directory / FILES / newest)}


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return []
