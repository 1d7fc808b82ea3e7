"""A teacher's decoder inside the step: its frames, and features of its first layers."""

import dataclasses
import functools
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

from jaxtrain.cost.flops import product_flops
from jaxtrain.errors import InputError
from jaxtrain.interop import weights
from jaxtrain.models import video_ae, wan_vae
from jaxtrain.models.reconstruction import reconstruction
from jaxtrain.models.wan import network as wan_network
from jaxtrain.storage import tensor_files
from jaxtrain.training.model_flops import model_flops
from jaxtrain.training.state import ModelDefinition

SIZES = wan_weights.NARROW["wan2.1"]
TAUGHT = dataclasses.replace(video_ae.Config.tiny(), frames=5)
OWN = dataclasses.replace(wan_vae.Config.tiny(), version="wan2.1", height=16, width=16)
NARROW = dataclasses.replace(OWN, decoder_width=4, chunk=1, freeze=("encoder",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wan_weights.write(tmp_path_factory.mktemp("wan") / "vae", SIZES)


def with_teacher(model: Any, folder: Path | None = None, **fields: Any) -> Any:
    weights = None if folder is None else str(folder)
    teacher = video_ae.Teacher(network="wan2.1", weights=weights, **fields)
    return dataclasses.replace(model, teacher=teacher)


class Student:
    """A model with its first parameters, and the teacher's weights from the folder."""

    def __init__(self, model: Any) -> None:
        self.definition = ModelDefinition(model.build, model.freeze)
        self.params = toy.stirred(jax.jit(self.definition.init)(jax.random.key(0))[0])
        found = model.file_weights()
        assert found.keys() == self.definition.file_weights
        self.extras = {name: jnp.asarray(array) for name, array in found.items()}

    def run(self, metric: str | None = None) -> tuple[dict[str, Any], Any, dict[str, jax.Array]]:
        """Returns the gradient of a metric, what the model computes, and its metrics."""
        clips = batch(TAUGHT)

        def metric_of(params: Any) -> Any:
            module = self.definition.module(params, self.extras)
            out = module._outputs(clips["video"] / 255.0, clips)
            _, sums = module._losses(out, clips, clips["weight"].sum())
            means = {name: total / weight for name, (total, weight) in sums.items()}
            return jnp.zeros(()) if metric is None else means[metric], (out, means)

        grads, (out, means) = jax.jit(jax.grad(metric_of, has_aux=True))(self.params)
        return grads, out, means


@functools.cache
def teachers_own(folder: Path) -> Any:
    """The frames that the teacher decodes of its own latents, as diffusers clamps them."""
    network = wan_weights.module(folder, SIZES)

    @jax.jit
    def decoded(video: Any) -> Any:
        latents = network.encode(video, jnp.float32)
        return latents, jnp.clip(wan_weights.decode(network, latents, None), 0, 1)

    return decoded(batch(TAUGHT)["video"] / 255.0)


def test_its_frames_are_the_target(folder: Path) -> None:
    """Of both targets, each has half of the error."""
    student = Student(with_teacher(TAUGHT, folder, target="both"))
    _, out, metrics = student.run()
    original, frames = out.targets
    np.testing.assert_allclose(frames, teachers_own(folder)[1], atol=1e-5)
    np.testing.assert_array_equal(original, out.target)
    assert np.ptp(frames) > 0.5
    assert out.features == []
    errors = [np.square(out.reconstruction - one).mean() for one in out.targets]
    assert errors[0] != pytest.approx(errors[1], rel=1e-2)
    assert metrics["reconstruction_loss"] == pytest.approx(np.mean(errors), rel=1e-5)
    alone = ModelDefinition(with_teacher(TAUGHT, folder, target="teacher").build)
    module = alone.module(student.params, student.extras)
    clips = batch(TAUGHT)
    shapes = jax.eval_shape(lambda clips: module._outputs(clips["video"] / 255.0, clips), clips)
    assert [one.shape for one in shapes.targets] == [frames.shape]


def test_features_train_the_first_layers_and_a_projection(folder: Path) -> None:
    student = Student(with_teacher(TAUGHT, folder, feature_weight=1.0, decode=True))
    grads, _, metrics = student.run("feature_loss")
    assert metrics["feature_loss"] > 0.1
    reached = {name for name, grad in grads.items() if np.any(grad)}
    first = ("decoder.head.", "decoder.stages.0.", "decoder.stages.1.blocks.", "projections.")
    assert reached == {name for name in grads if name.startswith(first)}
    # The decoder's later layers are neither read from the file nor kept on the device.
    later = [f"teacher_network.decoder.{part}" for part in ("up_blocks.1", "conv_out", "norm_out")]
    assert not [name for name in student.extras if name.startswith(tuple(later))]
    assert "teacher_network.decoder.up_blocks.0.resnets.2.conv2.kernel" in student.extras


def test_a_projection_has_the_frames_of_the_teacher() -> None:
    """The teacher's second feature has two frames for each latent but the first, which has one."""
    rng = np.random.default_rng(0)
    theirs = rng.normal(size=(2, 5, 4, 4, 3)).astype(np.float32)
    own = rng.normal(size=(2, 3, 4, 4, 6)).astype(np.float32)
    own[..., 3:] = theirs[:, ::2]
    own[:, 1:, ..., :3] = theirs[:, 1::2]
    exact = reconstruction._relative_error(jnp.asarray(own), jnp.asarray(theirs))
    np.testing.assert_array_equal(exact, 0)
    zeros = reconstruction._relative_error(jnp.zeros_like(own), jnp.asarray(theirs))
    np.testing.assert_allclose(zeros, 1, rtol=1e-6)


@pytest.mark.parametrize("model", [TAUGHT, OWN], ids=["taehv", "wan"])
def test_no_export_has_a_projection(model: Any, folder: Path, tmp_path: Path) -> None:
    model = with_teacher(model, folder, feature_weight=1.0)
    definition, bare = ModelDefinition(model.build), ModelDefinition(model.bare().build)
    extra = {name.partition(".")[0] for name in definition.params.keys() - bare.params.keys()}
    assert extra == {"projections"}
    arrays = {
        name: np.full(leaf.shape, number, np.float32)
        for number, (name, leaf) in enumerate(definition.params.items())
    }
    plain = {name: array for name, array in arrays.items() if name in bare.params}
    weights.save(tmp_path / "taught.safetensors", model, arrays)
    weights.save(tmp_path / "plain.safetensors", model.bare(), plain)
    taught, before = (
        tensor_files.read(tmp_path / f"{name}.safetensors")[0] for name in ("taught", "plain")
    )
    assert taught.keys() == before.keys()
    for name, array in before.items():
        np.testing.assert_array_equal(array, taught[name], err_msg=name)
    # A run with features starts from weights without a projection.
    started, notes = weights.params_for(tmp_path / "plain.safetensors", model, definition.params)
    assert started.keys() == bare.params.keys()
    assert "4 parameters of the model are newly initialized, such as projections.0.bias" in notes


def test_the_teacher_runs_only_as_far_as_needed(folder: Path) -> None:
    less = model_flops(with_teacher(TAUGHT, folder, feature_weight=1.0, decode=True))
    most = model_flops(with_teacher(TAUGHT, folder, target="teacher", decode=True))
    none = model_flops(with_teacher(TAUGHT, folder, decode=True))
    sizes = {"sizes": SIZES, "encodes": False}
    latents = jax.ShapeDtypeStruct((1, 2, 2, 2, 4), jnp.float32)

    def decoder(whole: bool) -> float:
        network = wan_network.WanVae(**sizes, whole=whole)
        traced = jax.make_jaxpr(lambda x: network.decode(x, jnp.float32))(latents)
        return product_flops(traced)

    assert most - none == decoder(whole=True)
    assert none + decoder(whole=False) < less < most


@pytest.mark.slow
def test_a_narrow_wan_learns_from_a_wide_one(folder: Path) -> None:
    """Its frozen encoder is the teacher's, which then has only a decoder, on the same latents."""
    student = Student(with_teacher(NARROW, folder, feature_weight=1.0, target="both"))
    assert not [name for name in student.extras if "teacher_network.encoder" in name]
    network = wan_weights.module(folder, SIZES)
    state = nnx.to_flat_state(nnx.state(network.encoder))
    own = {".".join(map(str, ("encoder", *path))): leaf.get_value() for path, leaf in state}
    own = {name: array for name, array in own.items() if name in student.params}
    assert own.keys() == {name for name in student.params if name.startswith("encoder.")}
    student.params |= own
    grads, out, metrics = student.run("feature_loss")
    latents, frames = teachers_own(folder)
    mean, deviation = (
        np.asarray(getattr(network, f"latents_{name}")[...]) for name in ("mean", "std")
    )
    # The student's own mean and deviation are 0 and 1, so its latents are others.
    np.testing.assert_allclose(out.encoded, np.asarray(latents) * deviation + mean, atol=1e-4)
    assert out.targets[1].shape == frames.shape
    assert np.any(grads["decoder.up_blocks.0.upsamplers.0.resample.kernel"])
    assert not np.any(grads["decoder.up_blocks.1.resnets.0.conv1.kernel"])
    assert not [name for name in metrics if name.startswith("encoder")]


def test_chunks_change_no_feature() -> None:
    found = []
    for chunk in (None, 1):
        model = dataclasses.replace(OWN, frames=13, chunk=chunk)
        definition = ModelDefinition(model.build)
        params = toy.stirred(jax.jit(definition.init)(jax.random.key(0))[0])
        module = definition.module(params, {})
        latents = jax.random.normal(jax.random.key(1), (1, 4, 2, 2, 4))
        (frames, features), first, plain = jax.jit(
            lambda x, m=module: (m.decode_with_features(x), m.first_features(x), m.decode(x))
        )(latents)
        np.testing.assert_allclose(first, features[0], atol=1e-5)
        np.testing.assert_allclose(plain, frames, atol=1e-5)
        shapes = [(feature.shape[1], *feature.shape[-3:]) for feature in features]
        assert shapes == [(4, 2, 2, 32), (7, 4, 4, 16)]
        assert [shape[-1] for shape in shapes] == [channels for channels, _ in model.features]
        found.append([frames, *features])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target": "teacher"}, r"target=teacher has no effect without model.teacher.network"),
        ({"feature_weight": 1.0}, r"feature_weight=1.0 has no effect without model.teacher.netw"),
    ],
)
def test_fields_without_effect_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        video_ae.Teacher(**fields)


def test_a_wan_needs_a_teacher_of_its_version_that_teaches_something() -> None:
    with pytest.raises(InputError, match=r"wan2.2: set --model.teacher.network wan2.2"):
        with_teacher(dataclasses.replace(wan_vae.Config.tiny()), target="teacher")
    with pytest.raises(InputError, match=r"^model.teacher has no effect on a frozen encoder"):
        with_teacher(NARROW, encoder_weight=1.0)
    assert with_teacher(OWN, encoder_weight=1.0).teacher_encodes
