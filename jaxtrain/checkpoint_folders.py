"""Which checkpoints lie on the disk, and what they say about themselves; reads no array.

A checkpoint is a folder named by its completed updates. Nothing is remembered between calls: a
failed save can leave the memory of a checkpoint manager wrong (maxtext#5260), but not the disk.
"""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain import manifest
from jaxtrain.disks import disk_trouble, reason
from jaxtrain.errors import InputError

if TYPE_CHECKING:
    import jax  # takes a second: not for those who only look

# Folders of a run's directory. The last two hold such folders again, of checkpoints that do not
# count: of a future that a resume has abandoned, and those that a resume found damaged.
BEST, CHECKPOINTS, SUPERSEDED, DAMAGED = "best", "checkpoints", "superseded", "damaged"
STATE, META = "state", "meta"  # folders of a checkpoint


def is_complete(path: Path) -> bool:
    """Whether a folder is a whole checkpoint, as far as can be told without reading its arrays.

    Orbax closed it, it has a manifest, and every file of the manifest is there in its size.
    :func:`jaxtrain.manifest.verify` reads the files too.

    Raises:
        OSError: the disk does not tell now.
    """
    return not missing(path)


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
        RunAgain: its disk does not answer.
    """
    meta: dict[str, Any] = _read(path)["meta"]
    return meta


def read_shapes(path: Path) -> dict[str, "jax.ShapeDtypeStruct"]:
    """Shape and dtype of every array of a checkpoint, by dotted name; reads no array.

    Raises:
        InputError: the folder is no complete checkpoint.
    """
    import jax

    return {
        name: jax.ShapeDtypeStruct(tuple(array["shape"]), array["dtype"])
        for name, array in _read(path)["arrays"].items()
    }


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


def missing(path: Path) -> str:
    """What keeps a folder from being a complete checkpoint; "" if nothing does."""
    return not_committed(path) or manifest.look(path)


def not_committed(path: Path) -> str:
    """What keeps a folder from being what Orbax writes and closes; "" if nothing does."""
    for name in (f"{STATE}/_METADATA", f"{STATE}/manifest.ocdbt", f"{META}/metadata"):
        if not (path / name).is_file():
            return f"{name} is missing"
    try:
        if not committed(path):
            return "it was never closed"
        json.loads((path / META / "metadata").read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        return f"it cannot be read: {reason(error)}"
    return ""


def committed(path: Path) -> int:
    """When Orbax closed a checkpoint, nanoseconds since 1970; 0 if it did not.

    Raises:
        OSError: its record cannot be read.
        ValueError: its record is damaged.
    """
    record = json.loads((path / "_CHECKPOINT_METADATA").read_text())
    return int(record.get("commit_timestamp_nsecs") or 0)


def _read(path: Path) -> dict[str, Any]:
    try:
        lacking = missing(path)
        if lacking:
            raise InputError(f"{path} is not a complete checkpoint: {lacking}")
        described: dict[str, Any] = json.loads((path / META / "metadata").read_text())
    except OSError as error:
        raise disk_trouble(error, f"checkpoint {path} cannot be read", "take another one") from None
    return described
