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

Files in a bucket (``s3://``, ``gs://``) are fetched one at a time, each time they are read, into a
temporary folder.
"""

import codecs
import contextlib
import dataclasses
import glob
import hashlib
import importlib.util
import json
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxtrain import versions
from jaxtrain.data import cache, worker_count, worker_pool
from jaxtrain.data.engine import Engine, Local
from jaxtrain.errors import BadExample, InputError, first_line
from jaxtrain.storage import addresses, bucket_output, disks, listing, shared_folder
from jaxtrain.storage.atomic import expanded
from jaxtrain.storage.bucket import normalized
from jaxtrain.telemetry import progress_bar

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
LONGEST_BYTES = 2**26
"""Limit for a document and for a line of ``.jsonl``: several times the longest books. Parsing a
line or tokenizing a text takes up to a hundred times its size in memory."""
_ROWS = 256  # of parquet, decoded together
_VERSION = 3  # of the scan record and of how files are read
_CHUNK_BYTES = 1 << 20
_MIN_MB_PER_PROCESS = 64.0  # for less text, starting a process costs more time than it saves
_KEEP_EVERY_S = 10.0
_LISTED = 5

_LARGEST_RECORD = 2**30  # bytes: about two million files
_LONGEST_LINE = 2**16  # bytes of it
_MOST_TEXT = 2**40  # bytes in one file

Fresh = tuple[int, str, str, int, int]
"""Number, path, name, size, and mtime_ns of a file that must be read."""
_Key = tuple[str, int, int]  # path, size, and mtime_ns

_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scanned:
    """The result of scanning one input file.

    Attributes:
        path: absolute path, or the URL of an object in a bucket.
        name: path relative to the given folder, with ``/``.
        size: file size in bytes.
        mtime_ns: modification time; for an object, a number made from its ETag.
        sha256: digest of the file's bytes.
        documents: number of documents; 0 for a bad file.
        characters: number of characters in the documents.
        text_bytes: size of the documents in bytes of UTF-8.
        reason: why the file is bad; None for a good one.
        skipped: number of rows without text.
        unread: the system could not read the file, which may be temporary.
    """

    path: str
    name: str
    size: int
    mtime_ns: int
    sha256: str
    documents: int
    characters: int
    text_bytes: int
    reason: str | None
    skipped: int = 0
    unread: bool = False

    @contextlib.contextmanager
    def opened(self) -> Iterator[Path]:
        """Yields the file on this disk.

        Raises:
            BadExample: it is an object that has changed since it was scanned.
            FileNotFoundError: it is an object that does not exist any more.
            RunAgain, InputError: it is an object that cannot be fetched.
        """
        with _on_disk(self.path) as (path, sha256):
            if sha256 not in (None, self.sha256):
                raise BadExample(self.path, "it has changed")
            yield path

    def unchanged(self) -> bool:
        """Returns whether size and modification time are the same as when it was scanned.

        Raises:
            OSError: the file or its disk is gone.
        """
        if addresses.is_address(self.path):  # compared when it was opened
            return True
        stat = Path(self.path).stat()
        return (stat.st_size, stat.st_mtime_ns) == (self.size, self.mtime_ns)


def is_absent(pattern: str) -> bool:
    """Returns whether ``pattern`` is neither a file nor a folder nor a glob with matches.

    URLs are not checked.
    """
    if addresses.is_address(pattern):
        return False
    given = expanded(pattern).absolute()
    there = os.path.isfile(given) or os.path.isdir(given)
    return not there and next(glob.iglob(str(given), recursive=True), None) is None


def absent(flag: str, pattern: str) -> str:
    """Returns the error message for a path for which :func:`is_absent` holds."""
    return (
        f"{flag} {pattern}: no such file or folder, and no file matches it; pass a text file "
        f"({', '.join(SUFFIXES)}), a folder or a glob of them, or hf:NAME for a Hugging Face "
        "dataset"
    )


@contextlib.contextmanager
def _on_disk(path: str) -> Iterator[tuple[Path, str | None]]:
    """Yields a file; of an object in a bucket, a temporary copy and its SHA-256."""
    if not addresses.is_address(path):
        yield Path(path), None
        return
    with bucket_output.fetched(path, cache.root(None)) as found:
        yield found


def find(pattern: str, flag: str, say: Callable[[str], None]) -> list[tuple[str, str, int, int]]:
    """Finds the text files of a folder (recursively, without hidden files) or a glob, or one file.

    Args:
        pattern: a file, a folder, or a glob (``**`` matches nested folders); or the URL of a file
            or a folder in a bucket.
        flag: the command-line flag that gave the pattern, for messages.
        say: prints a line about skipped links, and about skipped files of other kinds.

    Returns:
        Path or URL, relative name, size, and modification time or version of each file, sorted by
        name.

    Raises:
        InputError: nothing matches, no file has a known suffix, or a file is parquet and the extra
            ``parquet`` is not installed.
        RunAgain: the bucket is unavailable.
    """
    if addresses.is_address(pattern):
        found = _listed(pattern, flag)
    else:
        found = {
            str(path): (name, *_size_and_time(path)) for path, name in _walked(pattern, flag, say)
        }
    known = [(path, *about) for path, about in found.items() if _suffix(path) in SUFFIXES]
    if not found:
        raise InputError(
            f"{flag} {pattern} is empty (hidden files are not read): add {', '.join(SUFFIXES)} "
            "files to it, or pass another folder"
        )
    if not known:
        raise InputError(
            f"{flag} {pattern}: none of its {len(found)} files is a text file; pass "
            f"{', '.join(SUFFIXES)} files"
        )
    parquet = next((name for path, name, *_ in known if _suffix(path) == ".parquet"), None)
    if parquet:
        require_parquet(f"{flag} {pattern}: {parquet}")
    others = Counter(_suffix(path) or "without a suffix" for path in found) - Counter(
        _suffix(path) for path, *_ in known
    )
    if others:
        kinds = [f"{count} {ending}" for ending, count in others.most_common(_LISTED)]
        more = ", ..." if len(others) > _LISTED else ""
        say(
            f"{flag} {pattern}: skipped {others.total()} of {len(found)} files, which are of "
            f"other kinds: {', '.join(kinds)}{more}; supported: {', '.join(SUFFIXES)}"
        )
    return sorted(known, key=lambda item: item[1])


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


def _listed(pattern: str, flag: str) -> dict[str, tuple[str, int, int]]:
    """Returns name, size, and version of each object at a URL, without hidden ones."""
    url = normalized(pattern, flag)
    bucket, folder = bucket_output.object_at(url)
    there = {
        name.removeprefix(f"{folder}/"): about for name, about in bucket.versions(folder).items()
    }
    if not there and (file := bucket.about(folder)) is not None:
        url, _, name = url.rpartition("/")
        there = {name: file}
    if not there:
        raise InputError(f"{flag} {url}: no such file or folder in the bucket: check the URL")
    return {
        f"{url}/{name}": (name, size, int(cache.digest(tag)[:15], 16))
        for name, (size, tag) in there.items()
        if not any(part.startswith(".") for part in name.split("/"))
    }


def _walked(pattern: str, flag: str, say: Callable[[str], None]) -> Iterator[tuple[Path, str]]:
    """Yields the files that a path or a glob leads to, and their names."""
    given = expanded(pattern).absolute()
    if os.path.isfile(given):  # not pathlib, which raises if a name is too long
        base, paths = given.parent, [given]
    elif os.path.isdir(given):
        base, paths = given, list(listing.files(given, say))
    else:
        paths = [Path(p) for p in glob.glob(str(given), recursive=True)]
        if not paths:
            raise InputError(absent(flag, pattern))
        base = Path(os.path.commonpath([p if p.is_dir() else p.parent for p in paths]))
    yield from ((p, p.relative_to(base).as_posix()) for p in paths if not p.is_dir())


def scan(
    pattern: str,
    text_field: str | None,
    folder: Path,
    flag: str,
    say: Callable[[str], None],
    engine: Engine | None = None,
    processes: int | None = None,
    bucket: cache.CacheBucket | None = None,
) -> list[Scanned]:
    """Finds the files, reads each once, and records its contents or why it is bad.

    The record is kept in ``folder``, and in ``bucket`` if that folder is a copy. A file with the
    same size and modification time as before is not read again, unless the system could not read
    it. An engine reads the files on its nodes; without one, at most ``processes`` do, or one per
    core.

    Raises:
        InputError: see :func:`find`; or a node of the engine does not see a file.
        RunAgain: the engine failed.
    """
    record, result, fresh = look_up(pattern, text_field, folder, flag, say, bucket)
    if fresh:
        say(f"scanning {len(fresh)} text files, {sum(f[3] for f in fresh) / 1e6:.1f} MB")
        _scan_fresh(fresh, result, record, text_field, say, engine, processes)
    cache.upload_file(record, bucket)  # also if nothing is new: an earlier upload may have failed
    return [file for file in result if file]


def look_up(
    pattern: str,
    text_field: str | None,
    folder: Path,
    flag: str,
    say: Callable[[str], None],
    bucket: cache.CacheBucket | None = None,
) -> tuple[Path, list[Scanned | None], list[Fresh]]:
    """Finds the files, and what the record of earlier scans has about each.

    Returns:
        The path of the record; for each file, its scan, or None; and those that must be read.

    Raises:
        InputError: see :func:`find`.
    """
    where = pattern if addresses.is_address(pattern) else str(expanded(pattern).absolute())
    key = cache.digest(_VERSION, where, text_field)
    record = folder / f"scan-{key[:16]}.jsonl"
    cache.fetch_file(record, bucket, _LARGEST_RECORD, say)
    found = find(pattern, flag, say)
    known = _recorded(record, {(path, size, mtime_ns) for path, _, size, mtime_ns in found})
    result: list[Scanned | None] = []
    fresh = []
    for at, (path, name, size, mtime_ns) in enumerate(found):
        old = known.get((path, size, mtime_ns))
        result.append(dataclasses.replace(old, name=name) if old and old.name != name else old)
        if old is None:
            fresh.append((at, path, name, size, mtime_ns))
    return record, result, fresh


def _recorded(record: Path, wanted: set[_Key]) -> dict[_Key, Scanned]:
    """Reads the scans of some files from a record, which may come from another machine.

    Lines of other versions, and those that no scan writes, are ignored: their files are read again.
    """
    known: dict[_Key, Scanned] = {}
    with contextlib.suppress(OSError), open(record, "rb") as file:  # there may be no record
        while line := file.readline(_LONGEST_LINE):
            with contextlib.suppress(ValueError, TypeError, RecursionError):
                one = Scanned(**json.loads(line))
                key = one.path, one.size, one.mtime_ns
                if key in wanted and _is_sound(one):
                    known[key] = one
    return known


def _is_sound(one: Scanned) -> bool:
    """Whether a scan can be the result of :func:`scan_file`."""
    numbers = one.documents, one.characters, one.text_bytes
    if any(type(number) is not int for number in (one.size, one.mtime_ns, *numbers)):
        return False
    # The text of a parquet file may be compressed.
    most = _MOST_TEXT if _suffix(one.path) == ".parquet" else one.size
    return (
        isinstance(one.name, str)
        and isinstance(one.sha256, str)
        and re.fullmatch("([0-9a-f]{64})?", one.sha256) is not None
        and 0 <= one.documents <= one.characters <= one.text_bytes <= most
        and one.unread is False
        and (
            one.documents > 0
            if one.reason is None
            else isinstance(one.reason, str) and not one.documents
        )
    )


def _scan_fresh(
    fresh: list[Fresh],
    result: list[Scanned | None],
    record: Path,
    text_field: str | None,
    say: Callable[[str], None],
    engine: Engine | None,
    most: int | None,
) -> None:
    """Fills in ``result`` and saves it periodically, so that a kill loses little of the work."""
    total_mb = sum(size for *_, size, _ in fresh) / 1e6
    processes = min(most or worker_count.cores(), len(fresh), int(total_mb / _MIN_MB_PER_PROCESS))
    if engine is None and any(addresses.is_address(one[1]) for one in fresh):
        engine = Local(max(1, processes))  # a file may crash the reader
    done_mb, kept, pause_s = 0.0, time.monotonic(), _KEEP_EVERY_S
    with progress_bar.metered("scanning", total_mb, 0.0, say) as show:
        scanned: Iterable[tuple[Fresh, Scanned]]
        if engine is None:
            scanned = zip(
                fresh,
                worker_pool.in_order(scan_file, fresh, text_field, processes=processes),
                strict=True,
            )
        else:
            scanned = engine.as_finished(
                _scan_on_node, fresh, text_field, died=lambda one: bad(one[1:], "kills its reader")
            )
        for count, ((at, *_), one) in enumerate(scanned, 1):
            result[at] = one
            done_mb += one.size / 1e6
            show(done_mb)
            if time.monotonic() - kept > pause_s or count == len(fresh):
                began = time.monotonic()
                # In lines, because the record of a million files takes more memory than the files.
                cache.write_lines(
                    record,
                    (json.dumps(dataclasses.asdict(f)) for f in result if f and not f.unread),
                )
                kept = time.monotonic()
                # The record of a million files takes longer than that: 13 s (measured).
                pause_s = max(_KEEP_EVERY_S, 10 * (kept - began))


def bad(found: tuple[str, str, int, int], reason: str) -> Scanned:
    """Returns the scan of a file (path, name, size, and mtime_ns) that cannot be used."""
    path, name, size, mtime_ns = found
    sha256 = ""
    if not addresses.is_address(path):
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return Scanned(
        path=path,
        name=name,
        size=size,
        mtime_ns=mtime_ns,
        sha256=sha256,
        documents=0,
        characters=0,
        text_bytes=0,
        reason=reason,
    )


def _size_and_time(path: Path) -> tuple[int, int]:
    """Returns size and modification time; zeros for a broken link."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_size, stat.st_mtime_ns


def _scan_on_node(found: Fresh, text_field: str | None) -> Scanned:
    """Scans a file on a node of a cluster.

    Raises:
        InputError: the file is not there.
    """
    scanned = scan_file(found, text_field)
    if scanned.unread and not addresses.is_address(found[1]) and not os.path.exists(found[1]):
        raise shared_folder.not_seen(found[1])
    return scanned


def scan_file(found: Fresh, text_field: str | None) -> Scanned:
    """Reads a file; returns its contents in numbers, or why it is bad.

    Raises:
        DiskAway: its disk is unavailable for longer than readers wait.
    """
    return disks.when_readable(lambda: _scan_once(found, text_field))


def _scan_once(found: Fresh, text_field: str | None) -> Scanned:
    _, path, name, size, mtime_ns = found
    sha256, reason, unread = "", None, False
    documents = characters = text_bytes = 0
    skipped: Counter[str] = Counter()
    try:
        with _on_disk(path) as (there, fetched):
            if not stat.S_ISREG(there.stat().st_mode):  # a pipe or a device may never end
                raise BadExample(path, "not a regular file")
            if fetched is not None:
                sha256 = fetched
            else:
                with open(there, "rb") as file:
                    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            for document in read(there, text_field, skipped):
                documents += 1
                characters += len(document)
                text_bytes += len(document.encode())
        if documents == 0:
            reason = "no text in it"
    except BadExample as error:
        reason = error.reason
    except OSError as error:
        failure = disks.unreadable(path, error)
        if isinstance(failure, disks.DiskAway):
            raise failure from error
        reason, unread = failure.reason, True
    if reason is not None:
        documents = characters = text_bytes = 0
    return Scanned(
        path=path,
        name=name,
        size=size,
        mtime_ns=mtime_ns,
        sha256=sha256,
        documents=documents,
        characters=characters,
        text_bytes=text_bytes,
        reason=reason,
        skipped=skipped["rows"],
        unread=unread,
    )


def read(path: Path, text_field: str | None, skipped: Counter[str] | None = None) -> Iterator[str]:
    """Yields the documents of one file in order, without blank ones.

    Args:
        path: the file.
        text_field: the field or column with the text; None is the first of :data:`TEXT_FIELDS`
            that there is. Rows without it, or with null, are skipped, unless most lack it.
        skipped: counts these rows under "rows".

    Raises:
        BadExample: the file is broken; some documents may have been yielded before.
        OSError: the system cannot read the file.
    """
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        documents = _read_jsonl(path, text_field, skipped)
    elif suffix == ".parquet":
        documents = _read_parquet(path, text_field, skipped)
    else:
        documents = _read_sections(path)
    return (document for document in documents if document.strip())


def texts(
    path: Path,
    text_field: str | None,
    count: Callable[[str], int] | None = None,
    most: int | None = None,
) -> list[str]:
    """Reads the documents of one file without cutting long ones: a plain text file is one document.

    Args:
        path: a file in a form that training reads, too.
        text_field: see :func:`read`.
        count: returns the number of tokens of a text.
        most: stop after this many tokens; None reads all.

    Raises:
        BadExample: the file is broken.
        InputError: a package for this kind of file is not installed.
        OSError: the system cannot read the file.
    """
    is_plain = _suffix(str(path)) not in (".jsonl", ".parquet")
    if _suffix(str(path)) == ".parquet":
        require_parquet(str(path))
    found, tokens = [], 0
    for part in decoded(path) if is_plain else read(path, text_field):
        found.append(part)
        tokens += count(part) if count is not None and most is not None else 0
        if most is not None and tokens >= most:
            break
    return ["".join(found)] if is_plain else found


def require_parquet(name: str) -> None:
    """Checks that parquet files can be read.

    Raises:
        InputError: the extra ``parquet`` is not installed.
    """
    if importlib.util.find_spec("pyarrow") is None:
        raise InputError(f"{name} requires the package pyarrow: {versions.install('parquet')}")


def _read_sections(path: Path) -> Iterator[str]:
    """Yields the documents of a plain text file; keeps only a few sections in memory."""
    text = ""
    for chunk in decoded(path):
        text += chunk
        start = 0
        while len(text) - start >= 3 * SECTION_CHARACTERS:  # so that cuts do not depend on chunks
            end = _section_end(text, start)
            yield text[start:end]
            start = end
        text = text[start:]
    while len(text) > 2 * SECTION_CHARACTERS:
        end = _section_end(text, 0)
        yield text[:end]
        text = text[end:]
    yield text


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


def decoded(path: Path) -> Iterator[str]:
    """Yields the UTF-8 text of a file in chunks, with ``\\n`` line ends.

    Raises:
        BadExample: a byte that is not UTF-8 (with its offset), or a NUL character.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")("strict")
    offset, held = 0, ""
    with open(path, "rb") as file:
        while True:
            data = file.read(_CHUNK_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                at = offset - pending + error.start
                raise BadExample(str(path), f"not UTF-8: {error.reason} at byte {at}") from error
            if "\0" in text:
                raise BadExample(str(path), "it contains a NUL character: not a text file")
            offset += len(data)
            text = held + text
            held = "\r" if data and text.endswith("\r") else ""  # \r\n may straddle two chunks
            text = text[: len(text) - len(held)]
            yield text.replace("\r\n", "\n").replace("\r", "\n")
            if not data:
                return


def _read_jsonl(path: Path, text_field: str | None, skipped: Counter[str] | None) -> Iterator[str]:
    field = text_field
    has = lacks = 0
    first_without: tuple[int, list[str]] = (0, [])
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_BYTES + 1), b""), 1):
            if len(line) > LONGEST_BYTES:
                raise BadExample(str(path), _too_long(f"line {number}", len(line)))
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    continue
                row = json.loads(text)
            except UnicodeDecodeError as error:
                raise BadExample(str(path), f"line {number}: not UTF-8: {error.reason}") from error
            except (ValueError, RecursionError) as error:
                raise BadExample(str(path), f"line {number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise BadExample(str(path), f"line {number}: not a JSON object")
            if field is None:
                field = next((name for name in TEXT_FIELDS if name in row), None)
            value = None if field is None else row.get(field)
            lacks += field not in row
            has += field in row
            if lacks == 1 and field not in row:
                first_without = number, list(row)
            if value is None:
                if skipped is not None:
                    skipped["rows"] += 1
                continue
            if not isinstance(value, str):
                raise BadExample(
                    str(path), f"line {number}: field {field!r} is not text: {type(value).__name__}"
                )
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise BadExample(str(path), f"line {number}: an unpaired surrogate") from error
            yield value
    if lacks > has:
        number, names = first_without
        if field is None:
            raise _no_field(path, f"line {number}", names)
        raise BadExample(
            str(path),
            f"{lacks} of {lacks + has} lines have no field {field!r}, such as line "
            f"{number}, which has {_names(names)}: data.text_field names the field with the text",
        )


def _read_parquet(
    path: Path, text_field: str | None, skipped: Counter[str] | None
) -> Iterator[str]:
    import pyarrow  # here, so that worker processes, which read no parquet, do not load it
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, buffer_size=_CHUNK_BYTES) as file:
            names = file.schema_arrow.names
            field = text_field or next((name for name in TEXT_FIELDS if name in names), None)
            if field is None:
                raise _no_field(path, "columns", names)
            if field not in names:
                raise BadExample(
                    str(path),
                    f"no column {field!r}, only {_names(names)}: data.text_field names the column "
                    "with the text",
                )
            kind = file.schema_arrow.field(field).type
            if not _is_text(kind):
                raise BadExample(str(path), f"column {field!r} is not text: {kind}")
            for batch in file.iter_batches(_ROWS, columns=[field]):
                column = batch.column(0)
                if skipped is not None:
                    skipped["rows"] += column.null_count
                yield from (value for value in column.to_pylist() if value is not None)
    except BadExample:
        raise
    except Exception as error:  # a dozen classes of pyarrow, and Python's own
        if isinstance(error, OSError) and error.errno is not None:  # an error of the disk
            raise
        raise BadExample(str(path), f"broken parquet: {first_line(error)}") from error


def _too_long(what: str, size: int) -> str:
    return f"{what} has {size:,} bytes or more, and the limit is {LONGEST_BYTES:,}: split it"


def _is_text(kind: Any) -> bool:
    """Returns whether the values of an Arrow type are strings, however they are stored."""
    from pyarrow import types

    if types.is_dictionary(kind):  # pandas and polars write categories so
        return _is_text(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _no_field(path: Path, place: str, names: list[str]) -> BadExample:
    return BadExample(
        str(path),
        f"{place}: none of the usual text fields among {_names(names)}: data.text_field names the "
        "one with the text",
    )


def _names(names: list[str]) -> str:
    shown = (name if len(name) <= 60 else name[:60] + "..." for name in names[:8])
    return ", ".join(map(repr, shown)) + (", ..." if len(names) > 8 else "")
