"""The files of one split as columns on disk, from which workers read single entries.

As Python objects, the entries of a million clips take 3 GB in each worker, which also needs minutes
to unpickle them. A table is pickled as its path.
"""

import array
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from jaxtrain.data import cache
from jaxtrain.data.number_file import NumberFile, numbers_of
from jaxtrain.data.video.decode import FrameCheck
from jaxtrain.data.video.index import Entry
from jaxtrain.data.video.packets import Keyframe, Scan, Span

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
_DTYPES = {"rows": _ROW, "text": np.dtype(np.uint8), "numbers": np.dtype(np.int64)}


@dataclasses.dataclass(frozen=True)
class FileTable(Sequence[Entry]):
    """Entries of files that can be read; each is made when it is needed.

    Reading one raises DiskAway or BadExample if the columns cannot be read.

    Attributes:
        folder: the columns; see :meth:`stored`.
        length: number of entries.
    """

    folder: Path
    length: int

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
        return cls(target, len(columns["rows"]))

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, number: int) -> Entry: ...
    @overload
    def __getitem__(self, number: slice) -> list[Entry]: ...
    def __getitem__(self, number: int | slice) -> Entry | list[Entry]:
        numbers = range(self.length)[number]  # raises IndexError
        return self._entry(numbers) if isinstance(numbers, int) else list(map(self._entry, numbers))

    def fingerprint(self, *more: Any) -> str:
        """Returns a hex digest of the files' names, sizes, and frame counts, not of paths or times.

        Args:
            more: other JSON-serializable values that the examples depend on.
        """
        rows, text = self._column("rows"), self._column("text")
        names = [
            _decoded(text[start : start + length].tobytes())
            for start, length in rows["name"].tolist()
        ]
        files = zip(names, rows["size"].tolist(), rows["frames"].tolist(), strict=True)
        return cache.digest(sorted(files), *more)

    @property
    def frames(self) -> np.ndarray:
        """Returns the number of frames of each file, int64."""
        frames: np.ndarray = self._column("rows")["frames"]
        return frames

    @property
    def keyframes(self) -> np.ndarray:
        """Returns the number of keyframes of each file, int32; 0 if they are unknown."""
        keyframes: np.ndarray = self._column("rows")["keyframes"]["length"] // len(Keyframe._fields)
        return keyframes

    def _entry(self, number: int) -> Entry:
        (row,) = self._files["rows"].read(number, number + 1)
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
        if length == _NO:
            return None
        return _decoded(self._files["text"].read(start, start + length).tobytes())

    def _numbers(self, start: int, length: int) -> list[int] | None:
        return (
            None if length == _NO else self._files["numbers"].read(start, start + length).tolist()
        )

    @functools.cached_property
    def _files(self) -> dict[str, NumberFile]:
        # Not memory maps: the kernel maps 2 MB at a time, so that after a few hundred entries all
        # of a file counts as the worker's memory.
        return {name: NumberFile(str(self.folder / name), dtype) for name, dtype in _DTYPES.items()}

    def _column(self, name: str) -> np.ndarray:
        return numbers_of(str(self.folder / name), _DTYPES[name])

    def __reduce__(self) -> tuple[type["FileTable"], tuple[Path, int]]:
        """Pickles the fields, without the open files."""
        return FileTable, (self.folder, self.length)


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _columns(entries: Iterable[Entry]) -> dict[str, np.ndarray]:
    """Returns the arrays ``rows``, ``text`` and ``numbers``."""
    rows, text, numbers = [], bytearray(), array.array("q")

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
        "numbers": np.frombuffer(numbers, np.int64),
    }
