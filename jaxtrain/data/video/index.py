"""The index of a video data set: frames and keyframes of each file, built once and cached.

Building the index scans packets, which takes milliseconds per file. Decoding millions of files
would take core-weeks, so files are decoded completely only on demand; a clip checks the frames that
it decodes. The index is one JSON-lines file per input path. Files whose size, modification
time, or first or last bytes have changed are scanned again, and so are files that could not be
read.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from jaxtrain.data import remote
from jaxtrain.data.video import decode, packets, reader
from jaxtrain.data.video import files as video_files
from jaxtrain.data.video.decode import FrameCheck
from jaxtrain.data.video.packets import Keyframe, Scan
from jaxtrain.data.video.reader import Span
from jaxtrain.errors import BadExample
from jaxtrain.jobs import cache, limits, resumable
from jaxtrain.storage import addresses, disks, file_ends
from jaxtrain.storage.atomic import expanded
from jaxtrain.storage.bucket import is_bucket

_FORMAT = 5  # version of the index; one of another version is rebuilt
_REPORT_EVERY_S = 10.0
_KEEP_EVERY_S = 60.0
_NAME = "index.jsonl"
_BLOCK = 10_000  # files that wait for a thread: a million take 1.7 GB

Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One file of the index.

    Attributes:
        name: path relative to the folder or list.
        path: current absolute path, see :class:`jaxtrain.data.video.files.VideoFile`.
        size: size of the video in bytes; -1 if there is no file.
        mtime_ns: modification time of the video file or the tar.
        info: the scan of its packets; None if it cannot be read.
        reason: why ``info`` is None.
        verdict: the result of decoding it completely; None if that has not been done.
        span: the place in a tar; None for a separate file.
        ends: digest of both ends of the video (:mod:`jaxtrain.storage.file_ends`).
    """

    name: str
    path: str
    size: int
    mtime_ns: int
    info: Scan | None = None
    reason: str | None = None
    verdict: FrameCheck | None = None
    span: Span | None = None
    ends: str = ""

    @property
    def scanned(self) -> Scan:
        """Returns ``info``, of a file that can be read."""
        assert self.info is not None, f"{self.path} is broken: {self.reason}"
        return self.info

    @property
    def file(self) -> str:
        """Returns the file on disk: the video, or the tar."""
        return self.path if self.span is None else self.span.file


def folder_of(path: str, cache_root: Path) -> Path:
    """Returns the cache folder for the index of a path or URL.

    URLs that differ only in their signature share an index.
    """
    if addresses.is_address(path):
        identity = addresses.identity(path)
    else:
        identity = str(expanded(path).absolute())
    return cache_root / "video" / cache.digest(identity)[:16]


def of_path(
    path: str, flag: str, cache_root: Path, *, decode_all: bool, say: Callable[[str], None]
) -> list[Entry]:
    """Returns the entries of all files that a path leads to.

    Args:
        path, flag, cache_root: see :func:`jaxtrain.data.video.files.find`.
        decode_all, say: see :func:`build`.

    Raises:
        InputError: there are no files, or the clips of a folder are not completely prepared.
        RunAgain: their disk is unavailable for longer than readers wait.
    """
    if is_bucket(path):  # OUT is never a complete bucket
        inside = addresses.split(path).path.strip("/")
        folder = inside != "" and not video_files.is_file(path)
    else:
        folder = expanded(path).is_dir()
    if folder:
        resumable.check_complete(path)
    videos = disks.when_readable(lambda: video_files.find(path, flag, cache_root, say))
    entries = build(videos, folder_of(path, cache_root), decode_all=decode_all, say=say)
    for trait, meaning in reader.TRAITS.items():
        if names := [entry.name for entry in entries if entry.info and trait in entry.info.traits]:
            say(
                f"warning: {len(names):,} of {len(entries):,} videos of {flag} are {trait}, such "
                f"as {names[0]}: {meaning}"
            )
    return entries


def build(
    videos: list[video_files.VideoFile],
    folder: Path,
    *,
    decode_all: bool,
    say: Callable[[str], None],
) -> list[Entry]:
    """Returns the entries of all files, in their order; reuses unchanged cached entries.

    Args:
        videos: the files.
        folder: the input's folder in the cache.
        decode_all: whether to decode every file that is not verified yet, to find damage inside it.
        say: prints a message.

    Raises:
        DiskAway: their disk is unavailable for longer than readers wait.
    """
    file = folder / _NAME
    old = _load(file, say)
    todo = sum(video.name not in old for video in videos)
    if todo > 1:
        say(f"indexing {todo:,} videos")
    reported = kept = time.monotonic()
    pause_s = _KEEP_EVERY_S
    entries = []
    workers = limits.cores()  # threads suffice, because FFmpeg releases the GIL
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:

        def examine(video: video_files.VideoFile) -> Entry:
            return disks.when_readable(lambda: _examine(video, old.get(video.name), decode_all))

        blocks = (videos[first : first + _BLOCK] for first in range(0, len(videos), _BLOCK))
        for entry in itertools.chain.from_iterable(pool.map(examine, block) for block in blocks):
            entries.append(entry)
            if time.monotonic() - reported > _REPORT_EVERY_S:
                reported = time.monotonic()
                say(f"indexing videos: {len(entries):,} of {len(videos):,}")
            if (began := time.monotonic()) - kept > pause_s:
                # Those of a million videos take hours, which a kill would lose.
                known = old | {entry.name: entry for entry in entries}
                cache.write_lines(file, map(to_line, known.values()))
                kept = time.monotonic()
                pause_s = max(_KEEP_EVERY_S, 10 * (kept - began))
    if {entry.name: entry for entry in entries} != old:
        cache.write_lines(file, map(to_line, entries))
    return entries


def usable(
    entries: Iterable[Entry], frames: int, *, verified: bool = False
) -> tuple[list[Entry], list[BadExample]]:
    """Divides files into those with enough frames for a clip, and the others with reasons.

    Args:
        entries: the files.
        frames: frames of a clip.
        verified: whether files count as broken that were found so by decoding them completely.
    """
    good, bad = [], []
    for entry in entries:
        verdict = entry.verdict if verified else None
        count = 0 if entry.info is None else entry.info.frames
        count -= 0 if verdict is None else len(verdict.missing)
        if entry.info is None or (verdict is not None and verdict.broken):
            reason = verdict.broken if verdict is not None else entry.reason
            bad.append(BadExample(entry.path, str(reason)))
        elif count < frames:
            text = f"is too short: it has {count} frames, a clip needs {frames}"
            bad.append(BadExample(entry.path, text))
        else:
            good.append(entry)
    return good, bad


def with_frames(entry: Entry, read: Callable[[np.ndarray], Made]) -> Made:
    """Calls ``read`` with the numbers of the file's frames, ascending, and returns its result.

    An intact file may lack a frame or two, and only decoding it completely shows which. That is
    done if ``read`` fails, and ``read`` is called again with the frames that the file has, unless
    the file turns out to be broken.

    Args:
        entry: the file.
        read: decodes some of the frames.

    Raises:
        BadExample: the file is gone or has changed since it was indexed, or a frame is damaged.
    """
    check_unchanged(entry)
    numbers = np.arange(entry.scanned.frames)
    try:
        return read(numbers)
    except decode.Undecodable:
        verdict = entry.verdict or _verified(entry.path, entry.scanned, entry.span, entry.mtime_ns)
        if verdict.broken is not None:
            raise
    return read(np.setdiff1d(numbers, verdict.missing, assume_unique=True))


@functools.lru_cache(maxsize=1024)
def _verified(path: str, info: Scan, span: Span | None, mtime_ns: int) -> FrameCheck:
    """Decodes a file completely; a worker does this once for each file with damage."""
    del mtime_ns  # part of the key
    return decode.verify(path, info, span)


def check_unchanged(entry: Entry) -> None:
    """Checks that a file is there and has not changed.

    Raises:
        BadExample: it is gone, or has changed.
        DiskAway: its disk is temporarily unavailable.
    """
    span = entry.span
    try:
        status = os.stat(entry.file)
    except OSError as error:
        more = ", although it was indexed"
        raise disks.unreadable(
            entry.path, error, more, existed=True, folder=os.path.dirname(entry.file)
        ) from error
    if span is not None:
        if status.st_mtime_ns != entry.mtime_ns or status.st_size < span.offset + span.size:
            raise BadExample(entry.path, "changed during the run: its tar was modified")
    elif status.st_size != entry.size:
        text = f"has {status.st_size} bytes now, {entry.size} when it was indexed"
        raise BadExample(entry.path, f"changed during the run: {text}")


def _examine(video: video_files.VideoFile, old: Entry | None, decode_all: bool) -> Entry:
    """Returns the entry of one file; decodes the file only if ``decode_all``."""
    try:
        status = os.stat(video.file)
    except OSError as error:
        failure = disks.unreadable(video.path, error)
        if isinstance(failure, disks.DiskAway):
            raise failure from error
        return Entry(name=video.name, path=video.path, size=-1, mtime_ns=0, reason=failure.reason)
    size = status.st_size if video.span is None else video.span.size
    mtime_ns = status.st_mtime_ns
    ends = _ends(video, size)
    if old is not None and _is_same(old, video, size, mtime_ns, ends):
        entry = dataclasses.replace(old, path=video.path, span=video.span)
    else:
        info, reason = None, None
        try:
            info = packets.scan(video.path, video.span)
        except BadExample as bad:
            reason = bad.reason
            if video.fetched and video.span is None:
                remote.discard(video.path)
                reason += " (its copy was removed from the cache: the next start fetches it again)"
        entry = Entry(
            name=video.name,
            path=video.path,
            size=size,
            mtime_ns=mtime_ns,
            info=info,
            reason=reason,
            span=video.span,
            ends=ends,
        )
    if decode_all and entry.info is not None and entry.verdict is None:
        verdict = decode.verify(video.path, entry.info, video.span)
        return dataclasses.replace(entry, verdict=verdict)
    return entry


def _ends(video: video_files.VideoFile, size: int) -> str:
    """Returns the digest of both ends of a video; "" if it cannot be read, as its scan reports.

    Raises:
        DiskAway: its disk is temporarily unavailable.
    """
    try:
        return file_ends.digest(video.file, video.span.offset if video.span else 0, size)
    except OSError as error:
        failure = disks.unreadable(video.path, error)
        if isinstance(failure, disks.DiskAway):
            raise failure from error
        return ""


def _is_same(old: Entry, video: video_files.VideoFile, size: int, mtime_ns: int, ends: str) -> bool:
    """Returns whether a file that could be read is unchanged, and at the same place in its tar.

    Archives and container images restore times, so the digest of both ends is compared, too.
    """
    before = (old.size, old.mtime_ns, old.span and old.span.offset, old.ends)
    now = (size, mtime_ns, video.span and video.span.offset, ends)
    return old.info is not None and before == now


def _load(file: Path, say: Callable[[str], None]) -> dict[str, Entry]:
    """Returns the cached entries by name; none if there is no usable index."""
    try:
        with open(file, "rb") as lines:
            entries = [from_line(line) for line in lines]
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, IndexError):
        say(f"the index {file} is damaged or has another version: rebuilding it")
        return {}
    return {entry.name: entry for entry in entries}


def to_line(entry: Entry) -> str:
    """Returns an entry as a line of JSON, a list of its fields, without the line break."""
    place = (entry.name, entry.path, entry.size, entry.mtime_ns)
    rest = (entry.info, entry.reason, entry.verdict, entry.span, entry.ends)
    return json.dumps([_FORMAT, *place, *rest])


def from_line(line: bytes) -> Entry:
    """Returns the entry of a line.

    Raises:
        ValueError, TypeError, IndexError: it is not a line of :func:`to_line` in this version.
    """
    version, name, path, size, mtime_ns, info, reason, verdict, span, ends = json.loads(line)
    if version != _FORMAT:
        raise ValueError("another version")
    return Entry(
        name=name,
        path=path,
        size=size,
        mtime_ns=mtime_ns,
        info=info and _scan_of(info),
        reason=reason,
        verdict=verdict and FrameCheck(tuple(verdict[0]), verdict[1]),
        span=span and Span(*span),
        ends=ends,
    )


def _scan_of(values: list[Any]) -> Scan:
    """Returns a scan from its JSON, which has lists for tuples."""
    scan = Scan._make(values)
    keyframes = tuple(Keyframe(*key) for key in scan.keyframes)
    return scan._replace(traits=tuple(scan.traits), keyframes=keyframes)
