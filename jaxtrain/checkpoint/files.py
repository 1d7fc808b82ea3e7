"""Moves, links, and deletes complete checkpoints on disk, and cleans up after failed saves.

If a step is saved again, its old checkpoint is renamed to ``<step>.replaced`` until the new one has
its manifest; if that save never finishes, the old one is restored.
"""

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from jaxtrain.checkpoint import manifest
from jaxtrain.checkpoint.layout import (
    SUPERSEDED,
    is_complete,
    not_committed,
    numbered,
    steps,
)
from jaxtrain.storage.atomic import write_whole
from jaxtrain.storage.disks import disk_trouble

# On a network disk, other hosts may see a folder created by process 0 late.
_APPEARS_WITHIN_S = 30.0
_LEFTOVER = re.compile(r"\d+(\.replaced)?\.(orbax-checkpoint-tmp.*|deleted|partial)")
_REPLACED = ".replaced"


def make_folder(directory: Path) -> None:
    """Creates a folder for checkpoints.

    Raises:
        InputError: it cannot be created.
        RunAgain: its disk is full or does not respond.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_trouble(
            error, f"{directory} cannot be created", "choose another --output-dir"
        ) from error


def opened(directory: Path, *, wait: bool) -> int:
    """Opens a folder; with ``wait``, waits for another process to create it."""
    deadline = time.monotonic() + (_APPEARS_WITHIN_S if wait else 0.0)
    while True:
        try:
            return os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.2)


def complete(target: Path, files: Mapping[str, bytes], step: int | None = None) -> None:
    """Completes a checkpoint committed by Orbax: adds files and its manifest.

    Args:
        target: the folder.
        files: name -> content.
        step: completed steps; None if the folder is named after them.

    Raises:
        OSError: the checkpoint is not complete.
    """
    lacking = not_committed(target)
    if lacking:
        raise OSError(errno.EIO, lacking)
    for name, content in files.items():
        write_whole(target / name, content)
    manifest.write(target, int(target.name) if step is None else step)


def delete_oldest(folder: Path, keep: int, every: int = 1, certified: int | None = None) -> None:
    """Deletes complete checkpoints except the newest ``keep`` and the newest multiple of ``every``.

    The newest up to the certified step also stays: if a device turns out to have computed wrong
    results since then, the run resumes from it.

    Args:
        folder: contains the checkpoints.
        keep: number of checkpoints to keep.
        every: steps between checkpoints. A rollback uses a multiple of it, so that it does not
            depend on when a run was stopped.
        certified: see :func:`jaxtrain.checkpoint.layout.certified_step`.
    """
    there = steps(folder)
    at_cadence = [step for step in there if step % every == 0]
    right = [step for step in there if certified is not None and step <= certified]
    for step in there[:-keep]:
        if step not in (*at_cadence[-1:], *right[-1:]):
            _delete(folder / str(step))


def most_kept(keep: int, *, certifies: bool) -> int:
    """Returns how many checkpoints :func:`delete_oldest` leaves at most.

    Args:
        keep: see there.
        certifies: whether steps are certified.
    """
    return keep + 1 + certifies


def link(source: Path, target: Path) -> None:
    """Hard-links a checkpoint under a second name; copies it if hard links are not supported."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    partial = target.with_name(f"{target.name}.partial")
    if partial.exists():  # from a failed attempt
        shutil.rmtree(partial)
    shutil.copytree(source, partial, copy_function=link)
    replace(target)
    partial.rename(target)
    forget_replaced(target)


def supersede(folder: Path, step: int, say: Callable[[str], None]) -> None:
    """Moves checkpoints newer than ``folder/<step>`` aside, and reports each."""
    for number in [number for number in numbered(folder) if number > step]:
        aside = folder.parent / SUPERSEDED / folder.name / str(number)
        if aside.exists():
            shutil.rmtree(aside)
        aside.parent.mkdir(parents=True, exist_ok=True)
        (folder / str(number)).rename(aside)
        say(f"checkpoint {folder.name}/{number} is superseded: moved to {aside}")


def replace(target: Path) -> None:
    """Renames the old checkpoint of a step that is saved again, so that it can be restored."""
    if not target.exists():
        return
    aside = _replaced(target)
    if not aside.exists():
        target.rename(aside)
    elif is_complete(target):
        _delete(aside)
        target.rename(aside)
    else:  # the replaced one is complete, and this one is not
        _delete(target)


def forget_replaced(target: Path) -> None:
    """Deletes the replaced checkpoint of a step whose new one is complete."""
    if _replaced(target).exists():
        _delete(_replaced(target))


def give_back(folder: Path) -> None:
    """Restores replaced checkpoints whose new ones were never completed; deletes the others.

    Args:
        folder: ``checkpoints/`` or ``best/``; may be missing.
    """
    for step in replaced(folder):
        target = folder / str(step)
        if is_complete(target):
            forget_replaced(target)
            continue
        if target.exists():
            _delete(target)
        _replaced(target).rename(target)


def before_give_back(target: Path) -> Path:
    """Returns the current path of what :func:`give_back` would keep as ``target``."""
    aside = _replaced(target)
    return aside if aside.exists() and not is_complete(target) else target


def replaced(folder: Path) -> list[int]:
    """Returns the steps with a replaced checkpoint, ascending."""
    if not folder.is_dir():
        return []
    names = [entry.name.removesuffix(_REPLACED) for entry in folder.glob(f"*{_REPLACED}")]
    return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))


def _replaced(target: Path) -> Path:
    return target.with_name(target.name + _REPLACED)


def _delete(path: Path) -> None:
    """Deletes a checkpoint; if interrupted, the rest no longer looks like a checkpoint."""
    doomed = path.with_name(f"{path.name}.deleted")
    path.rename(doomed)
    shutil.rmtree(doomed)


def sweep(folder: Path) -> None:
    """Removes leftovers of interrupted saves and deletions; restores replaced checkpoints."""
    give_back(folder)
    if folder.is_dir():
        for entry in folder.iterdir():
            if _LEFTOVER.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)


def remove_failed(target: Path) -> None:
    """Removes the leftovers of a failed save, whose other writes may still create files."""
    if target.is_dir() and manifest.look(target):
        _delete(target)
    for _ in range(20):
        sweep(target.parent)
        time.sleep(0.1)
        if not any(_LEFTOVER.fullmatch(entry.name) for entry in target.parent.iterdir()):
            break
