"""Writes the files of a run that grow by lines: its log, its metrics, its lists of examples.

A line of ``metrics.jsonl`` is an object: ``step``, ``time`` (seconds since 1970) and the values
under their full names, with every digit. JSON has no NaN or Inf: such a value is ``null``, and
``"nonfinite": {NAME: "nan" | "inf" | "-inf"}`` on the same line has the value.
"""

import contextlib
import dataclasses
import datetime
import functools
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.errors import InputError
from jaxtrain.storage.atomic import Appended, drop_torn_line, open_own, write_whole
from jaxtrain.telemetry.events import BadStep, Message, Metrics, Rewound, StepExamples

LOG = "log.txt"  # of process 0
METRICS = "metrics.jsonl"

# Lines that wait for a change of their file to succeed, up to this size; then the newest is lost.
_MAX_WAITING_BYTES = 2**24

# Lists that each process writes for itself: file -> the event that adds a line, and the field that
# locates the line in the run.
_LISTS: dict[str, tuple[type[StepExamples | BadStep], str]] = {
    "examples": (StepExamples, "step"),
    "bad_steps": (BadStep, "position"),
}


class LineFile:
    """A file that grows by lines. Failed writes are kept and retried in order.

    Args:
        path: of the file. An incomplete last line, left by a killed process, is removed before the
            first write.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = Appended(path)
        self._behind = False  # the last line is pending inside self._file
        self._waiting: list[bytes | Callable[[], None]] = []
        if path.is_file():
            self._waiting.append(lambda: drop_torn_line(path))

    def append(self, line: str) -> None:
        """Appends a line.

        Raises:
            OSError: it could not be written; it is kept in memory and retried before the next one.
        """
        self._waiting.append(line.encode())
        self._settle()

    def change(self, action: Callable[[], None]) -> None:
        """Rewrites the file once all earlier lines are written.

        Args:
            action: rewrites the file; must be repeatable after an OSError.

        Raises:
            OSError: the file could not be rewritten; this is retried before the next line.
            InputError: the file has a line that jaxtrain did not write.
        """
        self._waiting.append(action)
        self._settle()

    def close(self) -> None:
        """Retries pending writes once and closes the file."""
        with contextlib.suppress(OSError, InputError):
            self._settle()
        self._file.close()

    def _settle(self) -> None:
        while self._waiting:
            first = self._waiting[0]
            try:
                if isinstance(first, bytes):
                    self._behind = True  # Appended keeps a line that it cannot write
                    self._waiting.pop(0)
                    self._file.append(first)
                    self._behind = False
                else:
                    if self._behind:
                        self._file.append(b"")
                        self._behind = False
                    self._file.close()
                    first()
                    self._waiting.pop(0)
            except OSError:
                lines = [one for one in self._waiting if isinstance(one, bytes)]
                if sum(map(len, lines)) > _MAX_WAITING_BYTES:
                    self._waiting.remove(lines[-1])
                raise


def log_name(process: int) -> str:
    """Returns the name of a process's log in the run directory."""
    return LOG if process == 0 else f"log.{process}.txt"


class LogFile:
    """Writes every message with the UTC time to ``log.txt``, or ``log.<process>.txt``."""

    takes = (Message,)

    def __init__(self, directory: Path, process: int) -> None:
        self._file = Appended(directory / log_name(process))
        self.name = self._file.path.name

    def handle(self, event: Message) -> None:
        """Appends a message."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        lines = event.text.rstrip("\n").split("\n")
        self._file.append("".join(f"{now} {line}\n" for line in lines).encode())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class MetricsFile:
    """Writes ``metrics.jsonl`` in process 0; :func:`read` reads it."""

    name = METRICS
    takes = (Metrics, Rewound)

    def __init__(self, directory: Path) -> None:
        self._file = LineFile(directory / METRICS)

    def handle(self, event: Metrics | Rewound) -> None:
        """Appends a record, or removes the records after the step of a rewind.

        Raises:
            OSError: the file could not be written; the next call retries.
            InputError: a line is not a record.
        """
        if isinstance(event, Metrics):
            self._file.append(_json_line(event.step, event.values))
        else:
            self._file.change(functools.partial(self._apply, event))

    def _apply(self, event: Rewound) -> None:
        path = self._file.path
        if not path.is_file():
            return
        _rewind(path, "step", event.step)
        if not event.validated:
            _remove_validation(path, event.step)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class ListFile:
    """Writes ``examples.jsonl`` or ``bad_steps.jsonl``; process N > 0 writes ``<kind>.N.jsonl``.

    Args:
        directory: the run directory.
        kind: ``"examples"`` or ``"bad_steps"``.
        process: index of this process. Process 0 also rewinds the lists of processes that existed
            in an earlier start but do not exist now.
        process_count: number of processes of the run.
    """

    def __init__(self, directory: Path, kind: str, process: int, process_count: int) -> None:
        event, self._key = _LISTS[kind]
        self.takes: tuple[type, ...] = (event, Rewound)
        self._kind = kind
        self._process, self._process_count = process, process_count
        suffix = ".jsonl" if process == 0 else f".{process}.jsonl"
        self._file = LineFile(directory / f"{kind}{suffix}")
        self.name = self._file.path.name

    def handle(self, event: StepExamples | BadStep | Rewound) -> None:
        """Appends an entry, or removes the entries after the step of a rewind.

        Raises:
            OSError: the file could not be written; the next call retries.
            InputError: a line is not an entry.
        """
        if isinstance(event, Rewound):
            self._file.change(functools.partial(self._apply, event))
        else:
            self._file.append(json.dumps(dataclasses.asdict(event), allow_nan=False) + "\n")

    def _apply(self, event: Rewound) -> None:
        for path in (self._file.path, *self._lists_of_former_processes()):
            if path.is_file():
                _rewind(path, self._key, event.step if self._key == "step" else event.seen - 1)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _lists_of_former_processes(self) -> Iterator[Path]:
        if self._process:
            return
        for path in self._file.path.parent.glob(f"{self._kind}.*.jsonl"):
            number = re.fullmatch(r"\w+\.(\d+)\.jsonl", path.name)
            if number and int(number[1]) >= self._process_count:
                yield path


def list_files(directory: Path, process: int, process_count: int) -> list[ListFile]:
    """Returns all lists of a process."""
    return [ListFile(directory, kind, process, process_count) for kind in _LISTS]


class Reader:
    """Reads the records of a file as it grows, with NaN/Inf restored.

    Omits an incomplete last line, which an active or killed run may leave.

    Args:
        path: of the file, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number: int | None = None  # of the inode: a rewind replaces the file
        self._offset = 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Yields the records since the last call; of a file that was rewound, all."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            number = os.fstat(file.fileno()).st_ino
            if number != self._number:
                self._number, self._offset = number, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                record: dict[str, Any] = json.loads(line)
                nonfinite = record.pop("nonfinite", {})
                yield record | {name: float(text) for name, text in nonfinite.items()}


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a file in order, with NaN/Inf restored.

    Raises:
        OSError: it cannot be read.
    """
    path.stat()
    yield from Reader(path).new()


def _rewind(path: Path, key: str, last: int) -> None:
    drop_torn_line(path)
    lines = _lines(path)
    kept = [line for line in lines if _number_of(line, key, path) <= last]
    if len(kept) < len(lines):
        write_whole(path, "".join(kept))


def _remove_validation(path: Path, step: int) -> None:
    """Removes the validation records of ``step``; its training record has other names."""
    lines = _lines(path)
    kept = [
        line
        for line in lines
        if not (
            json.loads(line)["step"] == step and any("val/" in name for name in json.loads(line))
        )
    ]
    write_whole(path, "".join(kept))


def _lines(path: Path) -> list[str]:
    try:
        with open(open_own(path, os.O_RDONLY), encoding="utf-8") as file:
            text = file.read()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 ({error.reason} at byte {error.start}): move the file away"
        ) from error
    return [f"{line}\n" for line in text.removesuffix("\n").split("\n")] if text else []


def _number_of(line: str, key: str, path: Path) -> int:
    try:
        return int(json.loads(line)[key])
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        raise InputError(
            f"{path} contains a line that jaxtrain did not write ({line[:60].strip()!r}): fix the "
            "line, or move the file away"
        ) from None


def _json_line(step: int, values: Mapping[str, float]) -> str:
    record: dict[str, Any] = {"step": step, "time": time.time()}
    record |= {name: value if math.isfinite(value) else None for name, value in values.items()}
    nonfinite = {name: str(value) for name, value in values.items() if not math.isfinite(value)}
    if nonfinite:
        record["nonfinite"] = nonfinite
    return json.dumps(record, allow_nan=False) + "\n"
