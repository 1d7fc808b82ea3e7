"""Copies files to a folder of a bucket and back: growing files in segments, the others as objects.

An object store cannot append. So a file that a run appends to, such as ``metrics.jsonl``, is a
folder there with the segments of it, each sent once::

    metrics.jsonl/<offset>-<generation>-<checksum>

All segments, in the order of their names, are the file. If a run resumes from an earlier step and
cuts the file, the segments after the cut are sent again with a higher generation, and the old ones
are deleted; a segment replaces whatever an older generation has from its offset on.
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

_SEGMENT_BYTES = 2**23
_AT_ONCE = 8  # segments and files
_TRIES = 3  # of a file that is fetched
_GROWS = re.compile(r"(log|hang)[^/]*\.txt|.*\.(jsonl|log)|(.*/)?events\.out\.tfevents\..*")
_NAME = re.compile(r"(.+)/(\d{15})-(\d{6})-([0-9a-f]{16})")


class _Segment(NamedTuple):
    """A segment of a file; ordered as segments replace each other."""

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
        """Whether the file has this segment."""
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
        self._segments: dict[str, list[_Segment]] | None = None  # of all files in the bucket
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
            self._upload_segments(name, path, state[0])
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
        self._segments = _of_listing({name: size for name, (size, _) in versions.items()})
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
        assert self._segments is not None, "fetch() lists them"
        path = self._directory / name
        if not path.is_file():
            return False
        state, chain = _state(path), _chain(self._segments.get(name, ()))
        if chain:
            longer = state[0] > chain[-1].end
            return (ahead or not longer) and all(segment.is_of(path) for segment in chain)
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
        assert self._segments is not None, "fetch() lists them"
        path = self._directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.partial")
        chain = _chain(self._segments.get(name, ()))
        if not chain:
            if not self._bucket.download(name, beside):  # it was deleted in the meantime
                beside.unlink(missing_ok=True)  # of a try that was interrupted
                return
        else:
            try:
                with beside.open("wb") as file:
                    self._write_segments(name, chain, file)
            except BaseException:
                beside.unlink(missing_ok=True)  # a hole in it must not become the file
                raise
        beside.replace(path)
        self._states[name] = _state(path)

    def _write_segments(self, name: str, chain: list[_Segment], file: BinaryIO) -> None:
        """Writes the segments of a file.

        Raises:
            RunAgain: the run has cut the file meanwhile; the next try sees its new segments.
        """
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            for start in range(0, len(chain), _AT_ONCE):
                segments = [segment.name(name) for segment in chain[start : start + _AT_ONCE]]
                for content in pool.map(self._bucket.get, segments):
                    if content is None:
                        assert self._segments is not None, "fetch() lists them"
                        self._segments[name] = _of_listing(self._bucket.sizes(name)).get(name, [])
                        raise RunAgain(
                            f"{self._bucket.url}/{name} changed while it was fetched: start again"
                        )
                    file.write(content.data)

    def _upload_segments(self, name: str, path: Path, size: int) -> None:
        if self._segments is None:
            self._segments = _of_listing(self._bucket.sizes())
        old = self._segments.get(name, [])
        chain = _chain(old)
        if name not in self._states:  # a resume may have changed any part of it
            kept = next(
                (i for i, segment in enumerate(chain) if not segment.is_of(path)), len(chain)
            )
            chain = chain[:kept]
        while chain and not chain[-1].is_of(path):  # it was cut
            chain.pop()
        unused = [segment for segment in old if segment not in chain]
        generation = max((segment.generation for segment in old), default=0) + bool(unused)
        begin = chain[-1].end if chain else 0
        for start in range(begin, size, _SEGMENT_BYTES):
            content = _read(path, start, min(_SEGMENT_BYTES, size - start))
            segment = _Segment(generation, start, len(content), _digest(content))
            self._bucket.put(segment.name(name), content)
            chain.append(segment)
            self._segments[name] = chain + unused
        self._bucket.delete([segment.name(name) for segment in unused])
        self._segments[name] = chain


def file_of(name: str) -> str:
    """Returns the file that an object is a segment of, or its own name."""
    match = _NAME.fullmatch(name)
    return match[1] if match else name


def _md5() -> Any:
    return hashlib.md5(usedforsecurity=False)


def _state(path: Path) -> tuple[int, int]:
    """Returns what changes with the content of a file."""
    about = path.stat()
    return about.st_size, about.st_mtime_ns


def _of_listing(names: dict[str, int]) -> dict[str, list[_Segment]]:
    """Returns the segments of each file from name -> bytes of all objects."""
    files: dict[str, list[_Segment]] = {}
    for name, size in names.items():
        if match := _NAME.fullmatch(name):
            segment = _Segment(int(match[3]), int(match[2]), size, match[4])
            files.setdefault(match[1], []).append(segment)
    return files


def _chain(segments: Iterable[_Segment]) -> list[_Segment]:
    """Returns the segments that together are the file."""
    chain: list[_Segment] = []
    for segment in sorted(segments):
        while chain and chain[-1].end > segment.offset:
            chain.pop()
        if (chain[-1].end if chain else 0) == segment.offset:
            chain.append(segment)
    return chain


def _read(path: Path, offset: int, size: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(size)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
