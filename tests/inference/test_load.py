"""Loading a trained model for a command: the model's methods determine what it can do."""

from pathlib import Path

import numpy as np
import pytest
from models.small_params import random_params, write_run

from jaxtrain.errors import InputError
from jaxtrain.inference import load
from jaxtrain.interop import weights
from jaxtrain.models import video_ae
from jaxtrain.storage import tensor_files

MODEL = video_ae.Config.tiny()


def test_optional_methods_determine_what_a_model_can_do() -> None:
    assert load.able("generate") == ["gpt", "llama"]
    assert load.able("fill") == ["mlm", "modern_bert"]
    assert load.able("reconstruct") == ["video_ae", "wan_vae"]
    assert load.able("generate", "fill") == ["gpt", "llama", "mlm", "modern_bert"]


def test_an_unsuitable_model_is_refused_before_its_arrays_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run", MODEL, 8, random_params(MODEL))
    monkeypatch.setattr(weights, "_of_checkpoint", None)
    with pytest.raises(
        InputError,
        match=r"run has the model video_ae, which fill cannot use: pass a model of the kind mlm or "
        r"modern_bert; to use this model: .* reconstruct .*run IN.mp4 OUT.mp4",
    ):
        load.load(tmp_path / "run", "fill", "fill")


def test_a_file_without_a_model_config_has_the_only_suitable_model(tmp_path: Path) -> None:
    params = random_params(MODEL)
    path = tmp_path / "bare.safetensors"
    tensor_files.write(path, MODEL.to_weights(params), {})
    trained = load.load(path, "encode", "reconstruct")
    assert trained.params.keys() == params.keys()
    for name, array in params.items():
        np.testing.assert_array_equal(trained.params[name], array)
    with pytest.raises(InputError, match="has no model config"):
        load.load(path, "generate", "generate")
