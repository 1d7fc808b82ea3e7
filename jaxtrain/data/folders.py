"""The files of a folder, as every data source finds them."""

import os
from collections.abc import Iterator
from pathlib import Path

from jaxtrain.errors import InputError


def files(top: Path) -> Iterator[Path]:
    """Files below ``top`` in the order of their names; hidden files and folders are left out.

    Links to folders are followed, each folder once.

    Raises:
        InputError: a folder cannot be listed: a run without its files would be another run.
    """

    def stop(error: OSError) -> None:
        raise InputError(
            f"cannot list the folder {error.filename} ({error.strerror}): make it readable, or "
            "move it away"
        ) from error

    seen: set[str] = set()
    for folder, inner, names in os.walk(top, followlinks=True, onerror=stop):
        real = os.path.realpath(folder)
        if real in seen:
            inner.clear()
            continue
        seen.add(real)
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(names) if not name.startswith("."))
