"""Teachers trained with jaxtrain, and refused sources; tests/interop covers diffusers."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxtrain.errors import InputError
from jaxtrain.inference import teachers
from jaxtrain.interop import weights
from jaxtrain.models import video_ae
from jaxtrain.training.state import ModelDefinition

MODEL = video_ae.Config.tiny()


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A weights file and the module that it was saved from."""
    path = tmp_path_factory.mktemp("teacher") / "taught v1.safetensors"
    definition = ModelDefinition(MODEL.build)
    params, _ = definition.init(jax.random.key(3))
    weights.save(path, MODEL, {name: np.asarray(array) for name, array in params.items()})
    return path, MODEL.build(nnx.Rngs(jax.random.key(3)))


def _load(path: Path | str, model: Any = MODEL, **more: Any) -> Any:
    settings = {"scaling": None, "say": lambda line: None, **more}
    teacher = teachers.load(str(path), **settings)
    teacher.check(f"--teacher {path}", model, model.frames, "--model.frames")
    return teacher


@pytest.mark.slow
def test_our_own_encoder_as_a_teacher(saved_model: tuple[Path, Any]) -> None:
    path, module = saved_model
    log: list[str] = []
    teacher = _load(path, say=log.append)
    video = np.random.default_rng(0).random((8, 4, 16, 16, 3), np.float32)
    expected = np.asarray(module.encode(video))
    found = teacher.encode(video)
    assert (found.dtype, found.shape) == (np.float32, (8, *MODEL.latent_shape))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(_load(path, scaling=0.5).encode(video), expected / 2, atol=1e-5)
    assert log == [f"teacher {teacher.name}: {path}, latents times 1"]


def test_the_name_depends_on_encoder_and_scaling(
    saved_model: tuple[Path, Any], tmp_path: Path
) -> None:
    path, _ = saved_model
    name = _load(path).name
    assert name.startswith("taught-v1-")
    loaded = weights.load(path)
    copy = tmp_path / path.name
    decoder = {k: v + k.startswith("decoder") for k, v in loaded.params.items()}
    weights.save(copy, MODEL, decoder)
    assert _load(copy).name == name
    encoder = {k: v + np.float32(1e-3) for k, v in loaded.params.items()}
    weights.save(copy, MODEL, encoder)
    assert len({name, _load(copy).name, _load(path, scaling=2.0).name}) == 3


@pytest.mark.parametrize("scaling", [0.0, float("nan"), float("inf")])
def test_a_factor_that_cannot_be_undone_is_refused(
    saved_model: tuple[Path, Any], scaling: float
) -> None:
    with pytest.raises(InputError, match=r"--teacher-scaling .*: use a finite factor other than 0"):
        _load(saved_model[0], scaling=scaling)


def test_loss_settings_do_not_change_a_teacher(
    saved_model: tuple[Path, Any], tmp_path: Path
) -> None:
    params = weights.load(saved_model[0]).params
    model = dataclasses.replace(MODEL, perceptual=None, teacher=video_ae.Teacher(), remat="block")
    path = tmp_path / saved_model[0].name
    weights.save(path, model, params)
    assert _load(path).name == _load(saved_model[0]).name


def test_sources_that_are_not_teachers_are_refused(
    saved_model: tuple[Path, Any], tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"--teacher .*gone: no such file or folder; pass a"):
        _load(tmp_path / "gone")
    with pytest.raises(InputError, match=r"no checkpoint found in"):
        _load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKL"}))
    with pytest.raises(
        InputError, match=r"pip install -e '.\[interop\]'|holds the class AutoencoderKL;"
    ):
        _load(tmp_path)
