"""The members of uncompressed tar files, and where they lie in it: nothing is unpacked.

Listing reads a header for each member, so what was found is kept in the cache until the tar
changes.
"""

import json
import os
import re
import tarfile
from pathlib import Path

from jaxtrain.data import cache
from jaxtrain.data.video_packets import Span
from jaxtrain.errors import InputError

SUFFIX = ".tar"
_PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
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


def expand(pattern: str) -> list[str]:
    """The names that ``shards-{000..127}.tar`` stands for; a name without braces stands for itself.

    Numbers are as wide as the first one is written.
    """
    match = _RANGE.search(pattern)
    if match is None:
        return [pattern]
    first, last = match.groups()
    head, tail = pattern[: match.start()], pattern[match.end() :]
    numbers = range(int(first), int(last) + 1)
    return [name for n in numbers for name in expand(f"{head}{n:0{len(first)}}{tail}")]


def members(tar: str, cache_root: Path) -> list[tuple[str, Span]]:
    """Names and places of the regular files of a tar, in order.

    Args:
        tar: an uncompressed tar.
        cache_root: of the cache.

    Raises:
        InputError: it is not there, or no tar, or cut short.
    """
    try:
        status = os.stat(tar)
        now = [_FORMAT, status.st_size, status.st_mtime_ns]
        kept = cache_root / "tar" / f"{cache.digest(tar)}.json"
        found = _read(kept, now)
        if found is None:
            found = _list(tar)
            cache.write_file(kept, json.dumps({"tar": now, "members": found}))
    except (OSError, tarfile.TarError) as error:
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
    with tarfile.open(tar, "r:") as file:
        return [(one.name, one.offset_data, one.size) for one in file if one.isreg()]


def _read(kept: Path, now: list[int]) -> list[tuple[str, int, int]] | None:
    try:
        whole = json.loads(kept.read_text(encoding="utf-8"))
        return [tuple(one) for one in whole["members"]] if whole["tar"] == now else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
