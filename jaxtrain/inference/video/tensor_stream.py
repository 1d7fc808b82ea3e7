"""Streams one large array to and from a ``.safetensors`` file, row by row.

The header with the array's shape precedes the data and may be padded with spaces. So space for it
is reserved, and it is written after the last row.
"""

import contextlib
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

from jaxtrain.errors import InputError
from jaxtrain.storage import atomic, disks, tensor_files

DTYPES: dict[str, tuple[str, np.dtype]] = {
    "float32": ("F32", np.dtype(np.float32)),
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
    "float16": ("F16", np.dtype(np.float16)),
}
"""Supported dtypes: name -> the format's name and the numpy dtype."""
_HEADER_BYTES = 2**14


class Rows:
    """Writes the rows of an array; created by :func:`writing`.

    Args:
        file: an empty file.
        dtype: one of :data:`DTYPES`.
        markers: names of empty arrays that the file has, too.
    """

    def __init__(self, file: BinaryIO, name: str, dtype: str, markers: Sequence[str] = ()) -> None:
        self._file, self._name, self._markers = file, name, markers
        self._code, self._dtype = DTYPES[dtype]
        self._shape: tuple[int, ...] | None = None
        self.count = 0
        file.write(b" " * (8 + _HEADER_BYTES))

    def add(self, row: np.ndarray) -> None:
        """Appends a row, which must have the shape of the previous ones."""
        if self._shape is None:
            self._shape = row.shape
        if row.shape != self._shape:
            raise ValueError(f"row has shape {row.shape}, but earlier rows have {self._shape}")
        with np.errstate(over="ignore"):
            stored = np.ascontiguousarray(row, self._dtype)
        if not np.isfinite(stored).all():
            if not np.isfinite(row).all():
                raise InputError(f"{self._name} {self.count} contains NaN/Inf: check the weights")
            raise InputError(
                f"{self._name} {self.count} has numbers up to {np.abs(row).max():.3g}, too large "
                f"for {self._dtype}: use --dtype float32, or another --scale or --shift"
            )
        self._file.write(stored.tobytes())
        self.count += 1

    def close(self, about: Mapping[str, str]) -> None:
        """Writes the header, with the metadata."""
        shape = [self.count, *(self._shape or ())]
        size = int(np.prod(shape)) * self._dtype.itemsize
        described = {"dtype": self._code, "shape": shape, "data_offsets": [0, size]}
        empty = {"dtype": self._code, "shape": [0], "data_offsets": [size, size]}
        entries = {self._name: described, **dict.fromkeys(self._markers, empty)}
        header = json.dumps({"__metadata__": dict(about), **entries}).encode()
        if len(header) > _HEADER_BYTES:
            raise InputError(
                f"metadata of {len(header)} bytes, more than {_HEADER_BYTES}: use one --scale and "
                "one --shift for all channels"
            )
        self._file.seek(0)
        self._file.write(struct.pack("<Q", _HEADER_BYTES) + header.ljust(_HEADER_BYTES))


@contextlib.contextmanager
def writing(
    path: Path, name: str, dtype: str, about: dict[str, str], markers: Sequence[str] = ()
) -> Iterator[Rows]:
    """Yields a writer for the rows of an array; the file appears when the block ends without error.

    Args:
        dtype: one of :data:`DTYPES`.
        about: the metadata; read at the end of the block.
        markers: names of empty arrays that the file has, too.

    Raises:
        RunAgain: the disk is full.
    """
    try:
        with atomic.appearing(path) as beside, open(beside, "wb") as file:
            rows = Rows(file, name, dtype, markers)
            yield rows
            rows.close(about)
    except OSError as error:
        raise disks.unwritable(path, error.strerror) from error


def read(path: Path, name: str) -> tuple[tuple[int, ...], dict[str, str], Iterator[np.ndarray]]:
    """Returns an array's shape, the file's metadata, and an iterator of float32 rows."""
    tensor_files.check_file(path, "a .safetensors file")
    arrays, about = tensor_files.locations(path)
    if name not in arrays:
        raise InputError(
            f"{path} does not contain {name!r}, which jaxtrain encode writes; it contains "
            f"{', '.join(list(arrays)[:6])}"
        )
    location = arrays[name]
    dtypes = dict(DTYPES.values())
    if location.code not in dtypes:
        raise InputError(
            f"{path}: {name} has dtype {location.code}: use one of {', '.join(dtypes)}"
        )
    if not location.shape or not location.bytes:
        raise InputError(
            f"{path}: {name} has shape {list(location.shape)} and contains no data: encode the "
            "video again"
        )
    return location.shape, about, _rows(path, location, dtypes[location.code])


def _rows(
    path: Path, location: tensor_files.ArrayLocation, dtype: np.dtype
) -> Iterator[np.ndarray]:
    shape = location.shape[1:]
    size = math.prod(shape) * dtype.itemsize
    with open(path, "rb") as file:
        file.seek(location.begin)
        for _ in range(location.shape[0]):
            try:
                content = file.read(size)
            except OSError as error:  # here, because the output is being written around it
                raise disks.disk_trouble(error, f"{path} cannot be read", "copy it") from error
            if len(content) < size:
                raise InputError(
                    f"{path} was truncated while being read: run the command again once no other "
                    "program writes it"
                )
            row = np.frombuffer(content, dtype).reshape(shape).astype(np.float32)
            if not np.isfinite(row).all():
                raise InputError(f"{path} contains NaN/Inf: encode the video again")
            yield row
