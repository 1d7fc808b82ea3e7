"""Reads the rows of ``.jsonl`` and ``.parquet`` files, and finds the field that has the text.

The field is chosen once for a source, from rows of many of its files: the usual name that most rows
have, in any case of letters. The rule is the same for both kinds of files.
"""

import codecs
import dataclasses
import importlib.util
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

from jaxtrain import versions
from jaxtrain.data.text import kinds
from jaxtrain.errors import BadExample, InputError, RunAgain, first_line
from jaxtrain.storage import disks

if TYPE_CHECKING:
    from jaxtrain.data.text.documents import File

MAIN_FIELD = "text"
"""Has the text if most rows have it, whatever else they have."""
TEXT_FIELDS = (
    MAIN_FIELD,
    "content",
    "body",
    "document",
    "article",
    "passage",
    "sentence",
    "review",
    "raw_content",
    "context",
)
LONGEST_LINE = 2**26
"""Bytes of a line of ``.jsonl``: several times the longest books."""
_ROWS = 256  # of parquet, decoded together
_CHUNK_BYTES = 1 << 20
# What a field is chosen from: rows at some places of some files. A file of the Hub is fetched
# completely.
_LOCAL_FILES, _BUCKET_FILES, _HUB_FILES = 64, 16, 2
_PLACES, _ROWS_THERE = 8, 64
_ROWS_FIRST = 2000  # of a small file, or of one that can only be read from its beginning
_LARGE_BYTES = 1 << 20  # of a file that is read at several places
_FILE_BYTES = 1 << 22  # read of a file, and so much more that there is a row at each place
_AT_ONCE = 16  # files that are read together


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """How to read rows: the lines of a ``.jsonl``, or those of a ``.parquet``.

    Attributes:
        field: the field or column with the text, in any case of letters; None if no row has a usual
            one. Rows without it, or with null, are skipped, unless most of a file lack it.
        max_bad_share: largest fraction of rows that cannot be used; they are skipped, too.
    """

    field: str | None = None
    max_bad_share: float = 0.0


@dataclasses.dataclass(slots=True)
class Skipped:
    """The rows of a section that are not read.

    Attributes:
        rows: number of those without text.
        bad, first: number of those that cannot be used; place and reason of the first.
    """

    rows: int = 0
    bad: int = 0
    first: str = ""


def require_parquet(name: str) -> None:
    """Checks that parquet files can be read."""
    if importlib.util.find_spec("pyarrow") is None:
        raise InputError(f"{name} requires the package pyarrow: {versions.install('parquet')}")


def _trouble(value: Any, field: str | None) -> str:
    """Returns why a value is not a text; "" if it is one."""
    if not isinstance(value, str):
        return f"field {field!r} is not text: {type(value).__name__}"
    if "\0" in value:
        return f"field {field!r} has a NUL character: not text"
    try:
        value.encode()
    except UnicodeEncodeError:
        return "an unpaired surrogate"
    return ""


class _BadLine(Exception):
    """A line that is not a JSON object."""


class _Rows:
    """Counts the rows of a section, and decides whether too many are bad."""

    def __init__(self, path: str, settings: Rows, skipped: Skipped, things: str) -> None:
        self._path, self._share = path, settings.max_bad_share
        self._skipped, self._things = skipped, things
        self._total = self._bad = 0
        self._first = ""

    def text(self, location: str, value: Any, field: str | None) -> str | None:
        """Counts a row; returns its text, or None if it has none or is bad."""
        if value is not None and (reason := _trouble(value, field)):
            self.bad(location, reason)
            return None
        self._total += 1
        self._skipped.rows += value is None
        return cast(str | None, value)

    def bad(self, location: str, reason: str) -> None:
        """Counts a row that cannot be used."""
        self._first = self._first or f"{location}: {reason}"
        self._bad += 1
        self._total += 1

    def finish(self) -> None:
        """Reports the skipped rows; raises BadExample if there are too many."""
        if self._bad > self._share * self._total:
            raise BadExample(
                self._path,
                f"{self._bad:,} of {self._total:,} {self._things} cannot be used, more than "
                f"data.max_bad_share={self._share:g} allows; the first is {self._first}",
            )
        self._skipped.bad += self._bad
        self._skipped.first = self._skipped.first or self._first


def _lines(data: BinaryIO, start: int, stop: int) -> Iterator[tuple[str, bytes]]:
    """Yields the lines that begin in a range, each after its place; a long one is cut."""
    number = at = 0
    if start:  # the line that begins before the range belongs to the one before
        data.seek(start - 1)
        at = start - 1 + _skip_line(data)
    while at < stop and (line := data.readline(LONGEST_LINE + 1)):
        number += 1
        location = f"the line at byte {at:,}" if start else f"line {number}"
        first = at == 0
        at += len(line)
        if not line.endswith(b"\n"):
            at += _skip_line(data)
        yield location, line.removeprefix(codecs.BOM_UTF8) if first else line


def _skip_line(data: BinaryIO) -> int:
    """Reads to the end of a line; returns how many bytes."""
    size = 0
    while chunk := data.readline(_CHUNK_BYTES):
        size += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return size


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Returns the object of a line; None for a blank one."""
    if len(line) > LONGEST_LINE:
        raise _BadLine(f"more than {LONGEST_LINE:,} bytes: split it")
    try:
        text = line.decode()
        if not text.strip():
            return None
        row = json.loads(text)
    except UnicodeDecodeError as error:
        raise _BadLine(f"not UTF-8: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        why = first_line(error)
        if isinstance(error, json.JSONDecodeError):
            why = f"{error.msg} at character {error.pos}"
        raise _BadLine(f"not JSON ({why}): write one JSON object per line") from error
    if not isinstance(row, dict):
        raise _BadLine("not a JSON object")
    return row


def read_jsonl(
    data: BinaryIO, path: str, start: int, stop: int, settings: Rows, skipped: Skipped
) -> Iterator[str]:
    """Yields the texts of the lines that begin in a range.

    Args:
        data: the file, at its start.
        start, stop: the range in bytes; a stream is read from 0.

    Raises:
        BadExample: too many lines cannot be used, or most lack the field.
    """
    field = settings.field
    rows = _Rows(path, settings, skipped, "lines")
    has = lacks = 0
    first_without = "", list[str]()
    for location, line in _lines(data, start, stop):
        try:
            row = _parsed(line)
        except _BadLine as error:
            rows.bad(location, str(error))
            continue
        if row is None:
            continue
        key = None if field is None else _spelled(field, row)
        lacks += key is None
        has += key is not None
        if lacks == 1 and key is None:
            first_without = location, list(row)
        text = rows.text(location, None if key is None else row[key], key)
        if text is not None:
            yield text
    rows.finish()
    if lacks > has:
        location, names = first_without
        if field is None:
            raise _no_field(path, location, names)
        raise BadExample(
            path,
            f"{lacks} of {lacks + has} lines have no field {field!r}, such as {location}, which "
            f"has {_names(names)}: data.text_field names the field with the text",
        )


def _spelled(field: str, names: Collection[str]) -> str | None:
    """Returns a field as some names spell it; None if it is not among them."""
    if field in names:
        return field
    lower = field.lower()
    return next((name for name in names if name.lower() == lower), None)


def read_parquet(
    data: BinaryIO, path: str, start: int, stop: int, settings: Rows, skipped: Skipped
) -> Iterator[str]:
    """Yields the texts of the row groups whose first column begins in the range.

    Raises:
        BadExample: the file is broken, lacks the column, or too many rows cannot be used.
    """
    import pyarrow.parquet  # here, because it is an extra

    rows = _Rows(path, settings, skipped, "rows")
    number, origin = 0, f" from byte {start:,}" if start else ""
    try:
        with pyarrow.parquet.ParquetFile(data, buffer_size=_CHUNK_BYTES) as file:
            names = file.schema_arrow.names
            if settings.field is None:
                raise _no_field(path, "columns", names)
            field = _spelled(settings.field, names)
            if field is None:
                raise BadExample(
                    path,
                    f"no column {settings.field!r}, only {_names(names)}: data.text_field names "
                    "the column with the text",
                )
            kind = file.schema_arrow.field(field).type
            if not _is_text(kind):
                raise BadExample(path, f"column {field!r} is not text: {kind}")
            starts = (
                file.metadata.row_group(group).column(0).data_page_offset
                for group in range(file.num_row_groups)
            )
            groups = [group for group, at in enumerate(starts) if start <= max(0, at) < stop]
            for batch in file.iter_batches(_ROWS, row_groups=groups, columns=[field]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    text = rows.text(f"row {number:,}{origin}", value, field)
                    if text is not None:
                        yield text
    except (BadExample, InputError, RunAgain):
        raise
    except Exception as error:  # a dozen classes of pyarrow, and Python's own
        if isinstance(error, OSError) and error.errno is not None:  # an error of the disk
            raise
        raise BadExample(path, f"broken parquet: {first_line(error)}") from error
    rows.finish()


def _is_text(kind: Any) -> bool:
    """Returns whether the values of an Arrow type are strings, however they are stored."""
    from pyarrow import types

    if types.is_dictionary(kind):  # pandas and polars write categories so
        return _is_text(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _no_field(path: str, place: str, names: list[str]) -> BadExample:
    return BadExample(
        path,
        f"{place}: none of the usual text fields among {_names(names)}: data.text_field names the "
        "one with the text",
    )


def _names(names: list[str]) -> str:
    shortened = (name if len(name) <= 60 else name[:60] + "..." for name in names[:8])
    return ", ".join(map(repr, shortened)) + (", ..." if len(names) > 8 else "")


class Field(NamedTuple):
    """The field with the text.

    Attributes:
        name: of the field, in lower case.
        has: number of rows that have it.
        of: number of rows that were read to choose it.
    """

    name: str
    has: int
    of: int


def choose(files: Sequence["File"], name: str, flag: str) -> Field | None:
    """Chooses the field that has the text.

    It is the earliest of the usual names (:data:`TEXT_FIELDS`) that most rows have, of those rows
    that have any, weighted by the size of the files.

    Args:
        files: the files of a source; those without rows do not matter.

    Returns:
        The field; None if no row has a usual one.

    Raises:
        InputError: several fields may have it, or pyarrow is required but not installed.
        RunAgain: the disk, the bucket or the Hub is unavailable.
    """
    with_rows = [file for file in files if not kinds.is_plain(file.name)]
    if not with_rows:
        return None
    max_files = _LOCAL_FILES if with_rows[0].is_local else _BUCKET_FILES
    max_files = _HUB_FILES if with_rows[0].is_on_hub else max_files
    chosen = with_rows[:: -(-len(with_rows) // max_files)]
    weights, double = defaultdict[str, float](float), defaultdict[str, float](float)
    rows, looked, total = Counter[str](), 0, 0.0
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        of_files = list(pool.map(_fields_of, chosen))
    for file, field_lists in zip(chosen, of_files, strict=True):
        looked += len(field_lists)
        fields = [of_row for of_row in field_lists if of_row]
        weight = file.size / max(1, len(fields))
        for of_row in fields:
            lower = Counter(field.lower() for field in of_row)
            rows.update([*lower])
            total += weight
            for field, spellings in lower.items():
                weights[field] += weight
                double[field] += weight * (spellings > 1)
    half = total / 2
    usual = [field for field in TEXT_FIELDS if weights[field] > half]
    if usual and (usual[0] == MAIN_FIELD or len(usual) == 1) and double[usual[0]] <= half:
        return Field(usual[0], rows[usual[0]], looked)
    several = usual or [field for field in TEXT_FIELDS if weights[field]]
    if not several:
        return None
    listed = ", ".join(f"{field} ({rows[field]:,})" for field in several)
    raise InputError(
        f"{name}: several fields may have the text: of {looked:,} rows that were read, {listed}: "
        f"set {flag} to the one to use"
    )


def _fields_of(file: "File") -> list[list[str]]:
    """Returns the usual fields, as spelled, of rows in several places of a file.

    They have text. Only if none of a row has, others count, so that reading finds what is in them.
    """
    try:
        with file.content(buffer_bytes=_FILE_BYTES // _PLACES) as data:
            is_table = kinds.suffix(file.name) == kinds.PARQUET
            return list((_parquet_fields if is_table else _line_fields)(data, file))
    except BadExample:
        return []  # reading reports it
    except OSError as error:
        trouble = disks.unreadable(file.path, error)
        if isinstance(trouble, disks.DiskAway):
            raise trouble from error
        return []


def _line_fields(data: BinaryIO, file: "File") -> Iterator[list[str]]:
    places, max_rows = 1, _ROWS_FIRST
    if not kinds.packing(file.name) and file.size > _LARGE_BYTES:
        places, max_rows = _PLACES, _ROWS_THERE
    for place in range(places):
        for line in _lines_at(data, file.size * place // places, _FILE_BYTES // places)[:max_rows]:
            try:
                row = _parsed(line)
            except _BadLine:
                continue
            if row is not None:
                yield _usual(row)


def _lines_at(data: BinaryIO, start: int, size: int) -> list[bytes]:
    """Returns the complete lines that begin in a part of a file, or the next one if none does."""
    data.seek(max(0, start - 1))  # what ends there belongs to the line before
    block = b""
    while len(block) <= LONGEST_LINE:
        more = data.read(max(size, len(block)))
        at_end = len(more) < max(size, len(block))
        block += more
        first, *lines = block.split(b"\n")
        if not start:
            lines = [first.removeprefix(codecs.BOM_UTF8), *lines]
        if at_end or len(lines) > 1:
            return lines if at_end else lines[:-1]
    return []


def _parquet_fields(data: BinaryIO, file: "File") -> Iterator[list[str]]:
    import pyarrow.parquet

    try:
        buffer_bytes = _FILE_BYTES // _PLACES
        with pyarrow.parquet.ParquetFile(data, buffer_size=buffer_bytes, pre_buffer=False) as table:
            names = [name for name in table.schema_arrow.names if name.lower() in TEXT_FIELDS]
            groups = range(0, table.num_row_groups, max(1, table.num_row_groups // _PLACES))
            for group in groups if names else ():
                # Of all columns: the description of a single one, if damaged, ends the process.
                about = table.metadata.row_group(group)
                size = about.total_byte_size
                fit = _FILE_BYTES // len(groups) * about.num_rows // max(1, size)
                max_rows = max(1, min(fit, -(-_ROWS_FIRST // len(groups))))
                batches = table.iter_batches(max_rows, row_groups=[group], columns=names)
                for batch in itertools.islice(batches, 1):
                    yield from map(_usual, batch.to_pylist())
    except (InputError, RunAgain):
        raise
    except Exception as error:  # see read_parquet
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise BadExample(file.path, first_line(error)) from error


def _usual(row: dict[str, Any]) -> list[str]:
    names = [name for name in row if name.lower() in TEXT_FIELDS and row[name] not in (None, "")]
    return [name for name in names if isinstance(row[name], str)] or names
