"""Whole checkpoints as files: made room for, linked, deleted, swept."""

import os
import re
import shutil
import time
from pathlib import Path

from jaxtrain import manifest
from jaxtrain.checkpoint_folders import steps
from jaxtrain.errors import InputError

# A folder that process 0 has made may reach another host's view of a network disk late.
_APPEARS_WITHIN_S = 30.0
_LEFTOVER = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|deleted|partial)")


def make(directory: Path) -> None:
    """Makes a folder of checkpoints.

    Raises:
        InputError: it cannot be made.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make {directory} ({error.strerror}): give another --output-dir"
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


def delete_oldest(folder: Path, keep: int) -> None:
    """Deletes complete checkpoints, all but the newest ``keep``."""
    for step in steps(folder)[:-keep]:
        _delete(folder / str(step))


def link(source: Path, target: Path) -> None:
    """The same files under a second name, or copies where the file system has no hard links."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:
            shutil.copy2(source, target)

    partial = target.with_name(f"{target.name}.partial")
    shutil.copytree(source, partial, copy_function=link)
    partial.rename(target)


def _delete(path: Path) -> None:
    """Deletes a checkpoint; if that breaks off, what is left no longer looks like one."""
    doomed = path.with_name(f"{path.name}.deleted")
    path.rename(doomed)
    shutil.rmtree(doomed)


def sweep(folder: Path) -> None:
    """Removes what interrupted saves and deletions have left."""
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
