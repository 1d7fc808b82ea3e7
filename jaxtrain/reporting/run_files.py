"""What a run's directory holds, as far as it can be read."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.errors import InputError, first_line
from jaxtrain.storage import addresses, atomic, lock

_PARTS = ("model", "data", "optim", "mesh", "loop", "checkpoint")
# Of a stranger's files, which may hold anything: 3 bytes of JSON can take 64 of memory (measured).
_MOST_BYTES, _MOST_LINES, _MOST_NAMES, _MOST_FILES = 2**26, 10**6, 300, 1000
_CHARACTERS = 100_000  # of a text
_LARGEST, _HUGE = 2**53, 1e100
_SHOWN = 2000  # of a text in a table
_LAST_TIME_S = 2.5e11  # in the year 9892; datetime ends with 9999
CONFIG, METRICS, HISTORY = "config.json", "metrics.jsonl", "history.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quarantined:
    """An input that could not be read, and why."""

    path: str
    reason: str
    found: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What is known of a run.

    Attributes:
        directory: of the run.
        label: what the page calls it; differs between the runs of a page.
        config: as in ``config.json``; {} where there is none.
        records: of ``metrics.jsonl``, in order of the steps.
        history: events of ``history.jsonl``, in order.
        quarantined: distinct inputs, of all processes.
        bad_updates: records of ``bad_steps.jsonl`` of process 0.
        at_work: the process that is at work on it, in words; "" if none is.
        missing: what is not there or cannot be read, a sentence each.
    """

    directory: Path
    label: str
    config: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    history: Sequence[Mapping[str, Any]]
    quarantined: Sequence[Quarantined]
    bad_updates: Sequence[Mapping[str, Any]]
    at_work: str
    missing: Sequence[str]

    @property
    def starts(self) -> list[Mapping[str, Any]]:
        """The ``start`` events."""
        return [event for event in self.history if event["event"] == "start"]

    def last(self, event: str) -> Mapping[str, Any]:
        """The newest event of a kind; {} where there is none."""
        return next((one for one in reversed(self.history) if one["event"] == event), {})


def check(directory: Path, given: object) -> None:
    """Refuses what is no run's directory.

    Args:
        directory: absolute.
        given: what was typed.

    Raises:
        InputError: names the cure.
    """
    if not directory.exists():
        raise InputError(f"report {given}: there is no such folder; name a run's directory")
    if not directory.is_dir():
        raise InputError(f"report {given}: this is a file; name a run's directory")
    if _is_run(directory):
        return
    near = next((one for one in directory.parents if _is_run(one)), None)
    if near is None:
        below = [one for one in directory.glob("*/") if _is_run(one)]
        near = max(below, key=lambda one: one.name, default=None)
    raise InputError(
        f"report {given}: this folder holds none of {CONFIG}, {METRICS} and {HISTORY}; name a "
        f"run's directory, as {near or 'output/latest'}"
    )


def read(directory: Path, label: str, *, own: bool = False) -> RecordedRun:
    """Reads a run; what cannot be read is named in ``missing``.

    Older versions recorded addresses with their query, which the page does not repeat.

    Args:
        directory: of the run.
        label: what the page calls it.
        own: whether this process is the run's, at its end: it asks nobody for its lock, as it
            would lose it by that.
    """
    missing: list[str] = []
    config = addresses.scrubbed(_config(directory / CONFIG, missing))
    records = _records(directory / METRICS, missing)
    history = addresses.scrubbed(_history(directory / HISTORY, missing))
    if records and not any(_validates(record) for record in records):
        missing.append("No validation is recorded.")
    return RecordedRun(
        directory=directory,
        label=label,
        config=config,
        records=records,
        history=history,
        quarantined=_quarantined(directory, missing),
        bad_updates=_lines(directory / "bad_steps.jsonl", missing),
        at_work="" if own else lock.holder(directory),
        missing=missing,
    )


def labels(directories: Sequence[Path]) -> list[str]:
    """A short name for each run, different from the others'."""
    for length in (1, 2, 3):
        found = ["/".join(directory.resolve().parts[-length:]) for directory in directories]
        # A run's own folder is named by the time; its config's name stands above it.
        if len(set(found)) == len(found) and not (length == 1 and any(_timed(f) for f in found)):
            return found
    return [str(directory) for directory in directories]


def _timed(name: str) -> bool:
    return name[:2].isdigit() and "T" in name


def _is_run(directory: Path) -> bool:
    return any((directory / name).is_file() for name in (CONFIG, METRICS, HISTORY))


def _validates(record: Mapping[str, Any]) -> bool:
    return any(name.startswith("val/") for name in record)


def _config(path: Path, missing: list[str]) -> dict[str, Any]:
    try:
        found = atomic.read_json(path, follow_links=False)
    except FileNotFoundError:
        missing.append(f"{CONFIG} is not there: the config is unknown.")
        return {}
    except (OSError, ValueError) as error:
        missing.append(f"{CONFIG} cannot be read ({first_line(error)}): the config is unknown.")
        return {}
    if not _is_config(found):
        missing.append(f"{CONFIG} is no config: the config is unknown.")
        return {}
    return found


def _is_config(found: object) -> bool:
    """Whether the page can take it: what it computes with is of the kind that a run writes."""
    if not isinstance(found, dict):
        return False
    if not all(isinstance(found.get(one, {}), dict) for one in _PARTS):
        return False
    return (
        _is_whole(found.get("data", {}).get("batch_size", 0))
        and _is_whole(found.get("loop", {}).get("steps") or 0)
        and isinstance(found.get("checkpoint", {}).get("best_metric"), str | None)
    )


def _is_whole(value: object) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_time(value: object) -> bool:
    return _is_number(value) and 0 <= value < _LAST_TIME_S  # type: ignore[operator]


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < _HUGE  # type: ignore[arg-type]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _CHARACTERS


def _records(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    """Records, each step's in order; of a damaged file what stands before the damage."""
    found: list[dict[str, Any]] = []
    names: set[str] = set()
    try:
        for line in _lines_of(path, missing):
            if not line.endswith(b"\n"):
                missing.append(f"The last line of {METRICS} is not whole and is left out.")
                break
            record = _record(line)
            names |= record.keys()
            if len(names) > _MOST_NAMES:
                raise ValueError(f"more than {_MOST_NAMES} names")
            found.append(record)
    except FileNotFoundError:
        missing.append(f"{METRICS} is not there: no update was recorded.")
        return []
    except OSError as error:
        missing.append(f"{METRICS} cannot be read ({error.strerror}).")
    except ValueError:
        missing.append(
            f"Line {len(found) + 1} of {METRICS} is no record: what follows it is left out."
        )
    else:
        if not found:
            missing.append(f"{METRICS} holds no whole record yet.")
    return sorted(found, key=lambda record: int(record["step"]))


def _record(line: bytes) -> dict[str, Any]:
    """A line of ``metrics.jsonl`` with NaN and infinities put back.

    Raises:
        ValueError: it is no record.
    """
    record = atomic.parse_json(line)
    if not isinstance(record, dict):
        raise ValueError("no object")
    nonfinite = record.pop("nonfinite", {})
    if not isinstance(nonfinite, dict) or not all(map(_is_text, nonfinite.values())):
        raise ValueError("no names of what is not finite")
    record |= {name: float(text) for name, text in nonfinite.items()}
    if not _is_whole(record.get("step")) or not _is_time(record.get("time")):
        raise ValueError("no step or time")
    for name, value in record.items():
        finite = _is_number(value) or value is None
        if not finite and not (isinstance(value, float) and not math.isfinite(value)):
            raise ValueError("no number")
        if not _is_text(name):
            raise ValueError("no name")
    return record


def _history(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    if not path.exists():
        missing.append(
            f"{HISTORY} is not there, as in runs of an older version: how it ended, where the time "
            "went, the plan, the hardware and the versions are unknown."
        )
        return []
    found = _lines(path, missing)
    whole = [one for one in found if _is_event(one)]
    if len(whole) < len(found):
        missing.append(f"{len(found) - len(whole)} lines of {HISTORY} are no events.")
    return whole


def _is_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(one, str) for one in value.values())


# What an event may hold that the page computes with: name -> whether a value is of its kind. None
# is always allowed. A run writes nothing else, so an event with something else is none.
_KINDS: dict[str, Callable[[object], bool]] = {
    **dict.fromkeys(("name", "from", "host", "device_kind", "platform", "driver", "why"), _is_text),
    **dict.fromkeys(("from_step", "seen", "total", "devices", "processes", "params"), _is_whole),
    **dict.fromkeys(("seconds", "waited_s", "planned_gib", "state_gib"), _is_number),
    **dict.fromkeys(("flops_per_step", "peak_flops", "bandwidth"), _is_number),
    "began": _is_time,
    "code": lambda value: type(value) is int and abs(value) < _LARGEST,
    "versions": _is_texts,
    "config": _is_config,
    "arguments": lambda value: isinstance(value, list) and all(map(_is_text, value)),
}


def _is_event(line: Mapping[str, Any]) -> bool:
    event = line.get("event")
    if not isinstance(event, str):
        return False
    needed = {"phase": ["seconds"], "start": ["began"]}.get(event, [])
    return (
        _is_time(line.get("time"))
        and _is_whole(line.get("step"))
        and all(line.get(name) is not None for name in needed)
        and all(
            value is None or name not in _KINDS or _KINDS[name](value)
            for name, value in line.items()
        )
    )


def _quarantined(directory: Path, missing: list[str]) -> list[Quarantined]:
    found: dict[str, Quarantined] = {}
    for path in sorted(directory.glob("quarantine*.jsonl"))[:_MOST_FILES]:
        for line in _lines(path, missing):
            name, reason, where = (
                str(line.get(key, other))[:_SHOWN]
                for key, other in (("path", "?"), ("reason", ""), ("found", ""))
            )
            found.setdefault(name, Quarantined(path=name, reason=reason, found=where))
    return list(found.values())


def _lines(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    """The objects of a file of one a line; says how many lines are none."""
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
        verb = "line is" if damaged == 1 else "lines are"
        missing.append(f"{damaged} {verb} not whole in {path.name}, and left out.")
    return found


def _lines_of(path: Path, missing: list[str]) -> Iterator[bytes]:
    """The lines of a file, within limits that no run comes near; says where they end it.

    Raises:
        OSError: it cannot be read, or is a symbolic link: a run makes none, and one could put any
            file of the reader's into the page.
        ValueError: it is not a regular file.
    """
    left = _MOST_BYTES
    with atomic.open_regular(path, follow_links=False) as file:
        for _ in range(_MOST_LINES):
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
        f"{path.name} has more than {_MOST_LINES:,} lines or {_MOST_BYTES:,} bytes: what follows "
        "them is left out."
    )
