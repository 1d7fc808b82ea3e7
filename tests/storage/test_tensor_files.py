"""Tests that untrusted weights files are read correctly, or rejected with one line."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxtrain.errors import InputError
from jaxtrain.inference.video import tensor_stream
from jaxtrain.storage import tensor_files


def forge(path: Path, header: Any, data: bytes = b"") -> Path:
    """Writes a .safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def array(code: str, shape: Any, data: bytes) -> dict[str, Any]:
    return {"a": {"dtype": code, "shape": shape, "data_offsets": [0, len(data)]}}


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        tensor_files.read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


@pytest.mark.parametrize("code", DTYPES)
def test_floats_become_float32_and_integers_are_unchanged(tmp_path: Path, code: str) -> None:
    is_float = code.startswith(("F", "BF"))
    values: np.ndarray = np.array([0.0, 1.0, -0.5, -16.0] if is_float else [0, 1, 1, 0])
    values = values.astype(DTYPES[code])
    if code in ("I64", "U64"):
        values[1] = 2**40  # jax would truncate it to 32 bits
    data = values.tobytes()
    path = forge(tmp_path / "x.safetensors", array(code, [2, 2], data), data)
    found, about = tensor_files.read(path)
    assert found["a"].dtype == (np.float32 if is_float else DTYPES[code])
    assert about == {}
    np.testing.assert_array_equal(found["a"].ravel(), values.astype(found["a"].dtype))


@pytest.mark.parametrize(
    ("code", "size"), [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6), ("F8_E8M0", 8), ("C64", 64)]
)
def test_unsupported_dtypes_are_rejected(tmp_path: Path, code: str, size: int) -> None:
    data = bytes(size)
    path = forge(tmp_path / "x.safetensors", array(code, [8], data), data)
    assert refusal(path) == (
        f"{path}: a has dtype {code}, which is not supported: export the weights as float32, "
        "bfloat16, or float16"
    )


def test_forged_headers_are_rejected(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    entry: dict[str, Any] = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    four = bytes(4)
    headers: tuple[Any, ...] = (
        {"a": entry | {"dtype": "F31"}},
        {"a": entry | {"dtype": 7}},
        {"a": entry | {"shape": [-1]}},
        {"a": entry | {"shape": 1}},
        {"a": entry | {"shape": [2**63, 2**63]}},
        {"a": entry | {"shape": [2**40]}},
        {"a": entry | {"data_offsets": [0, 2**62]}},
        {"a": entry | {"data_offsets": [4, 0]}},
        {"a": entry | {"data_offsets": [2]}},
        {"a": []},
        {"a": entry, "b": entry},
        {"a": entry, "__metadata__": {"n": 1}},
        {"a": entry, "__metadata__": []},
        [],
        b"[" * 100_000,
        b"\xff\xff",
        b"{",
        b"",
    )
    for header in headers:
        assert "is not a complete .safetensors file" in refusal(forge(path, header, four)), header
    path.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    assert "is not a complete .safetensors file" in refusal(path)
    path.write_bytes(b"")
    assert "is not a complete .safetensors file" in refusal(path)
    assert "is not a complete" in refusal(forge(path, {"a": entry}, bytes(3)))


@pytest.mark.parametrize("shape", [[0], [0, 2**40], [0, 2**62], [2**20, 0, 2**20], []])
def test_empty_arrays_allocate_nothing(tmp_path: Path, shape: list[int]) -> None:
    data = b"" if shape else bytes(4)
    path = forge(tmp_path / "x.safetensors", array("F32", shape, data), data)
    if max(shape, default=0) > 2**60:  # more than numpy supports
        assert "is not a complete .safetensors file" in refusal(path)
    else:
        assert tensor_files.read(path)[0]["a"].shape == tuple(shape)


def test_paths_other_than_regular_files_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    for name, what in (
        ("folder", "is a folder"),
        ("pipe", "is a pipe or a device"),
        ("zero", "is a pipe or a device"),
        ("none", "does not exist"),
    ):
        path = tmp_path / f"{name}.safetensors"
        assert refusal(path).startswith(f"{path} {what}: pass a weights file")
        with pytest.raises(InputError, match=what):
            tensor_stream.read(path, "a")


@pytest.mark.parametrize("shape", [[0, 2, 2], [4, 0], [2**40, 0], [], [0]])
def test_latents_of_an_invalid_shape_are_rejected(tmp_path: Path, shape: list[int]) -> None:
    data = b"" if shape else bytes(4)
    path = forge(tmp_path / "x.safetensors", array("F32", shape, data), data)
    with pytest.raises(
        InputError, match=r"has shape \[.*\] and contains no data: encode the video again"
    ):
        tensor_stream.read(path, "a")


def test_latents_are_read_row_by_row(tmp_path: Path) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    with tensor_stream.writing(tmp_path / "x.safetensors", "a", "bfloat16", {"n": "1"}) as file:
        for row in rows:
            file.add(row)
    shape, about, found = tensor_stream.read(tmp_path / "x.safetensors", "a")
    assert shape == (3, 2, 2)
    assert about == {"n": "1"}
    np.testing.assert_array_equal(np.stack(list(found)), rows)


def test_integer_or_truncated_latents_are_rejected(tmp_path: Path) -> None:
    data = bytes(8)
    path = forge(tmp_path / "x.safetensors", array("I64", [1], data), data)
    with pytest.raises(InputError, match="a has dtype I64: use one of F32, BF16, F16"):
        tensor_stream.read(path, "a")
    path = forge(path, array("F32", [2], data), data)
    _, _, rows = tensor_stream.read(path, "a")
    os.truncate(path, path.stat().st_size - 2)
    assert next(rows) == 0
    with pytest.raises(InputError, match="was truncated while being read"):
        next(rows)


def test_latents_that_a_dtype_cannot_hold_are_refused(tmp_path: Path) -> None:
    for row, message in (
        (
            np.array([1e5, -7e4], np.float32),
            r"numbers up to 1e\+05, too large for float16: use --dt",
        ),
        (np.array([0, np.nan], np.float32), "a 0 contains NaN/Inf: check the weights"),
    ):
        path = tmp_path / "x.safetensors"
        with (
            pytest.raises(InputError, match=message),
            tensor_stream.writing(path, "a", "float16", {}) as file,
        ):
            file.add(row)
        assert not path.exists()
    data = np.array([1, np.inf], np.float32).tobytes()
    path = forge(tmp_path / "y.safetensors", array("F32", [2], data), data)
    _, _, rows = tensor_stream.read(path, "a")
    assert next(rows) == 1
    with pytest.raises(InputError, match=r"contains NaN/Inf: encode the video"):
        next(rows)
