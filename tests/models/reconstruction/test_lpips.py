"""Tests LPIPS against the published network, on reproducible random weights."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.reconstruction import lpips_weights
from models.video_ae.small_autoencoder import batch
from training import toy

from jaxtrain import config
from jaxtrain.errors import InputError
from jaxtrain.models import video_ae
from jaxtrain.models.reconstruction import lpips
from jaxtrain.storage import tensor_files
from jaxtrain.training import state
from jaxtrain.training.model_flops import model_flops

# Computed by tests/interop/torch_lpips.py with PyTorch on the same weights and frames.
WANTED = {
    "alex": (1.0239794, 1.0610843, 1.0595266),
    "vgg": (0.8126042, 0.8214463, 0.8280355),
}


def frames(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(size=(3, 48, 40, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lpips_weights.write(tmp_path_factory.mktemp("lpips") / "lpips.safetensors")


def jitted(weights: Path, network: str) -> Any:
    by, measure = lpips.measure(weights)
    assert by == network
    return jax.jit(lambda one, other: measure(one[None], other[None])[0])


@pytest.fixture(scope="module")
def distance(weights: Path) -> Any:
    return jitted(weights, "alex")


def test_values_match_the_published_network(distance: Any) -> None:
    np.testing.assert_allclose(distance(frames(0), frames(1)), WANTED["alex"], rtol=1e-4)


def test_the_file_says_which_network_it_is_of(tmp_path: Path) -> None:
    path = lpips_weights.write_vgg(tmp_path / "vgg.safetensors")
    found = jitted(path, "vgg")(frames(0)[:1], frames(1)[:1])
    np.testing.assert_allclose(found, WANTED["vgg"][:1], rtol=1e-4)
    with pytest.raises(InputError, match=r"vgg.safetensors has LPIPS by vgg, but this takes alex"):
        model(path).file_weights()


@pytest.mark.slow
def test_black_frames_have_a_gradient(distance: Any) -> None:
    grad = jax.grad(lambda x: distance(x, frames(1)).sum())(jnp.zeros((3, 48, 40, 3)))
    assert np.isfinite(grad).all()
    assert np.any(grad)


def test_a_file_of_only_the_linear_layers_says_how_to_save_all(tmp_path: Path) -> None:
    tensor_files.write(tmp_path / "linear.safetensors", lpips_weights.linear(), {})
    with pytest.raises(InputError, match=r"torch.save\(lpips.LPIPS\(net='alex'\).state_dict\(\)"):
        lpips.read(tmp_path / "linear.safetensors")


def model(weights: Path, **more: Any) -> video_ae.Config:
    section = video_ae.Perceptual(weights=str(weights), weight=0.5)
    tiny = video_ae.Config.tiny()
    return dataclasses.replace(tiny, height=32, width=32, perceptual=section, **more)


@pytest.mark.slow
def test_lpips_is_a_loss_and_a_metric_without_trained_parameters(weights: Path) -> None:
    made = model(weights)
    definition = state.ModelDefinition(made.build)
    params, extras = definition.init(jax.random.key(0))
    params = toy.stirred(params)
    assert set(made.file_weights()) == set(extras)
    assert not any(name.startswith("lpips") for name in params)
    extras = {name: jnp.asarray(array) for name, array in made.file_weights().items()}
    clips = batch(made)

    def loss(params: Any, extras: Any) -> Any:
        return definition.module(params, extras).loss(clips, jax.random.split(jax.random.key(0), 2))

    total, weight, metrics = jax.jit(loss)(params, extras)
    parts = {name: float(value[0] / value[1]) for name, value in metrics.items()}
    assert float(total / weight) == pytest.approx(
        20 * parts["reconstruction_loss"] + 0.5 * parts["perceptual_loss"], rel=1e-5
    )
    assert parts["perceptual_loss"] > 0
    measured = jax.jit(lambda p, e: definition.module(p, e).evaluate(clips))(params, extras)
    assert set(measured) == {"loss", "psnr", "ssim", "lpips"}
    assert measured["lpips"][1] == 2
    without = dataclasses.replace(made, perceptual=None)
    assert model_flops(made) > model_flops(without)


@pytest.mark.long
@pytest.mark.parametrize("decode", [False, True])
def test_the_loss_follows_the_teacher(weights: Path, decode: bool) -> None:
    made = dataclasses.replace(
        video_ae.Config.tiny(), teacher=video_ae.Teacher(encoder_weight=0.25, decode=decode)
    )
    definition = state.ModelDefinition(made.build)
    params = toy.stirred(definition.init(jax.random.key(0))[0])
    clips = batch(made)
    module = definition.module(params, {})
    total, weight, metrics = module.loss(clips, jax.random.split(jax.random.key(0), 2))
    video = clips["video"].astype(jnp.float32) / 255
    ours = module.encode(video)
    found = module.decode(clips["latents"] if decode else ours)
    far = float(jnp.square(ours - clips["latents"]).mean())
    error = float(jnp.square(found - video[:, :1]).mean())
    assert float(metrics["encoder_loss"][0] / weight) == pytest.approx(far, rel=1e-4)
    assert float(total / weight) == pytest.approx(20 * error + 0.25 * far, rel=1e-4)


def test_sections_refuse_meaningless_settings(weights: Path) -> None:
    with pytest.raises(InputError, match=r"the teacher has no effect"):
        video_ae.Teacher(encoder_weight=0.0)
    with pytest.raises(InputError, match=r"model.perceptual.weight=-1"):
        video_ae.Perceptual(weights="x", weight=-1)
    with pytest.raises(InputError, match=r"model.perceptual needs at least 32"):
        dataclasses.replace(model(weights), height=16)
    gone = dataclasses.replace(model(weights).perceptual, weights="gone.safetensors")
    with pytest.raises(InputError, match=r"gone.safetensors does not exist"):
        dataclasses.replace(model(weights), perceptual=gone).file_weights()
    assert config.to_dict(model(weights))["perceptual"]["weight"] == 0.5
