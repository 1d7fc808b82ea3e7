"""The files of one split as columns on disk, which all processes of a machine map into memory.

As Python objects, the entries of a million clips take 3.5 GB in each worker, which also needs more
than a minute to unpickle them. A table is pickled as its path, and workers read single entries.
"""

import dataclasses
import errno
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from jaxtrain.data import cache
from jaxtrain.data.video.decode import FrameCheck
from jaxtrain.data.video.index import Entry
from jaxtrain.data.video.packets import Keyframe, Scan, Span
from jaxtrain.storage.disks import disk_trouble

_VERSION = 1  # of the columns
_NO = -1  # length of a value that is None
# One row for each file. A text is (start, bytes) in the array "text", and keyframes and missing
# frames are (start, numbers) in the array "numbers".
_PART = np.dtype([("start", np.int64), ("length", np.int32)])
_ROW = np.dtype(
    [
        *((name, np.int64) for name in ("size", "mtime_ns", "frames", "offset")),
        *((name, np.float64) for name in ("pixel_aspect", "fps")),
        *((name, np.int32) for name in ("stream", "width", "height", "rotation")),
        *((name, _PART) for name in ("name", "path", "tar", "broken", "keyframes", "missing")),
    ]
)


@dataclasses.dataclass(frozen=True)
class FileTable(Sequence[Entry]):
    """Entries of files that can be read; each is made when it is needed.

    Attributes:
        folder: the columns; see :meth:`stored`.
    """

    folder: Path

    @classmethod
    def stored(
        cls, entries: Iterable[Entry], folder: Path, say: Callable[[str], None]
    ) -> "FileTable":
        """Writes the columns, unless they exist, into a folder whose name depends on them.

        Args:
            entries: all have ``info``.
            folder: contains the folder.
            say: prints a message.

        Raises:
            InputError: the disk is read-only.
            RunAgain: the disk is full.
        """
        columns = _columns(entries)
        digest = hashlib.sha256(f"{_VERSION} {len(columns['rows'])}".encode())
        for column in columns.values():
            digest.update(column.data)

        def build(work: Path) -> dict[str, Any]:
            for name, column in columns.items():
                column.tofile(work / name)
            return {"version": _VERSION, "files": len(columns["rows"])}

        target = folder / f"files-{digest.hexdigest()[:20]}"
        cache.make_folder(target, build, say)
        return cls(target)

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, number: int) -> Entry: ...
    @overload
    def __getitem__(self, number: slice) -> list[Entry]: ...
    def __getitem__(self, number: int | slice) -> Entry | list[Entry]:
        numbers = range(len(self))[number]  # raises IndexError
        return self._entry(numbers) if isinstance(numbers, int) else list(map(self._entry, numbers))

    def fingerprint(self, *more: Any) -> str:
        """Returns a hex digest of the files' names, sizes, and frame counts, not of paths or times.

        Args:
            more: other JSON-serializable values that the examples depend on.
        """
        rows, text = self._rows, self._map("text", np.dtype(np.uint8))
        names = [
            _decoded(text[start : start + length].tobytes())
            for start, length in rows["name"].tolist()
        ]
        files = zip(names, rows["size"].tolist(), rows["frames"].tolist(), strict=True)
        return cache.digest(sorted(files), *more)

    @property
    def frames(self) -> np.ndarray:
        """Returns the number of frames of each file, int64."""
        frames: np.ndarray = self._rows["frames"]
        return frames

    @property
    def keyframes(self) -> np.ndarray:
        """Returns the number of keyframes of each file, int32; 0 if they are unknown."""
        keyframes: np.ndarray = self._rows["keyframes"]["length"] // len(Keyframe._fields)
        return keyframes

    def _entry(self, number: int) -> Entry:
        size = _ROW.itemsize
        (row,) = np.frombuffer(self._read("rows", number * size, size), _ROW)
        name, path, tar, broken = (
            self._text(*row[part].item()) for part in ("name", "path", "tar", "broken")
        )
        assert name is not None
        assert path is not None
        keyframes, missing = (self._numbers(*row[part].item()) for part in ("keyframes", "missing"))
        assert keyframes is not None
        return Entry(
            name=name,
            path=path,
            size=int(row["size"]),
            mtime_ns=int(row["mtime_ns"]),
            info=Scan(
                **{name: row[name].item() for name in Scan._fields if name != "keyframes"},
                keyframes=tuple(map(Keyframe, keyframes[::2], keyframes[1::2])),
            ),
            verdict=None if missing is None else FrameCheck(tuple(missing), broken),
            span=None if tar is None else Span(tar, int(row["offset"]), int(row["size"])),
        )

    def _text(self, start: int, length: int) -> str | None:
        return None if length == _NO else _decoded(self._read("text", start, length))

    def _numbers(self, start: int, length: int) -> list[int] | None:
        if length == _NO:
            return None
        return np.frombuffer(self._read("numbers", 8 * start, 8 * length), np.int64).tolist()

    def _read(self, column: str, start: int, length: int) -> bytes:
        """Reads a part of a column, in bytes.

        Not through a memory map: the kernel maps 2 MB of the file at a time, so that after a few
        hundred entries a worker has mapped all of it; and an error of the disk kills the worker.
        """
        try:
            data = os.pread(self._descriptors[column], length, start)
            if len(data) < length:
                raise OSError(errno.EIO, "it is truncated")
        except OSError as error:
            what = f"the index of the videos cannot be read: {self.folder / column}"
            raise disk_trouble(error, what, "start again, which writes it again") from error
        return data

    @functools.cached_property
    def _length(self) -> int:
        return (self.folder / "rows").stat().st_size // _ROW.itemsize

    @functools.cached_property
    def _descriptors(self) -> dict[str, int]:
        columns = ("rows", "text", "numbers")
        return {name: os.open(self.folder / name, os.O_RDONLY) for name in columns}

    def __del__(self) -> None:
        for descriptor in vars(self).pop("_descriptors", {}).values():
            os.close(descriptor)

    @property
    def _rows(self) -> np.ndarray:
        return self._map("rows", _ROW)

    def _map(self, column: str, dtype: np.dtype) -> np.ndarray:
        path = self.folder / column
        return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)

    def __reduce__(self) -> tuple[type["FileTable"], tuple[Path]]:
        """Pickles the path, without the open files."""
        return FileTable, (self.folder,)


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _columns(entries: Iterable[Entry]) -> dict[str, np.ndarray]:
    """Returns the arrays ``rows``, ``text`` and ``numbers``."""
    rows, text, numbers = [], bytearray(), list[int]()

    def put(value: str | None) -> tuple[int, int]:
        if value is None:
            return 0, _NO
        data = value.encode("utf-8", "surrogateescape")
        text.extend(data)
        return len(text) - len(data), len(data)

    def put_numbers(values: Sequence[int] | None) -> tuple[int, int]:
        if values is None:
            return 0, _NO
        numbers.extend(values)
        return len(numbers) - len(values), len(values)

    for entry in entries:
        info, span, verdict = entry.scanned, entry.span, entry.verdict
        rows.append(
            (
                *(entry.size, entry.mtime_ns, info.frames, 0 if span is None else span.offset),
                *(info.pixel_aspect, info.fps),
                *(info.stream, info.width, info.height, info.rotation),
                *(put(entry.name), put(entry.path), put(None if span is None else span.file)),
                put(None if verdict is None else verdict.broken),
                put_numbers([number for key in info.keyframes for number in key]),
                put_numbers(None if verdict is None else verdict.missing),
            )
        )
    return {
        "rows": np.array(rows, _ROW),
        "text": np.frombuffer(text, np.uint8),
        "numbers": np.array(numbers, np.int64),
    }
