"""Writes checkpoints without Orbax, for tests that restore nothing."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint import start
from jaxtrain.checkpoint.candidates import CheckpointCandidates
from jaxtrain.checkpoint.pointer import CHECKPOINTS, FILES, Pointer, folder_of
from jaxtrain.checkpoint.store import CheckpointStore, Folder, Place
from jaxtrain.storage import run_marker
from jaxtrain.storage.bucket import Bucket

RUN_ID = "0123456789abcdef"


def write(
    run: Path,
    step: int,
    kinds: Sequence[str] = (CHECKPOINTS,),
    *,
    files: Mapping[str, bytes] | None = None,
    meta: Mapping[str, Any] | None = None,
    name: str = "0123456789ab",
    saved: str | None = None,
) -> Path:
    """Writes a checkpoint and returns the path of its first pointer.

    Args:
        files: name -> content; by default one file, which depends on the step.
        meta: entries to add to the metadata.
        saved: UTC time; by default now.
    """
    mark(run)
    folder = run / files_folder(step, name)
    for file, content in (files or {"state/_METADATA": f"step {step}".encode()}).items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
    about = {"step": step, "examples_seen": 3 * step, "examples_skipped": 0, **(meta or {})}
    pointer = Pointer.of_folder(folder, about, {})
    if saved is not None:
        pointer = dataclasses.replace(pointer, saved=saved)
    CheckpointStore(Folder(run)).commit(tuple(kinds), step, pointer.to_json())
    return run / kinds[0] / f"{step}.json"


def mark(run: Path) -> None:
    """Marks a folder as the directory of a run, always the same one."""
    run.mkdir(parents=True, exist_ok=True)
    (run / run_marker.NAME).write_bytes(marker())


def marker() -> bytes:
    """Returns the marker of that run."""
    about = json.loads(run_marker.new())
    return json.dumps(about | {"id": RUN_ID}).encode()


def marker_of(bucket: Bucket) -> str:
    content = bucket.get(run_marker.NAME)
    assert content is not None
    return content.data.decode()


def files_folder(step: int, name: str = "0123456789ab", run_id: str = RUN_ID) -> str:
    return f"{FILES}/{run_marker.folder_name(run_id, step, name)}"


def aside(where: Path | Place) -> dict[int, str]:
    """Returns the steps of the checkpoints that were moved aside, each with the reason."""
    store = CheckpointStore(Folder(where) if isinstance(where, Path) else where)
    return {int(name.partition("-")[0]): store.why_aside(name) for name in store.asides()}


def choose(
    resume: str | None,
    run: Path,
    say: Callable[[str], None] = lambda line: None,
    *,
    place: Place | None = None,
    checkpoints: CheckpointCandidates | None = None,
) -> Path | None:
    """Returns the checkpoint that a run in a directory would start from."""
    begun = start.open_start(
        start.Flags(resume),
        place or Folder(run),
        checkpoints or CheckpointCandidates(run, say),
        run.parent / "cache",
        say,
    )
    return begun.path


def copy(path: Path, store: CheckpointStore, kinds: Sequence[str] = (CHECKPOINTS,)) -> None:
    """Copies a checkpoint that :func:`write` has written to a store, such as one of a bucket."""
    store.place.put(run_marker.NAME, marker())
    for file in data_of(path).rglob("*"):
        if file.is_file():
            name = file.relative_to(path.parent.parent).as_posix()
            store.place.put(name, file.read_bytes())
    store.commit(tuple(kinds), int(path.stem), path.read_bytes())


def data_of(path: Path) -> Path:
    """Returns the folder with the files of a checkpoint."""
    return folder_of(path)


def damage(path: Path) -> None:
    """Changes a byte of a file of a checkpoint."""
    (file,) = (one for one in sorted(data_of(path).rglob("*")) if one.name == "_METADATA")
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
