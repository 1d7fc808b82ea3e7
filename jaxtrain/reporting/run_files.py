"""Reads a run directory; files that are missing or damaged are reported on the page."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain import formats
from jaxtrain.checkpoint.pointer import ASIDE
from jaxtrain.checkpoint.store import CheckpointStore, Folder
from jaxtrain.config import metrics
from jaxtrain.errors import InputError, first_line
from jaxtrain.storage import addresses, atomic, json_lines, lock

CONFIG, METRICS, HISTORY = "config.json", "metrics.jsonl", "history.jsonl"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """The contents of a run directory.

    Attributes:
        label: the run's name on the page, unique on the page.
        config: contents of ``config.json``; {} if the file is missing.
        problems: sentences about missing files, unreadable input, and skipped steps.
    """

    directory: Path
    label: str
    config: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    history: Sequence[Mapping[str, Any]]
    active_process: str
    problems: Sequence[str]

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
        return next((record for record in reversed(self.history) if record["event"] == event), {})


def check(directory: Path, display_path: object) -> None:
    """Checks that a folder is a run directory.

    Args:
        directory: absolute path.
        display_path: as you typed it.

    Raises:
        InputError: it is not a run directory; the message suggests one.
    """
    if not directory.exists():
        raise InputError(f"report {display_path}: no such folder; pass a run directory")
    if not directory.is_dir():
        raise InputError(f"report {display_path}: this is a file; pass a run directory")
    if _is_run(directory):
        return
    near = next((folder for folder in directory.parents if _is_run(folder)), None)
    if near is None:
        below = [folder for folder in directory.glob("*/") if _is_run(folder)]
        near = max(below, key=lambda folder: folder.name, default=None)
    raise InputError(
        f"report {display_path}: this folder contains no {CONFIG}, {METRICS}, or {HISTORY}; pass a "
        f"run directory, such as {near or 'output/latest'}"
    )


def read(directory: Path, label: str, *, holder: str | None = None) -> RecordedRun:
    """Reads a run directory; unreadable files are listed in ``problems``.

    Args:
        holder: the process that trains the run, "" if none does; None looks at the run's lock,
            which the run itself must not do: closing the file would release the lock.
    """
    problems: list[str] = []
    if not (directory / HISTORY).exists():
        problems.append(
            f"{HISTORY} is missing: how the run ended, where the time "
            "went, the plan, the hardware, and the versions are unknown."
        )
    records = sorted(
        lines_of(directory / METRICS, problems), key=lambda record: int(record["step"])
    )
    if not records:
        problems.append(f"{METRICS} contains no record: no steps were recorded.")
    elif not any(name.startswith("val/") for record in records for name in record):
        problems.append("No validation was recorded.")
    quarantined = {
        line["path"]
        for path in directory.glob("quarantine*.jsonl")
        for line in lines_of(path, problems)
    }
    if quarantined:
        problems.append(f"Unreadable input files: {len(quarantined):,}; see quarantine.jsonl.")
    if skipped := len(lines_of(directory / "bad_steps.jsonl", problems)):
        problems.append(f"Skipped steps: {skipped:,}; see bad_steps.jsonl.")
    if aside := describe_aside(CheckpointStore(Folder(directory))):
        problems.append(f"{aside}; jaxtrain checkpoints RUN --prune deletes them.")
    return RecordedRun(
        directory=directory,
        label=label,
        config=addresses.scrubbed(config_of(directory / CONFIG, problems)),
        records=records,
        history=addresses.scrubbed(lines_of(directory / HISTORY, problems)),
        active_process=lock.holder(directory) if holder is None else holder,
        problems=problems,
    )


def describe_aside(store: CheckpointStore) -> str:
    """Returns how many checkpoints of a run no longer count, and their size; "" without any."""
    count = len(store.asides())
    if not count:
        return ""
    counted, size = formats.counted(count, "checkpoint"), formats.size(store.bytes_aside())
    return f"{ASIDE}/ has {counted} that no longer count{'s' if count == 1 else ''} ({size})"


def labels(directories: Sequence[Path]) -> list[str]:
    """Returns a short, unique name for each run."""
    for length in (1, 2, 3):
        names = ["/".join(directory.resolve().parts[-length:]) for directory in directories]
        # By default the folder is named after the time, and its parent after the config.
        timestamps = any(name[:2].isdigit() and "T" in name for name in names if length == 1)
        if len(set(names)) == len(names) and not timestamps:
            return names
    return [str(directory) for directory in directories]


def _is_run(directory: Path) -> bool:
    return any((directory / name).is_file() for name in (CONFIG, METRICS, HISTORY))


def config_of(path: Path, problems: list[str]) -> dict[str, Any]:
    """Returns the config of a run, {} if it cannot be read; adds why to the problems."""
    try:
        return atomic.read_json(path)
    except FileNotFoundError:
        problems.append(f"{CONFIG} is missing: the config is unknown.")
    except (OSError, ValueError) as error:
        problems.append(f"{CONFIG} cannot be read ({first_line(error)}): the config is unknown.")
    return {}


def lines_of(path: Path, problems: list[str]) -> list[json_lines.Record]:
    """Reads the records of a file; reports how many lines are damaged, such as a torn last one."""
    records, damaged = [], 0
    try:
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                records.append(json_lines.parse(line if line.endswith(b"\n") else b""))
            except ValueError:
                damaged += 1
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error.strerror}).")
    if damaged:
        lines = "line is" if damaged == 1 else "lines are"
        problems.append(f"{path.name}: {damaged} {lines} damaged; skipped.")
    return records
