"""What a run's directory holds, as far as it can be read."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain import addresses, directory_lock, metrics
from jaxtrain.errors import InputError

_PARTS = ("model", "data", "optim", "mesh", "loop", "checkpoint")
CONFIG, METRICS, HISTORY = "config.json", "metrics.jsonl", "history.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quarantined:
    """An input that could not be read, and why."""

    path: str
    reason: str
    found: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
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


def read(directory: Path, label: str, *, own: bool = False) -> Run:
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
    return Run(
        directory=directory,
        label=label,
        config=config,
        records=records,
        history=history,
        quarantined=_quarantined(directory, missing),
        bad_updates=_lines(directory / "bad_steps.jsonl", missing),
        at_work="" if own else directory_lock.holder(directory),
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
        found = json.loads(path.read_text())
    except FileNotFoundError:
        missing.append(f"{CONFIG} is not there: the config is unknown.")
        return {}
    except (OSError, ValueError) as error:
        missing.append(f"{CONFIG} cannot be read ({error}): the config is unknown.")
        return {}
    if not isinstance(found, dict) or not all(
        isinstance(found.get(one, {}), dict) for one in _PARTS
    ):
        missing.append(f"{CONFIG} is no config: the config is unknown.")
        return {}
    return found


def _records(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    """Records, each step's in order; of a damaged file what stands before the damage."""
    found: list[dict[str, Any]] = []
    try:
        for record in metrics.read(path):
            record["step"], record["time"] = int(record["step"]), float(record["time"])
            for name, value in record.items():
                record[name] = None if value is None else value + 0  # TypeError: no number
            found.append(record)
    except FileNotFoundError:
        missing.append(f"{METRICS} is not there: no update was recorded.")
    except OSError as error:
        missing.append(f"{METRICS} cannot be read ({error.strerror}).")
    except (ValueError, KeyError, TypeError, AttributeError):
        missing.append(
            f"Line {len(found) + 1} of {METRICS} is no record: what follows it is left out."
        )
    else:
        if not found:
            missing.append(f"{METRICS} holds no whole record yet.")
        if _torn(path):
            missing.append(f"The last line of {METRICS} is not whole and is left out.")
    return sorted(found, key=lambda record: record["step"])


def _history(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    if not path.is_file():
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


def _is_event(line: Mapping[str, Any]) -> bool:
    numbers = [line.get("time"), line.get("step")]
    if line.get("event") == "phase":
        numbers.append(line.get("seconds"))
    if line.get("event") == "start":
        numbers.append(line.get("began"))
    return "event" in line and all(isinstance(number, int | float) for number in numbers)


def _quarantined(directory: Path, missing: list[str]) -> list[Quarantined]:
    found: dict[str, Quarantined] = {}
    for path in sorted(directory.glob("quarantine*.jsonl")):
        for line in _lines(path, missing):
            name = str(line.get("path", "?"))
            reason, where = str(line.get("reason", "")), str(line.get("found", ""))
            found.setdefault(name, Quarantined(path=name, reason=reason, found=where))
    return list(found.values())


def _lines(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    """The objects of a file of one a line; says how many lines are none."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        missing.append(f"{path.name} cannot be read ({error.strerror}).")
        return []
    found, damaged = [], 0
    for line in lines:
        try:
            one = json.loads(line)
        except ValueError:
            one = None
        if isinstance(one, dict):
            found.append(one)
        else:
            damaged += 1
    if damaged:
        verb = "line is" if damaged == 1 else "lines are"
        missing.append(f"{damaged} {verb} not whole in {path.name}, and left out.")
    return found


def _torn(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size == 0:
            return False
        file.seek(size - 1)
        return file.read(1) != b"\n"
