"""Reads ranges of a file of numbers."""

import os
from typing import Any

import numpy as np

from jaxtrain.errors import BadExample
from jaxtrain.storage import disks


class NumberFile:
    """A file of numbers. Cheap to pickle: opens the file at first use.

    If its disk fails, a memory map would end the process (SIGBUS). Here, the read fails, and the
    next read opens the file again, because the disk may have been mounted again.
    """

    def __init__(self, path: str, dtype: str | np.dtype) -> None:
        self._path, self._dtype = path, np.dtype(dtype)
        self._file: _Opened | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_dtype": self._dtype, "_file": None}

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the numbers from ``start`` to ``stop``, read-only [stop - start].

        Raises:
            DiskAway: they cannot be read now.
            BadExample: they cannot be read, or the file ends before them.
        """
        size = self._dtype.itemsize
        try:
            # It is closed when no thread uses it any longer.
            file = self._file = self._file or _Opened(self._path)
            data = os.pread(file.descriptor, (stop - start) * size, start * size)
        except OSError as error:
            self._file = None
            raise disks.unreadable(self._path, error, existed=True) from error
        if len(data) < (stop - start) * size:
            raise BadExample(self._path, f"ends before number {stop:,}")
        return np.frombuffer(data, self._dtype)


class _Opened:
    """A file that is open while an object refers to it."""

    def __init__(self, path: str) -> None:
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


def numbers_of(path: str, dtype: str | np.dtype) -> np.ndarray:
    """Returns all numbers of a file.

    Raises:
        DiskAway, BadExample: it cannot be read, now or at all.
    """
    try:
        return np.fromfile(path, dtype)
    except OSError as error:
        raise disks.unreadable(path, error, existed=True) from error
