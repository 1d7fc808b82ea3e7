"""Copies files to a folder of a bucket and back: files that grow in parts, the others whole.

An object store cannot append. So a file that a run appends to, such as ``metrics.jsonl``, is a
folder there with the parts of it, each sent once::

    metrics.jsonl/<offset>-<generation>-<checksum>

All parts, in the order of their names, are the file. If a run resumes from an earlier step and cuts
the file, the parts after the cut are sent again with a higher generation, and the old ones are
deleted; a part replaces whatever an older generation has from its offset on.
"""

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxtrain.errors import RunAgain
from jaxtrain.storage.bucket import Bucket

_PART_BYTES = 2**23
_AT_ONCE = 8  # parts and files
_TRIES = 3  # of a file that is fetched
_GROWS = re.compile(r"(log|hang)[^/]*\.txt|.*\.(jsonl|log)|(.*/)?events\.out\.tfevents\..*")
_NAME = re.compile(r"(.+)/(\d{15})-(\d{6})-([0-9a-f]{16})")


class _Part(NamedTuple):
    """A part of a file; ordered as parts replace each other."""

    generation: int
    offset: int
    size: int
    digest: str

    @property
    def end(self) -> int:
        return self.offset + self.size

    def name(self, file: str) -> str:
        return f"{file}/{self.offset:015d}-{self.generation:06d}-{self.digest}"

    def is_of(self, path: Path) -> bool:
        """Whether the file has this part."""
        content = _read(path, self.offset, self.size)
        return len(content) == self.size and _digest(content) == self.digest


class FileCopies:
    """The copies of a folder's files in a bucket. For one thread at a time.

    Args:
        sent: called with the number of bytes that the bucket has taken of a file that does not
            grow: the log of an upload that fails grows, too.
    """

    def __init__(
        self, bucket: Bucket, directory: Path, sent: Callable[[int], object] = lambda count: None
    ) -> None:
        self._bucket, self._directory, self._sent = bucket, directory, sent
        self._parts: dict[str, list[_Part]] | None = None  # of all files in the bucket
        self._states: dict[str, tuple[int, int]] = {}  # size and time of what was sent

    def upload(self, name: str) -> None:
        """Uploads what has changed of a file.

        Raises:
            RunAgain, InputError: the bucket does not take it.
        """
        path = self._directory / name
        state = _state(path)
        if self._states.get(name) == state:
            return
        if _GROWS.fullmatch(name):
            self._upload_parts(name, path, state[0])
        else:
            self._bucket.put(name, path, self._sent)
        self._states[name] = state

    def delete_missing(self, folder: str) -> None:
        """Deletes files of a folder that were on disk, and were deleted there.

        Raises:
            RunAgain, InputError: the bucket does not delete them.
        """
        if not (self._directory / folder).is_dir():
            return
        missing = [
            name
            for name in self._states
            if name.startswith(f"{folder}/") and not (self._directory / name).exists()
        ]
        self._bucket.delete(missing)
        for name in missing:
            del self._states[name]

    def fetch(self, wanted: Callable[[str], bool], *, ahead: bool = False) -> None:
        """Makes the folder have the bucket's files: replaces others, and deletes the rest.

        Args:
            wanted: whether a name is of such a file; others are left alone.
            ahead: whether a file that grows may have more on disk than in the bucket, such as the
                log of a process that was killed. Not if the bucket has no files at all.

        Raises:
            RunAgain, InputError: one cannot be read.
        """
        versions = self._bucket.versions()
        self._parts = _of_listing({name: size for name, (size, _) in versions.items()})
        names = {name for name in map(file_of, versions) if wanted(name)}
        for path in [path for path in self._directory.rglob("*") if path.is_file()]:
            name = path.relative_to(self._directory).as_posix()
            stays = name in names or (ahead and names and _GROWS.fullmatch(name))
            if wanted(name) and not stays:
                path.unlink(missing_ok=True)

        def fetch(name: str) -> None:
            if not self._has(name, versions.get(name), ahead=ahead):
                self._fetch_patiently(name)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for _ in pool.map(fetch, sorted(names)):
                pass

    def _has(self, name: str, version: tuple[int, str] | None, *, ahead: bool) -> bool:
        """Whether the file on disk is the bucket's."""
        assert self._parts is not None, "fetch() lists them"
        path = self._directory / name
        if not path.is_file():
            return False
        state, chain = _state(path), _chain(self._parts.get(name, ()))
        if chain:
            longer = state[0] > chain[-1].end
            return (ahead or not longer) and all(part.is_of(path) for part in chain)
        # The ETag of an object that was not uploaded in parts is usually its MD5.
        if version is None or state[0] != version[0]:
            return False
        with path.open("rb") as file:
            same = hashlib.file_digest(file, _md5).hexdigest() == version[1].strip('"')
        if same:
            self._states[name] = state
        return same

    def _fetch_patiently(self, name: str) -> None:
        """Fetches a file; tries again, or the next start would begin with all files."""
        for _ in range(_TRIES - 1):
            with contextlib.suppress(RunAgain):
                return self._fetch(name)
        return self._fetch(name)

    def _fetch(self, name: str) -> None:
        assert self._parts is not None, "fetch() lists them"
        path = self._directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.partial")
        chain = _chain(self._parts.get(name, ()))
        if not chain:
            self._bucket.download(name, beside)
        else:
            try:
                with beside.open("wb") as file:
                    self._write_parts(name, chain, file)
            except BaseException:
                beside.unlink(missing_ok=True)  # a hole in it must not become the file
                raise
        if beside.exists():  # otherwise it was deleted in the meantime
            beside.replace(path)
            self._states[name] = _state(path)

    def _write_parts(self, name: str, chain: list[_Part], file: BinaryIO) -> None:
        """Writes the parts of a file.

        Raises:
            RunAgain: the run has cut the file meanwhile; the next try sees its new parts.
        """
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for start in range(0, len(chain), _AT_ONCE):
                parts = [part.name(name) for part in chain[start : start + _AT_ONCE]]
                for content in pool.map(self._bucket.get, parts):
                    if content is None:
                        assert self._parts is not None, "fetch() lists them"
                        self._parts[name] = _of_listing(self._bucket.sizes(name)).get(name, [])
                        raise RunAgain(
                            f"{self._bucket.url}/{name} changed while it was fetched: start again"
                        )
                    file.write(content.data)

    def _upload_parts(self, name: str, path: Path, size: int) -> None:
        if self._parts is None:
            self._parts = _of_listing(self._bucket.sizes())
        old = self._parts.get(name, [])
        chain = _chain(old)
        if name not in self._states:  # a resume may have changed any part of it
            kept = next((i for i, part in enumerate(chain) if not part.is_of(path)), len(chain))
            chain = chain[:kept]
        while chain and not chain[-1].is_of(path):  # it was cut
            chain.pop()
        unused = [part for part in old if part not in chain]
        generation = max((part.generation for part in old), default=0) + bool(unused)
        begin = chain[-1].end if chain else 0
        for start in range(begin, size, _PART_BYTES):
            content = _read(path, start, min(_PART_BYTES, size - start))
            part = _Part(generation, start, len(content), _digest(content))
            self._bucket.put(part.name(name), content)
            chain.append(part)
            self._parts[name] = chain + unused
        self._bucket.delete([part.name(name) for part in unused])
        self._parts[name] = chain


def file_of(name: str) -> str:
    """Returns the file that an object is a part of, or its own name."""
    match = _NAME.fullmatch(name)
    return match[1] if match else name


def _md5() -> Any:
    return hashlib.md5(usedforsecurity=False)


def _state(path: Path) -> tuple[int, int]:
    """Returns what changes with the content of a file."""
    about = path.stat()
    return about.st_size, about.st_mtime_ns


def _of_listing(names: dict[str, int]) -> dict[str, list[_Part]]:
    """Returns the parts of each file from name -> bytes of all objects."""
    files: dict[str, list[_Part]] = {}
    for name, size in names.items():
        if match := _NAME.fullmatch(name):
            part = _Part(int(match[3]), int(match[2]), size, match[4])
            files.setdefault(match[1], []).append(part)
    return files


def _chain(parts: Iterable[_Part]) -> list[_Part]:
    """Returns the parts that together are the file."""
    chain: list[_Part] = []
    for part in sorted(parts):
        while chain and chain[-1].end > part.offset:
            chain.pop()
        if (chain[-1].end if chain else 0) == part.offset:
            chain.append(part)
    return chain


def _read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
