"""The kinds of text files, by their names; compressed ones are unpacked while they are read."""

import bz2
import contextlib
import gzip
import io
import lzma
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from jaxtrain.errors import BadExample, first_line

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
PLAIN = (".txt", ".md")
PARQUET = ".parquet"
_JSON_LINES = (".jsonl", ".json")  # .json only if compressed, as C4 has it
_MAGIC = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd", ".xz": b"\xfd7zXZ\0", ".bz2": b"BZh91AY"}
SUFFIXES = (
    *(*PLAIN, ".jsonl", PARQUET),
    *(f"{kind}{packed}" for kind in (".txt", *_JSON_LINES) for packed in COMPRESSED),
)
SUPPORTED = f".txt, .md, .jsonl, .parquet; .txt, .jsonl, .json also with {', '.join(COMPRESSED)}"
"""The suffixes, for messages."""

# Files of a repository that describe its data, such as README.md, LICENSE-MIT.txt, README_zh.md.
_ABOUT = re.compile(
    r"(read_?me|licen[cs]es?|copying|copyright|notice|third_party_notices|change(s|log)|authors"
    r"|contribut(ing|ors)|code_of_conduct|citation|security|requirements|data(set)?_?card|datasheet"
    r"|(sha\d+|md5)(sums?)?|checksums?)"
    r"([-_.].*)?",
    re.IGNORECASE,
)
_MOST_BYTES = 2**28
"""For the dictionary of a .xz file, which has up to 4 GiB; ``xz -9`` uses 64 MiB. Those of the
other formats have at most 128 MiB: zstd's library rejects more."""
_ERRORS = (EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError)


def suffix(name: str) -> str:
    """Returns the suffix that decides how a file is read, such as ``.jsonl`` or ``.json.gz``."""
    stem, last = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] + last if last in COMPRESSED else last


def packing(name: str) -> str:
    """Returns which of :data:`COMPRESSED` a file has; "" if it is not compressed."""
    last = os.path.splitext(name.lower())[1]
    return last if last in COMPRESSED else ""


def packing_of(head: bytes) -> str:
    """Returns how content is compressed, by its first bytes; "" if they do not show it."""
    return next((packing for packing, magic in _MAGIC.items() if head.startswith(magic)), "")


def is_plain(name: str) -> bool:
    """Returns whether a file is plain text, without rows."""
    return suffix(name).removesuffix(packing(name)) in PLAIN


def describes(name: str) -> bool:
    """Returns whether a file most likely describes the others in its folder: a card, a license."""
    stem, last = os.path.splitext(os.path.basename(name))
    return last.lower() in PLAIN and _ABOUT.fullmatch(stem) is not None


@contextlib.contextmanager
def unpacked(data: BinaryIO, packing: str, path: str, buffer_bytes: int) -> Iterator[BinaryIO]:
    """Opens a compressed file as one stream; several parts one after another are one, too.

    Args:
        data: the file, at its start.

    Raises:
        BadExample: it is damaged, incomplete, or not compressed; also while the block reads.
    """
    try:
        with contextlib.closing(_OPENED[packing](data)) as stream:
            yield cast(BinaryIO, io.BufferedReader(stream, buffer_bytes))
    except (*_ERRORS, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # an error of the disk
            raise
        raise BadExample(path, f"broken {packing}: {first_line(error)}") from error


class _Xz(io.RawIOBase):
    """The content of a .xz file, forward only. Python's LZMAFile has no limit of memory."""

    def __init__(self, data: BinaryIO) -> None:
        self._data, self._at = data, 0
        self._part = lzma.LZMADecompressor(memlimit=_MOST_BYTES)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:  # to where it is, as a buffer at the beginning does
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if (offset, whence) not in ((self._at, os.SEEK_SET), (0, os.SEEK_CUR)):
            raise io.UnsupportedOperation("a compressed file is read forward")
        return self._at

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        unpacked = b""
        while not unpacked:
            packed = b""
            if self._part.eof:
                # Zeros may follow each part.
                packed = self._part.unused_data.lstrip(b"\0")
                while not packed:
                    if not (more := self._data.read(io.DEFAULT_BUFFER_SIZE)):
                        return 0
                    packed = more.lstrip(b"\0")
                self._part = lzma.LZMADecompressor(memlimit=_MOST_BYTES)
            elif self._part.needs_input:
                packed = self._data.read(io.DEFAULT_BUFFER_SIZE)
                if not packed:
                    raise EOFError("it ends before its end mark")
            unpacked = self._part.decompress(packed, len(buffer))
        buffer[: len(unpacked)] = unpacked
        self._at += len(unpacked)
        return len(unpacked)


_OPENED: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": lambda data: gzip.GzipFile(fileobj=data),
    ".zst": zstd.ZstdFile,
    ".bz2": bz2.BZ2File,
    ".xz": _Xz,
}
