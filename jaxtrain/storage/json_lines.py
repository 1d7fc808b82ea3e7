"""Files of JSON objects, one per line: append, rewind, read, and read on.

JSON has no NaN or Inf: such a value of an object is ``null``, and ``"nonfinite": {NAME: "nan" |
"inf" | "-inf"}`` on the same line has the value.
"""

import contextlib
import functools
import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.errors import InputError
from jaxtrain.storage.atomic import Appended, drop_torn_line, write_whole

Record = dict[str, Any]


class JsonLines(Appended):
    """Writes records. Failed writes are kept and retried in order.

    Args:
        path: of the file. An incomplete last line, left by a killed process, is removed before the
            first write.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if path.is_file():
            self._waiting.append(lambda: drop_torn_line(path))

    def add(self, *records: Mapping[str, Any]) -> None:
        """Appends records, at once.

        Raises:
            OSError: they could not be written; they are kept and retried before the next ones.
        """
        self.append("".join(_line(record) for record in records).encode())

    def rewind(self, kept: Callable[[Record], bool], paths: tuple[Path, ...] = ()) -> None:
        """Removes records, once all earlier ones are written.

        Args:
            kept: whether a record stays; any error means that jaxtrain did not write it.
            paths: of the files; by default this one.

        Raises:
            OSError: a file could not be rewritten; this is retried before the next record.
            InputError: a file has a line that jaxtrain did not write.
        """
        for path in paths or (self.path,):
            self.change(functools.partial(_rewind, path, kept))


class Reader:
    """Reads the records of a file as it grows.

    Omits an incomplete last line, which an active or killed run may leave.

    Args:
        path: of the file, which need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Stays open: a rewind replaces the file, and a second rewind could give the inode of a
        # closed one to another file, which would be taken for it.
        self._file: io.FileIO | None = None
        self._offset = 0

    def new(self) -> Iterator[Record]:
        """Yields the records since the last call; of a file that was rewound, all.

        Raises:
            OSError: it cannot be read.
            ValueError: a line is not JSON.
        """
        if not self._path.is_file():
            return
        if self._file is None or not os.path.samestat(
            os.fstat(self._file.fileno()), self._path.stat()
        ):
            self.close()
            self._file, self._offset = io.FileIO(self._path), 0
        with open(self._file.fileno(), "rb", closefd=False) as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield parse(line)

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()


def read(path: Path) -> Iterator[Record]:
    """Yields the records of a file in order.

    Raises:
        OSError: it cannot be read.
        ValueError: a line is not JSON.
    """
    path.stat()
    with contextlib.closing(Reader(path)) as reader:
        yield from reader.new()


def parse(line: str | bytes) -> Record:
    """Returns the record of a line.

    Raises:
        ValueError: it is not JSON.
    """
    record: Record = json.loads(line)
    nonfinite = record.pop("nonfinite", {})
    return record | {name: float(text) for name, text in nonfinite.items()}


def _line(record: Mapping[str, Any]) -> str:
    nonfinite = {
        name: str(value)
        for name, value in record.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    if nonfinite:
        record = {**record, **dict.fromkeys(nonfinite), "nonfinite": nonfinite}
    return json.dumps(record) + "\n"


def _rewind(path: Path, kept: Callable[[Record], bool]) -> None:
    if not path.is_file():
        return
    drop_torn_line(path)
    try:
        with path.open(encoding="utf-8") as file:
            lines = file.readlines()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 ({error.reason} at byte {error.start}): move the file away"
        ) from error
    staying = [line for line in lines if _stays(line, kept, path)]
    if len(staying) < len(lines):
        write_whole(path, "".join(staying))


def _stays(line: str, kept: Callable[[Record], bool], path: Path) -> bool:
    try:
        return kept(parse(line))
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        raise InputError(
            f"{path} contains a line that jaxtrain did not write ({line[:60].strip()!r}): fix the "
            "line, or move the file away"
        ) from None
