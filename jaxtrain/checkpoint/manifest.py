"""Writes and verifies a checkpoint's manifest: the size and checksums of every file.

``manifest.json`` is written last and marks the checkpoint as complete::

    {"format": 1, "step": 12, "saved": "2026-01-31T09:00:00Z",
     "files": {"meta/metadata": {"bytes": 8123, "sha256": ["..."]}, ...},
     "sha256": "..."}                              of everything above, as canonical JSON

A file has a checksum per 64 MiB, so that several threads can read a large one. A folder without a
manifest, or with one that was edited, truncated or copied from another step, is not a complete
checkpoint. Unlisted files are allowed.
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
from jaxtrain.storage import listing
from jaxtrain.storage.atomic import read_json, sync, write_whole

NAME = "manifest.json"

_FORMAT = 1
PIECE_BYTES = 2**26
_BUFFER_BYTES = 2**20
# hashlib releases the GIL. More threads would only wait for the disk.
_THREADS = 8
# These mean that a file is lost. Any other error (a stale handle, EIO, no permission, too many open
# files) may come from the disk, the mount or this process: the file may be readable again later.
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a manifest.

    Attributes:
        step: number of completed steps.
        saved: UTC time, such as ``2026-01-31T09:00:00Z``.
        files: path in the checkpoint -> (bytes, hexadecimal sha256 of each piece).
    """

    step: int
    saved: str
    files: dict[str, tuple[int, list[str]]]

    def size(self) -> int:
        """Returns the total bytes of all files."""
        return sum(size for size, _ in self.files.values())


class Unusable(Exception):
    """The manifest is missing or damaged; the message gives the reason."""


class Foreign(Unusable):
    """The manifest has another version's format; it is not damaged."""


class Linked(Unusable):
    """The checkpoint contains something other than files and folders, such as a link or a pipe.

    Saves never create those, so this is not damage either: they were added later.
    """


def write(folder: Path, step: int) -> None:
    """Hashes every file of a checkpoint and writes its manifest, which completes the checkpoint.

    The files are synced first: after a crash, a manifest must not exist without its files.

    Args:
        folder: the checkpoint, committed by Orbax.
        step: number of completed steps.

    Raises:
        OSError: no manifest was written.
    """
    paths = _paths(folder)
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(sync, [*paths, *{path.parent for path in paths}]))
    sizes = {path: path.stat().st_size for path in paths}
    found = hashes(sizes)
    content = {
        "format": _FORMAT,
        "step": step,
        "saved": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "files": {
            path.relative_to(folder).as_posix(): {"bytes": size, "sha256": found[path]}
            for path, size in sizes.items()
        },
    }
    whole = content | {"sha256": checksum(content)}
    write_whole(folder / NAME, json.dumps(whole, indent=1) + "\n")
    sync(folder.parent)


def read(folder: Path) -> Manifest:
    """Reads and checks the manifest of a checkpoint.

    Raises:
        Unusable: it is missing or damaged.
        OSError: the disk does not respond.
    """
    try:
        found = parsed(read_json(folder / NAME))
    except _MISSING:
        raise Unusable(
            f"{NAME} is missing: the save did not finish, or the file was lost"
        ) from None
    except ValueError as error:
        raise Unusable(f"{NAME} is damaged: {error}") from None
    named = folder.name.isascii() and folder.name.isdigit()
    if named and int(folder.name) != found.step:
        raise Unusable(f"{NAME} is for step {found.step}, but the folder is for step {folder.name}")
    return found


def parsed(content: dict[str, Any]) -> Manifest:
    """Checks the content of a manifest.

    Raises:
        Unusable: it is damaged.
    """
    if content.pop("sha256", None) != checksum(content):
        raise Unusable(f"{NAME} is damaged: its content does not match its own checksum")
    found_format = content.get("format")
    if not _is_count(found_format):
        raise Unusable(f"{NAME} is damaged: its format is not a number")
    if found_format != _FORMAT:
        raise Foreign(f"{NAME} has format {found_format}, but this version reads format {_FORMAT}")
    step: Any = content.get("step")
    saved, files = content.get("saved"), content.get("files")
    if not _is_count(step) or not isinstance(saved, str) or not isinstance(files, dict):
        raise Unusable(f"{NAME} is damaged: its step, time, or list of files is missing")
    for name, entry in files.items():
        if not listing.is_inside(name):
            raise Unusable(f"{NAME} is damaged: it lists {name!a}, which is outside this folder")
        if not is_entry(entry):
            raise Unusable(
                f"{NAME} is damaged: its entry for {name!a} is not a size with checksums"
            )
    return Manifest(
        step, saved, {name: (one["bytes"], one["sha256"]) for name, one in files.items()}
    )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def is_entry(entry: object) -> bool:
    """Whether an entry has a size and one checksum per piece.

    This bounds the number of pieces to hash by the size of the manifest.
    """
    if not isinstance(entry, dict) or not _is_count(entry.get("bytes")):
        return False
    found = entry.get("sha256")
    return (
        isinstance(found, list)
        and all(isinstance(digest, str) for digest in found)
        and len(found) == -(-entry["bytes"] // PIECE_BYTES)
    )


def look(folder: Path) -> str:
    """Returns why a checkpoint is incomplete, by names and sizes of files; "" if it seems complete.

    Reads only the manifest.

    Raises:
        OSError: the disk does not respond.
    """
    try:
        return _look(folder, read(folder))
    except Unusable as why:
        return str(why)


def verify(folder: Path) -> str:
    """Returns how a checkpoint differs from what was saved; "" if it is intact. Reads all files.

    Raises:
        OSError: a file cannot be read at the moment, so its damage is unknown.
        InputError: another version wrote it, or it contains links, pipes or devices.
    """
    try:
        found = read(folder)
    except Foreign as why:
        raise InputError(f"{folder}: {why}: use the version of jaxtrain that wrote it") from None
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
        now = hashes({folder / name: size for name, (size, _) in found.files.items()})
    except _MISSING as error:
        return f"{error.filename} is missing"
    for name, (_, saved) in found.files.items():
        if now[folder / name] != saved:
            return f"{name} was changed after it was saved: its checksum is wrong"
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
            return f"{name} has {there} bytes, but {size} were saved"
    return ""


def _folders_of(name: str) -> list[str]:
    """Returns the parent folders of a file inside the checkpoint, outermost first."""
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _check_unlisted(folder: Path) -> None:
    """Checks that a checkpoint contains only files and folders, as Orbax would open anything else.

    Raises:
        Linked: it contains something else; the message names it.
        OSError: the disk does not respond.
    """
    folders = [folder]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(Path(entry.path))
                else:
                    mode = entry.stat(follow_symlinks=False).st_mode
                    _check_kind(Path(entry.path).relative_to(folder).as_posix(), mode)


def _check_kind(name: str, mode: int) -> None:
    if stat.S_ISLNK(mode):
        raise Linked(f"{name} is a link")
    if not stat.S_ISREG(mode):
        raise Linked(f"{name} is a pipe or a device")


def checksum(content: dict[str, Any]) -> str:
    """Returns the checksum of a manifest's content, as canonical JSON."""
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


def digests(data: bytes) -> list[str]:
    """Returns the checksum of each piece of a file's content."""
    starts = range(0, len(data), PIECE_BYTES)
    return [hashlib.sha256(data[start : start + PIECE_BYTES]).hexdigest() for start in starts]


def hashes(sizes: dict[Path, int]) -> dict[Path, list[str]]:
    """Returns the checksums of each file's pieces, given the file sizes."""
    pieces = [
        (path, start) for path, size in sizes.items() for start in range(0, size, PIECE_BYTES)
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
            left = PIECE_BYTES
            while left and (count := file.readinto(buffer[: min(left, _BUFFER_BYTES)])):
                digest.update(buffer[:count])
                left -= count
    except OSError as error:  # errors of reads name no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    return digest.hexdigest()
