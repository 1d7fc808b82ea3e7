"""Finds text files and reads documents from them.

A document is a coherent text, independent of the documents around it.

* ``.jsonl``: one document per line, a JSON object with the text in one field.
* ``.parquet``: one document per row, the text in one column.
* ``.txt`` and ``.md``: the file is one document. A long file (a book) is cut into documents of
  16,000 characters or a little more, at blank lines, else at line ends, so that memory stays
  bounded and a single file can be split into training and validation. For masked models a line
  end inside a paragraph counts as a space, as in hard-wrapped books; causal models keep it. A
  corpus with one document per line should be ``.jsonl``: a ``.txt`` file has no separators between
  its lines.

Text is UTF-8. A file with any error is bad: it is recorded with the reason, and nothing in it is
used for training.

A file may be an object in a bucket (``s3://``, ``gs://``), of which parts are read as needed, or a
file on the Hugging Face Hub, which is fetched into the Hub's cache.
"""

import codecs
import contextlib
import dataclasses
import glob
import importlib.util
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from jaxtrain import versions
from jaxtrain.data import bucket_folders, listing
from jaxtrain.data.text import hub_datasets
from jaxtrain.errors import BadExample, InputError, RunAgain, first_line
from jaxtrain.storage import addresses, atomic
from jaxtrain.storage.atomic import expanded
from jaxtrain.storage.bucket import Bucket, normalized

SUFFIXES = (".txt", ".md", ".jsonl", ".parquet")
TEXT_FIELDS = (
    "text",
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
SECTION_CHARACTERS = 16_000
LONGEST_LINE = 2**26
"""Bytes of a line of ``.jsonl``: several times the longest books. With more, it is another kind."""
_ROWS = 256  # of parquet, decoded together
_CHUNK_BYTES = 1 << 20
_OBJECT_BYTES = 1 << 23  # read together from a bucket
_LISTED = 5

_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")
_BLANK_LINE_BYTES = re.compile(rb"\n[ \t\r]*\n")
_CHARACTER_START = re.compile(rb"[^\x80-\xbf]")


@dataclasses.dataclass(frozen=True, slots=True)
class File:
    """An input file.

    Attributes:
        path: absolute path, the URL of an object in a bucket, or ``hf://datasets/NAME@COMMIT/PATH``.
        name: path relative to the given folder, with ``/``.
        size: in bytes.
        version: changes with the content: the modification time in nanoseconds, with a mark if the
            file cannot be read; an ETag; or a blob of the Hub.
    """

    path: str
    name: str
    size: int
    version: str

    @property
    def suffix(self) -> str:
        """Returns the suffix, which decides how the file is read."""
        return os.path.splitext(self.name)[1].lower()

    @contextlib.contextmanager
    def opened(self) -> Iterator[BinaryIO]:
        """Opens the file.

        Raises:
            BadExample: it is not a regular file.
            OSError: the system cannot read it.
            RunAgain, InputError: the bucket or the Hub cannot be read.
        """
        if self.path.startswith(hub_datasets.FILE):
            with open(hub_datasets.fetched(self.path), "rb") as file:
                yield file
        elif addresses.is_address(self.path):
            bucket, name = bucket_folders.object_at(self.path)
            yield cast(BinaryIO, io.BufferedReader(_Object(bucket, name, self), _OBJECT_BYTES))
        else:
            with contextlib.ExitStack() as stack:
                try:
                    file = stack.enter_context(atomic.open_regular(Path(self.path)))
                except ValueError as error:  # a pipe or a device may never end
                    raise BadExample(self.path, "not a regular file") from error
                yield file

    def changed(self) -> bool:
        """Returns whether a local file has changed since it was found.

        The bucket refuses to read an object that has changed.
        """
        local = not addresses.is_address(self.path) and not self.path.startswith(hub_datasets.FILE)
        return local and _local(Path(self.path), self.name) != self


class _Object(io.RawIOBase):
    """An object in a bucket, read in parts."""

    def __init__(self, bucket: Bucket, name: str, file: File) -> None:
        self._bucket, self._name, self._file, self._at = bucket, name, file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at}.get(whence, self._file.size)
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        stop = min(self._at + len(buffer), self._file.size)
        if stop <= self._at:
            return 0
        data = self._bucket.read(self._name, self._at, stop, self._file.version)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def is_absent(pattern: str) -> bool:
    """Returns whether ``pattern`` is neither a file nor a folder nor a glob with matches.

    URLs are not checked.
    """
    if addresses.is_address(pattern):
        return False
    given = expanded(pattern).absolute()
    exists = os.path.isfile(given) or os.path.isdir(given)
    return not exists and next(glob.iglob(str(given), recursive=True), None) is None


def absent(flag: str, pattern: str) -> str:
    """Returns the error message for a path for which :func:`is_absent` holds."""
    return (
        f"{flag} {pattern}: no such file or folder, and no file matches it; pass a text file "
        f"({', '.join(SUFFIXES)}), a folder or a glob of them, or hf:NAME for a Hugging Face "
        "dataset"
    )


def find(pattern: str, flag: str, root: Path, say: Callable[[str], None]) -> list[File]:
    """Finds the text files of a folder (recursively, without hidden files) or a glob, or one file.

    Args:
        pattern: a file, a folder, or a glob (``**`` matches nested folders); the URL of a file or a
            folder in a bucket; or a data set, see :mod:`jaxtrain.data.text.hub_datasets`.
        flag: the command-line flag that gave the pattern, for messages.
        root: the cache folder.
        say: prints a line about skipped links, and about skipped files of other kinds.

    Returns:
        The files, sorted by name.

    Raises:
        InputError: nothing matches, no file has a known suffix, or a file is parquet and the extra
            ``parquet`` is not installed.
        RunAgain: the bucket or the Hub is unavailable.
    """
    if hub_datasets.is_named(pattern):
        files = [File(*about) for about in hub_datasets.find(pattern, flag, root / "hf", say)]
    elif addresses.is_address(pattern):
        files = _listed(pattern, flag)
    else:
        files = [_local(path, name) for path, name in _walked(pattern, flag, say)]
    known = [file for file in files if file.suffix in SUFFIXES]
    if not files:
        raise InputError(
            f"{flag} {pattern} is empty (hidden files are not read): add {', '.join(SUFFIXES)} "
            "files to it, or pass another folder"
        )
    if not known:
        raise InputError(
            f"{flag} {pattern}: none of its {len(files)} files is a text file; pass "
            f"{', '.join(SUFFIXES)} files"
        )
    parquet = next((file.name for file in known if file.suffix == ".parquet"), None)
    if parquet:
        require_parquet(f"{flag} {pattern}: {parquet}")
    others = Counter(
        file.suffix or "without a suffix" for file in files if file.suffix not in SUFFIXES
    )
    if others:
        kinds = [f"{count} {ending}" for ending, count in others.most_common(_LISTED)]
        more = ", ..." if len(others) > _LISTED else ""
        say(
            f"{flag} {pattern}: skipped {others.total()} of {len(files)} files, which are of "
            f"other kinds: {', '.join(kinds)}{more}; supported: {', '.join(SUFFIXES)}"
        )
    return sorted(known, key=lambda file: file.name)


def _local(path: Path, name: str) -> File:
    """Returns a file on disk; of a broken link, size and version are 0."""
    try:
        status = path.stat()
    except OSError:
        return File(str(path), name, 0, "0")
    unreadable = "" if os.access(path, os.R_OK) else " unreadable"
    return File(str(path), name, status.st_size, f"{status.st_mtime_ns}{unreadable}")


def _listed(pattern: str, flag: str) -> list[File]:
    """Returns the objects at a URL, without hidden ones."""
    url = normalized(pattern, flag)
    bucket, folder = bucket_folders.object_at(url)
    objects = {
        name.removeprefix(f"{folder}/"): about for name, about in bucket.versions(folder).items()
    }
    if not objects and (about := bucket.about(folder)) is not None:
        url, _, name = url.rpartition("/")
        objects = {name: about}
    if not objects:
        raise InputError(f"{flag} {url}: no such file or folder in the bucket: check the URL")
    return [
        File(f"{url}/{name}", name, size, tag)
        for name, (size, tag) in objects.items()
        if not any(part.startswith(".") for part in name.split("/"))
    ]


def _walked(pattern: str, flag: str, say: Callable[[str], None]) -> Iterator[tuple[Path, str]]:
    """Yields the files that a path or a glob leads to, and their names."""
    given = expanded(pattern).absolute()
    if os.path.isfile(given):  # not pathlib, which raises if a name is too long
        base, paths = given.parent, [given]
    elif os.path.isdir(given):
        if problem := listing.in_run(given, flag):
            raise InputError(problem)
        base, paths = given, list(listing.files(given, say))
    else:
        paths = [Path(p) for p in glob.glob(str(given), recursive=True)]
        if not paths:
            raise InputError(absent(flag, pattern))
        base = Path(os.path.commonpath([p if p.is_dir() else p.parent for p in paths]))
        not_data = listing.NotData(base)
        paths = list(not_data.outside(paths))
        not_data.report(say)
    yield from ((p, p.relative_to(base).as_posix()) for p in paths if not p.is_dir())


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A file, or a part of a large one: the documents that begin in a range of its bytes.

    Attributes:
        file: the file.
        start: of the range.
        stop: end of the range.
    """

    file: File
    start: int
    stop: int

    @property
    def is_complete(self) -> bool:
        """Whether it is the complete file."""
        return self.start == 0 and self.stop == self.file.size

    def read(self, text_field: str | None, skipped: Counter[str]) -> Iterator[str]:
        """Yields the documents in order, without blank ones.

        Args:
            text_field: the field or column with the text; None is the first of :data:`TEXT_FIELDS`
                that there is. Rows without it, or with null, are skipped, unless most lack it.
            skipped: counts these rows under "rows".

        Raises:
            BadExample: the file is broken; some documents may have been yielded before.
            OSError: the system cannot read the file.
            RunAgain, InputError: the bucket or the Hub cannot be read.
        """
        with self.file.opened() as data:
            if self.file.suffix == ".jsonl":
                documents = _read_jsonl(data, self, text_field, skipped)
            elif self.file.suffix == ".parquet":
                documents = _read_parquet(data, self, text_field, skipped)
            else:
                documents = _read_text(data, self)
            yield from (document for document in documents if document.strip())


def texts(
    path: Path,
    text_field: str | None,
    count: Callable[[str], int] | None = None,
    most: int | None = None,
) -> list[str]:
    """Reads the documents of one file without cutting long ones: a plain text file is one document.

    Args:
        path: a file in a form that training reads, too.
        text_field: see :meth:`Section.read`.
        count: returns the number of tokens of a text.
        most: stop after this many tokens; None reads all.

    Raises:
        BadExample: the file is broken.
        InputError: a package for this kind of file is not installed.
        OSError: the system cannot read the file.
    """
    size = path.stat().st_size
    file = File(str(path), path.name, size, "")
    is_plain = file.suffix not in (".jsonl", ".parquet")
    if file.suffix == ".parquet":
        require_parquet(str(path))
    documents, tokens = [], 0
    with open(path, "rb") as data:
        parts = (
            decoded(data, str(path), 0, size)
            if is_plain
            else Section(file, 0, size).read(text_field, Counter())
        )
        for part in parts:
            documents.append(part)
            tokens += count(part) if count is not None and most is not None else 0
            if most is not None and tokens >= most:
                break
    return ["".join(documents)] if is_plain else documents


def require_parquet(name: str) -> None:
    """Checks that parquet files can be read.

    Raises:
        InputError: the extra ``parquet`` is not installed.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise InputError(f"{name} requires the package pyarrow: {versions.install('parquet')}")


def _read_text(data: BinaryIO, section: Section) -> Iterator[str]:
    """Yields the documents of a plain text file; keeps only a few of them in memory."""
    start, stop = (_boundary(data, at, section.file.size) for at in (section.start, section.stop))
    text = ""
    for chunk in decoded(data, section.file.path, start, stop):
        text += chunk
        begin = 0
        while len(text) - begin >= 3 * SECTION_CHARACTERS:  # so that cuts do not depend on chunks
            end = _section_end(text, begin)
            yield text[begin:end]
            begin = end
        text = text[begin:]
    while len(text) > 2 * SECTION_CHARACTERS:
        end = _section_end(text, 0)
        yield text[:end]
        text = text[end:]
    yield text


def _boundary(data: BinaryIO, offset: int, size: int) -> int:
    """Returns where the first document of a range begins: after a blank line, else a line end."""
    if offset == 0 or offset >= size:
        return offset
    data.seek(offset)
    chunk = data.read(_CHUNK_BYTES)
    if match := _BLANK_LINE_BYTES.search(chunk):
        return offset + match.end()
    if line := chunk.find(b"\n") + 1:
        return offset + line
    if len(chunk) < _CHUNK_BYTES:  # the file ends with this line
        return size
    character = _CHARACTER_START.search(chunk)
    return offset + (character.start() if character else 0)


def _section_end(text: str, start: int) -> int:
    """Returns where to cut: after a blank line, else a line end, else a space, else anywhere."""
    least, most = start + SECTION_CHARACTERS, start + 2 * SECTION_CHARACTERS
    match = _BLANK_LINE.search(text, least, most)
    if match:
        return match.end()
    for mark in "\n ":
        at = text.find(mark, least, most)
        if at >= 0:
            return at + 1
    return most


def decoded(data: BinaryIO, path: str, start: int, stop: int) -> Iterator[str]:
    """Yields the UTF-8 text of a range of a file in chunks, with ``\\n`` line ends.

    Raises:
        BadExample: a byte that is not UTF-8 (with its offset), or a NUL character.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig" if start == 0 else "utf-8")("strict")
    offset, kept = start, ""
    data.seek(start)
    while True:
        chunk = data.read(min(_CHUNK_BYTES, max(0, stop - offset)))
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            at = offset - pending + error.start
            raise BadExample(path, f"not UTF-8: {error.reason} at byte {at}") from error
        if "\0" in text:
            raise BadExample(path, "it contains a NUL character: not a text file")
        offset += len(chunk)
        text = kept + text
        kept = "\r" if chunk and text.endswith("\r") else ""  # \r\n may straddle two chunks
        text = text[: len(text) - len(kept)]
        yield text.replace("\r\n", "\n").replace("\r", "\n")
        if not chunk:
            return


def _read_jsonl(
    data: BinaryIO, section: Section, text_field: str | None, skipped: Counter[str]
) -> Iterator[str]:
    path, field = section.file.path, text_field
    has = lacks = number = 0
    first_without = "", list[str]()
    at = 0
    if section.start:  # the line that begins before the range belongs to the one before
        data.seek(section.start - 1)
        at = section.start - 1 + len(data.readline(LONGEST_LINE + 1))
    while at < section.stop and (line := data.readline(LONGEST_LINE + 1)):
        number += 1
        where = f"the line at byte {at:,}" if section.start else f"line {number}"
        if len(line) > LONGEST_LINE:
            raise BadExample(path, f"{where} has more than {LONGEST_LINE:,} bytes: split it")
        encoding = "utf-8" if at else "utf-8-sig"
        at += len(line)
        try:
            text = line.decode(encoding)
            if not text.strip():
                continue
            row = json.loads(text)
        except UnicodeDecodeError as error:
            raise BadExample(path, f"{where}: not UTF-8: {error.reason}") from error
        except (ValueError, RecursionError) as error:
            why = first_line(error)
            if isinstance(error, json.JSONDecodeError):
                why = f"{error.msg} at character {error.pos}"
            raise BadExample(
                path, f"{where}: not JSON ({why}): write one JSON object per line"
            ) from error
        if not isinstance(row, dict):
            raise BadExample(path, f"{where}: not a JSON object")
        if field is None:
            field = next((name for name in TEXT_FIELDS if name in row), None)
        value = None if field is None else row.get(field)
        lacks += field not in row
        has += field in row
        if lacks == 1 and field not in row:
            first_without = where, list(row)
        if value is None:
            skipped["rows"] += 1
            continue
        if not isinstance(value, str):
            raise BadExample(path, f"{where}: field {field!r} is not text: {type(value).__name__}")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise BadExample(path, f"{where}: an unpaired surrogate") from error
        yield value
    if lacks > has:
        where, names = first_without
        if field is None:
            raise _no_field(path, where, names)
        raise BadExample(
            path,
            f"{lacks} of {lacks + has} lines have no field {field!r}, such as {where}, which has "
            f"{_names(names)}: data.text_field names the field with the text",
        )


def _read_parquet(
    data: BinaryIO, section: Section, text_field: str | None, skipped: Counter[str]
) -> Iterator[str]:
    """Yields the documents of the row groups whose first column begins in the range."""
    import pyarrow.parquet  # here, because it is an extra

    path = section.file.path
    try:
        with pyarrow.parquet.ParquetFile(data, buffer_size=_CHUNK_BYTES) as file:
            names = file.schema_arrow.names
            field = text_field or next((name for name in TEXT_FIELDS if name in names), None)
            if field is None:
                raise _no_field(path, "columns", names)
            if field not in names:
                raise BadExample(
                    path,
                    f"no column {field!r}, only {_names(names)}: data.text_field names the column "
                    "with the text",
                )
            kind = file.schema_arrow.field(field).type
            if not _is_text(kind):
                raise BadExample(path, f"column {field!r} is not text: {kind}")
            starts = (
                file.metadata.row_group(group).column(0).data_page_offset
                for group in range(file.num_row_groups)
            )
            groups = [
                group
                for group, start in enumerate(starts)
                if section.start <= min(max(0, start), section.file.size - 1) < section.stop
            ]
            for batch in file.iter_batches(_ROWS, row_groups=groups, columns=[field]):
                column = batch.column(0)
                skipped["rows"] += column.null_count
                yield from (value for value in column.to_pylist() if value is not None)
    except (BadExample, InputError, RunAgain):
        raise
    except Exception as error:  # a dozen classes of pyarrow, and Python's own
        if isinstance(error, OSError) and error.errno is not None:  # an error of the disk
            raise
        raise BadExample(path, f"broken parquet: {first_line(error)}") from error


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
    shown = (name if len(name) <= 60 else name[:60] + "..." for name in names[:8])
    return ", ".join(map(repr, shown)) + (", ..." if len(names) > 8 else "")
