"""Finds the files of a folder, in the same way for every data source, and checks listed names."""

import collections
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from jaxtrain.storage import disks, run_marker


def files(top: Path, say: Callable[[str], None]) -> Iterator[Path]:
    """Yields the files below ``top``, ordered by name, without hidden files and folders.

    Links to folders are followed; each folder is visited once. Run directories and caches below
    ``top`` are skipped.

    Args:
        say: receives a line at the end if links, run directories or caches were skipped.

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

    visited: set[str] = set()
    skipped = []
    not_data = NotData(top)
    for folder, inner, names in os.walk(top, followlinks=True, onerror=stop):
        real = os.path.realpath(folder)
        if real in visited:
            skipped.append(folder)
            inner.clear()
            continue
        visited.add(real)
        if not_data.has(Path(folder)):
            inner.clear()
            continue
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))
    not_data.report(say)
    if skipped:
        links = "a link" if len(skipped) == 1 else f"{len(skipped):,} links"
        say(
            f"skipped {links} to folders that are read already, such as {skipped[0]} -> "
            f"{os.path.realpath(skipped[0])}"
        )


def in_run(path: Path, flag: str) -> str:
    """Returns why a folder is not data because it is a run directory or in one; "" if it is not."""
    run = run_marker.run_above(path) if path.is_dir() else None
    if run is None:
        return ""
    relation = "is a run directory" if run == path else f"is in the run directory {run}"
    return (
        f"{flag} {path} {relation}, whose files are not data and change during the run: pass "
        "another folder"
    )


class NotData:
    """Recognizes the folders below a folder of data that belong to a run or are a cache."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self._kinds: dict[Path, str] = {}

    def has(self, folder: Path) -> bool:
        """Whether a folder below ``top`` is a run directory or a cache; counts it."""
        if folder == self._top:
            return False
        kind = "run" if run_marker.is_run(folder) else ""
        kind = kind or ("cache" if run_marker.is_cache(folder) else "")
        if kind:
            self._kinds[folder] = kind
        return bool(kind)

    def outside(self, paths: Iterable[Path]) -> Iterator[Path]:
        """Yields the paths that are not in such a folder; those of a pattern may be."""
        inside: dict[Path, bool] = {self._top: False}

        def is_inside(folder: Path) -> bool:
            if folder not in inside:
                above = folder != folder.parent and is_inside(folder.parent)
                inside[folder] = above or (self._top in folder.parents and self.has(folder))
            return inside[folder]

        yield from (path for path in paths if not is_inside(path.parent))

    def report(self, say: Callable[[str], None]) -> None:
        """Prints how many folders were skipped, if any."""
        counts = collections.Counter(self._kinds.values())
        nouns = {"run": ("a run directory", "run directories"), "cache": ("a cache", "caches")}
        if counts:
            skipped = " and ".join(
                nouns[kind][0] if count == 1 else f"{count:,} {nouns[kind][1]}"
                for kind, count in sorted(counts.items(), reverse=True)
            )
            such_as = ":" if len(self._kinds) == 1 else f" below {self._top}, such as"
            say(f"skipped {skipped}{such_as} {min(self._kinds)}")
