"""Follows a run and records it with one tracker, in a process of its own.

:class:`jaxtrain.telemetry.tracker.Tracker` starts ``python -m jaxtrain.telemetry.tracker_process
NAME DIRECTORY``. The process reads ``metrics.jsonl`` as it grows and sends each line once, with the
samples of a validation. ``trackers/NAME.jsonl`` in the run directory has the id of the tracker's
run, and on each further line the step and time of a line that was sent. A line of ``metrics.jsonl``
is identified by both: a step repeated after a kill or a rollback has another time, and is sent
again.

After a kill, a tracker may not have everything that was sent. A recorder finds out how much it has,
and the rest is sent again. So a tracker may have a step several times, and the last one counts; but
none is missing.
"""

import contextlib
import fcntl
import itertools
import json
import os
import re
import secrets
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxtrain.errors import first_line, one_line
from jaxtrain.storage.atomic import drop_torn_line, open_own, parse_json
from jaxtrain.telemetry import line_files, samples
from jaxtrain.telemetry.tracker import END_S, FOLDER, WARNING

PROJECT = "jaxtrain"
"""The project or experiment, unless the tracker's own environment variable names another."""

_POLL_S = 1.0
_ROWS = 100  # sent at once
_ID = re.compile(r"[0-9a-f]{8}")
_HARDWARE = ("host", "processes", "devices", "device_kind", "platform", "driver")
_UNKNOWN = (-1, 0.0)  # a row whose step and time are not known


class Row(NamedTuple):
    """A line of ``metrics.jsonl``.

    Attributes:
        step: completed steps.
        time: seconds since 1970.
        values: metrics by full name.
        samples: files of the samples; of a validation.
    """

    step: int
    time: float
    values: dict[str, float]
    samples: Sequence[Path]


class Info(NamedTuple):
    """What a tracker shows about a run.

    Attributes:
        id: eight hexadecimal digits, always the same for a run directory.
        name: the name of the config and of the run directory.
        directory: the run directory.
        config: all fields of the config by section; versions; hardware; the command line.
        sent: number of rows that earlier starts of the run have sent.
    """

    id: str
    name: str
    directory: Path
    config: Mapping[str, Any]
    sent: int


class Recorder(Protocol):
    """An open run of a tracker. Any method may raise any error, or hang.

    Attributes:
        where: the URL or folder of the run, for the user.
        arrived: how many of the rows that were sent earlier the tracker has.
    """

    where: str
    arrived: int

    def record(self, first: int, rows: Sequence[Row]) -> None:
        """Sends rows.

        Args:
            first: number of rows sent before them.
            rows: in the order of ``metrics.jsonl``.
        """

    def close(self, code: int) -> None:
        """Sends all that is pending, and ends the run.

        Args:
            code: exit code of the run.
        """


class Ledger:
    """The rows that were sent: ``trackers/NAME.jsonl``, locked while it is open.

    Args:
        path: the file.

    Attributes:
        id: of the tracker's run.
        sent: step and time of each row, in the order in which they were sent.

    Raises:
        BlockingIOError: another process is sending rows of this run.
        ValueError: a line of the file is not from jaxtrain.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        descriptor = open_own(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self._file = open(descriptor, "rb+", buffering=0)  # noqa: SIM115  # close() does
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            drop_torn_line(path)
            self.id, self.sent = self._read()
        except BaseException:
            self._file.close()
            raise
        self._known = set(self.sent)

    def _read(self) -> tuple[str, list[tuple[int, float]]]:
        head, *lines = self._path.read_bytes().splitlines() or [b""]
        if not head:
            id = secrets.token_hex(4)
            self._file.write(json.dumps({"run": id}).encode() + b"\n")
            return id, []
        try:
            id = json.loads(head)["run"]
            found = [json.loads(line) for line in lines]
            if _ID.fullmatch(id):
                return id, [(int(step), float(when)) for step, when in found]
        except (ValueError, LookupError, TypeError, RecursionError):
            pass
        raise ValueError(f"{self._path} has a line that is not from jaxtrain: move it away")

    def __contains__(self, row: Row) -> bool:
        return (row.step, row.time) in self._known

    def add(self, rows: Sequence[tuple[int, float]]) -> None:
        """Adds rows that were sent."""
        self._file.write("".join(f"{json.dumps(row)}\n" for row in rows).encode())
        self.sent += rows
        self._known.update(rows)

    def keep(self, count: int) -> None:
        """Removes the rows after the first ``count``, so that they are sent again."""
        if count > len(self.sent):  # it was killed between sending and adding
            self.add([_UNKNOWN] * (count - len(self.sent)))
        elif count < len(self.sent):
            lines = self._path.read_bytes().splitlines(keepends=True)
            self._file.truncate(sum(map(len, lines[: count + 1])))
            del self.sent[count:]
            self._known = set(self.sent)

    def close(self) -> None:
        """Closes and unlocks the file."""
        self._file.close()


class End:
    """The end of the run: its exit code arrives on stdin, which is closed if the run is killed.

    The process ends by itself some time after the run, even if a tracker hangs.

    Attributes:
        code: exit code of the run; 1 if it was killed.
    """

    def __init__(self) -> None:
        self.code = 1
        self._over = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def over(self) -> bool:
        """Whether the run has ended."""
        return self._over.is_set()

    def wait(self, seconds: float) -> None:
        """Waits for the end of the run, at most for some seconds."""
        self._over.wait(seconds)

    def _read(self) -> None:
        text = sys.stdin.buffer.read()
        self.code = int(text) if text.isdigit() else 1
        self._over.set()
        time.sleep(END_S)
        os._exit(1)


class _MetricsFile:
    """Reads the lines of ``metrics.jsonl``, again from the start after it was replaced.

    Args:
        directory: the run directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / line_files.METRICS
        self._file: BufferedReader | None = None  # open, so that its inode is not used again
        self._offset = 0

    def rows(self) -> Iterator[Row]:
        """Yields the rows that were added since the last call; of a replaced file, all."""
        if not self._path.is_file():
            return
        now = open(open_own(self._path, os.O_RDONLY), "rb")  # noqa: SIM115
        if self._file is None or not os.path.sameopenfile(self._file.fileno(), now.fileno()):
            self._file, now, self._offset = now, self._file or now, 0
        if now is not self._file:
            now.close()
        self._file.seek(self._offset)
        for line in self._file:
            if not line.endswith(b"\n"):
                return
            self._offset += len(line)
            yield self._row(line)

    def _row(self, line: bytes) -> Row:
        values = line_files.parse(line)
        step, when = int(values.pop("step")), float(values.pop("time"))
        files: Sequence[Path] = ()
        if any(name.startswith("val/") for name in values):
            found = (self._directory / samples.FOLDER).glob(f"*_{step}.*")
            # In a run directory from someone else, a link could send any file of yours.
            files = sorted(
                path
                for path in found
                if samples.step_of(path) == step and path.is_file() and not path.is_symlink()
            )
        return Row(step, when, values, files)


def follow(name: str, directory: Path, end: End, say: Callable[[str], None]) -> None:
    """Records a run until its end.

    Args:
        name: of the tracker.
        directory: the run directory.
        end: the end of the run.
        say: prints a line for the user.
    """
    (directory / FOLDER).mkdir(exist_ok=True)
    with contextlib.closing(_locked(directory / FOLDER / f"{name}.jsonl", end)) as ledger:
        before = len(ledger.sent)
        recorder = open_recorder(name, _info(directory, ledger))
        ledger.keep(recorder.arrived)
        lost = before - len(ledger.sent)
        which = "1 lost record is" if lost == 1 else f"{lost} lost records are"
        say(f"{recorder.where}; {which} sent again" if lost > 0 else recorder.where)
        metrics = _MetricsFile(directory)
        while True:
            over = end.over()  # before the file is read
            missing = (row for row in metrics.rows() if row not in ledger)
            while rows := list(itertools.islice(missing, _ROWS)):
                recorder.record(len(ledger.sent), rows)
                ledger.add([(row.step, row.time) for row in rows])
            if over:
                recorder.close(end.code)
                return
            end.wait(_POLL_S)


def _locked(path: Path, end: End) -> Ledger:
    """Opens the ledger; waits for the process of an earlier start that was killed."""
    while True:
        try:
            return Ledger(path)
        except BlockingIOError:
            if end.over():
                raise
            end.wait(_POLL_S)


def open_recorder(name: str, info: Info) -> Recorder:
    """Opens the run of a tracker.

    A new tracker is a file such as tracker_wandb.py, a case here, its name in
    :data:`jaxtrain.telemetry.tracker.TRACKERS`, and an extra in ``pyproject.toml``.
    """
    match name:
        case "wandb":
            from jaxtrain.telemetry.tracker_wandb import WandB

            return WandB(info)
        case "trackio":
            from jaxtrain.telemetry.tracker_trackio import Trackio

            return Trackio(info)
        case "mlflow":
            from jaxtrain.telemetry.tracker_mlflow import MLflow

            return MLflow(info)
    raise ValueError(f"unknown tracker {name}")


def _info(directory: Path, ledger: Ledger) -> Info:
    """Reads what the run has recorded about itself, which has no credentials."""
    start: dict[str, Any] = {}
    for line in (directory / "history.jsonl").read_bytes().splitlines():
        record = parse_json(line)
        if record["event"] == "start":
            start = record
    config = dict(start["config"])
    config["versions"] = start["versions"]
    config["hardware"] = {name: start[name] for name in _HARDWARE}
    config["run"] = {
        "directory": str(directory),
        "arguments": shlex.join(start["arguments"]),
        "resumed_from": start["from"] or "",
    }
    name = f"{config['name']}/{directory.name}"
    return Info(ledger.id, name, directory, config, len(ledger.sent))


def main(arguments: Sequence[str]) -> int:
    """Records a run. Lines for the user go to stdout, all other output to stderr."""
    name, directory = arguments
    channel = os.dup(1)
    os.dup2(2, 1)  # libraries print to stdout, too
    # They end the run, which then ends this process. Not SIG_IGN, which subprocesses inherit.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)

    def say(text: str) -> None:
        with contextlib.suppress(OSError):  # the run may have been killed
            os.write(channel, f"{one_line(text)}\n".encode())

    try:
        follow(name, Path(directory), End(), say)
    except BaseException as error:
        traceback.print_exc()
        say(f"{WARNING}{type(error).__name__}: {first_line(error)}")
        sys.stderr.flush()
        os._exit(1)  # without what a failing tracker does at exit, which may hang
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
