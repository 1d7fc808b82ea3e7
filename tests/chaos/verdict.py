"""Compares a disturbed run with the undisturbed one: every digit and every example."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from program import arrays_of

from jaxtrain.checkpoint import pointer
from jaxtrain.checkpoint.store import CheckpointStore, Folder

# Endings of metrics that differ between any two runs: times and hardware readings.
_MEASURED = (
    "per_second",
    "data_wait_fraction",
    "mfu",
    "gpu_memory_usage",
    "gpu_utilization",
    "gpu_power_w",
    "gpu_temperature_c",
    "host_memory_gib",
    "shm_gib",
)
# Parts of the names of files that exist only while something is written or deleted.
_TEMPORARY = (".orbax-checkpoint-tmp", ".partial", ".part", ".tmp")
_LOCK = ".lock"


@dataclass
class Verdict:
    """The result of a comparison.

    Attributes:
        problems: one sentence each; empty if the run passed.
        lost: examples of the undisturbed run that this run has not recorded.
        repeated: examples that this run has seen more often than the undisturbed run.
    """

    problems: list[str] = field(default_factory=list)
    lost: int = 0
    repeated: int = 0


def compare(reference: Path, run: Path) -> Verdict:
    """Compares the records of two run directories, each with any number of processes."""
    verdict = Verdict()
    _compare_metrics(reference, run, verdict)
    _compare_examples(_examples(reference, Verdict()), _examples(run, verdict), verdict)
    return verdict


def leftovers(directory: Path) -> list[str]:
    """Returns the temporary files and folders in a directory, as relative paths.

    Those of damaged checkpoints are excluded: they are moved aside unchanged.
    """
    found = []
    store = CheckpointStore(Folder(directory))
    folders = [
        directory / folder
        for name in damaged(store)
        if (folder := store.folder_of(f"{pointer.ASIDE}/{name}.json"))  # "" for half a pointer
    ]
    for path in sorted(directory.rglob("*")):
        if any(path.is_relative_to(folder) for folder in folders):
            continue
        hidden = path.name.startswith(".") and path.name != _LOCK
        if hidden or any(part in path.name for part in _TEMPORARY):
            found.append(str(path.relative_to(directory)))
    return found


def damaged(store: CheckpointStore) -> list[str]:
    """Returns the names of the checkpoints in ``aside/`` that the run found damaged."""
    return [name for name in store.asides() if store.why_aside(name).startswith(pointer.DAMAGED)]


def same_arrays(reference: Path, checkpoint: Path) -> str:
    """Describes how a checkpoint differs from that of another run; empty if they are identical.

    All arrays are read, so a damaged checkpoint cannot pass.
    """
    try:
        wanted, found = _arrays(reference), _arrays(checkpoint)
    except Exception as error:  # whatever the libraries raise for a damaged file
        return f"{checkpoint} cannot be read: {error}"
    if wanted.keys() != found.keys():
        return f"{checkpoint} contains different arrays: {sorted(wanted.keys() ^ found.keys())}"
    other = [name for name in wanted if wanted[name] != found[name]]
    return f"{checkpoint} differs in {', '.join(other)}" if other else ""


def _arrays(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = {name: one.tobytes() for name, one in arrays_of(checkpoint).items()}
    meta = pointer.read_meta(checkpoint)
    return found | {name: meta[name] for name in ("step", "examples_seen", "fingerprint")}


def _compare_metrics(reference: Path, run: Path, verdict: Verdict) -> None:
    wanted = _values(reference / "metrics.jsonl", [])
    found = _values(run / "metrics.jsonl", verdict.problems)
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        verdict.problems.append(f"metrics.jsonl has no {_listed(missing)}")
    surplus = sorted(found.keys() - wanted.keys())
    if surplus:
        verdict.problems.append(f"metrics.jsonl has unexpected {_listed(surplus)}")
    other = sorted(key for key in wanted.keys() & found.keys() if wanted[key] != found[key])
    for step, name in other[:1]:
        verdict.problems.append(
            f"{name} of step {step} is {found[step, name]!r} instead of "
            f"{wanted[step, name]!r}, and {len(other) - 1} more values differ"
        )


def _values(path: Path, problems: list[str]) -> dict[tuple[int, str], float]:
    """Returns (step, name) -> value; reports misordered, repeated and incomplete lines."""
    values: dict[tuple[int, str], float] = {}
    twice: list[tuple[int, str]] = []
    last = 0
    for record in _lines(path, problems):
        step = record["step"]
        if step < last:
            problems.append(f"{path.name}: step {step} follows step {last}")
        last = step
        for name, value in record.items():
            if name in ("step", "time") or name.endswith(_MEASURED):
                continue
            if (step, name) in values:
                twice.append((step, name))
            values[step, name] = value
    if twice:
        problems.append(f"{path.name} has {_listed(twice)} twice")
    return values


def _examples(run: Path, verdict: Verdict) -> dict[int, dict[str, Any]]:
    """Returns step -> position and examples of all processes, in the order of the global batch."""
    paths = sorted(run.glob("examples*.jsonl"), key=lambda path: (len(path.name), path.name))
    merged: dict[int, dict[str, Any]] = {}
    if not paths:
        verdict.problems.append("examples.jsonl is missing")
    for path in paths:
        seen: set[int] = set()
        for record in _lines(path, verdict.problems):
            step = record["step"]
            if step in seen:
                verdict.problems.append(f"{path.name} has step {step} twice")
                verdict.repeated += len(record["ids"])
                continue
            seen.add(step)
            one = merged.setdefault(step, {"position": record["position"], "ids": []})
            if one["position"] != record["position"]:
                verdict.problems.append(f"the processes have different positions in step {step}")
            one["ids"] += record["ids"]
    return merged


def _compare_examples(
    wanted: dict[int, dict[str, Any]], found: dict[int, dict[str, Any]], verdict: Verdict
) -> None:
    """Reports the first step that differs; counts lost and repeated examples of all steps."""
    other = []
    for step in sorted(wanted.keys() | found.keys()):
        here, there = found.get(step), wanted.get(step)
        if here == there:
            continue
        ids = Counter(here["ids"] if here else ())
        right = Counter(there["ids"] if there else ())
        verdict.lost += (right - ids).total()
        verdict.repeated += (ids - right).total()
        other.append(f"examples of step {step}: {here} instead of {there}")
    if other:
        verdict.problems.append(f"{other[0]}; and {len(other) - 1} more steps")


def _lines(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    if not path.is_file():
        problems.append(f"{path.name} is missing")
        return
    for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("no newline")
            yield json.loads(line)
        except ValueError as error:
            problems.append(f"{path.name}, line {number} is incomplete ({error}): {line[:60]!r}")


def _listed(keys: list[tuple[int, str]]) -> str:
    steps = sorted({step for step, _ in keys})
    names = sorted({name for _, name in keys})
    return f"{', '.join(names[:4])} of {len(steps)} steps ({steps[0]} to {steps[-1]})"
