"""Digests the ends of a file, which tell files apart whose names, sizes and times are equal.

Equal times are normal in container images, zip files, and Nix, and equal sizes after ``split -b``.
"""

import hashlib
import os
from pathlib import Path

_BYTES = 2**16  # at each end


def digest(path: str | Path, start: int = 0, size: int | None = None) -> str:
    """Returns a digest of the first and the last 64 KiB of a file.

    Args:
        start, size: of a part of the file in bytes; the default is all of it.
    """
    with open(path, "rb") as file:
        stop = file.seek(0, os.SEEK_END) if size is None else start + size
        content = hashlib.sha256()
        for at in (start, max(start, stop - _BYTES)):
            file.seek(at)
            content.update(file.read(min(_BYTES, stop - at)))
    return content.hexdigest()[:16]
