"""What a checkpoint is: a pointer, ``checkpoints/12.json``, to an immutable folder of files.

In a run directory, and below the URL of a run in a bucket::

    checkpoints/<step>.json    pointer: the step, the metadata, the shapes of the arrays, and the
                               size and checksums of every file; written last, at once
    best/<step>.json           the same, of the best checkpoint; both may point to the same files
    aside/<step>-<id>.json     the same, of a checkpoint that does not count: abandoned by a resume
                               from an earlier step, damaged, computed on a wrong device
                               (``loop.replay_every``), or the state before a bad step, with its
                               batch; the reason is in <step>-<id>.txt
    checkpoints/files/<step>-<id>/state/
                               every array by its dotted name, "params.encoder.0.kernel", except
                               those that the model reads from files, as Orbax writes them
    checkpoints/files/<step>-<id>/NAME
                               files added by the data, such as tokenizer.json

A checkpoint is *complete* if its pointer can be read and every file has its size, and *intact* if
every checksum also matches. A pointer is complete or missing, and its files never change: a step
that is saved again gets another ``<id>``. So a checkpoint appears, moves and disappears with one
small file. A folder in ``checkpoints/files/`` that this run has named
(:func:`jaxtrain.storage.run_marker.folder_name`) and to which nothing points is deleted.

A file has a checksum per 64 MiB, so that several threads can read a large one. Orbax itself does
not notice damage: of 12 flipped bits in its data files it restored 12 without an error.
"""

import dataclasses
import datetime
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from jaxtrain.errors import InputError
from jaxtrain.storage.atomic import sync
from jaxtrain.storage.disks import disk_trouble
from jaxtrain.storage.run_marker import FORMAT

if TYPE_CHECKING:
    import jax  # takes a second, and commands that only look do not need it

CHECKPOINTS, BEST = "checkpoints", "best"
KINDS = (CHECKPOINTS, BEST)
ASIDE = "aside"
SUPERSEDED, DAMAGED, SUSPECT, BAD_STEP = "superseded", "damaged", "suspect", "bad step"
"""Why a checkpoint is aside: the first word of its reason."""
FILES = "checkpoints/files"
STATE = "state"  # folder of the arrays, in that of a checkpoint
INDEX, INDEX_DATA = "manifest.ocdbt", "d"
"""In the folder of the arrays: what Orbax makes of the files of all processes to find them.

Each process of a run in a bucket has only its own files. So these are not in the bucket, and are
made where a checkpoint is fetched. They are small: the arrays themselves are in the files of the
processes.
"""

CHUNK_BYTES = 2**26
_BUFFER_BYTES = 2**20
# hashlib releases the GIL. More threads would only wait for the disk.
_THREADS = 8
_NAME = re.compile(r"(0|[1-9][0-9]*)\.json")
_ASIDE_NAME = re.compile(r"(0|[1-9][0-9]*)-[0-9a-f]{12,}\.json")
_FOLDER = re.compile(rf"{FILES}/(0|[1-9][0-9]*)-[0-9a-f]{{12,}}")
# These mean that a file is lost. Any other error (a stale handle, EIO, no permission, too many open
# files) may come from the disk, the mount or this process: the file may be readable again later.
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

FileList = dict[str, tuple[int, list[str]]]
"""Path in the folder of the files -> (bytes, hexadecimal SHA-256 of each chunk)."""


class Damaged(Exception):
    """A pointer is missing or damaged, or a file differs; the message gives the reason."""


@dataclasses.dataclass(frozen=True)
class Pointer:
    """The content of a pointer.

    Attributes:
        saved: UTC time, such as ``2026-01-31T09:00:00Z``.
        data: folder of the files in the run, such as ``checkpoints/files/12-0123456789abcdef``.
        meta: from the caller of :meth:`jaxtrain.checkpoint.saver.CheckpointSaver.save`.
        arrays: name -> ``{"shape": ..., "dtype": ...}``.
    """

    step: int
    saved: str
    data: str
    meta: dict[str, Any]
    arrays: dict[str, Any]
    files: FileList

    @classmethod
    def of_folder(cls, folder: Path, meta: Mapping[str, Any], arrays: Mapping[str, Any]) -> Self:
        """Hashes the files of a new checkpoint, which are synced first.

        After a crash, a pointer must not exist without its files.

        Args:
            meta: JSON-able, with the step.
        """
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        folders = {path.parent for path in paths} | {folder, *folder.parents[:3]}
        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(sync, [*paths, *folders]))
        sizes = {path: path.stat().st_size for path in paths}
        digests = hashes(sizes)
        return cls(
            meta["step"],
            datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            f"{FILES}/{folder.name}",
            dict(meta),
            dict(arrays),
            {path.relative_to(folder).as_posix(): (sizes[path], digests[path]) for path in paths},
        )

    @classmethod
    def parse(cls, content: bytes, step: int) -> Self:
        """Reads the stored form.

        Args:
            step: from its name.

        Raises:
            Damaged: it is truncated, was edited, or is of another step.
            InputError: another version of jaxtrain wrote it.
        """
        try:
            raw = json.loads(content)
            digest = raw.pop("sha256")
            if digest != _digest(raw):
                raise Damaged("its pointer is damaged: its content does not match its checksum")
            if raw.pop("format") != FORMAT:
                raise InputError(
                    "it has the format of another version of jaxtrain: use the version that "
                    "wrote it"
                )
            files = {name: (size, list(digests)) for name, (size, digests) in raw["files"].items()}
            pointer = cls(**raw | {"files": files})
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise Damaged(f"its pointer is damaged: {error}") from None
        if pointer.step != step:
            raise Damaged(f"its pointer is for step {pointer.step}")
        return pointer

    def to_json(self) -> bytes:
        """Returns the stored form."""
        # Tuples become lists, so that the digest equals that of the parsed file.
        content = json.loads(json.dumps(dataclasses.asdict(self) | {"format": FORMAT}))
        return json.dumps(content | {"sha256": _digest(content)}, indent=1).encode() + b"\n"

    def size(self) -> int:
        """Returns the total bytes of all files."""
        return sum(size for size, _ in self.files.values())

    def missing(self, run_dir: Path) -> str:
        """Returns why files are missing, by their names and sizes; "" if none is.

        Raises:
            OSError: the disk does not respond.
        """
        for name, (size, _) in self.files.items():
            try:
                size_now = (run_dir / self.data / name).stat().st_size
            except _MISSING:
                return f"{name} is missing"
            if size_now != size:
                return f"{name} has {size_now} bytes, but {size} were saved"
        return ""

    def damage(self, run_dir: Path) -> str:
        """Returns how the files differ from what was saved; "" if they do not. Reads all of them.

        Raises:
            OSError: a file cannot be read at the moment, so its damage is unknown.
        """
        if missing := self.missing(run_dir):
            return missing
        folder = run_dir / self.data
        try:
            digests = hashes({folder / name: size for name, (size, _) in self.files.items()})
        except _MISSING as error:
            return f"{error.filename} is missing"
        for name, (_, saved) in self.files.items():
            if digests[folder / name] != saved:
                return f"{name} was changed after it was saved: its checksum is wrong"
        return ""


def data_of(content: bytes | None) -> str:
    """Returns the folder that a pointer names, even if it is damaged; "" if it has none."""
    match = re.search(rb'"data": ?"([^"]*)"', content or b"")
    data = match[1].decode(errors="replace") if match else ""
    return data if _FOLDER.fullmatch(data) else ""


def name_of(kind: str, step: int) -> str:
    """Returns the path of a pointer in its run."""
    return f"{kind}/{step}.json"


def step_of(name: str) -> int | None:
    """Returns the step of a pointer's file name; None if it is not such a name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def step_aside(name: str) -> int | None:
    """Returns the step of the file name of a pointer in ``aside/``; None if it is not one."""
    match = _ASIDE_NAME.fullmatch(name)
    return int(match[1]) if match else None


def step_in(name: str) -> int:
    """Returns the step in the path of a pointer, of any folder."""
    return int(Path(name).stem.partition("-")[0])


def is_aside(path: Path) -> bool:
    """Whether a path has the form of a pointer in ``aside/``."""
    return path.parent.name == ASIDE and step_aside(path.name) is not None


def steps(folder: Path) -> list[int]:
    """Returns the steps of the pointers in ``checkpoints/`` or ``best/``, ascending."""
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted(step for name in names if (step := step_of(name)) is not None)


def run_of(path: Path) -> Path:
    """Returns the run directory of a pointer on disk."""
    return path.parent.parent


def read(path: Path) -> Pointer:
    """Reads a pointer on disk.

    Raises:
        Damaged: it is missing or damaged.
        InputError: another version of jaxtrain wrote it.
        OSError: the disk does not respond.
    """
    try:
        if step_of(path.name) is None and not is_aside(path):
            raise FileNotFoundError
        content = path.read_bytes()
    except _MISSING:
        raise Damaged("there is no such checkpoint") from None
    try:
        return Pointer.parse(content, step_in(path.name))
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def verify(path: Path) -> str:
    """Returns the damage of a checkpoint on disk, of which all files are read; "" if it is intact.

    Raises:
        OSError: a file cannot be read at the moment, so its damage is unknown.
        InputError: another version of jaxtrain wrote it.
    """
    try:
        return read(path).damage(run_of(path))
    except Damaged as why:
        return str(why)


def is_complete(path: Path) -> bool:
    """Whether a pointer is intact and its files exist; reads none of them.

    Raises:
        OSError: the disk does not respond.
    """
    try:
        return not read(path).missing(run_of(path))
    except Damaged:
        return False


def newest_complete(folder: Path) -> Path | None:
    """Returns the newest complete checkpoint in ``checkpoints/`` or ``best/``."""
    paths = (folder / f"{step}.json" for step in reversed(steps(folder)))
    return next((path for path in paths if is_complete(path)), None)


def folder_of(path: Path) -> Path:
    """Returns the folder with the files of a checkpoint.

    Raises:
        InputError, RunAgain: it cannot be read.
    """
    return run_of(path) / _readable(path).data


def read_meta(path: Path) -> dict[str, Any]:
    """Returns the ``meta`` with which this checkpoint was saved.

    Raises:
        InputError: it is not a complete checkpoint.
        RunAgain: its disk does not respond.
    """
    return _readable(path).meta


def read_shapes(path: Path) -> dict[str, "jax.ShapeDtypeStruct"]:
    """Returns the shape and dtype of every array of a checkpoint by dotted name.

    Raises:
        InputError: it is not a complete checkpoint.
        RunAgain: its disk does not respond.
    """
    import jax
    import jax.numpy as jnp  # knows the small floats

    return {
        name: jax.ShapeDtypeStruct(tuple(array["shape"]), jnp.dtype(array["dtype"]))
        for name, array in _readable(path).arrays.items()
    }


def _readable(path: Path) -> Pointer:
    try:
        pointer = read(path)
        if missing := pointer.missing(run_of(path)):
            raise Damaged(missing)
        return pointer
    except Damaged as why:
        raise InputError(f"{path} is not a complete checkpoint: {why}") from None
    except OSError as error:
        raise disk_trouble(error, f"checkpoint {path} cannot be read", "use another one") from None


def find(path: Path) -> Path | None:
    """Returns the pointer that a typed path names, with or without ``.json``; None if none does."""
    for pointer in (path, path.with_name(f"{path.name}.json")):
        is_name = step_of(pointer.name) is not None and pointer.parent.name in KINDS
        if (is_name or is_aside(pointer)) and pointer.is_file():
            return pointer
    return None


def is_checkpoint(path: Path) -> bool:
    """Whether a typed path names a checkpoint; see :func:`find`."""
    return find(path) is not None


def format_steps(numbers: list[int]) -> str:
    """Formats steps for a message."""
    return ", ".join(map(str, numbers)) or "none"


def format_other_steps(by_kind: Mapping[str, list[int]], step: int) -> str:
    """Formats the steps in ``checkpoints/`` and ``best/`` for a message, without a damaged one."""
    intact = {kind: [n for n in numbers if n != step] for kind, numbers in by_kind.items()}
    return "; ".join(f"{kind}/ has: {format_steps(numbers)}" for kind, numbers in intact.items())


def chunks(size: int) -> Iterator[tuple[int, int]]:
    """Yields the begin and the end of each chunk of a file that has a checksum of its own."""
    for start in range(0, size, CHUNK_BYTES):
        yield start, min(start + CHUNK_BYTES, size)


def hashes(sizes: Mapping[Path, int]) -> dict[Path, list[str]]:
    """Returns the checksums of each file's chunks, given the file sizes."""
    to_hash = [(path, start) for path, size in sizes.items() for start, _ in chunks(size)]
    digests: dict[Path, list[str]] = {path: [] for path in sizes}
    with ThreadPoolExecutor(_THREADS) as pool:
        for (path, _), digest in zip(to_hash, pool.map(_hash_chunk, to_hash), strict=True):
            digests[path].append(digest)
    return digests


def _hash_chunk(chunk: tuple[Path, int]) -> str:
    path, start = chunk
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_BUFFER_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            left = CHUNK_BYTES
            while left and (count := file.readinto(buffer[: min(left, _BUFFER_BYTES)])):
                digest.update(buffer[:count])
                left -= count
    except OSError as error:  # errors of reads name no file
        raise OSError(error.errno, error.strerror, str(path)) from error
    return digest.hexdigest()


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
