"""Named arrays in a file: ``.safetensors``, and PyTorch's ``.pth`` and ``.pt``.

PyTorch's files need PyTorch itself (``pip install -e '.[interop]'``); it reads arrays only and
runs nothing that such a file may hold.
"""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain import files
from jaxtrain.errors import InputError, first_line

SAFETENSORS = ".safetensors"
PYTORCH = (".pth", ".pt", ".bin")
ENDINGS = (SAFETENSORS, *PYTORCH)

Tensors = dict[str, np.ndarray]
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
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise InputError(f"{path} {what}; name a weights file ({', '.join(ENDINGS)})")
    return _read_safetensors(path) if path.suffix == SAFETENSORS else (_read_pytorch(path), {})


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
        files.write_whole(path, safetensors.numpy.save(contiguous, metadata=metadata))
        return
    import io

    torch = _torch(path)
    held = io.BytesIO()
    # Copied: PyTorch warns of arrays that cannot be written, as those of jax.
    torch.save({name: torch.tensor(array) for name, array in contiguous.items()}, held)
    files.write_whole(path, held.getvalue())


def _read_safetensors(path: Path) -> tuple[Tensors, dict[str, str]]:
    import safetensors

    found: Tensors = {}
    try:
        with safetensors.safe_open(path, framework="flax") as file:
            about = file.metadata() or {}
            for name in file.keys():  # noqa: SIM118  not a mapping
                found[name] = _widened(np.asarray(file.get_tensor(name)))
    except (safetensors.SafetensorError, OSError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is no whole .safetensors file ({error})") from error
    return found, dict(about)


def _read_pytorch(path: Path) -> Tensors:
    torch = _torch(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise InputError(f"{path} is no PyTorch file of arrays ({first_line(error)})") from error
    return {name: _as_array(torch, tensor) for name, tensor in _state_dict(path, content).items()}


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
    tensor = tensor.detach().cpu()
    wide = tensor.to(torch.float32) if tensor.is_floating_point() else tensor
    return np.asarray(wide.numpy())


def _widened(array: np.ndarray) -> np.ndarray:
    small = array.dtype.kind == "V" or array.dtype.name == "bfloat16" or array.dtype == np.float16
    return array.astype(np.float32) if small or array.dtype == np.float64 else array


def _torch(path: Path) -> Any:
    try:
        import torch
    except ImportError as error:
        raise InputError(
            f"{path}: PyTorch's files need PyTorch: pip install -e '.[interop]', or take a "
            f"{SAFETENSORS} file"
        ) from error
    return torch
