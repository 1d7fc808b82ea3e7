"""Lists the members of uncompressed tar files and their offsets, without unpacking."""

import itertools
import os
import re
import tarfile
from collections.abc import Iterator

from jaxtrain.data.video.reader import Span
from jaxtrain.errors import InputError
from jaxtrain.storage import disks

SUFFIX = ".tar"
_PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_RANGE = re.compile(r"\{(\d{1,9})\.\.(\d{1,9})\}")


def check_not_packed(path: str, flag: str) -> None:
    """Rejects a compressed tar, because its members cannot be read without unpacking it."""
    if path.lower().endswith(_PACKED):
        raise InputError(
            f"{flag} {path} is a compressed tar, which cannot be read in place: decompress it to a "
            "plain .tar with gunzip, bunzip2, unxz, or unzstd (video files hardly grow)"
        )


def is_pattern(path: str) -> bool:
    """Returns whether a path contains a range such as ``{000..127}``."""
    return _RANGE.search(path) is not None


def expand(pattern: str) -> Iterator[str]:
    """Expands a pattern such as ``shards-{000..127}.tar``; yields a name without braces as it is.

    Numbers are padded to the width of the first one.
    """
    split = _RANGE.split(pattern)  # text, first, last, text, first, last, ..., text
    ranges = zip(split[1::3], split[2::3], strict=True)
    numbers = [
        [f"{n:0{len(first)}}" for n in range(int(first), int(last) + 1)] for first, last in ranges
    ]
    for chosen in itertools.product(*numbers):
        yield split[0] + "".join(map("".join, zip(chosen, split[3::3], strict=True)))


def members(tar: str) -> list[tuple[str, Span]]:
    """Returns the names and spans of the regular files of a tar, in order.

    Raises:
        InputError: the tar is missing, invalid or truncated.
        RunAgain: its disk is unavailable.
    """
    try:
        if os.path.exists(tar) and not os.path.isfile(tar):  # opening a pipe would wait forever
            raise ValueError("it is not a regular file")
        with tarfile.open(tar, "r:") as file:
            return list(_spans(tar, file))
    except OSError as error:
        raise disks.disk_trouble(
            error, f"{tar} cannot be read as a tar", "correct the path, or make it readable"
        ) from error
    # Invalid or oversized numbers, invalid sparse maps, and deeply nested headers.
    except (tarfile.TarError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
        raise InputError(
            f"{tar} cannot be read as a tar: {error or 'it declares a header that is too large'}: "
            "copy it again, or remove it"
        ) from error


def _spans(tar: str, file: tarfile.TarFile) -> Iterator[tuple[str, Span]]:
    while (member := file.next()) is not None:
        file.members = []  # type: ignore[attr-defined]  # each member keeps a copy of its headers
        if member.issparse():
            raise InputError(
                f"{tar}: its member {member.name} is sparse, which cannot be read in place: "
                "recreate the tar without --sparse"
            )
        if member.isreg():
            yield member.name, Span(tar, member.offset_data, member.size)
