"""The files of one split on disk, from which workers read single entries.

As Python objects, the entries of a million clips take 3 GB in each worker, which also needs minutes
to unpickle them. A table has the lines of the index and a column of numbers; it is pickled as its
path.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from jaxtrain.data.number_file import NumberFile, numbers_of
from jaxtrain.data.video import index
from jaxtrain.data.video.index import Entry
from jaxtrain.jobs import cache

_LINES, _ROWS = "lines", "rows"
_ROW = np.dtype(
    [("start", np.int64), ("bytes", np.int32), ("keyframes", np.int32), ("frames", np.int64)]
)


@dataclasses.dataclass(frozen=True)
class FileTable(Sequence[Entry]):
    """Entries of files that can be read; each is made when it is needed.

    Reading one raises DiskAway or BadExample if the table cannot be read.

    Attributes:
        folder: the table; see :meth:`stored`.
        length: number of entries.
        content: a digest of the files' names, sizes, ends, and frame counts, not of paths or times.
    """

    folder: Path
    length: int
    content: str

    @classmethod
    def stored(
        cls, entries: Iterable[Entry], folder: Path, say: Callable[[str], None]
    ) -> "FileTable":
        """Writes the table, unless it exists, into a folder whose name depends on it.

        Args:
            entries: all have ``info``.
            folder: contains the folder.
            say: prints a message.

        Raises:
            InputError: the disk is read-only.
            RunAgain: the disk is full.
        """
        lines, rows, files = bytearray(), [], []
        for entry in entries:
            line, info = index.to_line(entry).encode(), entry.scanned
            rows.append((len(lines), len(line), len(info.keyframes), info.frames))
            files.append((entry.name, entry.size, info.frames, entry.ends))
            lines += line
        digest = hashlib.sha256(lines).hexdigest()

        def build(work: Path) -> dict[str, Any]:
            (work / _LINES).write_bytes(lines)
            np.array(rows, _ROW).tofile(work / _ROWS)
            return {"files": len(rows)}

        target = folder / f"split-{digest[:20]}"
        cache.make_folder(target, build, say)
        return cls(target, len(rows), cache.digest(sorted(files)))

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, number: int) -> Entry: ...
    @overload
    def __getitem__(self, number: slice) -> list[Entry]: ...
    def __getitem__(self, number: int | slice) -> Entry | list[Entry]:
        numbers = range(self.length)[number]  # raises IndexError
        return self._entry(numbers) if isinstance(numbers, int) else list(map(self._entry, numbers))

    @property
    def frames(self) -> np.ndarray:
        """Returns the number of frames of each file, int64."""
        return self._column("frames")

    @property
    def keyframes(self) -> np.ndarray:
        """Returns the number of keyframes of each file, int32; 0 if they are unknown."""
        return self._column("keyframes")

    def _column(self, name: str) -> np.ndarray:
        column: np.ndarray = numbers_of(str(self.folder / _ROWS), _ROW)[name]
        return column

    def _entry(self, number: int) -> Entry:
        ((start, size, *_),) = self._rows.read(number, number + 1).tolist()
        return index.from_line(self._lines.read(start, start + size).tobytes())

    # Not memory maps: the kernel maps 2 MB at a time, so that after a few hundred entries all of a
    # file counts as the worker's memory.
    @functools.cached_property
    def _rows(self) -> NumberFile:
        return NumberFile(str(self.folder / _ROWS), _ROW)

    @functools.cached_property
    def _lines(self) -> NumberFile:
        return NumberFile(str(self.folder / _LINES), "uint8")

    def __reduce__(self) -> tuple[type["FileTable"], tuple[Path, int, str]]:
        """Pickles the fields, without the open files."""
        return FileTable, (self.folder, self.length, self.content)
