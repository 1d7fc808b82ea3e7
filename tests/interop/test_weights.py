"""Parameters from checkpoints, runs and weights files, with or without a known model."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.video.sample_videos import busy, write
from models.small_params import random_params, write_run

from jaxtrain import config, main
from jaxtrain.checkpoint import resume
from jaxtrain.errors import InputError
from jaxtrain.interop import weights
from jaxtrain.models import gpt, mlm, video_ae
from jaxtrain.storage import tensor_files
from jaxtrain.training.state import ModelDefinition

MODEL = video_ae.Config.tiny()
WITH = dataclasses.replace(
    MODEL, height=32, width=32, frames=12, adversary=video_ae.Adversary(replay=4)
)


def same(found: Any, wanted: Any) -> None:
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)


def test_the_best_checkpoint_of_a_run_is_preferred_to_the_newest(tmp_path: Path) -> None:
    newest, best = random_params(MODEL, 1), random_params(MODEL, 2)
    write_run(tmp_path / "run", MODEL, 8, newest)
    found = weights.load(tmp_path / "run")
    assert (found.model, found.source) == (MODEL, str(tmp_path / "run" / "checkpoints" / "8.json"))
    same(found.params, newest)
    write_run(tmp_path / "run", MODEL, 4, best, best=True)
    same(weights.load(tmp_path / "run").params, best)
    same(weights.load(tmp_path / "run" / "checkpoints" / "8").params, newest)


def test_identifying_a_model_reads_no_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run", MODEL, 8, random_params(MODEL))
    monkeypatch.setattr(resume, "newest_intact", None)  # reads every byte
    for source in (tmp_path / "run", tmp_path / "run/checkpoints/8"):
        assert weights.model_at(source) == MODEL
    for other in (tmp_path, tmp_path / "gone", Path(__file__)):
        assert weights.model_at(other) is None


def test_a_weights_file_contains_its_model(tmp_path: Path) -> None:
    params = random_params(WITH)
    own = {name: array for name, array in params.items() if not name.startswith("adversary.")}
    weights.save(tmp_path / "x.safetensors", WITH, params)
    found = weights.load(tmp_path / "x.safetensors")
    assert found.model == WITH
    same(found.params, own)  # the reference has no place for a discriminator
    tensors, about = tensor_files.read(tmp_path / "x.safetensors")
    assert about["format"] == "pt"
    assert not any("adversary" in name for name in tensors)


def test_a_run_starts_from_the_parameters_that_fit(tmp_path: Path) -> None:
    expected = ModelDefinition(WITH.build).params
    write_run(tmp_path / "run", MODEL, 8, random_params(MODEL))
    found, notes = weights.params_for(tmp_path / "run", WITH, expected)
    same(found, random_params(MODEL))
    assert notes == [
        "24 parameters of the model are newly initialized, such as "
        "adversary.discriminator.layers.0.head"
    ]
    write_run(tmp_path / "with", WITH, 8, random_params(WITH))
    bare = ModelDefinition(MODEL.build).params
    found, notes = weights.params_for(tmp_path / "with", MODEL, bare)
    assert set(found) == set(bare)
    assert notes == [
        "24 parameters in the source are not used, such as adversary.discriminator.layers.0.head"
    ]


@pytest.mark.slow
def test_settings_that_shapes_do_not_show_must_be_equal(tmp_path: Path) -> None:
    """For example how frames map to latents, in weights for CogVideoX."""
    other = dataclasses.replace(MODEL, trim="odd_latents")
    shapes = ModelDefinition(MODEL.build).params
    write_run(tmp_path / "run", other, 8, random_params(MODEL))
    weights.save(tmp_path / "x.safetensors", other, random_params(MODEL))
    tensor_files.write(tmp_path / "taecvx.safetensors", MODEL.to_weights(random_params(MODEL)), {})
    for name in ("run", "x.safetensors", "taecvx.safetensors"):
        with pytest.raises(InputError, match=r"set --model.trim odd_latents"):
            weights.params_for(tmp_path / name, MODEL, shapes)
        same(weights.params_for(tmp_path / name, other, shapes)[0], random_params(MODEL))
    folder = tmp_path / "taecvx"
    folder.mkdir()
    tensor_files.write(folder / "x.safetensors", MODEL.to_weights(random_params(MODEL)), {})
    weights.params_for(folder / "x.safetensors", MODEL, shapes)


def test_a_model_guessed_from_weights_leaves_unknown_fields_open(tmp_path: Path) -> None:
    """A GPT's bare weights do not show its heads; None equals the number derived from it."""
    model = dataclasses.replace(gpt.Config.tiny(), width=16, heads=2)
    shapes = ModelDefinition(model.build).params
    params = random_params(model)
    tensor_files.write(tmp_path / "bare.safetensors", model.to_weights(params), {})
    found, notes = weights.params_for(tmp_path / "bare.safetensors", model, shapes)
    same(found, params)
    assert "model.heads cannot be read from the weights: using 2" in notes
    one = dataclasses.replace(model, heads=1)
    dial = dataclasses.replace(model, heads=None)
    weights.save(tmp_path / "one.safetensors", one, params)
    assert weights.params_for(tmp_path / "one.safetensors", dial, shapes)[1] == []
    with pytest.raises(InputError, match=r"with model.heads=1, but this model has 2: set --model"):
        weights.params_for(tmp_path / "one.safetensors", model, shapes)


def test_weights_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    write_run(tmp_path / "run", MODEL, 8, random_params(MODEL))
    wide = dataclasses.replace(MODEL, encoder_width=16)
    message = r"8.json does not fit this model; misshapen: .* and \d+ more\. Use the model config"
    with pytest.raises(InputError, match=message):
        weights.params_for(tmp_path / "run", wide, ModelDefinition(wide.build).params)
    with pytest.raises(InputError, match=r"gone.pth does not exist"):
        weights.load(tmp_path / "gone.pth")
    weights.save(tmp_path / "y.safetensors", MODEL, random_params(MODEL))
    language = mlm.Config.tiny()
    with pytest.raises(InputError, match=r"does not fit this model; missing: bert.embeddings"):
        weights.params_for(tmp_path / "y.safetensors", language, {})


def test_arrays_that_do_not_fit_their_own_config_are_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A forged checkpoint used to end in a traceback."""
    wide = dataclasses.replace(MODEL, encoder_width=16)
    write_run(tmp_path / "run", None, 8, random_params(MODEL), stored=config.to_dict(wide))
    video = write(tmp_path / "in.mp4", busy(4, height=MODEL.height, width=MODEL.width))
    out = tmp_path / "out.safetensors"
    assert main.main(["encode", str(tmp_path / "run"), str(video), str(out)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(
        r"run.checkpoints.8.json does not fit this model; misshapen: encoder.*damaged", line
    )
    assert not out.exists()
