"""Writes the files of a run that grow by lines: its log, its metrics, its lists of examples.

A record of ``metrics.jsonl`` (:mod:`jaxtrain.storage.json_lines`) has ``step``, ``time`` (seconds
since 1970) and the values under their full names, with every digit.
"""

import dataclasses
import datetime
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxtrain.storage.atomic import Appended
from jaxtrain.storage.json_lines import JsonLines, Record
from jaxtrain.telemetry.events import BadStep, Message, Metrics, Rewound, StepExamples

LOG = "log.txt"  # of process 0
METRICS = "metrics.jsonl"


class LogFile:
    """Writes every message with the UTC time to ``log.txt``, or ``log.<process>.txt``."""

    takes = (Message,)

    def __init__(self, directory: Path, process: int) -> None:
        self.name = LOG if process == 0 else f"log.{process}.txt"
        self._file = Appended(directory / self.name)

    def handle(self, event: Message) -> None:
        """Appends a message."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        lines = event.text.rstrip("\n").split("\n")
        self._file.append("".join(f"{now} {line}\n" for line in lines).encode())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class RecordFile:
    """Writes the events of one type, a line for each; a rewind removes later lines.

    Args:
        stays: whether a record stays after a rewind.
    """

    def __init__(
        self,
        path: Path,
        event: type,
        record: Callable[[Any], Record],
        stays: Callable[[Record, Rewound], bool],
        others: Iterable[Path] = (),
    ) -> None:
        self.name = path.name
        self.takes = (event, Rewound)
        self._file = JsonLines(path)
        self._record, self._stays = record, stays
        self._paths = (path, *others)

    def handle(self, event: Any) -> None:
        """Appends a record, or removes the records after the step of a rewind.

        Raises:
            OSError: the file could not be written; the next call retries.
            InputError: a line is not a record.
        """
        if isinstance(event, Rewound):
            self._file.rewind(lambda record: self._stays(record, event), self._paths)
        else:
            self._file.add(self._record(event))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def metrics_file(directory: Path) -> RecordFile:
    """Returns ``metrics.jsonl``, which process 0 writes."""

    def record(event: Metrics) -> Record:
        return {"step": event.step, "time": time.time(), **event.values}

    def stays(record: Record, to: Rewound) -> bool:
        repeated = not to.validated and any(name.startswith("val/") for name in record)
        return int(record["step"]) <= to.step - repeated

    return RecordFile(directory / METRICS, Metrics, record, stays)


def list_files(directory: Path, process: int, process_count: int) -> list[RecordFile]:
    """Returns ``examples.jsonl`` and ``bad_steps.jsonl``; of process N > 0, ``<kind>.N.jsonl``.

    Process 0 also rewinds the lists of processes that existed in an earlier start but do not now.
    """

    def file(kind: str, event: type, stays: Callable[[Record, Rewound], bool]) -> RecordFile:
        numbers = {
            path: re.fullmatch(rf"{kind}\.([1-9][0-9]*)\.jsonl", path.name)
            for path in directory.glob(f"{kind}.*.jsonl")
            if not path.is_symlink()
        }
        former = (
            path
            for path, number in numbers.items()
            if process == 0 and number and int(number[1]) >= process_count
        )
        name = f"{kind}.jsonl" if process == 0 else f"{kind}.{process}.jsonl"
        return RecordFile(directory / name, event, dataclasses.asdict, stays, former)

    return [
        file("examples", StepExamples, lambda record, to: int(record["step"]) <= to.step),
        file("bad_steps", BadStep, lambda record, to: int(record["position"]) < to.seen),
    ]
