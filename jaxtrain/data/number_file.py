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

    Args:
        path: the file.
        dtype: dtype of the numbers.
    """

    def __init__(self, path: str, dtype: str | np.dtype) -> None:
        self._path, self._dtype = path, np.dtype(dtype)
        self._descriptor = -1

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_dtype": self._dtype, "_descriptor": -1}

    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the numbers from ``start`` to ``stop``, read-only [stop - start].

        Raises:
            DiskAway: they cannot be read now.
            BadExample: they cannot be read, or the file ends before them.
        """
        size = self._dtype.itemsize
        try:
            if self._descriptor < 0:
                self._descriptor = os.open(self._path, os.O_RDONLY)
            data = os.pread(self._descriptor, (stop - start) * size, start * size)
        except OSError as error:
            self._close()
            raise disks.unreadable(self._path, error, existed=True) from error
        if len(data) < (stop - start) * size:
            raise BadExample(self._path, f"ends before number {stop:,}")
        return np.frombuffer(data, self._dtype)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def __del__(self) -> None:
        self._close()


def numbers_of(path: str, dtype: str | np.dtype) -> np.ndarray:
    """Returns all numbers of a file.

    Raises:
        DiskAway, BadExample: it cannot be read, now or at all.
    """
    try:
        return np.fromfile(path, dtype)
    except OSError as error:
        raise disks.unreadable(path, error, existed=True) from error
