"""Which checkpoints lie on the disk, and what they say about themselves; reads no array.

A checkpoint is a folder named by its completed updates. Nothing is remembered between calls: a
failed save can leave the memory of a checkpoint manager wrong (maxtext#5260), but not the disk.
"""

import json
import re
from pathlib import Path
from typing import Any

import jax

from jaxtrain.errors import InputError

BEST, CHECKPOINTS = "best", "checkpoints"  # folders of a run's directory
STATE, META = "state", "meta"  # folders of a checkpoint


def is_complete(path: Path) -> bool:
    """Whether a folder is a whole checkpoint: Orbax closed it, and meta and index are there."""
    return not _missing(path)


def steps(folder: Path) -> list[int]:
    """The complete checkpoints in ``checkpoints/`` or ``best/``, ascending."""
    return [step for step in numbered(folder) if is_complete(folder / str(step))]


def latest_in(folder: Path) -> Path | None:
    """The newest complete checkpoint in ``checkpoints/`` or ``best/``."""
    for step in reversed(numbered(folder)):
        if is_complete(folder / str(step)):
            return folder / str(step)
    return None


def read_meta(path: Path) -> dict[str, Any]:
    """What the caller of :meth:`Checkpoints.save` said about this checkpoint.

    Raises:
        InputError: the folder is no complete checkpoint.
    """
    meta: dict[str, Any] = _read(path)["meta"]
    return meta


def read_shapes(path: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of every array of a checkpoint, by dotted name; reads no array.

    Raises:
        InputError: the folder is no complete checkpoint.
    """
    return {
        name: jax.ShapeDtypeStruct(tuple(array["shape"]), array["dtype"])
        for name, array in _read(path)["arrays"].items()
    }


def find(resume: str, output_dir: Path | None, runs_root: Path) -> Path | None:
    """The checkpoint that ``--resume`` means.

    Args:
        resume: ``"latest"``: the newest of ``output_dir``, or without one, of the run below
            ``runs_root`` that saved last. A number: that step of ``output_dir``, among the newest
            or the best. A path: of a checkpoint, or of a run's directory (its newest).
        output_dir: the run's directory, if it was given.
        runs_root: ``output/NAME``.

    Returns:
        The folder of a complete checkpoint; None only for ``"latest"`` where there is none.

    Raises:
        InputError: a step or path that does not name a complete checkpoint.
    """
    if resume == "latest":
        if output_dir is not None:
            return latest_in(output_dir / CHECKPOINTS)
        runs = runs_root.iterdir() if runs_root.is_dir() else ()
        found = [newest for run in runs if (newest := latest_in(run / CHECKPOINTS))]
        # By the time of the save, and not of the file: a copied run is as old as the original.
        return max(found, key=lambda path: (_committed(path), path), default=None)
    if resume.isdigit():
        return _find_step(int(resume), output_dir)
    return _find_path(Path(resume).expanduser())


def _find_step(step: int, output_dir: Path | None) -> Path:
    if output_dir is None:
        raise InputError(f"--resume {step} needs --output-dir, the run that holds this step")
    for folder in (output_dir / CHECKPOINTS, output_dir / BEST):
        if is_complete(folder / str(step)):
            return folder / str(step)
    kept, best = steps(output_dir / CHECKPOINTS), steps(output_dir / BEST)
    there = f"complete ones are {listed(kept)}" if kept else "it holds no complete one"
    if best:
        there += f", and {listed(best)} as the best"
    raise InputError(f"--resume {step}: {output_dir} has no complete checkpoint {step}: {there}")


def _find_path(path: Path) -> Path:
    if not path.exists():
        raise InputError(
            f"--resume {path}: there is no such folder; give latest, a step, or the path of a "
            "checkpoint or of a run's directory"
        )
    if is_complete(path):
        return path
    found = latest_in(path / CHECKPOINTS) or latest_in(path)
    if found is not None:
        return found
    if path.name.isdigit():
        raise InputError(
            f"--resume {path} is not a complete checkpoint ({_missing(path)}); beside it are "
            f"{listed(steps(path.parent))}"
        )
    raise InputError(f"--resume {path} holds no complete checkpoint")


def listed(numbers: list[int]) -> str:
    """Steps for a message."""
    return ", ".join(map(str, numbers)) or "none"


def numbered(folder: Path) -> list[int]:
    """All folders named by a step, complete or not, ascending."""
    if not folder.is_dir():
        return []
    return sorted(
        int(entry.name)
        for entry in folder.iterdir()
        if re.fullmatch(r"0|[1-9]\d*", entry.name) and entry.is_dir()
    )


def _missing(path: Path) -> str:
    """What keeps a folder from being a complete checkpoint; empty if nothing does."""
    for name in (f"{STATE}/_METADATA", f"{STATE}/manifest.ocdbt", f"{META}/metadata"):
        if not (path / name).is_file():
            return f"{name} is missing"
    try:
        if not _committed(path):
            return "it was never closed"
        json.loads((path / META / "metadata").read_text())
    except (OSError, ValueError) as error:
        return f"it cannot be read: {reason(error)}"
    return ""


def _committed(path: Path) -> int:
    """When Orbax closed a checkpoint, nanoseconds since 1970; 0 if it did not."""
    record = json.loads((path / "_CHECKPOINT_METADATA").read_text())
    return int(record.get("commit_timestamp_nsecs") or 0)


def _read(path: Path) -> dict[str, Any]:
    missing = _missing(path)
    if missing:
        raise InputError(f"{path} is not a complete checkpoint: {missing}")
    described: dict[str, Any] = json.loads((path / META / "metadata").read_text())
    return described


def reason(error: BaseException) -> str:
    """The first cause in a few words: TensorStore ends its messages with the system's own."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    from_system = re.search(r"([^:\[]+) \[os_error_code=", str(error))
    if from_system:
        return from_system[1].strip()
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
