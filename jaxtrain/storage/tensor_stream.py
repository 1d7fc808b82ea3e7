"""One large array in a ``.safetensors`` file, written and read row by row.

The format has a header in front that holds the array's shape; it may be filled up with spaces. So
its place is kept free, and it is written when the last row has come.
"""

import contextlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

from jaxtrain.errors import InputError
from jaxtrain.storage import atomic, tensor_files

DTYPES: dict[str, tuple[str, np.dtype]] = {
    "float32": ("F32", np.dtype(np.float32)),
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
    "float16": ("F16", np.dtype(np.float16)),
}
"""What rows can be stored as: name -> the format's name and numpy's type."""
_HEADER_BYTES = 2**14


class Rows:
    """Takes the rows of an array; made by :func:`writing`.

    Args:
        file: at its beginning.
        name: of the array.
        dtype: one of :data:`DTYPES`.
    """

    def __init__(self, file: BinaryIO, name: str, dtype: str) -> None:
        self._file, self._name = file, name
        self._code, self._dtype = DTYPES[dtype]
        self._shape: tuple[int, ...] | None = None
        self.count = 0
        file.write(b" " * (8 + _HEADER_BYTES))

    def add(self, row: np.ndarray) -> None:
        """The next row, of the shape of those before."""
        if self._shape is None:
            self._shape = row.shape
        if row.shape != self._shape:
            raise ValueError(f"a row of shape {row.shape} after rows of {self._shape}")
        self._file.write(np.ascontiguousarray(row, self._dtype).tobytes())
        self.count += 1

    def close(self, about: Mapping[str, str]) -> None:
        """Writes the header, with what the file says of itself."""
        shape = [self.count, *(self._shape or ())]
        size = int(np.prod(shape)) * self._dtype.itemsize
        described = {"dtype": self._code, "shape": shape, "data_offsets": [0, size]}
        header = json.dumps({"__metadata__": dict(about), self._name: described}).encode()
        if len(header) > _HEADER_BYTES:
            raise ValueError(f"a header of {len(header)} bytes, more than {_HEADER_BYTES}")
        self._file.seek(0)
        self._file.write(struct.pack("<Q", _HEADER_BYTES) + header.ljust(_HEADER_BYTES))


@contextlib.contextmanager
def writing(path: Path, name: str, dtype: str, about: dict[str, str]) -> Iterator[Rows]:
    """A file for the rows of one array; it appears whole when the block ends without an error.

    Args:
        path: of the file.
        name: of the array.
        dtype: one of :data:`DTYPES`.
        about: what the file says of itself; taken when the block ends.

    Raises:
        InputError: it cannot be written.
    """
    try:
        with atomic.appearing(path) as beside, open(beside, "wb") as file:
            rows = Rows(file, name, dtype)
            yield rows
            rows.close(about)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from error


def read(path: Path, name: str) -> tuple[tuple[int, ...], dict[str, str], Iterator[np.ndarray]]:
    """Shape of an array, what its file says of itself, and its rows, float32.

    Raises:
        InputError: there is no such file, or it holds no such array.
    """
    tensor_files.check_file(path, "a .safetensors file")
    there, about = tensor_files.places(path)
    if name not in there:
        raise InputError(
            f"{path} holds no {name!r}, which jaxtrain encode writes; there is "
            f"{', '.join(list(there)[:6])}"
        )
    place = there[name]
    dtypes = dict(DTYPES.values())
    if place.code not in dtypes:
        raise InputError(
            f"{path}: {name} has the type {place.code}: use one of {', '.join(dtypes)}"
        )
    if not place.shape or not place.bytes:
        raise InputError(
            f"{path}: {name} has shape {list(place.shape)} and contains no data: encode the video "
            "again"
        )
    return place.shape, about, _rows(path, place, dtypes[place.code])


def _rows(path: Path, place: tensor_files.Place, dtype: np.dtype) -> Iterator[np.ndarray]:
    shape = place.shape[1:]
    size = math.prod(shape) * dtype.itemsize
    with open(path, "rb") as file:
        file.seek(place.begin)
        for _ in range(place.shape[0]):
            content = file.read(size)
            if len(content) < size:
                raise InputError(f"{path} was cut off while it was read")
            yield np.frombuffer(content, dtype).reshape(shape).astype(np.float32)
