"""Lists the checkpoints on disk and reads their metadata; reads no arrays.

A checkpoint is a folder named after its number of completed steps. Nothing is cached between calls:
a failed save can corrupt a checkpoint manager's view (maxtext#5260), but not the disk's.
"""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxtrain.checkpoint import manifest
from jaxtrain.errors import InputError
from jaxtrain.storage import atomic
from jaxtrain.storage.disks import disk_trouble, reason

if TYPE_CHECKING:
    import jax  # takes a second, and commands that only look do not need it

# Folders of a run directory. The last three contain the same folders again, for checkpoints that do
# not count: those abandoned by a resume from an earlier step, damaged ones, and those that a device
# may have computed wrongly (``loop.replay_every``).
BEST, CHECKPOINTS, SUPERSEDED, DAMAGED = "best", "checkpoints", "superseded", "damaged"
UNCERTIFIED = "uncertified"
CERTIFIED = "certified.txt"
STATE, META = "state", "meta"  # folders of a checkpoint


def is_complete(path: Path) -> bool:
    """Whether a folder is a complete checkpoint; reads no arrays.

    Orbax has committed it, it has a manifest, and every listed file exists with its size.
    :func:`jaxtrain.checkpoint.manifest.verify` also checks the content.

    Raises:
        OSError: the disk does not respond.
    """
    return not missing(path)


def steps(folder: Path) -> list[int]:
    """Returns the complete checkpoints in ``checkpoints/`` or ``best/``, ascending."""
    return [step for step in numbered(folder) if is_complete(folder / str(step))]


def latest_in(folder: Path) -> Path | None:
    """Returns the newest complete checkpoint in ``checkpoints/`` or ``best/``."""
    for step in reversed(numbered(folder)):
        if is_complete(folder / str(step)):
            return folder / str(step)
    return None


def certified_step(run: Path) -> int | None:
    """Returns the newest step that ``loop.replay_every`` has certified; None if none is recorded.

    Args:
        run: the run directory.

    Raises:
        OSError: the disk does not respond.
    """
    try:
        with open(atomic.open_own(run / CERTIFIED, os.O_RDONLY), "rb") as file:
            text = file.read(_LONGEST_NUMBER).strip()
    except FileNotFoundError:
        return None
    return int(text) if text.isdigit() else None


def read_meta(path: Path) -> dict[str, Any]:
    """Reads the ``meta`` argument of :meth:`Checkpoints.save` for this checkpoint.

    Its ``step``, ``examples_seen`` and ``examples_left_out`` are integers, and ``best`` is None or
    written by :mod:`jaxtrain.training.save_policy`; for other entries see :func:`read_run_meta`.

    Raises:
        InputError: the folder is not a complete checkpoint, or its metadata is invalid.
        RunAgain: its disk does not respond.
    """
    meta: dict[str, Any] = _read(path)["meta"]
    _check(meta, _COUNTS, path, "meta")
    if meta.get("best") is not None:
        _check(meta, {"best": dict}, path, "meta")
        _check(meta["best"], _BEST, path, "meta.best")
    return meta


def read_run_meta(path: Path) -> dict[str, Any]:
    """Reads the metadata of a checkpoint to resume from: also its config, data, and versions.

    Raises:
        InputError: the folder is not a complete checkpoint, or was not saved by a run.
        RunAgain: its disk does not respond.
    """
    meta = read_meta(path)
    _check(meta, _OF_RUN, path, "meta")
    _check(meta["config"], _CONFIG, path, "meta.config")
    data = meta["config"]["data"]
    numbers = [name for name in _NUMBERS_OF_DATA if data.get(name) is not None]
    _check(data, dict.fromkeys(numbers, int), path, "meta.config.data")
    _check(meta["constants"], dict.fromkeys(meta["constants"], str), path, "meta.constants")
    return meta | {"best": meta.get("best")}


_COUNTS = dict.fromkeys(("step", "examples_seen", "examples_left_out"), int)
_BEST = {"step": int, "metric": str, "mode": str, "validations_since": int}
_OF_RUN = {
    "fingerprint": str,
    "config": dict,
    "versions": dict,
    "constants": dict,
    "evaluation_due": bool,
}
_CONFIG = {"seed": int, "name": str, "model": dict, "data": dict}
_NUMBERS_OF_DATA = ("batch_size", "clips_per_video")
_KINDS = {int: "a whole number", str: "a string", dict: "an object", bool: "a boolean"}


def _check(held: Mapping[str, Any], kinds: Mapping[str, type], path: Path, where: str) -> None:
    """Checks the types of an object's entries.

    Raises:
        InputError: names the first entry that is missing or of another type.
    """
    for name, kind in kinds.items():
        value: Any = held.get(name)
        if type(value) is not kind or (type(value) is int and not 0 <= value < _MOST):
            raise InputError(
                f"checkpoint {path} was not written by jaxtrain: {where}.{name} in {META}/metadata "
                f"is not {_KINDS[kind]}"
            )


def read_shapes(path: Path) -> dict[str, "jax.ShapeDtypeStruct"]:
    """Returns the shape and dtype of every array in a checkpoint by dotted name; reads no arrays.

    Raises:
        InputError: the folder is not a complete checkpoint, or its metadata is invalid.
    """
    import jax
    import numpy as np

    found = {}
    for name, array in _read(path)["arrays"].items():
        if not _is_array(array):
            raise InputError(
                f"checkpoint {path} was not written by jaxtrain: the shape or dtype of {name!a} in "
                f"{META}/metadata is not that of an array"
            )
        found[name] = jax.ShapeDtypeStruct(tuple(array["shape"]), np.dtype(array["dtype"]))
    return found


_LONGEST_NUMBER = 20  # digits
_MOST = 2**63
_DTYPE = re.compile(r"bool|u?int(2|4|8|16|32|64)|float(16|32|64)|complex(64|128)|bfloat16")


def _is_array(described: object) -> bool:
    """Whether this is a shape and dtype in the format of ``restore.shapes_of``."""
    if not isinstance(described, dict):
        return False
    shape, dtype = described.get("shape"), described.get("dtype")
    return (
        isinstance(shape, list)
        and all(type(size) is int and 0 <= size < _MOST for size in shape)
        and math.prod(size for size in shape if size) < _MOST
        and isinstance(dtype, str)
        and _DTYPE.fullmatch(dtype) is not None
    )


def listed(numbers: list[int]) -> str:
    """Formats steps for a message."""
    return ", ".join(map(str, numbers)) or "none"


def others(there: Mapping[str, list[int]], step: int) -> str:
    """Formats the steps in ``checkpoints/`` and ``best/`` for a message, without a damaged one."""
    found = {name: [one for one in numbers if one != step] for name, numbers in there.items()}
    return "; ".join(f"{name}/ has: {listed(numbers)}" for name, numbers in found.items())


def numbered(folder: Path) -> list[int]:
    """Returns the steps of all checkpoint folders, complete or not, ascending."""
    if not folder.is_dir():
        return []
    return sorted(
        int(entry.name)
        for entry in folder.iterdir()
        if re.fullmatch(r"0|[1-9][0-9]*", entry.name) and entry.is_dir()
    )


def missing(path: Path) -> str:
    """Returns why a folder is not a complete checkpoint; "" if it is."""
    return not_committed(path) or manifest.look(path)


def not_committed(path: Path) -> str:
    """Returns why a folder is not a checkpoint committed by Orbax; "" if it is."""
    for name in (f"{STATE}/_METADATA", f"{STATE}/manifest.ocdbt", f"{META}/metadata"):
        if not (path / name).is_file():
            return f"{name} is missing"
    try:
        if not committed(path):
            return "Orbax never committed it"
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        return f"_CHECKPOINT_METADATA cannot be read: {_words(error)}"
    try:
        atomic.read_json(path / META / "metadata")
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        return f"{META}/metadata cannot be read: {_words(error)}"
    return ""


def committed(path: Path) -> int:
    """Returns when Orbax committed a checkpoint, in nanoseconds since 1970; 0 if it never did.

    Raises:
        OSError: the record of the commit cannot be read.
        ValueError: the record is damaged.
    """
    moment = atomic.read_json(path / "_CHECKPOINT_METADATA").get("commit_timestamp_nsecs") or 0
    if type(moment) is not int or not 0 <= moment < _MOST:
        raise ValueError("its commit time is not a number of nanoseconds")
    return moment


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else reason(error)


def _read(path: Path) -> dict[str, Any]:
    try:
        lacking = missing(path)
        if lacking:
            raise InputError(f"{path} is not a complete checkpoint: {lacking}")
        described = atomic.read_json(path / META / "metadata")
    except OSError as error:
        raise disk_trouble(error, f"checkpoint {path} cannot be read", "use another one") from None
    except ValueError as error:
        raise InputError(f"{path} is not a complete checkpoint: {META}/metadata: {error}") from None
    for name in ("meta", "arrays"):
        if not isinstance(described.get(name), dict):
            raise InputError(
                f"checkpoint {path} was not written by jaxtrain: {META}/metadata has no object "
                f"{name!r}"
            )
    return described
