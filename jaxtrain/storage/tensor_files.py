"""Named arrays in a file: ``.safetensors``, and PyTorch's ``.pth`` and ``.pt``.

PyTorch's files need PyTorch itself (``pip install -e '.[interop]'``); it reads arrays only and
runs nothing that such a file may hold.

Both kinds come from strangers. What is no plain array of real numbers, or would take far more
memory than its file, is refused before memory is taken for it.
"""

import math
import struct
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxtrain import errors, versions
from jaxtrain.errors import InputError, first_line
from jaxtrain.storage import atomic, pytorch_format

SAFETENSORS = ".safetensors"
PYTORCH = (".pth", ".pt", ".bin")
ENDINGS = (SAFETENSORS, *PYTORCH)

Tensors = dict[str, np.ndarray]
# What safetensors calls the types that are read. Those of 8 bits are exact in float32; files whose
# numbers of 8 bits need scales have these as further arrays, which no model here takes.
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
# The same of PyTorch, whose names end the names of its types.
_TORCH_DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz", "int64", "int32", "int16", "int8"),
    *("uint64", "uint32", "uint16", "uint8", "bool"),
)
# 8 bits become 32, and a tied array has two names.
_MOST_WIDENING = 16
_MOST_SMALL_BYTES = 2**26
_NAME_CHARACTERS = 300
# Where PyTorch programs put a state dict among other things.
_WRAPPERS = ("state_dict", "model", "module", "model_state_dict")


def check_ending(path: Path) -> None:
    """Refuses a name that says of no known format.

    Raises:
        InputError: names those there are.
    """
    if path.suffix not in ENDINGS:
        raise InputError(f"{path}: weights files end with one of {', '.join(ENDINGS)}")


def check_pytorch(path: Path) -> None:
    """Refuses a PyTorch file where there is no PyTorch.

    Raises:
        InputError: says how to get it.
    """
    _torch(path)


def read(path: Path) -> tuple[Tensors, dict[str, str]]:
    """All arrays of a file, floating-point ones as float32, and what the file says of itself.

    Raises:
        InputError: there is no such file, or it holds something else.
    """
    check_ending(path)
    check_file(path, f"a weights file ({', '.join(ENDINGS)})")
    return _read_safetensors(path) if path.suffix == SAFETENSORS else (_read_pytorch(path), {})


def check_file(path: Path, wanted: str) -> None:
    """Refuses what is no regular file.

    Args:
        path: of the file.
        wanted: what to name instead, for the error.

    Raises:
        InputError: says what it is.
    """
    if path.is_file():
        return
    if path.is_dir():
        what = "is a folder"
    else:
        what = "is a pipe or a device" if path.exists() else "does not exist"
    raise InputError(f"{path} {what}; name {wanted}")


def check_real(tensors: Mapping[str, np.ndarray], source: str) -> None:
    """Refuses whole numbers where weights should be, such as quantized ones without their scales.

    Raises:
        InputError: names the first array.
    """
    for name, array in tensors.items():
        if array.dtype.kind in "iub":
            raise InputError(
                f"{source}: {name} holds whole numbers ({array.dtype}), not weights: export the "
                "weights as float32, bfloat16 or float16"
            )


def write(path: Path, tensors: Mapping[str, np.ndarray], about: Mapping[str, str]) -> None:
    """Writes arrays; the file appears whole.

    Args:
        path: its ending names the format.
        tensors: name -> array.
        about: what a ``.safetensors`` file says of itself; PyTorch's format has no place for it.

    Raises:
        InputError: the ending is none of those known, or PyTorch is needed and missing.
        OSError: the file cannot be written.
    """
    check_ending(path)
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    if path.suffix == SAFETENSORS:
        import safetensors.numpy

        metadata = {"format": "pt", **about}  # what transformers and diffusers look for
        atomic.write_whole(path, safetensors.numpy.save(contiguous, metadata=metadata))
        return
    import io

    torch = _torch(path)
    held = io.BytesIO()
    # Copied: PyTorch warns of arrays that cannot be written, as those of jax.
    torch.save({name: torch.tensor(array) for name, array in contiguous.items()}, held)
    atomic.write_whole(path, held.getvalue())


class Place(NamedTuple):
    """Where an array is in a ``.safetensors`` file.

    Attributes:
        code: the format's name of its type.
        shape: of the array.
        begin: its first byte, from the beginning of the file.
        bytes: how many it has.
    """

    code: str
    shape: tuple[int, ...]
    begin: int
    bytes: int


def places(path: Path) -> tuple[dict[str, Place], dict[str, str]]:
    """Where the arrays of a ``.safetensors`` file are, and what the file says of itself.

    Raises:
        InputError: the file is damaged, or is something else.
    """
    import safetensors

    try:
        # Checks the header: its size, its JSON, that arrays have the sizes of their shapes and
        # types, and that they fill the file without holes or overlaps.
        with safetensors.safe_open(path, framework="numpy") as opened:
            about = dict(opened.metadata() or {})
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = atomic.parse_json(file.read(length))
        header.pop("__metadata__", None)
        found = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            found[name] = Place(entry["dtype"], shape, 8 + length + begin, end - begin)
    except (safetensors.SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is no whole .safetensors file ({first_line(error)[:_NAME_CHARACTERS]})"
        ) from error
    for name in found:
        _check_name(path, name)
    return found, about


def _check_name(path: Path, name: object) -> None:
    """Refuses names that no program gives, and no terminal should be shown."""
    if not isinstance(name, str) or not name.isprintable() or len(name) > _NAME_CHARACTERS:
        raise InputError(
            f"{path}: {errors.shown(name)} is not the name of an array in any model here"
        )


def _read_safetensors(path: Path) -> tuple[Tensors, dict[str, str]]:
    there, about = places(path)
    for name, place in there.items():
        if place.code not in _DTYPES:
            raise InputError(
                f"{path}: {name} is of type {place.code}, which is not read here: export the "
                "weights as float32, bfloat16 or float16"
            )
    try:
        with open(path, "rb") as file:
            return {name: _read_array(file, place) for name, place in there.items()}, about
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no whole .safetensors file ({error})") from error


def _read_array(file: BufferedReader, place: Place) -> np.ndarray:
    dtype = _DTYPES[place.code]
    file.seek(place.begin)
    content = bytearray(place.bytes)  # at most the file's size, which was checked
    if file.readinto(content) < place.bytes or math.prod(place.shape) * dtype.itemsize != len(
        content
    ):
        raise ValueError("an array is cut off")
    return _widened(np.frombuffer(content, dtype).reshape(place.shape))


def _read_pytorch(path: Path) -> Tensors:
    torch = _torch(path)
    try:
        pytorch_format.check(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # PyTorch raises all kinds for damaged files
        raise InputError(f"{path} is no PyTorch file of arrays ({first_line(error)})") from error
    found, taken = _state_dict(path, content), 0
    most = _MOST_WIDENING * path.stat().st_size + _MOST_SMALL_BYTES
    for name, tensor in found.items():
        _check_name(path, name)
        _check_tensor(torch, tensor, f"{path}: {name}")
        taken += tensor.numel() * 4
        if taken > most:
            raise InputError(
                f"{path}: its arrays, as far as {name}, would take {taken:,} bytes in float32, "
                f"which its {path.stat().st_size:,} bytes cannot hold: save them with .clone()"
            )
    return {name: _as_array(torch, tensor) for name, tensor in found.items()}


def _check_tensor(torch: Any, tensor: Any, what: str) -> None:
    """Refuses what is no plain array.

    Raises:
        InputError: says what it is.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else "sparse"
    elif tensor.is_quantized:
        kind = "quantized"
    elif tensor.device.type != "cpu":  # "meta": without its numbers
        kind = f"on the device {tensor.device.type!r}, without its numbers,"
    elif dtype not in _TORCH_DTYPES:
        kind = f"of type {dtype}"
    else:
        return
    raise InputError(
        f"{what} is {kind} and not read here: save dense arrays of float32, bfloat16 or float16"
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
    raise InputError(f"{path} holds no state dict (names of arrays), but {type(content).__name__}")


def _as_array(torch: Any, tensor: Any) -> np.ndarray:
    tensor = tensor.detach().resolve_neg()
    wide = tensor.to(torch.float32) if tensor.is_floating_point() else tensor
    return np.asarray(wide.numpy())


def _widened(array: np.ndarray) -> np.ndarray:
    """Floating-point numbers as float32; others as they are."""
    exact = array.dtype.kind in "iub" or array.dtype == np.float32
    return array if exact else array.astype(np.float32)


def _torch(path: Path) -> Any:
    try:
        import torch
    except ImportError as error:
        raise InputError(
            f"{path}: PyTorch's files need PyTorch: {versions.install('interop')}, or take a "
            f"{SAFETENSORS} file"
        ) from error
    return torch
