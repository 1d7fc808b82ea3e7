"""Writes the files of a run that grow by lines: its log, its metrics, its lists of examples.

A record of ``metrics.jsonl`` (:mod:`jaxtrain.storage.json_lines`) has ``step``, ``time`` (seconds
since 1970) and the values under their full names, with every digit.
"""

import dataclasses
import datetime
import re
import time
from collections.abc import Iterator
from pathlib import Path

from jaxtrain.storage.atomic import Appended
from jaxtrain.storage.json_lines import JsonLines, Record
from jaxtrain.telemetry.events import BadStep, Message, Metrics, Rewound, StepExamples

LOG = "log.txt"  # of process 0
METRICS = "metrics.jsonl"

# Lists that each process writes for itself: file -> the event that adds a line, and the field that
# locates the line in the run.
_LISTS: dict[str, tuple[type[StepExamples | BadStep], str]] = {
    "examples": (StepExamples, "step"),
    "bad_steps": (BadStep, "position"),
}


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
    """Writes ``metrics.jsonl`` in process 0."""

    name = METRICS
    takes = (Metrics, Rewound)

    def __init__(self, directory: Path) -> None:
        self._file = JsonLines(directory / METRICS)

    def handle(self, event: Metrics | Rewound) -> None:
        """Appends a record, or removes the records after the step of a rewind.

        Raises:
            OSError: the file could not be written; the next call retries.
            InputError: a line is not a record.
        """
        if isinstance(event, Metrics):
            self._file.add({"step": event.step, "time": time.time(), **event.values})
            return

        def kept(record: Record) -> bool:
            repeated = not event.validated and any(name.startswith("val/") for name in record)
            return int(record["step"]) <= event.step - repeated

        self._file.rewind(kept)

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
        self._file = JsonLines(directory / f"{kind}{suffix}")
        self.name = self._file.path.name

    def handle(self, event: StepExamples | BadStep | Rewound) -> None:
        """Appends an entry, or removes the entries after the step of a rewind.

        Raises:
            OSError: the file could not be written; the next call retries.
            InputError: a line is not an entry.
        """
        if not isinstance(event, Rewound):
            self._file.add(dataclasses.asdict(event))
            return
        last = event.step if self._key == "step" else event.seen - 1
        self._file.rewind(
            lambda entry: int(entry[self._key]) <= last,
            (self._file.path, *self._lists_of_former_processes()),
        )

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
