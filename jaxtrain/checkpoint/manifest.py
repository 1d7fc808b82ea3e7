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
from jaxtrain.storage.atomic import read_json, sync, write_whole

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


class Linked(Unusable):
    """Something in a checkpoint that is no file and no folder, such as a link or a pipe.

    Saving makes none, so this is no damage either: somebody has put it there.
    """


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
    path = folder / NAME
    try:
        content: dict[str, Any] = read_json(path)
    except _MISSING:
        raise Unusable(f"{NAME} is missing: the save did not end, or the file was lost") from None
    except ValueError as error:
        raise Unusable(f"{NAME} is damaged: {error}") from None
    if content.pop("sha256", None) != _checksum(content):
        raise Unusable(f"{NAME} is damaged: its content does not match its own checksum")
    found_format = content.get("format")
    if not _is_count(found_format):
        raise Unusable(f"{NAME} is damaged: its format is not a number")
    if found_format != _FORMAT:
        raise Foreign(f"{NAME} has format {found_format}, and this version reads {_FORMAT}")
    step: Any = content.get("step")
    saved, files = content.get("saved"), content.get("files")
    if not _is_count(step) or not isinstance(saved, str) or not isinstance(files, dict):
        raise Unusable(f"{NAME} is damaged: its step, its time or its list of files is missing")
    if folder.name.isascii() and folder.name.isdigit() and int(folder.name) != step:
        raise Unusable(f"{NAME} is of step {step}, and the folder of step {folder.name}")
    for name, entry in files.items():
        if not _is_inside(name):
            raise Unusable(f"{NAME} is damaged: it lists {name!a}, which is not in this folder")
        if not _is_entry(entry):
            raise Unusable(f"{NAME} is damaged: its entry of {name!a} is not a size with checksums")
    return Manifest(
        step, saved, {name: (one["bytes"], one["sha256"]) for name, one in files.items()}
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_inside(name: str) -> bool:
    """Whether a listed name is that of a file in the checkpoint itself, as we write them."""
    return "\0" not in name and not any(part in ("", ".", "..") for part in name.split("/"))


def _is_entry(entry: object) -> bool:
    """Whether a file is described as we do it, with a checksum for each of its pieces.

    So the number of pieces to be hashed is bounded by the size of the manifest.
    """
    if not isinstance(entry, dict) or not _is_count(entry.get("bytes")):
        return False
    digests = entry.get("sha256")
    return (
        isinstance(digests, list)
        and all(isinstance(digest, str) for digest in digests)
        and len(digests) == -(-entry["bytes"] // _PIECE_BYTES)
    )


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
        InputError: another version wrote it, or it holds links, pipes or devices.
    """
    try:
        found = read(folder)
    except Foreign as why:
        raise InputError(f"{folder}: {why}: take the version of jaxtrain that wrote it") from None
    except Unusable as why:
        return str(why)
    try:
        wrong = _look(folder, found)
        if wrong:
            return wrong
        _check_unlisted(folder)
    except Linked as why:
        raise InputError(f"{folder}: {why}: copy the checkpoint without links (cp -rL)") from None
    try:
        digests = _hash({folder / name: size for name, (size, _) in found.files.items()})
    except _MISSING as error:
        return f"{error.filename} is missing"
    for name, (_, saved) in found.files.items():
        if digests[folder / name] != saved:
            return f"{name} has other bytes than were saved: its checksum is wrong"
    return ""


def _look(folder: Path, manifest: Manifest) -> str:
    for inner in sorted({inner for name in manifest.files for inner in _folders_of(name)}):
        try:
            mode = (folder / inner).lstat().st_mode
        except (*_MISSING, ValueError):
            return f"{inner} is missing"
        if stat.S_ISLNK(mode):
            raise Linked(f"{inner} is a link")
    for name, (size, _) in manifest.files.items():
        try:
            entry = (folder / name).lstat()
        except (*_MISSING, ValueError):
            return f"{name} is missing"
        if stat.S_ISDIR(entry.st_mode):
            return f"{name} is missing"
        _check_kind(name, entry.st_mode)
        there = entry.st_size
        if there != size:
            return f"{name} has {there} bytes, and {size} were saved"
    return ""


def _folders_of(name: str) -> list[str]:
    """The folders in the checkpoint that a file is in, the outer ones first."""
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _check_unlisted(folder: Path) -> None:
    """Refuses what is no file and no folder anywhere in a checkpoint: Orbax would open it.

    Raises:
        Linked: names it.
        OSError: the disk does not tell now.
    """
    places = [folder]
    while places:
        with os.scandir(places.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    places.append(Path(entry.path))
                else:
                    mode = entry.stat(follow_symlinks=False).st_mode
                    _check_kind(Path(entry.path).relative_to(folder).as_posix(), mode)


def _check_kind(name: str, mode: int) -> None:
    if stat.S_ISLNK(mode):
        raise Linked(f"{name} is a link")
    if not stat.S_ISREG(mode):
        raise Linked(f"{name} is a pipe or a device")


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
