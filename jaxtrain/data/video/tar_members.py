"""Lists the members of uncompressed tar files and their offsets, without unpacking.

Listing reads a header for each member, so the result is cached until the tar changes.
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
from jaxtrain.storage import disks

SUFFIX = ".tar"
_PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
# Limits for the names from all patterns of a list, because each tar is searched for and listed.
_MAX_NAMES, _MAX_CHARACTERS = 100_000, 2**25
_MAX_RANGES, _MAX_DIGITS = 8, 18  # ranges per pattern, and digits per number
_MAX_HEADER = 2**16  # bytes; a path has at most 4,096, and the other fields are short
_MAX_NAME = 4096  # characters of a member's name; Linux allows as many bytes
# Before Python 3.11.10 and 3.12.6, tarfile takes a time that grows with the square of the length of
# a number in a PAX header: 6 s for 60 kB, measured (CVE-2024-6232). A name may have 255 digits.
_MOST_DIGITS = 255
_LONG_NUMBER = re.compile(rb"[0-9]{%d}" % (_MOST_DIGITS + 1))
_MAX_GLOBAL_KEYS = 100  # git archive writes one, "comment"
_SHOWN = 200  # characters of a pattern in a message
_FORMAT = 1


def check_not_packed(path: str, flag: str) -> None:
    """Rejects a compressed tar, because its members cannot be read without unpacking it.

    Raises:
        InputError: the tar is compressed.
    """
    if path.lower().endswith(_PACKED):
        raise InputError(
            f"{flag} {path} is a compressed tar, which cannot be read in place: decompress it to a "
            "plain .tar with gunzip, bunzip2, unxz, or unzstd (video files hardly grow)"
        )


def is_pattern(path: str) -> bool:
    """Returns whether a path contains a range such as ``{000..127}``."""
    return _RANGE.search(path) is not None


class Budget:
    """Limits the number of names from all patterns of one list, or of one path."""

    def __init__(self) -> None:
        self._names = self._characters = 0

    def take(self, pattern: str) -> None:
        """Counts the names of a pattern, without generating them.

        Raises:
            InputError: there are too many names.
        """
        shown = pattern if len(pattern) <= _SHOWN else f"{pattern[:_SHOWN]}..."
        ranges = _RANGE.findall(pattern)
        digits = max((len(number) for limits in ranges for number in limits), default=0)
        if len(ranges) > _MAX_RANGES or digits > _MAX_DIGITS:
            raise InputError(
                f"{shown}: a pattern may have at most {_MAX_RANGES} ranges, and its numbers at "
                f"most {_MAX_DIGITS} digits: correct it, or pass a folder"
            )
        count = math.prod(max(0, int(last) - int(first) + 1) for first, last in ranges)
        self._names += count
        self._characters += count * len(pattern)
        if self._names > _MAX_NAMES:
            before = self._names - count
            others = f", in addition to {before:,} of other patterns" if before else ""
            raise InputError(
                f"{shown} expands to {count:,} names{others}, and the limit is {_MAX_NAMES:,}: "
                "correct it, or pass a folder"
            )
        if self._characters > _MAX_CHARACTERS:
            raise InputError(
                f"{shown}: the expanded names have {self._characters:,} characters in total, and "
                f"the limit is {_MAX_CHARACTERS:,}: shorten them, or pass a folder"
            )


def expand(pattern: str, budget: Budget | None = None) -> Iterator[str]:
    """Expands a pattern such as ``shards-{000..127}.tar``; yields a name without braces as it is.

    Numbers are padded to the width of the first one.

    Args:
        pattern: a name with or without ranges.
        budget: the budget of the pattern's list; by default, the pattern has its own.

    Raises:
        InputError: there are too many names.
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
    """Checks that a file of a pattern exists.

    Raises:
        InputError: the file is missing.
    """
    if not os.path.exists(path):
        raise InputError(
            f"{path} cannot be read as a tar: No such file or directory ({pattern} includes it): "
            "correct the numbers, or copy the file"
        )


def members(tar: str, cache_root: Path) -> list[tuple[str, Span]]:
    """Returns the names and spans of the regular files of a tar, in order.

    Raises:
        InputError: the tar is missing, invalid or truncated.
    """
    try:
        status = os.stat(tar)
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait forever
            raise ValueError("it is not a regular file: remove it")
        now = [_FORMAT, status.st_size, status.st_mtime_ns]
        kept = cache_root / "tar" / f"{cache.digest(tar)}.json"
        found = _read(kept, now)
        if found is None:
            found = _list(tar)
            cache.write_file(kept, json.dumps({"tar": now, "members": found}))
    except OSError as error:
        raise disks.disk_trouble(
            error, f"{tar} cannot be read as a tar", "make it readable"
        ) from error
    # Invalid or oversized numbers, invalid sparse maps, and deeply nested headers.
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise InputError(f"{tar} cannot be read as a tar: {error}") from error
    for name, offset, size in found[-1:]:
        if offset + size > status.st_size:
            raise InputError(
                f"{tar} is truncated: its member {name} ends at byte {offset + size:,}, the file "
                f"at {status.st_size:,}: copy it again, or remove it"
            )
    return [(name, Span(tar, offset, size)) for name, offset, size in found]


def _list(tar: str) -> list[tuple[str, int, int]]:
    found = []
    globals_ = _GlobalHeaders()
    with _Headers(tar) as headers, tarfile.open(tar, "r:", headers, pax_headers=globals_) as file:
        while (one := file.next()) is not None:
            file.members = []  # type: ignore[attr-defined]  # each member keeps a copy of its headers
            if not one.isreg():
                continue
            if len(one.name) > _MAX_NAME:
                raise tarfile.ReadError(
                    f"the name of the member at byte {one.offset:,} has {len(one.name):,} "
                    f"characters, and the limit is {_MAX_NAME:,}: rename it"
                )
            if one.issparse():
                raise InputError(
                    f"{tar}: its member {one.name} is sparse, which cannot be read in place: "
                    "recreate the tar without --sparse"
                )
            found.append((one.name, one.offset_data, one.size))
    return found


class _GlobalHeaders(dict[str, str]):
    """PAX headers that apply to all following members; tarfile copies them into each member."""

    def __setitem__(self, key: str, value: str, /) -> None:
        """Raises ReadError for a key that would rename every member, and for too many keys."""
        if key in ("path", "linkpath"):
            raise tarfile.ReadError(
                f"a global PAX header sets {key!r} for all members: recreate the tar"
            )
        super().__setitem__(key, value)
        if len(self) > _MAX_GLOBAL_KEYS:
            raise tarfile.ReadError(
                f"global PAX headers have more than {_MAX_GLOBAL_KEYS} keys: recreate the tar"
            )


class _Headers(io.FileIO):
    """A tar of which only the headers are read; a long name or PAX header can declare gigabytes."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Raises ReadError if a header is longer than any valid one."""
        if size is None or not 0 <= size <= _MAX_HEADER:
            raise tarfile.ReadError(f"a header of {size:,} bytes at byte {self.tell():,}")
        header = super().read(size) or b""
        if _LONG_NUMBER.search(header):
            raise tarfile.ReadError(f"a number of more than {_MOST_DIGITS} digits in a header")
        return header


def _read(kept: Path, now: list[int]) -> list[tuple[str, int, int]] | None:
    try:
        record = json.loads(kept.read_text(encoding="utf-8"))
        return [tuple(one) for one in record["members"]] if record["tar"] == now else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
