"""Finds the files of a folder, in the same way for every data source, and checks listed names."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxtrain.storage import disks


def files(top: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Yields the files below ``top``, ordered by name, without hidden files and folders.

    Links to folders are followed; each folder is visited once.

    Args:
        top: the folder.
        say: receives a line at the end if links were skipped.

    Raises:
        DiskAway, InputError: a folder cannot be listed. Training without its files would be a
            different run.
    """

    def stop(error: OSError) -> None:
        raise disks.disk_trouble(
            error,
            f"cannot list the folder {error.filename}",
            "make it readable, or move it elsewhere",
        ) from error

    seen: set[str] = set()
    skipped = []
    for folder, inner, names in os.walk(top, followlinks=True, onerror=stop):
        real = os.path.realpath(folder)
        if real in seen:
            skipped.append(folder)
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))
    if skipped:
        links = "a link" if len(skipped) == 1 else f"{len(skipped):,} links"
        say(
            f"skipped {links} to folders that are read already, such as {skipped[0]} -> "
            f"{os.path.realpath(skipped[0])}"
        )
