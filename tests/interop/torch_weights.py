"""Weights to and from PyTorch files.

What the arrays compute is compared with the reference's outputs in
tests/models/video_ae/test_weights.py.

Run by name: ``python -m pytest tests/interop/torch_weights.py``; requires the extra ``interop``.
The file's name keeps it out of the ordinary suite.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli.test_weights_commands import FIXTURES, published
from torch import nn

from jaxtrain import main
from jaxtrain.errors import InputError
from jaxtrain.interop import weights
from jaxtrain.storage import tensor_files


def command(*arguments: Any) -> int:
    return main.main([*map(str, arguments)])


def of_reference(checkout: Path, name: str, place: Path) -> dict[str, torch.Tensor]:
    """Returns noise with the names and shapes of a network of the reference."""
    arrays = published(checkout, name, place / "noise.safetensors")
    return {key: torch.from_numpy(array) for key, array in arrays.items()}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", FIXTURES)
def test_import_and_export_change_nothing(
    name: str, wrapped: bool, checkout: Path, tmp_path: Path
) -> None:
    tensors = of_reference(checkout, name, tmp_path)
    theirs = tmp_path / ("taeh3.pth" if name == "taehv_h3" else "taehv.pth")
    torch.save({"state_dict": tensors, "epoch": 3} if wrapped else tensors, theirs)
    assert command("import", theirs, tmp_path / "ours.safetensors") == 0
    assert command("export", tmp_path / "ours.safetensors", tmp_path / "back.pth") == 0
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    assert [*back] == [*tensors]
    for key, tensor in tensors.items():
        assert torch.equal(back[key], tensor), key


def test_half_precision_is_converted_to_float32(checkout: Path, tmp_path: Path) -> None:
    tensors = of_reference(checkout, "taehv_base", tmp_path)
    low = {key: tensor.to(torch.bfloat16) for key, tensor in tensors.items()}
    torch.save(low, tmp_path / "taehv.pth")
    assert command("import", tmp_path / "taehv.pth", tmp_path / "ours.safetensors") == 0
    found = weights.load(tmp_path / "ours.safetensors").params
    assert {str(array.dtype) for array in found.values()} == {"float32"}
    head = low["encoder.0.weight"].float().numpy().transpose(2, 3, 1, 0)
    np.testing.assert_array_equal(found["encoder.head.kernel"], head)


@pytest.mark.parametrize("content", ["text", "module", "torn", "numbers"])
def test_other_files_are_rejected(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "theirs.pth"
    if content == "text":
        path.write_text("no weights")
    elif content == "module":  # a pickled module could run anything
        torch.save(nn.Conv2d(3, 3, 1), path)
    elif content == "torn":
        torch.save({"a": torch.zeros(1000)}, path)
        path.write_bytes(path.read_bytes()[:-700])
    else:
        torch.save({"a": 1, "b": 2}, path)
    assert command("import", path, tmp_path / "ours.safetensors") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "theirs.pth" in line
    assert "not a PyTorch file of arrays" in line or "not a state dict" in line
    assert not (tmp_path / "ours.safetensors").exists()


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        tensor_files.read(path)
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: torch.eye(4).to_sparse(),
            "a is not supported (sparse, nested, or quantized; float32",
        ),
        (lambda: torch.zeros(4, device="meta"), "a is not supported (float32 on the device meta)"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
            "a is not supported (sparse, nested, or quantized; qint8",
        ),
        (
            lambda: torch.zeros(4, dtype=torch.complex64),
            "a is not supported (complex64 on the device cpu)",
        ),
        (lambda: torch.zeros(1).expand(10**12), "would take 4,000,000,000,000 bytes in float32"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_tensors_other_than_plain_arrays_are_rejected(
    make: Callable[[], torch.Tensor], words: str, tmp_path: Path
) -> None:
    torch.save({"a": make()}, tmp_path / "x.pth")
    assert words in refusal(tmp_path / "x.pth")


def test_odd_but_plain_tensors_are_read(tmp_path: Path) -> None:
    held = torch.arange(6.0).reshape(2, 3)
    content = {
        "transposed": held.T,
        "eight": held.to(torch.float8_e4m3fn),
        "parameter": nn.Parameter(held),
        "flag": torch.ones(2, dtype=torch.bool),
        "empty": torch.zeros(0, 5),
        "u16": torch.ones(2, dtype=torch.uint16),
    }
    torch.save(content, tmp_path / "x.pth")
    found, _ = tensor_files.read(tmp_path / "x.pth")
    np.testing.assert_array_equal(found["transposed"], held.numpy().T)
    np.testing.assert_array_equal(found["eight"], held.numpy())
    np.testing.assert_array_equal(found["parameter"], held.numpy())
    assert [str(found[name].dtype) for name in ("flag", "empty", "u16")] == [
        "bool",
        "float32",
        "uint16",
    ]


def test_views_of_one_storage_cannot_exhaust_memory(tmp_path: Path) -> None:
    shared = torch.zeros(2**20, dtype=torch.bfloat16)
    torch.save({str(number): shared[:] for number in range(2000)}, tmp_path / "x.pth")
    assert "bytes in float32, but the file has only" in refusal(tmp_path / "x.pth")


def test_a_file_of_older_pytorch_is_read(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(4)}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert tensor_files.read(tmp_path / "old.pth")[0]["a"].shape == (4,)


def test_names_other_than_printable_strings_are_rejected(tmp_path: Path) -> None:
    for name in (7, "a\nb", "a\x1b[2J"):
        torch.save({name: torch.zeros(1)}, tmp_path / "x.pth")
        assert "is not a valid array name" in refusal(tmp_path / "x.pth")
