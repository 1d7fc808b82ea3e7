"""What export writes is read back and compared."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from models.video_ae import small_autoencoder

from jaxtrain.errors import InputError
from jaxtrain.inference import export_check
from jaxtrain.interop import weights
from jaxtrain.models import mlm
from jaxtrain.storage import tensor_files


def exported(path: Path) -> tuple[Any, dict[str, np.ndarray]]:
    model = small_autoencoder.config()
    params = small_autoencoder.params(model)
    weights.save(path, model, params)
    return model, params


def test_equal_files_pass(tmp_path: Path) -> None:
    model, params = exported(tmp_path / "out.safetensors")
    (sentence,) = export_check.check(tmp_path / "out.safetensors", model, params)
    assert "equal to the bit" in sentence


def test_one_changed_bit_is_named(tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    model, params = exported(path)
    tensors, about = tensor_files.read(path)
    name = "decoder.1.bias"
    tensors[name] = np.nextafter(tensors[name], np.float32(9))
    safetensors.numpy.save_file(tensors, path, {"format": "pt", **about})
    with pytest.raises(InputError, match=r"decoder\.\S+ differs from the exported model"):
        export_check.check(path, model, params)


def test_another_config_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    model, params = exported(path)
    tensors, about = tensor_files.read(path)
    stored = json.loads(about[weights.ABOUT])
    about[weights.ABOUT] = json.dumps(stored | {"trim": "odd_latents"})
    safetensors.numpy.save_file(tensors, path, {"format": "pt", **about})
    with pytest.raises(InputError, match="model config differs"):
        export_check.check(path, model, params)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (np.zeros((1, 4, 8), np.float32), "computes other logits"),
        (np.zeros((1, 4, 7), np.float32), "of shape"),
        (np.full((1, 4, 8), np.nan, np.float32), "computes other logits"),
    ],
)
def test_another_output_of_a_reference_is_refused(outputs: np.ndarray, words: str) -> None:
    ours = {"logits": np.random.default_rng(0).standard_normal((1, 4, 8), np.float32)}
    with pytest.raises(InputError, match=words):
        export_check._same("transformers", ours, {"logits": outputs}, Path("out"))


def test_differences_are_in_standard_deviations() -> None:
    ours = {"logits": np.random.default_rng(0).standard_normal((1, 400, 8), np.float32) * 5}
    theirs = {"logits": ours["logits"] + np.float32(5e-4)}
    assert "logits 0.0001)" in export_check._same("x", ours, theirs, Path("out"))


def test_a_transformers_that_cannot_read_the_folder_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any) -> None:
        raise ValueError("unknown model type")

    monkeypatch.setattr(export_check.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(export_check.huggingface, "is_model_folder", lambda path: True)
    monkeypatch.setattr(export_check, "_read_back", lambda *arguments: "Read back.")
    monkeypatch.setattr(export_check, "_of_transformers", fails)
    model = mlm.Config.tiny()
    assert export_check.check(tmp_path, model, {}) == [
        "Read back.",
        "Not compared: transformers cannot read it (unknown model type).",
    ]
