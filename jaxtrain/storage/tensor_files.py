"""Reads and writes files of named arrays: ``.safetensors``, and PyTorch's ``.pth`` and ``.pt``.

PyTorch's files require PyTorch (``pip install -e '.[interop]'``), which reads only arrays and runs
no code from such a file.

Both kinds are untrusted: they can run no code, and anything but plain arrays of real numbers is
rejected. What PyTorch allocates while it reads a hostile file is not limited.
"""

import math
import struct
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxtrain import errors, versions
from jaxtrain.errors import InputError, first_line
from jaxtrain.storage import atomic, stand_ins

SAFETENSORS = ".safetensors"
PYTORCH = (".pth", ".pt", ".bin")
ENDINGS = (SAFETENSORS, *PYTORCH)
INDEX = ".index.json"
"""Added to the name of a file that is split into parts: lists them."""

Tensors = dict[str, np.ndarray]
# safetensors' names of the supported dtypes. 8-bit floats are exact in float32; if they need
# scales, the file has these as additional arrays, which no model here accepts.
_DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_TORCH_DTYPES = {dtype.name for dtype in _DTYPES.values()}  # without the prefix "torch."
# 8 bits become 32, and tied arrays have several names.
_MOST_WIDENING = 16
_MOST_SMALL_BYTES = 2**26
_NAME_CHARACTERS = 300
# Keys under which PyTorch programs nest a state dict.
_WRAPPERS = ("state_dict", "model", "module", "model_state_dict")


def check_ending(path: Path) -> None:
    """Checks that a file name has a supported suffix."""
    if path.suffix not in ENDINGS:
        raise InputError(
            f"{path}: the name of a weights file must end with one of {', '.join(ENDINGS)}"
        )


def read(
    path: Path, wanted: Callable[[str], bool] = lambda name: True
) -> tuple[Tensors, dict[str, str]]:
    """Reads the arrays of a file (floating-point ones as float32), and its metadata.

    Raises:
        InputError: the file does not exist, or has other content.
    """
    check_ending(path)
    check_file(path, f"a weights file ({', '.join(ENDINGS)})")
    if path.suffix == SAFETENSORS:
        return _read_safetensors(path, wanted)
    return {name: array for name, array in _read_pytorch(path).items() if wanted(name)}, {}


def of_folder(folder: Path, name: str) -> list[Path]:
    """Returns the ``.safetensors`` files of a folder of transformers or diffusers.

    Args:
        name: the file, or that of which ``NAME.index.json`` lists the parts; the file comes first,
            as in transformers.

    Returns:
        The paths, which may not exist; [] if the folder has neither file.

    Raises:
        InputError: the index is damaged.
    """
    if (folder / name).is_file():
        return [folder / name]
    index = folder / f"{name}{INDEX}"
    return [folder / shard for shard in shards(index)] if index.is_file() else []


def shards(index: Path) -> list[str]:
    """Returns the files that an index lists, all in its own folder.

    Raises:
        InputError: it lists none, or files elsewhere.
    """
    try:
        names = atomic.read_json(index).get("weight_map")
    except (OSError, ValueError) as error:
        raise InputError(f"{index} cannot be read: {first_line(error)}") from error
    if not isinstance(names, dict) or not names:
        raise InputError(
            f"{index} lists no files: its weight_map must be an object with file names"
        )
    for name in names.values():
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or not name.isprintable()
            or not name.endswith(SAFETENSORS)
        ):
            raise InputError(
                f"{index}: its weight_map lists {errors.short_repr(name)}, but only "
                f"{SAFETENSORS} files of its own folder are allowed"
            )
    return sorted(set(names.values()))


def check_file(path: Path, wanted: str) -> None:
    """Checks that a path is a regular file."""
    if path.is_file():
        return
    if path.is_dir():
        problem = "is a folder"
    else:
        problem = "is a pipe or a device" if path.exists() else "does not exist"
    raise InputError(f"{path} {problem}: pass {wanted}")


def check_real(tensors: Mapping[str, np.ndarray], source: str) -> None:
    """Checks that weights are finite numbers, and not quantized ones without their scales.

    Raises:
        InputError: an array contains integers, NaN or Inf; the message names the first such array.
    """
    for name, array in tensors.items():
        if array.dtype.kind in "iub":
            raise InputError(
                f"{source}: {name} contains integers ({array.dtype}), not weights: export the "
                "weights as float32, bfloat16, or float16"
            )
        if array.dtype.kind == "f" and not (finite := np.isfinite(array)).all():
            count = array.size - np.count_nonzero(finite)
            raise InputError(
                f"{source}: {name} contains NaN or Inf ({count:,} of {array.size:,} numbers): pass "
                "weights from before the training diverged, or download them again"
            )


def write(path: Path, tensors: Mapping[str, np.ndarray], about: Mapping[str, str]) -> None:
    """Writes arrays atomically.

    Args:
        about: metadata for a ``.safetensors`` file; PyTorch's format has none.

    Raises:
        InputError: the suffix is not supported, or PyTorch is required but not installed.
    """
    check_ending(path)
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    if path.suffix == SAFETENSORS:
        import safetensors.numpy

        metadata = {"format": "pt", **about}  # required by transformers and diffusers
        atomic.write_whole(path, safetensors.numpy.save(contiguous, metadata=metadata))
        return
    import io

    torch = pytorch(path)
    content = io.BytesIO()
    # Copied, as PyTorch warns about read-only arrays such as jax's.
    torch.save({name: torch.tensor(array) for name, array in contiguous.items()}, content)
    atomic.write_whole(path, content.getvalue())


class ArrayLocation(NamedTuple):
    """The location of an array in a ``.safetensors`` file.

    Attributes:
        code: the format's name for the dtype.
        begin: offset of its first byte in the file.
    """

    code: str
    shape: tuple[int, ...]
    begin: int
    bytes: int


def locations(path: Path) -> tuple[dict[str, ArrayLocation], dict[str, str]]:
    """Returns the locations of the arrays in a ``.safetensors`` file, and its metadata.

    Raises:
        InputError: the file is damaged, or has another format.
    """
    import safetensors

    try:
        # Checks the header's size and JSON, that arrays have the sizes of their shapes and dtypes,
        # and that they fill the file without holes or overlaps.
        with safetensors.safe_open(path, framework="numpy") as opened:
            about = dict(opened.metadata() or {})
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = atomic.parse_json(file.read(length))
        header.pop("__metadata__", None)
        arrays = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            arrays[name] = ArrayLocation(entry["dtype"], shape, 8 + length + begin, end - begin)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        if instead := stand_ins.of(path):
            raise InputError(f"{path} is {instead}") from error
        raise InputError(
            f"{path} is not a complete .safetensors file ({first_line(error)[:_NAME_CHARACTERS]})"
        ) from error
    for name in arrays:
        _check_name(path, name)
    return arrays, about


def _check_name(path: Path, name: object) -> None:
    """Rejects names that no model uses and that must not be printed on a terminal."""
    if not isinstance(name, str) or not name.isprintable() or len(name) > _NAME_CHARACTERS:
        raise InputError(f"{path}: {errors.short_repr(name)} is not a valid array name")


def _read_safetensors(path: Path, wanted: Callable[[str], bool]) -> tuple[Tensors, dict[str, str]]:
    everything, about = locations(path)
    chosen = {name: location for name, location in everything.items() if wanted(name)}
    for name, location in chosen.items():
        if location.code not in _DTYPES:
            raise InputError(
                f"{path}: {name} has dtype {location.code}, which is not supported: export the "
                "weights as float32, bfloat16, or float16"
            )
    try:
        with open(path, "rb") as file:
            return {name: _read_array(file, location) for name, location in chosen.items()}, about
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is not a complete .safetensors file ({error})") from error


def _read_array(file: BufferedReader, location: ArrayLocation) -> np.ndarray:
    dtype = _DTYPES[location.code]
    file.seek(location.begin)
    content = bytearray(location.bytes)  # at most the file's size, checked in locations()
    if file.readinto(content) < location.bytes or math.prod(location.shape) * dtype.itemsize != len(
        content
    ):
        raise ValueError("an array is truncated")
    return _widened(np.frombuffer(content, dtype).reshape(location.shape))


def _read_pytorch(path: Path) -> Tensors:
    if instead := stand_ins.of(path):
        raise InputError(f"{path} is {instead}")
    torch = pytorch(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # PyTorch raises various exceptions for damaged files
        raise InputError(f"{path} is not a PyTorch file of arrays ({first_line(error)})") from error
    tensors, taken = _state_dict(path, content), 0
    max_bytes = _MOST_WIDENING * path.stat().st_size + _MOST_SMALL_BYTES
    for name, tensor in tensors.items():
        _check_name(path, name)
        _check_tensor(torch, tensor, f"{path}: {name}")
        taken += tensor.numel() * 4
        if taken > max_bytes:
            raise InputError(
                f"{path}: its arrays up to {name} would take {taken:,} bytes in float32, but the "
                f"file has only {path.stat().st_size:,} bytes: save them with .clone()"
            )
    return {name: _as_array(torch, tensor) for name, tensor in tensors.items()}


def _check_tensor(torch: Any, tensor: Any, name: str) -> None:
    """Checks that a tensor is a plain array."""
    dtype, device = str(tensor.dtype).removeprefix("torch."), tensor.device.type
    dense = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    if not dense or device != "cpu" or dtype not in _TORCH_DTYPES:  # "meta" has no data
        raise InputError(
            f"{name} is not supported ({'' if dense else 'sparse, nested, or quantized; '}{dtype} "
            f"on the device {device}): save dense float32, bfloat16, or float16 arrays"
        )


def _state_dict(path: Path, content: Any) -> Mapping[str, Any]:
    for _ in range(len(_WRAPPERS)):
        if not isinstance(content, Mapping):
            break
        if content and all(hasattr(value, "detach") for value in content.values()):
            return content
        inner = [content[name] for name in _WRAPPERS if name in content]
        if not inner:
            break
        content = inner[0]
    raise InputError(f"{path} contains {type(content).__name__}, not a state dict (name -> array)")


def _as_array(torch: Any, tensor: Any) -> np.ndarray:
    tensor = tensor.detach().resolve_neg()
    wide = tensor.to(torch.float32) if tensor.is_floating_point() else tensor
    return np.asarray(wide.numpy())


def _widened(array: np.ndarray) -> np.ndarray:
    """Converts floating-point arrays to float32; others are unchanged."""
    exact = array.dtype.kind in "iub" or array.dtype == np.float32
    return array if exact else array.astype(np.float32)


def pytorch(path: Path) -> Any:
    """Returns PyTorch, or raises InputError: a PyTorch file requires it."""
    try:
        import torch
    except ImportError as error:
        raise InputError(
            f"{path} requires PyTorch: {versions.install('interop')}, or use a {SAFETENSORS} file"
        ) from error
    return torch
