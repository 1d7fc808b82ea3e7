"""A teacher inside the step of the video autoencoder."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models.video_ae.small_autoencoder import batch
from models.wan import wan_weights
from training import toy

from jaxtrain.cost import flops
from jaxtrain.errors import InputError
from jaxtrain.models import video_ae
from jaxtrain.models.wan import network as wan_network
from jaxtrain.training import state as states
from jaxtrain.training.model_flops import model_flops

SIZES = wan_weights.NARROW["wan2.1"]
MODEL = dataclasses.replace(
    video_ae.Config.tiny(),
    frames=12,
    teacher=video_ae.Teacher(network="wan2.1", encoder_weight=0.5, decode=True),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wan_weights.write(tmp_path_factory.mktemp("wan") / "vae", SIZES)


def with_folder(folder: Path | str | None) -> video_ae.Config:
    assert MODEL.teacher is not None
    weights = None if folder is None else str(folder)
    return dataclasses.replace(MODEL, teacher=dataclasses.replace(MODEL.teacher, weights=weights))


@pytest.mark.slow
def test_it_teaches_both_parts(folder: Path) -> None:
    """12 frames have 3 latents, of which 9 frames are decoded and compared."""
    model = with_folder(folder)
    definition = states.ModelDefinition(model.build)
    params, extras = jax.jit(definition.init)(jax.random.key(0))
    found = model.file_weights()
    assert found.keys() == extras.keys()
    extras = {name: jnp.asarray(array) for name, array in found.items()}
    network = wan_weights.module(folder, SIZES, decodes=False)
    clips = batch(MODEL)

    @jax.jit
    def wanted(params: Any) -> Any:
        module = definition.module(params, extras)
        video = clips["video"] / 255.0
        taught = network.encode(video, jnp.float32)
        far = jnp.square(module.encode(video) - taught).mean()
        return far, jnp.square(module.decode(taught) - video[:, :9]).mean()

    @jax.jit
    def loss(params: Any) -> Any:
        total, weight, metrics = definition.module(params, extras).loss(clips, jax.random.key(0))
        return total / weight, {name: one[0] / one[1] for name, one in metrics.items()}

    total, metrics = loss(params)
    far, error = wanted(params)
    assert metrics["encoder_loss"] == pytest.approx(float(far), rel=1e-4)
    assert metrics["reconstruction_loss"] == pytest.approx(float(error), rel=1e-4)
    assert total == pytest.approx(0.5 * float(far) + 20 * float(error), rel=1e-4)


@pytest.mark.slow
@pytest.mark.long
def test_a_step_on_four_devices_is_that_of_one_and_keeps_the_teacher(folder: Path) -> None:
    """The teacher is sharded with the state."""
    model, taught = with_folder(folder), None
    losses = {}
    for devices in (1, 4):
        stepper = toy.stepper(model, fsdp=devices, batch_size=4)
        stepper.state = states.with_values(stepper.state, {}, model.file_weights())
        before = {name: np.asarray(one) for name, one in stepper.state.extras.items()}
        losses[devices] = float(stepper(batch(MODEL, 4))["loss"])
        for name, array in stepper.state.extras.items():
            assert name.startswith("teacher_network.")
            np.testing.assert_array_equal(array, before[name], err_msg=name)
        taught = stepper.target.extras["teacher_network.encoder.mid_block.resnets.0.conv1.kernel"]
    assert losses[4] == pytest.approx(losses[1], rel=1e-5)
    assert taught is not None
    assert any(taught.sharding.spec)


def test_it_has_no_gradient_and_no_optimizer_state(folder: Path) -> None:
    model = with_folder(folder)
    definition = states.ModelDefinition(model.build)
    bare = states.ModelDefinition(model.bare().build)
    assert definition.params == bare.params
    assert all(name.startswith("teacher_network.encoder.") for name in list(definition.extras)[:9])
    assert "latents" not in model.batch_spec(2)
    assert model.teacher is not None
    encodes = dataclasses.replace(model, teacher=dataclasses.replace(model.teacher, decode=False))
    clip = jax.ShapeDtypeStruct((1, 12, 16, 16, 3), jnp.float32)
    network = wan_network.WanVae(SIZES, decodes=False)
    forward = flops.product_flops(jax.make_jaxpr(lambda x: network.encode(x, jnp.float32))(clip))
    bare_flops = model_flops(model.bare())
    assert model_flops(encodes) - bare_flops == forward
    # The decoder gets the teacher's latents, which need no gradient.
    assert bare_flops < model_flops(model) < bare_flops + forward


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"patch_size": 2, "height": 32, "width": 32}, r"model.patch_size=2: .*patch_size 1"),
        (
            {"frames": 8, "trim": "odd_latents"},
            r"model.frames=8: .* cover 5 of them; .* cover 8 .*: use --model.frames 9",
        ),
        (
            {"time_downscale": (True,) * 3},
            r"model.frames=12: .* makes 3 latents .* makes 2, .*: use --model.frames 4",
        ),
    ],
)
def test_clips_that_it_cannot_take_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(MODEL, **fields)


@pytest.mark.parametrize("frames", [1, 4, 5, 9, 12, 19])
def test_any_number_of_frames_has_as_many_latents_as_the_model(folder: Path, frames: int) -> None:
    model = dataclasses.replace(with_folder(folder), frames=frames)
    spec = jax.eval_shape(
        lambda x: model.build(nnx.Rngs(0)).teacher_network.encode(x, jnp.float32),
        jax.ShapeDtypeStruct((1, frames, 16, 16, 3), jnp.float32),
    )
    assert spec.shape[1:] == model.latent_shape


def test_a_run_needs_the_folder(tmp_path: Path, folder: Path) -> None:
    (missing,) = with_folder(None).problems()
    assert missing.startswith("model.teacher.weights is not set: pass the local folder of wan2.1's")
    (gone,) = with_folder(tmp_path / "gone").problems()
    assert f"model.teacher.weights={tmp_path / 'gone'}: no such folder: pass" in gone
    assert with_folder(folder).problems() == []
    with pytest.raises(InputError, match=r"weights=x has no effect without model.teacher.network"):
        video_ae.Teacher(weights="x")


def test_its_widths_are_those_of_the_folder(folder: Path) -> None:
    """A plan without the weights is for the published ones, and says so."""
    for model, sizes in (
        (with_folder(folder), SIZES),
        (with_folder(None), dataclasses.replace(wan_network.VERSIONS["wan2.1"], latent_channels=4)),
    ):
        assert model.teacher is not None
        assert model.teacher.sizes(4) == sizes
        extras = states.ModelDefinition(model.build).extras
        assert extras["teacher_network.encoder.conv_in.bias"].shape == (sizes.width,)
        assert ("published wan2.1" in " ".join(model.notes())) == (sizes is not SIZES)
