"""The members of uncompressed tar files, and where they lie in it: nothing is unpacked.

Listing reads a header for each member, so what was found is kept in the cache until the tar
changes.
"""

import io
import itertools
import json
import math
import os
import re
import stat
import tarfile
from collections.abc import Iterator
from pathlib import Path

from jaxtrain.data import cache
from jaxtrain.data.video.packets import Span
from jaxtrain.errors import InputError

SUFFIX = ".tar"
_PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
# That the patterns of a list stand for together; each is looked for and listed by itself.
_MOST_NAMES, _MOST_CHARACTERS = 100_000, 2**25
_MOST_RANGES, _MOST_DIGITS = 8, 18  # of a pattern, and of a number in it
_LONGEST_HEADER = 2**16  # bytes; a path has 4,096 at most, and what else stands there is short
_LONGEST_NAME = 4096  # characters, of a member; Linux allows as many bytes
_MOST_GLOBAL_KEYS = 100  # git archive writes one, "comment"
_SHOWN = 200  # characters of a pattern in a message
_FORMAT = 1


def check_not_packed(path: str, flag: str) -> None:
    """Refuse a compressed tar, in which nothing can be found without unpacking all before it.

    Raises:
        InputError: says how to unpack it.
    """
    if path.lower().endswith(_PACKED):
        raise InputError(
            f"{flag} {path} is a compressed tar, which cannot be read in place: make it a plain "
            ".tar once (gunzip, bunzip2, unxz or unzstd); video does not shrink by it anyway"
        )


def is_pattern(path: str) -> bool:
    """Whether a path has braces that stand for numbers."""
    return _RANGE.search(path) is not None


class Budget:
    """How many names the patterns of one list, or of one path, may stand for together."""

    def __init__(self) -> None:
        self._names = self._characters = 0

    def take(self, pattern: str) -> None:
        """Counts the names of a pattern, without making them.

        Raises:
            InputError: they are too many.
        """
        shown = pattern if len(pattern) <= _SHOWN else f"{pattern[:_SHOWN]}..."
        ranges = _RANGE.findall(pattern)
        digits = max((len(number) for limits in ranges for number in limits), default=0)
        if len(ranges) > _MOST_RANGES or digits > _MOST_DIGITS:
            raise InputError(
                f"{shown}: a pattern has at most {_MOST_RANGES} ranges, and its numbers at most "
                f"{_MOST_DIGITS} digits"
            )
        count = math.prod(max(0, int(last) - int(first) + 1) for first, last in ranges)
        self._names += count
        self._characters += count * len(pattern)
        if self._names > _MOST_NAMES:
            before = self._names - count
            beside = f", beside {before:,} of other patterns" if before else ""
            raise InputError(
                f"{shown} stands for {count:,} names{beside}, and the limit is {_MOST_NAMES:,}: "
                "correct it, or name a folder"
            )
        if self._characters > _MOST_CHARACTERS:
            raise InputError(
                f"{shown}: the names that patterns stand for have {self._characters:,} characters "
                f"together, and the limit is {_MOST_CHARACTERS:,}: shorten them, or name a folder"
            )


def expand(pattern: str, budget: Budget | None = None) -> Iterator[str]:
    """The names that ``shards-{000..127}.tar`` stands for; a name without braces stands for itself.

    Numbers are as wide as the first one is written.

    Args:
        pattern: with braces, or without.
        budget: of the list that it is in; by default the pattern has one of its own.

    Raises:
        InputError: they are too many.
    """
    if not is_pattern(pattern):
        return iter([pattern])
    (budget or Budget()).take(pattern)
    return _names(pattern)


def _names(pattern: str) -> Iterator[str]:
    parts = _RANGE.split(pattern)  # text, first, last, text, first, last, ..., text
    ranges = zip(parts[1::3], parts[2::3], strict=True)
    numbers = [
        [f"{n:0{len(first)}}" for n in range(int(first), int(last) + 1)] for first, last in ranges
    ]
    for chosen in itertools.product(*numbers):
        yield parts[0] + "".join(map("".join, zip(chosen, parts[3::3], strict=True)))


def check_exists(path: str, pattern: str) -> None:
    """Refuses a pattern at the first of its files that is missing.

    Raises:
        InputError: names the file and the pattern.
    """
    if not os.path.exists(path):
        raise InputError(
            f"{path} cannot be read as a tar: No such file or directory; {pattern} stands for it: "
            "correct the numbers, or copy the file"
        )


def members(tar: str, cache_root: Path) -> list[tuple[str, Span]]:
    """Names and places of the regular files of a tar, in order.

    Args:
        tar: an uncompressed tar.
        cache_root: of the cache.

    Raises:
        InputError: it is not there, is not a regular file or not a tar, or is cut short.
    """
    try:
        status = os.stat(tar)
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for without end
            raise ValueError("it is not a regular file: remove it")
        now = [_FORMAT, status.st_size, status.st_mtime_ns]
        kept = cache_root / "tar" / f"{cache.digest(tar)}.json"
        found = _read(kept, now)
        if found is None:
            found = _list(tar)
            cache.write_file(kept, json.dumps({"tar": now, "members": found}))
    # A number that is none or too large for a file, sparse maps that are none, and headers of
    # headers of headers.
    except (OSError, tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        text = getattr(error, "strerror", None) or error
        raise InputError(f"{tar} cannot be read as a tar: {text}") from error
    for name, offset, size in found[-1:]:
        if offset + size > status.st_size:
            raise InputError(
                f"{tar} is cut short: its member {name} ends at byte {offset + size:,}, the file "
                f"at {status.st_size:,}; copy it again, or leave it out"
            )
    return [(name, Span(tar, offset, size)) for name, offset, size in found]


def _list(tar: str) -> list[tuple[str, int, int]]:
    found = []
    globals_ = _GlobalHeaders()
    with _Headers(tar) as headers, tarfile.open(tar, "r:", headers, pax_headers=globals_) as file:
        while (one := file.next()) is not None:
            file.members = []  # type: ignore[attr-defined]  # each one holds a copy of its headers
            if not one.isreg():
                continue
            if len(one.name) > _LONGEST_NAME:
                raise tarfile.ReadError(
                    f"the name of the member at byte {one.offset:,} has {len(one.name):,} "
                    f"characters, and the limit is {_LONGEST_NAME:,}: rename it"
                )
            if one.issparse():
                raise InputError(
                    f"{tar}: its member {one.name} is sparse, which cannot be read in place: make "
                    "the tar again without --sparse"
                )
            found.append((one.name, one.offset_data, one.size))
    return found


class _GlobalHeaders(dict[str, str]):
    """PAX headers that hold for all members that follow; tarfile copies them into each one."""

    def __setitem__(self, key: str, value: str, /) -> None:
        """Raises ReadError for the name of all members, and for one key too many."""
        if key in ("path", "linkpath"):
            raise tarfile.ReadError(
                f"a global PAX header sets {key!r} for all members: make the tar again"
            )
        super().__setitem__(key, value)
        if len(self) > _MOST_GLOBAL_KEYS:
            raise tarfile.ReadError(
                f"global PAX headers have more than {_MOST_GLOBAL_KEYS} keys: make the tar again"
            )


class _Headers(io.FileIO):
    """A tar of which only headers are read: a long name or PAX header can announce gigabytes."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Raises ReadError where a header is longer than any should be."""
        if size is None or not 0 <= size <= _LONGEST_HEADER:
            raise tarfile.ReadError(f"a header of {size:,} bytes at byte {self.tell():,}")
        return super().read(size) or b""


def _read(kept: Path, now: list[int]) -> list[tuple[str, int, int]] | None:
    try:
        whole = json.loads(kept.read_text(encoding="utf-8"))
        return [tuple(one) for one in whole["members"]] if whole["tar"] == now else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
