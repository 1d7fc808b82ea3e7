"""The manifest of a checkpoint: size and checksum of every file, and the mark that it is whole.

``manifest.json`` is written last, beside the files that it lists::

    {"format": 1, "step": 12, "saved": "2026-01-31T09:00:00Z",
     "files": {"meta/metadata": {"bytes": 8123, "sha256": ["..."]}, ...},
     "sha256": "..."}                              of all that stands above, as canonical JSON

A file has a checksum for each 64 MiB, so that several threads can read a large one. A folder
without a manifest, or with one that was edited, cut off or copied from another step, is no complete
checkpoint. Files that it does not list are allowed.
"""

import dataclasses
import datetime
import hashlib
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxtrain.errors import InputError
from jaxtrain.files import sync, write_whole

NAME = "manifest.json"

_FORMAT = 1
_PIECE_BYTES = 2**26
_BUFFER_BYTES = 2**20
# hashlib lets other threads run while it works. More of them would only wait for the disk.
_THREADS = 8
# What an own file's loss looks like. All else (a stale handle, EIO, no permission, too many open
# files) may be the disk's, the mount's or this process's: the same file can be whole in a minute.
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a manifest says.

    Attributes:
        step: completed updates.
        saved: UTC, as ``2026-01-31T09:00:00Z``.
        files: path inside the checkpoint -> (bytes, sha256 of each piece in hexadecimal).
    """

    step: int
    saved: str
    files: dict[str, tuple[int, list[str]]]

    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.files.values())


class Unusable(Exception):
    """A manifest that is not there, or is not what was written; says why."""


class Foreign(Unusable):
    """A manifest of another version's format, which is no damage."""


def write(folder: Path, step: int) -> None:
    """Hashes every file of a checkpoint and writes its manifest: the checkpoint is complete then.

    The files reach the disk first: a manifest must not outlive what it promises.

    Args:
        folder: the checkpoint, committed.
        step: completed updates.

    Raises:
        OSError: there is no manifest then.
    """
    paths = _paths(folder)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(sync, [*paths, *{path.parent for path in paths}]))
    sizes = {path: path.stat().st_size for path in paths}
    found = _hash(sizes)
    content = {
        "format": _FORMAT,
        "step": step,
        "saved": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "files": {
            path.relative_to(folder).as_posix(): {"bytes": size, "sha256": found[path]}
            for path, size in sizes.items()
        },
    }
    whole = content | {"sha256": _checksum(content)}
    write_whole(folder / NAME, json.dumps(whole, indent=1) + "\n")
    sync(folder.parent)


def read(folder: Path) -> Manifest:
    """What the manifest of a checkpoint says, if it can be trusted.

    Raises:
        Unusable: it cannot; says why.
        OSError: the disk does not give it now.
    """
    try:
        content: Any = json.loads((folder / NAME).read_bytes())
    except _MISSING:
        raise Unusable(f"{NAME} is missing: the save did not end, or the file was lost") from None
    except ValueError:
        raise Unusable(f"{NAME} is damaged: it is no JSON") from None
    if not isinstance(content, dict) or content.pop("sha256", None) != _checksum(content):
        raise Unusable(f"{NAME} is damaged: its content does not match its own checksum")
    if content["format"] != _FORMAT:
        raise Foreign(f"{NAME} has format {content['format']}, and this version reads {_FORMAT}")
    step = int(content["step"])
    if folder.name.isdigit() and int(folder.name) != step:
        raise Unusable(f"{NAME} is of step {step}, and the folder of step {folder.name}")
    files = {name: (one["bytes"], one["sha256"]) for name, one in content["files"].items()}
    return Manifest(step, content["saved"], files)


def look(folder: Path) -> str:
    """Why a checkpoint is not whole, as far as names and sizes tell; "" if nothing speaks against.

    Cheap: no file but the manifest is read.

    Raises:
        OSError: the disk does not tell now.
    """
    try:
        return _look(folder, read(folder))
    except Unusable as why:
        return str(why)


def verify(folder: Path) -> str:
    """Why a checkpoint is not what was saved; "" if every byte is. Reads all files.

    Raises:
        OSError: the disk does not give a file now: nobody knows whether it is damaged.
        InputError: another version wrote it.
    """
    try:
        found = read(folder)
    except Foreign as why:
        raise InputError(f"{folder}: {why}: take the version of jaxtrain that wrote it") from None
    except Unusable as why:
        return str(why)
    wrong = _look(folder, found)
    if wrong:
        return wrong
    try:
        digests = _hash({folder / name: size for name, (size, _) in found.files.items()})
    except _MISSING as error:
        return f"{error.filename} is missing"
    for name, (_, saved) in found.files.items():
        if digests[folder / name] != saved:
            return f"{name} has other bytes than were saved: its checksum is wrong"
    return ""


def _look(folder: Path, manifest: Manifest) -> str:
    for name, (size, _) in manifest.files.items():
        try:
            entry = (folder / name).stat()
        except _MISSING:
            return f"{name} is missing"
        if not stat.S_ISREG(entry.st_mode):
            return f"{name} is missing"
        there = entry.st_size
        if there != size:
            return f"{name} has {there} bytes, and {size} were saved"
    return ""


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _paths(folder: Path) -> list[Path]:
    def fail(error: OSError) -> None:
        raise error

    return sorted(
        Path(inner) / name
        for inner, _, names in os.walk(folder, onerror=fail)
        for name in names
        if not (Path(inner) == folder and name.lstrip(".").startswith(NAME))
    )


def _hash(sizes: dict[Path, int]) -> dict[Path, list[str]]:
    """The checksums of files of these sizes, piece by piece."""
    pieces = [
        (path, start) for path, size in sizes.items() for start in range(0, size, _PIECE_BYTES)
    ]
    found: dict[Path, list[str]] = {path: [] for path in sizes}
    with ThreadPoolExecutor(_THREADS) as pool:
        for (path, _), digest in zip(pieces, pool.map(_hash_piece, pieces), strict=True):
            found[path].append(digest)
    return found


def _hash_piece(piece: tuple[Path, int]) -> str:
    path, start = piece
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_BUFFER_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            left = _PIECE_BYTES
            while left and (count := file.readinto(buffer[: min(left, _BUFFER_BYTES)])):
                digest.update(buffer[:count])
                left -= count
    except OSError as error:  # of a read it names no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    return digest.hexdigest()
