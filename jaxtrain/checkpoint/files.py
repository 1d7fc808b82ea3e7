"""Whole checkpoints as files: made room for, linked, deleted, swept.

Where a step is saved again, the old checkpoint waits as ``<step>.replaced`` until the new one has
its manifest; a save that never ends gives it back.
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

# A folder that process 0 has made may reach another host's view of a network disk late.
_APPEARS_WITHIN_S = 30.0
_LEFTOVER = re.compile(r"\d+(\.replaced)?\.(orbax-checkpoint-tmp.*|deleted|partial)")
_REPLACED = ".replaced"


def make(directory: Path) -> None:
    """Makes a folder of checkpoints.

    Raises:
        InputError: it cannot be made.
        RunAgain: not now: its disk is full or does not answer.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_trouble(
            error, f"cannot make {directory}", "give another --output-dir"
        ) from error


def opened(directory: Path, *, wait: bool) -> int:
    """A descriptor of a folder; with ``wait``, of one that another process has made just now."""
    deadline = time.monotonic() + (_APPEARS_WITHIN_S if wait else 0.0)
    while True:
        try:
            return os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.2)


def complete(target: Path, files: Mapping[str, bytes]) -> None:
    """Adds files to a checkpoint that Orbax has closed, and its manifest: it is complete then.

    Args:
        target: the checkpoint.
        files: name -> content.

    Raises:
        OSError: it is not complete.
    """
    lacking = not_committed(target)
    if lacking:
        raise OSError(errno.EIO, lacking)
    for name, content in files.items():
        write_whole(target / name, content)
    manifest.write(target, int(target.name))


def delete_oldest(folder: Path, keep: int, every: int = 1) -> None:
    """Deletes complete checkpoints, all but the newest ``keep`` and the newest at cadence.

    Args:
        folder: of the checkpoints.
        keep: how many stay.
        every: the cadence. A rollback goes to a checkpoint at cadence, or it would depend on when a
            run was stopped.
    """
    there = steps(folder)
    at_cadence = [step for step in there if step % every == 0]
    for step in there[:-keep]:
        if step not in at_cadence[-1:]:
            _delete(folder / str(step))


def link(source: Path, target: Path) -> None:
    """The same files under a second name, or copies where the file system has no hard links."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    partial = target.with_name(f"{target.name}.partial")
    if partial.exists():  # of a try that failed
        shutil.rmtree(partial)
    shutil.copytree(source, partial, copy_function=link)
    replace(target)
    partial.rename(target)
    forget_replaced(target)


def supersede(folder: Path, step: int, say: Callable[[str], None]) -> None:
    """Moves aside what would count as newer than ``folder/<step>``, and says so."""
    for number in [number for number in numbered(folder) if number > step]:
        aside = folder.parent / SUPERSEDED / folder.name / str(number)
        if aside.exists():
            shutil.rmtree(aside)
        aside.parent.mkdir(parents=True, exist_ok=True)
        (folder / str(number)).rename(aside)
        say(f"checkpoint {folder.name}/{number} is overtaken: moved to {aside}")


def replace(target: Path) -> None:
    """Makes room for a checkpoint that is saved again; the old one can be given back."""
    if not target.exists():
        return
    aside = _replaced(target)
    if not aside.exists():
        target.rename(aside)
    elif is_complete(target):
        _delete(aside)
        target.rename(aside)
    else:  # what waits there is whole, and this is not
        _delete(target)


def forget_replaced(target: Path) -> None:
    """Deletes the old checkpoint of a step whose new one is complete."""
    if _replaced(target).exists():
        _delete(_replaced(target))


def give_back(folder: Path) -> None:
    """Gives back old checkpoints whose new ones were never completed, and deletes other old ones.

    Args:
        folder: ``checkpoints/`` or ``best/``; it may be missing.
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
    """Where that checkpoint is now that :func:`give_back` would leave as ``target``."""
    aside = _replaced(target)
    return aside if aside.exists() and not is_complete(target) else target


def replaced(folder: Path) -> list[int]:
    """Steps whose old checkpoint still waits, ascending."""
    if not folder.is_dir():
        return []
    names = [entry.name.removesuffix(_REPLACED) for entry in folder.glob(f"*{_REPLACED}")]
    return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))


def _replaced(target: Path) -> Path:
    return target.with_name(target.name + _REPLACED)


def _delete(path: Path) -> None:
    """Deletes a checkpoint; if that breaks off, what is left no longer looks like one."""
    doomed = path.with_name(f"{path.name}.deleted")
    path.rename(doomed)
    shutil.rmtree(doomed)


def sweep(folder: Path) -> None:
    """Removes what interrupted saves and deletions have left; gives back what they replaced."""
    give_back(folder)
    if folder.is_dir():
        for entry in folder.iterdir():
            if _LEFTOVER.fullmatch(entry.name):
                shutil.rmtree(entry, ignore_errors=True)


def remove_failed(target: Path) -> None:
    """What a failed save has left; other writes of it may still be under way, and make files."""
    if target.is_dir() and manifest.look(target):
        _delete(target)
    for _ in range(20):
        sweep(target.parent)
        time.sleep(0.1)
        if not any(_LEFTOVER.fullmatch(entry.name) for entry in target.parent.iterdir()):
            break
