"""The index of a video data set: what each file holds, built once and kept in the cache.

Building scans packets, which takes milliseconds a file; decoding all of it would take core-weeks on
millions of files, so a file is decoded whole when it is first used, or here on demand. The index is
one JSON-lines file for each input path. A file whose size or time of change differs is scanned
anew, and so is one that could not be read.

Workers leave the verdicts of first use as small files beside the index, each written whole; the
next opening takes them into the index.
"""

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxtrain.data import cache, remote
from jaxtrain.data.video import decode, packets
from jaxtrain.data.video import files as video_files
from jaxtrain.data.video.decode import FrameCheck
from jaxtrain.data.video.packets import Keyframe, Scan, Span
from jaxtrain.errors import BadExample, InputError
from jaxtrain.storage import addresses
from jaxtrain.storage.atomic import expanded

_FORMAT = 2  # of the index; another number builds it anew
_SAY_EVERY_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One file of the index.

    Attributes:
        name: path from the folder or list that named the file.
        path: where it lies now, as :class:`jaxtrain.data.video.files.Found` has it.
        size: bytes of the video; -1 where there is no file.
        mtime_ns: time of the last change of the file that it lies in.
        info: what its packets tell; None where that cannot be read.
        reason: why ``info`` is None.
        verdict: what decoding all of it showed; None where that was not done yet.
        span: where in a tar; None for a file of its own.
    """

    name: str
    path: str
    size: int
    mtime_ns: int
    info: Scan | None = None
    reason: str | None = None
    verdict: FrameCheck | None = None
    span: Span | None = None

    @property
    def scanned(self) -> Scan:
        """``info`` of a file that can be read."""
        assert self.info is not None, f"{self.path} is broken: {self.reason}"
        return self.info


def folder_of(path: str, cache_root: Path) -> Path:
    """Where the cache keeps the index of what a path names; by its place, or its address.

    A newly signed address has the index of the one before it.
    """
    if addresses.is_address(path):
        whole = addresses.identity(path)
    else:
        whole = str(expanded(path).absolute())
    return cache_root / "video" / cache.digest(whole)[:16]


def build(
    found: list[video_files.Found],
    folder: Path,
    *,
    decode_all: bool,
    say: Callable[[str], None],
) -> list[Entry]:
    """The entries of all files, in the order of ``found``, from the cache where it is fresh.

    Args:
        found: the files.
        folder: of this input in the cache.
        decode_all: decode every file that was not decoded yet, to find those broken inside.
        say: takes messages for the console.
    """
    file = folder / "index.jsonl"
    old, markers = _load(file, say), _load_verdicts(folder)
    todo = sum(one.name not in old for one in found)
    if todo > 1:
        say(f"indexing {todo:,} videos")
    told = time.monotonic()
    entries = []
    workers = os.cpu_count() or 1  # FFmpeg lets go of the interpreter, so threads do
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:

        def examine(one: video_files.Found) -> Entry:
            return _examine(one, old.get(one.name), markers.get(one.name), decode_all)

        for entry in pool.map(examine, found):
            entries.append(entry)
            if time.monotonic() - told > _SAY_EVERY_S:
                told = time.monotonic()
                say(f"indexing videos: {len(entries):,} of {len(found):,}")
    if {entry.name: entry for entry in entries} != old:
        cache.write_file(file, "".join(_to_line(entry) for entry in entries))
    for name in markers:  # they are in the index now
        verdict_file(folder, name).unlink(missing_ok=True)
    return entries


def fingerprint(entries: Iterable[Entry], *more: Any) -> str:
    """Hex digest of what the files are: names, sizes and frame counts, not places and times.

    Args:
        entries: the files.
        more: JSON-able values that also decide what the examples are.
    """
    files = sorted((entry.name, entry.size, entry.scanned.frames) for entry in entries)
    return cache.digest(files, *more)


def first_use(entry: Entry, folder: Path) -> FrameCheck:
    """The verdict on a file: the index's, another worker's, or, if there is none, by decoding it.

    Raises:
        BadExample: the file is gone or is not the one that was indexed.
    """
    mtime_ns = check_unchanged(entry)
    if entry.verdict is not None and mtime_ns == entry.mtime_ns:
        return entry.verdict
    file = verdict_file(folder, entry.name)
    left = _read_verdict(file)
    if left is not None and left["size"] == entry.size and left["mtime_ns"] == mtime_ns:
        return FrameCheck(tuple(left["missing"]), left["broken"])
    verdict = decode.verify(entry.path, entry.scanned, entry.span)
    record = {"name": entry.name, "size": entry.size, "mtime_ns": mtime_ns, **verdict._asdict()}
    with contextlib.suppress(InputError):  # a full disk: the file is decoded again next time
        cache.write_file(file, json.dumps(record))
    return verdict


def check_unchanged(entry: Entry) -> int:
    """The file's time of change, in ns; raises BadExample where it is gone or its size differs."""
    span = entry.span
    try:
        status = os.stat(entry.path if span is None else span.file)
    except OSError as error:
        raise BadExample(entry.path, f"{error.strerror}, though it was indexed") from error
    if span is not None:
        if status.st_mtime_ns != entry.mtime_ns or status.st_size < span.offset + span.size:
            raise BadExample(entry.path, "changed during the run: its tar is another one now")
    elif status.st_size != entry.size:
        text = f"has {status.st_size} bytes now, {entry.size} when it was indexed"
        raise BadExample(entry.path, f"changed during the run: {text}")
    return status.st_mtime_ns


def verdict_file(folder: Path, name: str) -> Path:
    """Where the verdict on a file is left for the next opening."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).hexdigest()
    return folder / "verdicts" / digest[:2] / f"{digest[2:]}.json"


def _examine(
    found: video_files.Found, old: Entry | None, left: dict[str, Any] | None, decode_all: bool
) -> Entry:
    """The entry of one file; decodes it only if asked to."""
    try:
        status = os.stat(found.file)
    except OSError as error:
        return Entry(
            name=found.name, path=found.path, size=-1, mtime_ns=0, reason=str(error.strerror)
        )
    size = status.st_size if found.span is None else found.span.size
    mtime_ns = status.st_mtime_ns
    if (
        old is not None
        and old.info is not None
        and (old.size, old.mtime_ns) == (size, mtime_ns)
        and _offset(old.span) == _offset(found.span)
    ):
        entry = dataclasses.replace(old, path=found.path, span=found.span)
    else:
        info, reason = None, None
        try:
            info = packets.scan(found.path, found.span)
        except BadExample as bad:
            reason = bad.reason
            if found.fetched and found.span is None:
                remote.discard(found.path)
                reason += " (its copy was removed from the cache: the next start fetches it again)"
        entry = Entry(
            name=found.name,
            path=found.path,
            size=size,
            mtime_ns=mtime_ns,
            info=info,
            reason=reason,
            span=found.span,
        )
    if entry.info is None or entry.verdict is not None:
        return entry
    if left is not None and (left["size"], left["mtime_ns"]) == (entry.size, entry.mtime_ns):
        verdict = FrameCheck(tuple(left["missing"]), left["broken"])
        return dataclasses.replace(entry, verdict=verdict)
    if decode_all:
        verdict = decode.verify(found.path, entry.info, found.span)
        return dataclasses.replace(entry, verdict=verdict)
    return entry


def _offset(span: Span | None) -> int | None:
    return None if span is None else span.offset


def _to_line(entry: Entry) -> str:
    fields = {"format": _FORMAT, **dataclasses.asdict(entry)}
    fields["info"] = entry.info._asdict() if entry.info else None
    fields["verdict"] = entry.verdict._asdict() if entry.verdict else None
    fields["span"] = entry.span._asdict() if entry.span else None
    return json.dumps(fields) + "\n"


def _load(file: Path, say: Callable[[str], None]) -> dict[str, Entry]:
    """The cached entries by name; none where there is no index, or it cannot be used."""
    try:
        with open(file, encoding="utf-8") as lines:
            entries = [_from_line(line) for line in lines]
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        say(f"the index {file} is damaged or of another version: building it anew")
        return {}
    return {entry.name: entry for entry in entries}


def _from_line(line: str) -> Entry:
    fields = json.loads(line)
    if fields.pop("format") != _FORMAT:
        raise ValueError("another format")
    if fields["info"]:
        keys = tuple(Keyframe(*key) for key in fields["info"].pop("keyframes"))
        fields["info"] = Scan(**fields["info"], keyframes=keys)
    if fields["verdict"]:
        fields["verdict"] = FrameCheck(**fields["verdict"])
        fields["verdict"] = fields["verdict"]._replace(missing=tuple(fields["verdict"].missing))
    if fields["span"]:
        fields["span"] = Span(**fields["span"])
    return Entry(**fields)


def _load_verdicts(folder: Path) -> dict[str, dict[str, Any]]:
    """The verdicts that workers left, by the file's name."""
    left = map(_read_verdict, (folder / "verdicts").glob("*/*.json"))
    return {one["name"]: one for one in left if one is not None}


def _read_verdict(file: Path) -> dict[str, Any] | None:
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:  # not there, or an opening has just taken it into the index
        return None
    return record
