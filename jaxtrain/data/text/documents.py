"""Finds text files and reads documents from them.

A document is a coherent text, independent of the documents around it.

* ``.jsonl``: one document per line, a JSON object with the text in one field. Lines that cannot be
  read are skipped and counted, up to ``data.max_bad_share`` of them.
* ``.parquet``: one document per row, the text in one column.
* ``.txt`` and ``.md``: the file is one document. A long file (a book) is cut into documents of
  16,000 characters or a little more, at blank lines, else at line ends, so that memory stays
  bounded and a single file can be split into training and validation. For masked models a line
  end inside a paragraph counts as a space, as in hard-wrapped books; causal models keep it. A
  corpus with one document per line should be ``.jsonl``: a ``.txt`` file has no separators between
  its lines.

``.txt`` and ``.jsonl`` may be compressed (:data:`jaxtrain.data.text.kinds.COMPRESSED`), and a
``.json`` that is compressed is read as ``.jsonl``. Such a file is one stream: however large, it is
not divided into sections.

Text is UTF-8. A file with any other error is bad: it is recorded with the reason, and nothing in it
is used for training. So is a file that only stands for another one
(:mod:`jaxtrain.storage.stand_ins`). Files that describe a data set, such as its README, are not
text beside files of other kinds.

A file may be an object in a bucket (``s3://``, ``gs://``), of which parts are read as needed, or a
file on the Hugging Face Hub, which is fetched into the Hub's cache.
"""

import codecs
import contextlib
import dataclasses
import glob
import io
import itertools
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, cast

from jaxtrain.data import listing, remote, splits
from jaxtrain.data.text import hub_datasets, kinds, rows
from jaxtrain.data.text.rows import Rows, Skipped
from jaxtrain.errors import BadExample, InputError
from jaxtrain.storage import addresses, atomic, bucket_folders, file_ends, stand_ins
from jaxtrain.storage.atomic import expanded
from jaxtrain.storage.bucket import Bucket, normalized

SECTION_CHARACTERS = 16_000
_CHUNK_BYTES = 1 << 20
_STRICT = Rows()
_UNREADABLE = "unreadable"
_AT_ONCE = 16  # files that are looked at together
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
        version: changes with the content: the modification time in nanoseconds and a digest of both
            ends, or a mark if the file cannot be read; an ETag; or a blob of the Hub.
    """

    path: str
    name: str
    size: int
    version: str

    @property
    def suffix(self) -> str:
        """Returns the suffix, which decides how the file is read."""
        return kinds.suffix(self.name)

    @contextlib.contextmanager
    def content(self, start: int = 0, buffer_bytes: int = _OBJECT_BYTES) -> Iterator[BinaryIO]:
        """Opens the file, unpacked.

        Args:
            start: the first byte that is needed. What the file is instead of its content is checked
                only with its beginning.
            buffer_bytes: read together from a bucket.

        Raises:
            BadExample: as :meth:`opened`, or it only stands for another file, or cannot be
                unpacked.
        """
        packing = kinds.packing(self.name)
        with self.opened(buffer_bytes) as raw:
            if start:
                yield raw
                return
            head = self._check(raw)
            if not packing:
                if by_content := kinds.packing_of(head):
                    raise BadExample(self.path, f"compressed: add {by_content} to its name")
                yield raw
                return
            with kinds.unpacked(raw, packing, self.path, _CHUNK_BYTES) as data:
                self._check(data)
                yield data

    def _check(self, data: BinaryIO) -> bytes:
        head = cast(io.BufferedReader, data).peek(stand_ins.HEAD_BYTES)[: stand_ins.HEAD_BYTES]
        if reason := stand_ins.reason(head):
            raise BadExample(self.path, reason)
        return head

    @contextlib.contextmanager
    def opened(self, buffer_bytes: int = _OBJECT_BYTES) -> Iterator[BinaryIO]:
        """Opens the file.

        Raises:
            BadExample: it is not a regular file.
            RunAgain, InputError: the bucket or the Hub cannot be read.
        """
        if self.is_on_hub:
            with open(hub_datasets.fetched(self.path), "rb") as file:
                yield file
        elif addresses.is_address(self.path):
            bucket, name = bucket_folders.object_at(self.path)
            yield cast(BinaryIO, io.BufferedReader(_Object(bucket, name, self), buffer_bytes))
        else:
            with contextlib.ExitStack() as stack:
                try:
                    file = stack.enter_context(atomic.open_regular(Path(self.path)))
                except ValueError as error:  # a pipe or a device may never end
                    raise BadExample(self.path, "not a regular file") from error
                yield file

    @property
    def is_local(self) -> bool:
        """Whether it is on a disk of this machine, not in a bucket or on the Hub."""
        return not self.is_on_hub and not addresses.is_address(self.path)

    @property
    def is_on_hub(self) -> bool:
        """Whether it is fetched from the Hub."""
        return self.path.startswith(hub_datasets.FILE)

    def changed(self) -> bool:
        """Returns whether a local file has changed since it was found.

        The bucket refuses to read an object that has changed.
        """
        return self.is_local and _local(Path(self.path), self.name) != self


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
    path = expanded(pattern).absolute()
    exists = os.path.isfile(path) or os.path.isdir(path)
    return not exists and next(glob.iglob(str(path), recursive=True), None) is None


def absent(flag: str, pattern: str) -> str:
    """Returns the error message for a path for which :func:`is_absent` holds."""
    return (
        f"{flag} {pattern}: no such file or folder, and no file matches it; pass a text file "
        f"({kinds.SUPPORTED}), a folder or a glob of them, or hf:NAME for a Hugging Face dataset"
    )


def find(pattern: str, flag: str, root: Path, say: Callable[[str], None]) -> list[File]:
    """Finds the text files of a folder (recursively, without hidden files) or a glob, or one file.

    Args:
        pattern: a file, a folder, or a glob (``**`` matches nested folders); the URL of a file or a
            folder in a bucket; or a data set, see :mod:`jaxtrain.data.text.hub_datasets`.

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
        with ThreadPoolExecutor(_AT_ONCE) as pool:  # a network file system takes milliseconds
            files = list(pool.map(lambda walked: _local(*walked), _walked(pattern, flag, say)))
    if not files:
        raise InputError(
            f"{flag} {pattern} is empty (hidden files are not read): add files to it "
            f"({kinds.SUPPORTED}), or pass another folder"
        )
    known, about = _divided(files)
    name = f"{flag} {pattern}"
    if not known:
        more = f" ({splits.listed(about)} describes the others)" if about else ""
        raise InputError(
            f"{name}: none of its {len(files)} files is a text file{more}; pass {kinds.SUPPORTED}"
        )
    parquet = next((file.name for file in known if file.suffix == kinds.PARQUET), None)
    if parquet:
        rows.require_parquet(f"{name}: {parquet}")
    if about:
        say(
            f"{name}: skipped {len(about)} of {len(files)} files, which describe the others: "
            f"{splits.listed(sorted(about))}"
        )
    other_kinds = Counter(
        file.suffix or "without a suffix" for file in files if file.suffix not in kinds.SUFFIXES
    )
    _name_twins(name, known, say)
    if other_kinds:
        counts = [f"{count} {ending}" for ending, count in other_kinds.most_common(_LISTED)]
        more = ", ..." if len(other_kinds) > _LISTED else ""
        say(
            f"{name}: skipped {other_kinds.total()} of {len(files)} files, which are of other "
            f"kinds: {', '.join(counts)}{more}; supported: {kinds.SUPPORTED}"
        )
    return sorted(known, key=lambda file: file.name)


def is_cut(file: File) -> bool:
    """Returns whether a file of plain text is most likely cut into several documents."""
    return kinds.is_plain(file.name) and file.size > 2 * SECTION_CHARACTERS


def _name_twins(name: str, files: Sequence[File], say: Callable[[str], None]) -> None:
    """Prints which files are most likely equal to others.

    A document is never on two sides of a split. Of one that validates, the copies that would train
    are not used; others are used twice.
    """
    first, twins = dict[tuple[int, str], str](), dict[str, str]()
    for file in sorted(files, key=lambda file: file.name):
        content = file.version.rpartition(" ")[2]
        if file.size and content and content != _UNREADABLE:
            other = first.setdefault((file.size, content), file.name)
            if other != file.name:
                twins[file.name] = other
    if twins:
        listed = splits.listed([f"{copy} = {other}" for copy, other in twins.items()])
        say(
            f"warning: {name}: {len(twins):,} of {len(files):,} files have the size and both ends "
            f"of another, so they are most likely copies: {listed}; remove them, or their text is "
            "used twice where it is on one side"
        )


def _divided(files: Sequence[File]) -> tuple[list[File], list[str]]:
    """Returns the text files, and the names of those that only describe the others.

    The latter are text if all other text files are of their kind, such as a folder of ``.md``.
    """
    about, data = list[File](), list[File]()
    for file in files:
        (about if kinds.describes(file.name) else data).append(file)
    known = [file for file in data if file.suffix in kinds.SUFFIXES]
    of_kinds = {file.suffix for file in known or data}
    text = [file for file in about if not of_kinds - {file.suffix}]
    return known + text, [file.name for file in about if of_kinds - {file.suffix}]


def _local(path: Path, name: str) -> File:
    """Returns a file on disk; of a broken link, size and version are 0."""
    try:
        status = path.stat()
    except OSError:
        return File(str(path), name, 0, "0")
    content = _UNREADABLE
    if os.access(path, os.R_OK) and stat.S_ISREG(status.st_mode):
        with contextlib.suppress(OSError):
            content = file_ends.digest(path)
    return File(str(path), name, status.st_size, f"{status.st_mtime_ns} {content}")


def _listed(pattern: str, flag: str) -> list[File]:
    """Returns the objects at a URL, without hidden ones."""
    url = normalized(pattern, flag)
    objects, top = remote.list_folder(url, flag), url
    if not objects and (about := remote.version_of(url, flag)) is not None:
        objects, top = {url: about}, url.rpartition("/")[0]
    if not objects:
        raise InputError(f"{flag} {url}: no such file or folder in the bucket: check the URL")
    return [
        File(path, path.removeprefix(f"{top}/"), size, tag) for path, (size, tag) in objects.items()
    ]


def _walked(pattern: str, flag: str, say: Callable[[str], None]) -> Iterator[tuple[Path, str]]:
    """Yields the files that a path or a glob leads to, and their names."""
    path = expanded(pattern).absolute()
    if os.path.isfile(path):  # not pathlib, which raises if a name is too long
        base, paths = path.parent, [path]
    elif os.path.isdir(path):
        if problem := listing.in_run(path, flag):
            raise InputError(problem)
        base, paths = path, list(listing.files(path, say))
    else:
        paths = [Path(p) for p in glob.glob(str(path), recursive=True)]
        if not paths:
            raise InputError(absent(flag, pattern))
        base = _folder_before_wildcard(path)
        not_data = listing.NotData(base)
        paths = list(not_data.outside(paths))
        not_data.report(say)
    yield from ((p, p.relative_to(base).as_posix()) for p in paths if not p.is_dir())


def _folder_before_wildcard(pattern: Path) -> Path:
    """Returns the folder before the first wildcard of a pattern, to which names are relative.

    So the name of a file does not depend on which others match.
    """
    folders = itertools.takewhile(lambda name: not glob.has_magic(name), pattern.parts[:-1])
    return Path(*folders)


@dataclasses.dataclass(frozen=True, slots=True)
class FileRange:
    """A file, or a part of a large one: the documents that begin in a range of its bytes."""

    file: File
    start: int
    stop: int
    rows: Rows = _STRICT

    @property
    def is_complete(self) -> bool:
        """Whether it is the complete file."""
        return self.start == 0 and self.stop == self.file.size

    def key(self) -> list[Any]:
        """Returns JSON values that change with the documents."""
        file = self.file
        row_settings = (
            [] if kinds.is_plain(file.name) else [self.rows.field, self.rows.max_bad_share]
        )
        return [file.name, file.size, file.version, self.start, self.stop, *row_settings]

    def read(self, skipped: Skipped) -> Iterator[str]:
        """Yields the documents in order, without blank ones.

        Raises:
            BadExample: the file is broken; some documents may have been yielded before.
        """
        with self.file.content(self.start) as data:
            if kinds.is_plain(self.file.name):
                documents = _read_text(data, self)
            else:
                is_table = self.file.suffix == kinds.PARQUET
                read = rows.read_parquet if is_table else rows.read_jsonl
                # Of a table without rows, the first column is at the end.
                ends = self.stop == self.file.size
                stop = sys.maxsize if ends else self.stop
                documents = read(data, self.file.path, self.start, stop, self.rows, skipped)
            yield from (document for document in documents if document.strip())


def texts(
    path: Path,
    text_field: str | None,
    count: Callable[[str], int] | None = None,
    max_tokens: int | None = None,
) -> list[str]:
    """Reads the documents of one file without cutting long ones: a plain text file is one document.

    Args:
        text_field: the field or column with the text; None is a usual one.
        count: returns the number of tokens of a text.
        max_tokens: stop after this many; None reads all.

    Raises:
        InputError: a package for this kind of file is not installed.
    """
    size = path.stat().st_size
    file = File(str(path), path.name, size, "")
    is_plain = kinds.is_plain(file.name)
    if file.suffix == kinds.PARQUET:
        rows.require_parquet(str(path))
    if text_field is None and (field := rows.choose([file], str(path), "--text-field")):
        text_field = field.name
    documents, tokens = [], 0
    with file.content() as data:
        contents = (
            decoded(data, str(path), 0, sys.maxsize)
            if is_plain
            else FileRange(file, 0, size, Rows(text_field)).read(Skipped())
        )
        for content in contents:
            documents.append(content)
            tokens += count(content) if count is not None and max_tokens is not None else 0
            if max_tokens is not None and tokens >= max_tokens:
                break
    return ["".join(documents)] if is_plain else documents


def _read_text(data: BinaryIO, file_range: FileRange) -> Iterator[str]:
    """Yields the documents of a plain text file; keeps only a few of them in memory."""
    start, stop = 0, sys.maxsize
    if not kinds.packing(file_range.file.name):
        size = file_range.file.size
        start, stop = (
            _boundary(data, file_range.start, size),
            _boundary(data, file_range.stop, size),
        )
    text = ""
    for chunk in decoded(data, file_range.file.path, start, stop):
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
    earliest, latest = start + SECTION_CHARACTERS, start + 2 * SECTION_CHARACTERS
    match = _BLANK_LINE.search(text, earliest, latest)
    if match:
        return match.end()
    for mark in "\n ":
        at = text.find(mark, earliest, latest)
        if at >= 0:
            return at + 1
    return latest


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
