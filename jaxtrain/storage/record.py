"""The record of what was made: its files, with their sizes and SHA-256; and how it appears.

A folder of a cache has its record in :data:`NAME`, which a reader trusts: without it, or with a
file of another size, the folder is absent. Checksums are compared where files are read as a whole:
when a small folder is opened, when a folder is fetched, and when shards of tokens are laid out.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtrain.storage import atomic

NAME = "manifest.json"
"""In a folder: its entry ``files`` has size and SHA-256 of each other file. It is written last."""
_SMALL_BYTES = 2**24  # a file whose checksum is compared whenever its folder is opened: some 20 ms

Record = dict[str, Any]


def files_of(made: Path) -> dict[str, list[Any]]:
    """Returns the size and SHA-256 of a file, named "", or of each file of a folder."""
    if made.is_file():
        return {"": _about(made)}
    return {
        path.relative_to(made).as_posix(): _about(path)
        for path in sorted(made.rglob("*"))
        if path.is_file() and path != made / NAME
    }


def _about(path: Path) -> list[Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return [path.stat().st_size, digest]


def write(folder: Path, content: Mapping[str, Any]) -> Record:
    """Writes the record of a folder, with further content; returns it."""
    record = {**content, "files": files_of(folder)}
    atomic.write_whole(folder / NAME, json.dumps(record, indent=1))
    return record


def parsed(data: bytes | None) -> Record | None:
    """Returns a record; None if it is missing or damaged."""
    try:
        record = dict(json.loads(data or b""))
        listed = record["files"].values()
        sound = all(type(size) is int and len(digest) == 64 for size, digest in listed)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return record if sound else None


def sizes(record: Record) -> dict[str, int]:
    """Returns the size of each file that a record lists."""
    return {name: size for name, (size, _) in record["files"].items()}


def read(folder: Path, *, verify: bool = False) -> Record | None:
    """Returns the record of a complete folder; None if it is absent, or a file does not match it.

    Args:
        verify: whether to compare the checksums of files of up to 16 MiB, too.
    """
    try:
        record = parsed((folder / NAME).read_bytes())
        if record is None:
            return None
        present = {name: (folder / name).stat().st_size for name in record["files"]}
        if present != sizes(record) or (verify and damaged(folder, record, _SMALL_BYTES)):
            return None
    except (OSError, ValueError):
        return None
    return record


def damaged(folder: Path, record: Record, largest: int | None = None) -> str | None:
    """Returns the first file whose size or checksum is another one; None if all are equal.

    Args:
        largest: size in bytes above which files are not read; None reads all.
    """
    for name, about in record["files"].items():
        if (largest is None or about[0] <= largest) and _about(folder / name) != list(about):
            return str(name)
    return None


def publish(made: Path, target: Path, aside: Path) -> None:
    """Moves what was made to its place, durably; what is there before goes.

    At any time, the target is missing or complete, also if another process publishes the same.

    Args:
        made: a file or folder on the same disk.
        aside: a path that does not exist, on the same disk.

    Raises:
        OSError: the disk is full or unavailable.
    """
    for path in (*made.rglob("*"), made):
        atomic.sync(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    remove(target, aside)
    try:
        os.replace(made, target)
    except OSError:
        if not target.exists():
            raise
    atomic.sync(target.parent)


def remove(target: Path, aside: Path) -> None:
    """Removes a file or folder, if it exists, at once; see :func:`publish`."""
    try:
        os.rename(target, aside)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # so it does not exist
            return
        raise
    if aside.is_dir():
        shutil.rmtree(aside, ignore_errors=True)
    else:
        aside.unlink()
