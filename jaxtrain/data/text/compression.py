"""Unpacks compressed files while they are read, with a bound on memory."""

import bz2
import contextlib
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from jaxtrain.errors import BadExample, first_line

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

_MOST_BYTES = 2**28
"""For the dictionary of a .xz file, which has up to 4 GiB; ``xz -9`` uses 64 MiB. Those of the
other formats have at most 128 MiB: zstd's library rejects more."""
_ERRORS = (EOFError, zlib.error, lzma.LZMAError, zstd.ZstdError)


@contextlib.contextmanager
def unpacked(data: BinaryIO, packing: str, path: str, buffer_bytes: int) -> Iterator[BinaryIO]:
    """Opens a compressed file as one stream; several parts one after another are one, too.

    Args:
        data: the file, at its start.
        packing: one of :data:`jaxtrain.data.text.kinds.COMPRESSED`.
        path: of the file.
        buffer_bytes: to unpack at once.

    Raises:
        BadExample: it is damaged, incomplete, or not compressed; also while the block reads.
    """
    try:
        if packing == ".xz":
            head = cast(io.BufferedReader, data).peek(buffer_bytes)
            lzma.LZMADecompressor(memlimit=_MOST_BYTES).decompress(head, 1)
        with contextlib.closing(_opened(data, packing)) as stream:
            yield cast(BinaryIO, io.BufferedReader(stream, buffer_bytes))
    except (*_ERRORS, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # an error of the disk
            raise
        raise BadExample(path, f"broken {packing}: {first_line(error)}") from error


def _opened(data: BinaryIO, packing: str) -> Any:
    if packing == ".gz":
        return gzip.GzipFile(fileobj=data)
    if packing == ".bz2":
        return bz2.BZ2File(data)
    if packing == ".xz":
        return lzma.LZMAFile(data)
    return zstd.ZstdFile(data)
