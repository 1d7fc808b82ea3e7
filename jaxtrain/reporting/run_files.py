"""Reads a run directory; files that are missing or damaged are reported on the page."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.config import metrics
from jaxtrain.errors import InputError, first_line
from jaxtrain.storage import addresses, atomic, lock

_PARTS = ("model", "data", "optim", "mesh", "loop", "checkpoint")
# Limits, since a run directory from someone else may contain anything: 3 bytes of JSON can take 64
# bytes of memory (measured).
_MAX_BYTES, _MAX_LINES, _MAX_NAMES, _MAX_FILES = 2**26, 10**6, 300, 1000
_MAX_CHARACTERS = 100_000  # of a text
_MAX_INTEGER, _MAX_NUMBER = 2**53, 1e100
_SHOWN_CHARACTERS = 2000  # of a text in a table
_MAX_TIME_S = 2.5e11  # in the year 9892; datetime ends with 9999
CONFIG, METRICS, HISTORY = "config.json", "metrics.jsonl", "history.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quarantined:
    """An input file that could not be read, and the reason."""

    path: str
    reason: str
    found: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """The contents of a run directory.

    Attributes:
        directory: the run directory.
        label: the run's name on the page, unique on the page.
        config: contents of ``config.json``; {} if the file is missing.
        records: records of ``metrics.jsonl``, ordered by step.
        history: events of ``history.jsonl``, in order.
        quarantined: unreadable inputs of all processes, without duplicates.
        bad_steps: records of ``bad_steps.jsonl`` of process 0.
        active_process: description of the process that is training this run; "" if none is.
        missing: a sentence for each file that is missing or unreadable.
    """

    directory: Path
    label: str
    config: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    history: Sequence[Mapping[str, Any]]
    quarantined: Sequence[Quarantined]
    bad_steps: Sequence[Mapping[str, Any]]
    active_process: str
    missing: Sequence[str]

    @property
    def starts(self) -> list[Mapping[str, Any]]:
        """Returns the ``start`` events."""
        return [event for event in self.history if event["event"] == "start"]

    @functools.cached_property
    def metrics(self) -> dict[str, metrics.Metric]:
        """Returns all metrics by name, with those that the model adds."""
        added = self.last("start").get("metrics") or {}
        return metrics.table(
            {
                name: metrics.Metric(**fields | {"better": fields.get("better")})
                for name, fields in added.items()
            }
        )

    def last(self, event: str) -> Mapping[str, Any]:
        """Returns the newest event of a kind; {} if there is none."""
        return next((one for one in reversed(self.history) if one["event"] == event), {})


def check(directory: Path, given: object) -> None:
    """Checks that a folder is a run directory.

    Args:
        directory: absolute path.
        given: the path as you typed it.

    Raises:
        InputError: it is not a run directory; the message suggests one.
    """
    if not directory.exists():
        raise InputError(f"report {given}: no such folder; pass a run directory")
    if not directory.is_dir():
        raise InputError(f"report {given}: this is a file; pass a run directory")
    if _is_run(directory):
        return
    near = next((one for one in directory.parents if _is_run(one)), None)
    if near is None:
        below = [one for one in directory.glob("*/") if _is_run(one)]
        near = max(below, key=lambda one: one.name, default=None)
    raise InputError(
        f"report {given}: this folder contains no {CONFIG}, {METRICS}, or {HISTORY}; pass a run "
        f"directory, such as {near or 'output/latest'}"
    )


def read(directory: Path, label: str, *, own: bool = False) -> RecordedRun:
    """Reads a run directory; unreadable files are listed in ``missing``.

    Args:
        directory: the run directory.
        label: the run's name on the page.
        own: whether the calling process is the run itself, at its end. It must not check the run's
            lock: closing the file would release the lock.
    """
    missing: list[str] = []
    config = addresses.scrubbed(_config(directory / CONFIG, missing))
    records = _records(directory / METRICS, missing)
    history = addresses.scrubbed(_history(directory / HISTORY, missing))
    if records and not any(_validates(record) for record in records):
        missing.append("No validation was recorded.")
    return RecordedRun(
        directory=directory,
        label=label,
        config=config,
        records=records,
        history=history,
        quarantined=_quarantined(directory, missing),
        bad_steps=_lines(directory / "bad_steps.jsonl", missing),
        active_process="" if own else lock.holder(directory),
        missing=missing,
    )


def labels(directories: Sequence[Path]) -> list[str]:
    """Returns a short, unique name for each run."""
    for length in (1, 2, 3):
        found = ["/".join(directory.resolve().parts[-length:]) for directory in directories]
        # By default the folder is named after the time, and its parent after the config.
        timestamps = length == 1 and any(map(_is_timestamp, found))
        if len(set(found)) == len(found) and not timestamps:
            return found
    return [str(directory) for directory in directories]


def _is_timestamp(name: str) -> bool:
    return name[:2].isdigit() and "T" in name


def _is_run(directory: Path) -> bool:
    return any((directory / name).is_file() for name in (CONFIG, METRICS, HISTORY))


def _validates(record: Mapping[str, Any]) -> bool:
    return any(name.startswith("val/") for name in record)


def _config(path: Path, missing: list[str]) -> dict[str, Any]:
    try:
        found = atomic.read_json(path, follow_links=False)
    except FileNotFoundError:
        missing.append(f"{CONFIG} is missing: the config is unknown.")
        return {}
    except (OSError, ValueError) as error:
        missing.append(f"{CONFIG} cannot be read ({first_line(error)}): the config is unknown.")
        return {}
    if not _is_config(found):
        missing.append(f"{CONFIG} is not a config: the config is unknown.")
        return {}
    return found


def _is_config(found: object) -> bool:
    """Returns whether all fields that the page computes with have the expected type."""
    if not isinstance(found, dict):
        return False
    if not all(isinstance(found.get(one, {}), dict) for one in _PARTS):
        return False
    return (
        _is_count(found.get("data", {}).get("batch_size", 0))
        and _is_count(found.get("loop", {}).get("steps") or 0)
        and isinstance(found.get("checkpoint", {}).get("best_metric"), str | None)
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_INTEGER


def _is_time(value: object) -> bool:
    return is_number(value) and 0 <= value < _MAX_TIME_S  # type: ignore[operator]


def is_number(value: object) -> bool:
    """Returns whether a value is a number with which the page computes."""
    return type(value) in (int, float) and abs(value) < _MAX_NUMBER  # type: ignore[arg-type]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_CHARACTERS


def _records(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    """Reads the records, ordered by step; from a damaged file, those before the damage."""
    found: list[dict[str, Any]] = []
    names: set[str] = set()
    try:
        for line in _lines_of(path, missing):
            if not line.endswith(b"\n"):
                missing.append(f"The last line of {METRICS} is incomplete and was skipped.")
                break
            record = _record(line)
            names |= record.keys()
            if len(names) > _MAX_NAMES:
                raise ValueError(f"more than {_MAX_NAMES} names")
            found.append(record)
    except FileNotFoundError:
        missing.append(f"{METRICS} is missing: no steps were recorded.")
        return []
    except OSError as error:
        missing.append(f"{METRICS} cannot be read ({error.strerror}).")
    except ValueError:
        missing.append(
            f"Line {len(found) + 1} of {METRICS} is not a record; it and later lines were skipped."
        )
    else:
        if not found:
            missing.append(f"{METRICS} contains no complete record yet.")
    return sorted(found, key=lambda record: int(record["step"]))


def _record(line: bytes) -> dict[str, Any]:
    """Parses a line of ``metrics.jsonl`` and restores its NaN/Inf values.

    Raises:
        ValueError: the line is not a record.
    """
    record = atomic.parse_json(line)
    if not isinstance(record, dict):
        raise ValueError("not an object")
    nonfinite = record.pop("nonfinite", {})
    if not isinstance(nonfinite, dict) or not all(map(_is_text, nonfinite.values())):
        raise ValueError("invalid nonfinite")
    record |= {name: float(text) for name, text in nonfinite.items()}
    if not _is_count(record.get("step")) or not _is_time(record.get("time")):
        raise ValueError("no valid step or time")
    for name, value in record.items():
        finite = is_number(value) or value is None
        if not finite and not (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError("a value is not a number")
        if not _is_text(name):
            raise ValueError("a name is too long")
    return record


def _history(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    if not path.exists():
        missing.append(
            f"{HISTORY} is missing: how the run ended, where the time "
            "went, the plan, the hardware, and the versions are unknown."
        )
        return []
    found = _lines(path, missing)
    valid = [one for one in found if _is_event(one)]
    if len(valid) < len(found):
        count = len(found) - len(valid)
        verb = "line is not an event" if count == 1 else "lines are not events"
        missing.append(f"{HISTORY}: {count} {verb}; skipped.")
    return valid


def _is_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


def _are_metrics(value: object) -> bool:
    names = {field.name for field in dataclasses.fields(metrics.Metric)}
    return isinstance(value, dict) and all(
        isinstance(fields, dict)
        and fields.keys() <= names
        and fields.get("better") in ("max", "min", None)
        and all(_is_text(fields.get(name, "")) for name in ("title", "unit"))
        for fields in value.values()
    )


# Fields that the page computes with, and a check of the value's type. None is always allowed. A run
# writes nothing else, so a line with any other value is not an event.
_KINDS: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(("name", "from", "host", "device_kind", "platform", "driver", "why"), _is_text),
    **dict.fromkeys(("from_step", "seen", "total", "devices", "processes", "params"), _is_count),
    **dict.fromkeys(("seconds", "waited_s", "planned_gib", "state_gib"), is_number),
    **dict.fromkeys(("flops_per_step", "moved_bytes", "peak_flops", "bandwidth"), is_number),
    "began": _is_time,
    "code": lambda value: type(value) is int and abs(value) < _MAX_INTEGER,
    "versions": _is_texts,
    "config": _is_config,
    "metrics": _are_metrics,
    "arguments": lambda value: isinstance(value, list) and all(map(_is_text, value)),
}


def _is_event(line: Mapping[str, Any]) -> bool:
    event = line.get("event")
    if not isinstance(event, str):
        return False
    needed = {"phase": ["seconds"], "start": ["began"]}.get(event, [])
    return (
        _is_time(line.get("time"))
        and _is_count(line.get("step"))
        and all(line.get(name) is not None for name in needed)
        and all(
            value is None or name not in _KINDS or _KINDS[name](value)
            for name, value in line.items()
        )
    )


def _quarantined(directory: Path, missing: list[str]) -> list[Quarantined]:
    found: dict[str, Quarantined] = {}
    for path in sorted(directory.glob("quarantine*.jsonl"))[:_MAX_FILES]:
        for line in _lines(path, missing):
            name, reason, where = (
                str(line.get(key, other))[:_SHOWN_CHARACTERS]
                for key, other in (("path", "?"), ("reason", ""), ("found", ""))
            )
            found.setdefault(name, Quarantined(path=name, reason=reason, found=where))
    return list(found.values())


def _lines(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    """Reads the JSON objects of a file, one per line; reports how many lines are not objects."""
    found, damaged = [], 0
    try:
        for line in _lines_of(path, missing):
            try:
                one = atomic.parse_json(line.decode(errors="replace"))
            except ValueError:
                one = None
            if isinstance(one, dict):
                found.append(one)
            else:
                damaged += 1
    except FileNotFoundError:
        return []
    except OSError as error:
        missing.append(f"{path.name} cannot be read ({error.strerror}).")
    except ValueError as error:
        missing.append(f"{path.name} cannot be read ({error}).")
    if damaged:
        lines = "line is" if damaged == 1 else "lines are"
        missing.append(f"{path.name}: {damaged} {lines} damaged; skipped.")
    return found


def _lines_of(path: Path, missing: list[str]) -> Iterator[bytes]:
    """Yields the lines of a file, up to limits far above any real run; reports a file cut there.

    Raises:
        OSError: the file cannot be read, or is a symbolic link. A run makes no links, and a link
            could put any file of the reader's into the page.
        ValueError: it is not a regular file.
    """
    left = _MAX_BYTES
    with atomic.open_regular(path, follow_links=False) as file:
        for _ in range(_MAX_LINES):
            line = file.readline(left + 1)
            left -= len(line)
            if not line:
                return
            if left < 0:
                break
            yield line
        if left >= 0 and not file.read(1):
            return
    missing.append(
        f"{path.name} has more than {_MAX_LINES:,} lines or {_MAX_BYTES:,} bytes: the rest was "
        "skipped."
    )
