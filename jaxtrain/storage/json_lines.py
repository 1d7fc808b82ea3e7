"""Files of JSON objects, one per line: append, rewind, read, and read on.

JSON has no NaN or Inf: such a value of an object is ``null``, and ``"nonfinite": {NAME: "nan" |
"inf" | "-inf"}`` on the same line has the value.
"""

import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jaxtrain.errors import InputError
from jaxtrain.storage.atomic import Appended, drop_torn_line

Record = dict[str, Any]

_CHUNK_BYTES = 2**16
_LINE_BYTES = 2**24  # far more than the examples of a step


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
        self._offset = 0
        self._last = b""  # the last line: another one is there after a rewind

    def new(self) -> Iterator[Record]:
        """Yields the records since the last call; of a file that was rewound, all.

        Raises:
            ValueError: a line is not JSON.
        """
        if not self._path.is_file():
            return
        with open(self._path, "rb") as file:
            file.seek(self._offset - len(self._last))
            if file.read(len(self._last)) != self._last:
                file.seek(0)
                self._offset, self._last = 0, b""
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset, self._last = self._offset + len(line), line
                yield parse(line)


def read(path: Path) -> Iterator[Record]:
    """Yields the records of a file in order.

    Raises:
        ValueError: a line is not JSON.
    """
    path.stat()
    yield from Reader(path).new()


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
    """Cuts a file after the last record that stays; reads only what follows that record.

    Records are in the order of the run, so those that stay come before those that do not.
    """
    if not path.is_file():
        return
    drop_torn_line(path)
    with path.open("rb") as file:
        size = end = file.seek(0, os.SEEK_END)
        for line in _backwards(file, size):
            if _stays(line, kept, path, end - len(line)):
                break
            end -= len(line)
    if end < size:
        os.truncate(path, end)


def _backwards(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yields the lines of a file, which ends with a line break, from the last one on."""
    rest = b""  # begins inside a line
    for start in range(size - size % _CHUNK_BYTES, -1, -_CHUNK_BYTES):
        file.seek(start)
        first, *lines = (file.read(_CHUNK_BYTES) + rest).splitlines(keepends=True) or [b""]
        yield from reversed(lines)
        rest = first
        if len(rest) > _LINE_BYTES:
            break
    if rest:
        yield rest


def _stays(line: bytes, kept: Callable[[Record], bool], path: Path, offset: int) -> bool:
    try:
        return kept(parse(line.decode()))
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 ({error.reason} at byte {offset + error.start}): move the file "
            "away"
        ) from error
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        raise InputError(
            f"{path} contains a line that jaxtrain did not write "
            f"({line[:60].decode(errors='replace').strip()!r}): fix the line, or move the file away"
        ) from None
