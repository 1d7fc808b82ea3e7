"""Frozen parameters: no gradient, no decay, no optimizer state, no communication."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cost import communication_formula
from flax import nnx
from training import toy

from jaxtrain import config
from jaxtrain.config import param_groups
from jaxtrain.cost import flops
from jaxtrain.errors import InputError
from jaxtrain.models import video_ae
from jaxtrain.training import first_state, step_setup
from jaxtrain.training.model_flops import model_flops
from jaxtrain.training.state import ModelDefinition
from jaxtrain.training.state_size import bytes_per_device

FROZEN = toy.Config(freeze=("blocks.0",))
STEPS = 50


def changed(stepper: toy.Stepper, batch: dict[str, np.ndarray]) -> dict[str, bool]:
    """Runs 50 steps; returns for each parameter whether any bit differs."""
    before = stepper.params()
    for _ in range(STEPS):
        stepper(batch)
    return {
        name: before[name].tobytes() != array.tobytes() for name, array in stepper.params().items()
    }


@pytest.mark.parametrize(("shard", "accumulate"), [("params", 2), ("optimizer", 1), ("none", 1)])
def test_frozen_parameters_keep_every_bit(shard: str, accumulate: int) -> None:
    assert toy.OPTIM.weight_decay > 0
    stepper = toy.stepper(FROZEN, fsdp=4, shard=shard, accumulate=accumulate)
    found = changed(stepper, toy.random_batch(stepper.spec))
    assert found == {name: not name.startswith("blocks.0.") for name in found}


@pytest.mark.slow
def test_decoder_only_training_leaves_the_encoder_as_it_was() -> None:
    tiny = dataclasses.replace(video_ae.Config.tiny(), freeze=("encoder",))
    stepper = toy.stepper(tiny, fsdp=2, batch_size=2)
    batch = {
        "video": np.random.default_rng(0).integers(0, 256, stepper.spec["video"].shape, np.uint8),
        "weight": np.ones(2, np.float32),
    }
    found = changed(stepper, batch)
    assert found == {name: name.startswith("decoder.") for name in found}
    assert not [name for name in optimized(stepper.target.opt) if "encoder" in name]


def optimized(opt: Any) -> set[str]:
    """Returns the names of the parameters in an optimizer's state."""
    paths = jax.tree_util.tree_flatten_with_path(opt)[0]
    return {str(key.key) for path, _ in paths for key in path if hasattr(key, "key")}


def test_frozen_parameters_have_no_optimizer_state() -> None:
    stepper = toy.stepper(FROZEN, fsdp=4)
    names = {name for name in optimized(stepper.target.opt) if name.startswith("blocks.")}
    assert names == {name for name in stepper.definition.params if name.startswith("blocks.1.")}
    whole = toy.stepper(toy.Config(), fsdp=4)
    arrays = [bytes_per_device(one.target.opt) for one in (stepper, whole)]
    assert arrays[0] < 0.55 * arrays[1]


def test_the_others_have_the_gradients_of_full_training() -> None:
    found = []
    for model in (FROZEN, toy.Config()):
        stepper = toy.stepper(model, optimizer=toy.recording())
        stepper(toy.random_batch(stepper.spec))
        found.append(stepper.state.opt)
    assert all(name.startswith("blocks.1.") for name in found[0])
    for name, grad in found[0].items():
        np.testing.assert_allclose(grad, found[1][name], rtol=1e-5, atol=1e-7)


def test_freezing_saves_optimizer_state_and_communication() -> None:
    run = config.named("h100_16")
    built = {}
    for freeze in ((), ("encoder",)):
        model = dataclasses.replace(run.model, freeze=freeze)
        mesh = config.Mesh(data=1, fsdp=4, shard="params")
        small = dataclasses.replace(run, model=model, mesh=mesh)
        built[freeze] = step_setup.build_without_data(small, toy.mesh_of(1, 4))
    plain, frozen = built[()], built["encoder",]
    # Two float32 numbers per element, over 4 devices; small arrays are not sharded.
    saved = bytes_per_device(plain.target.opt) - bytes_per_device(frozen.target.opt)
    assert saved == pytest.approx(2 * 4 * 1_470_928 / 4, rel=0.1)
    # Two all-gathers and one reduce-scatter in bfloat16, over 4 devices.
    sent = communication_formula.of_step(plain) - communication_formula.of_step(frozen)
    assert sent == pytest.approx(3 * 2 * 1_470_928 * 3 / 4, rel=0.1)


def test_paths_without_parameters_are_refused_with_the_nearest() -> None:
    names = ModelDefinition(video_ae.Config.tiny().build).params
    frozen = param_groups.frozen(("decoder.stages.0", "encoder.head"), names)
    assert all(name.startswith(("decoder.stages.0.", "encoder.head.")) for name in frozen)
    assert param_groups.frozen(("encoder.head.bias",), names) == {"encoder.head.bias"}
    with pytest.raises(InputError, match=r"freeze=encodr: .* nearest is encoder, .* decoder, enc"):
        param_groups.frozen(("encodr",), names)
    with pytest.raises(InputError, match=r"freeze=enc: the model has no parameters below"):
        param_groups.frozen(("enc",), names)  # a path, not the beginning of a name
    with pytest.raises(InputError, match=r"freeze=encoder decoder leaves no parameter to train"):
        param_groups.frozen(("encoder", "decoder"), names)


def small_run(**more: Any) -> config.Run:
    """Returns `demo` with a tiny model."""
    model = dataclasses.replace(video_ae.Config.tiny(), **more)
    return dataclasses.replace(config.named("demo"), model=model)


def test_a_discriminator_alone_is_not_trained() -> None:
    adversary = video_ae.Adversary(replay=4)
    run = small_run(freeze=("encoder", "decoder"), adversary=adversary)
    with pytest.raises(InputError, match=r"encoder decoder leaves only adversary to train: drop o"):
        step_setup.build_without_data(run, toy.mesh_of(1, 1))
    step_setup.build_without_data(
        small_run(freeze=("encoder",), adversary=adversary), toy.mesh_of(1, 1)
    )


@pytest.mark.slow
def test_frozen_parameters_without_a_source_are_reported() -> None:
    said: list[str] = []
    for freeze in ((), ("encoder",)):
        built = step_setup.build_without_data(small_run(freeze=freeze), toy.mesh_of(1, 1))
        first_state._first_values(built, None, {}, said.append)
    (line,) = said
    assert line.startswith("warning: model.freeze=encoder without model.init_from: the frozen par")


# Wide latents, so that the decoder's first layer is a large part.
WIDE = video_ae.Config(
    frames=4,
    height=16,
    width=16,
    latent_channels=512,
    encoder_width=8,
    decoder_widths=(64, 8, 8, 8),
)


def test_operations_that_freezing_saves_are_not_counted() -> None:
    """Each of a part's two gradients costs as much as its forward pass; the video has none."""
    module = WIDE.build(nnx.Rngs(0))
    video = jax.ShapeDtypeStruct((1, 4, 16, 16, 3), jnp.float32)
    latents = jax.ShapeDtypeStruct((1, *WIDE.latent_shape), jnp.float32)
    encoder, decoder = (
        flops.product_flops(jax.make_jaxpr(part)(array))
        for part, array in ((module.encode, video), (module.decode, latents))
    )
    first = 2 * 9 * np.prod(WIDE.latent_shape) * WIDE.widths[0]  # of the decoder
    teacher = video_ae.Teacher(decode=True)
    for freeze, taught, saved in (
        (("encoder",), None, 2 * encoder + first),  # also the gradient of the decoder's input
        (("decoder",), None, decoder),
        (("decoder",), teacher, 2 * decoder),
    ):
        less = dataclasses.replace(WIDE, freeze=freeze, teacher=taught)
        assert model_flops(WIDE) - model_flops(less) == pytest.approx(saved, rel=0.1)
