"""Training Wan's autoencoders: chunks, freezing, devices, folders. tests/interop has diffusers."""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models.wan import wan_weights
from training import toy

from jaxtrain import config, main
from jaxtrain.errors import InputError
from jaxtrain.interop import huggingface, weights
from jaxtrain.models import from_file, wan_vae
from jaxtrain.models.reconstruction import streaming
from jaxtrain.models.wan import network
from jaxtrain.storage import tensor_files
from jaxtrain.training.state import ModelDefinition

TINY = dataclasses.replace(wan_vae.Config.tiny(), freeze=("encoder",))
OLD = dataclasses.replace(TINY, version="wan2.1", latent_channels=16)


def video(frames: int, clips: int = 1) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (clips, frames, 32, 32, 3), np.uint8)


def batch(clips: int, frames: int = 5) -> dict[str, Any]:
    return {
        "video": video(frames, clips),
        "weight": np.ones(clips, np.float32),
    }


@pytest.fixture(scope="module")
def definition_and_params() -> Any:
    """Definition and parameters; those that start as zeros have other values."""
    definition = ModelDefinition(TINY.build)
    return definition, toy.stirred(definition.init(jax.random.key(0))[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frames": 12}, r"^model.frames=12: use 4 n \+ 1 frames; the nearest is 13$"),
        ({"height": 40}, r"^model.height=40 and model.width=32 must be multiples of 16"),
        ({"remat": "chunk"}, r"^model.remat=chunk requires model.chunk: set --model.chunk 1, or"),
        ({"latents_std": (1.0,)}, r"^model.latents_std has 1 numbers, but model.latent_channels=4"),
        (
            {"latents_std": (1.0, 1.0, 0.0, 1.0)},
            r"^model.latents_std=.*: use a number above 0, or",
        ),
    ],
)
def test_wrong_fields_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(TINY, **changes)


@pytest.mark.parametrize(("frames", "padded"), [(1, 1), (2, 5), (4, 5), (5, 5), (6, 9), (9, 9)])
def test_a_clip_is_padded_to_the_next_4_n_plus_1_frames(frames: int, padded: int) -> None:
    assert TINY.timing.latent_frames(frames) == 1 + padded // 4
    assert TINY.timing.pad_time(np.zeros((1, frames, 1, 1, 3))).shape[1] == padded  # type: ignore[arg-type]


def test_statistics_are_the_published_ones_if_the_channels_are() -> None:
    assert OLD.mean == wan_vae.PUBLISHED["wan2.1"][0]
    assert (TINY.mean, TINY.deviation) == ((0.0,) * 4, (1.0,) * 4)
    full = config.named("wan2_2_decoder_h100_8").model
    assert full.sizes == network.VERSIONS["wan2.2"]
    assert (full.mean, full.deviation) == wan_vae.PUBLISHED["wan2.2"]


def test_the_largest_rate_is_that_of_the_widest_layer() -> None:
    """It is in the middle of the network, with four times the channels of the outer layers."""
    (width,) = ModelDefinition(TINY.build).params["decoder.conv_in.bias"].shape
    assert TINY.largest_rate == 0.1 / width
    full = config.named("wan2_2_decoder_h100_1")
    assert full.optim.peak_lr < full.model.largest_rate == 0.1 / 1024


@pytest.mark.long
def test_chunks_and_rematerialization_change_no_gradient(definition_and_params: Any) -> None:
    _, params = definition_and_params
    found = []
    for remat, chunk in (("none", None), ("chunk", 1)):
        model = dataclasses.replace(TINY, frames=9, remat=remat, chunk=chunk)
        definition = ModelDefinition(model.build, model.freeze)
        fixed = {name: params[name] for name in definition.frozen}

        def loss(trained: Any, definition: Any = definition, fixed: Any = fixed) -> Any:
            module = definition.module(trained | fixed, {})
            total, _, _ = module.loss(batch(1, 9), jax.random.split(jax.random.key(0), 1))
            return total

        found.append(jax.jit(jax.value_and_grad(loss))(definition.trained(params)))
    (one, grads), (other, others) = found
    np.testing.assert_allclose(one, other, rtol=1e-5)
    for name, grad in grads.items():
        atol = 1e-4 * np.abs(grad).max()
        np.testing.assert_allclose(grad, others[name], rtol=0, atol=atol, err_msg=name)


@pytest.mark.slow
def test_a_stream_has_the_latents_and_frames_of_the_clip(definition_and_params: Any) -> None:
    """Of 6 frames: the last is repeated to 9, which are 3 latents."""
    definition, params = definition_and_params
    module = definition.module(params, {})
    clip = jnp.asarray(video(6), jnp.float32) / 255
    latents = jax.jit(type(module).encode)(module, clip)
    frames = jax.jit(type(module).decode)(module, latents)
    assert (latents.shape, frames.shape) == ((1, 3, 2, 2, 4), (1, 9, 32, 32, 3))
    encoder, decoder = streaming.EncoderStream(module), streaming.DecoderStream(module)
    given = [encoder.push(clip[:, number]) for number in range(6)]
    assert [latent is not None for latent in given] == [True, *[False] * 3, True, False]
    made_latents = [latent for latent in (*given, encoder.flush()) if latent is not None]
    np.testing.assert_allclose(jnp.stack(made_latents, 1), latents, atol=1e-4)
    parts = jnp.concatenate([decoder.push(latent) for latent in made_latents], axis=1)
    np.testing.assert_allclose(parts, frames, atol=1e-4)


@pytest.mark.long
def test_four_devices_train_as_one_and_keep_every_bit_of_the_encoder() -> None:
    losses = []
    for fsdp in (1, 4):
        stepper = toy.stepper(
            dataclasses.replace(TINY, remat="block"), fsdp=fsdp, shard="optimizer", batch_size=4
        )
        before = stepper.params()
        losses.append([stepper(batch(4))["loss"] for _ in range(50)])
        after = stepper.params()
        for name, array in before.items():
            same = array.tobytes() == after[name].tobytes()
            assert same == name.startswith("encoder."), name
    # The second loss is after an update. tests/training/test_step.py compares the gradients.
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = wan_weights.NARROW["wan2.2"]
    return wan_weights.write(tmp_path_factory.mktemp("wan") / "vae", sizes)


def test_a_folder_is_read_and_written_as_it_was(folder: Path, tmp_path: Path) -> None:
    loaded = weights.load(folder)
    assert loaded.model.latents_mean == (-0.2, -0.033, 0.133, 0.3)
    huggingface.write_diffusers(tmp_path / "vae", loaded.model, loaded.params)
    again = weights.load(tmp_path / "vae")
    assert again.model == loaded.model
    for name, array in loaded.params.items():
        np.testing.assert_array_equal(array, again.params[name], err_msg=name)


def test_a_folder_of_other_sizes_is_refused_with_all_flags(tmp_path: Path) -> None:
    """The statistics, one number per channel, differ too; those of wan2.1 are its default."""
    mean, deviation = wan_vae.PUBLISHED["wan2.1"]
    settings = network.to_settings(network.VERSIONS["wan2.1"], mean, deviation)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    run = config.named("wan2_2_decoder_h100_1")
    message = (
        r"model.version=wan2.1, but this model has wan2.2: set (--model.version wan2.1 "
        r"--model.latent_channels 16 --model.encoder_width 96 --model.decoder_width 96)$"
    )
    with pytest.raises(InputError, match=message) as refused:
        weights.check_settings(tmp_path, run.model)
    flags = re.search(message, str(refused.value))
    assert flags is not None
    changed = config.load("wan2_2_decoder_h100_1", flags[1].split())
    weights.check_settings(tmp_path, changed.model)


def test_a_run_resumes_with_its_own_statistics() -> None:
    """A checkpoint has them in JSON, where they are lists."""
    model = dataclasses.replace(TINY, latents_mean=(0.5,) * 4)
    from_file.check_not_in_weights(model, json.loads(json.dumps(config.to_dict(model))), "x")


def test_a_run_starts_only_from_a_folder_of_its_network(folder: Path, tmp_path: Path) -> None:
    fits = dataclasses.replace(weights.load(folder).model, frames=9, height=64, width=64)
    expected = ModelDefinition(fits.build).params
    params, _ = weights.params_for(folder, fits, expected)
    assert params.keys() == expected.keys()
    with pytest.raises(InputError, match=r"with model.latents_mean=\(-0.2, -0.033, 0.133, 0.3\)"):
        weights.params_for(folder, dataclasses.replace(fits, latents_mean=None), expected)
    wide = dataclasses.replace(fits, decoder_width=16)
    with pytest.raises(InputError, match=r"^model.decoder_width=16 is above the 12 of .*, or less"):
        weights.params_for(folder, wide, ModelDefinition(wide.build).params)
    (tmp_path / "other").mkdir()
    settings = json.loads((folder / "config.json").read_text()) | {"_class_name": "AutoencoderKL"}
    (tmp_path / "other" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(InputError, match=rf"has no checkpoint and .*: pass {folder}$"):
        weights.check_there(folder.parent)  # of a pipeline, with vae/ in it
    (tmp_path / "empty").mkdir()
    shutil.copy(folder / "config.json", tmp_path / "empty")
    with pytest.raises(
        InputError, match=r"/empty has no diffusion_pytorch_model.safetensors: down"
    ):
        weights.load(tmp_path / "empty")
    with pytest.raises(InputError, match=r"unknown _class_name 'AutoencoderKL'; use one of Autoen"):
        weights.load(tmp_path / "other")
    sizes = network.VERSIONS["wan2.2"]
    settings = network.to_settings(sizes, *wan_vae.PUBLISHED["wan2.2"]) | {"dim_mult": [1]}
    with pytest.raises(InputError, match=r"^x has .*: pass the folder of wan2.2's autoencoder$"):
        wan_vae.Config.from_settings(settings, "x")
    with pytest.raises(InputError, match=r"pass the folder that has them together with their conf"):
        wan_vae.Config.guess({}, "x")


def own_names(version: network.Version) -> set[str]:
    """Lists the names of Wan's own files, as its modules nest."""
    block = [f"residual.{place}" for place in (0, 2, 3, 6)]
    attention = ["norm", "to_qkv", "proj"]
    layers = ["conv1", "conv2"]
    for side, changes in (("encoder", [0, 1, 1]), ("decoder", [1, 1, 0])):
        way = "down" if side == "encoder" else "up"
        layers += [f"{side}.{name}" for name in ("conv1", "head.0", "head.2")]
        layers += [f"{side}.middle.{at}.{name}" for at in (0, 2) for name in block]
        layers += [f"{side}.middle.1.{name}" for name in attention]
        depth = 2 if side == "encoder" else 3
        flat = 0
        for stage in range(4):
            for at in range(depth + (stage < 3)):
                place = f"{stage}.{way}samples.{at}" if version == "wan2.2" else str(flat)
                flat += 1
                layer = f"{side}.{way}samples.{place}"
                if at < depth:
                    layers += [f"{layer}.{name}" for name in block]
                else:
                    timed = ["time_conv"] if changes[stage] else []
                    layers += [f"{layer}.{name}" for name in ("resample.1", *timed)]
        shortcuts = {
            ("wan2.1", "encoder"): ["3", "6"],
            ("wan2.1", "decoder"): ["4"],
            ("wan2.2", "encoder"): ["1.downsamples.0", "2.downsamples.0"],
            ("wan2.2", "decoder"): ["2.upsamples.0", "3.upsamples.0"],
        }[version, side]
        layers += [f"{side}.{way}samples.{place}.shortcut" for place in shortcuts]
    norms = (".residual.0", ".residual.3", ".norm", "head.0")
    return {
        f"{layer}.{part}"
        for layer in layers
        for part in (("gamma",) if layer.endswith(norms) else ("weight", "bias"))
    }


@pytest.mark.parametrize("version", network.VERSIONS)
def test_the_names_of_wans_own_files(version: network.Version) -> None:
    table, shapes = network.table(network.VERSIONS[version], decodes=True, own=True)
    assert set(table.shapes(shapes)) == own_names(version)


@pytest.mark.parametrize("version", network.VERSIONS)
def test_wans_own_files_are_recognized(version: network.Version, tmp_path: Path) -> None:
    """A narrow network; of the published one, the file has more than 500 MB."""
    latents = len(wan_vae.PUBLISHED[version][0])
    sizes = dataclasses.replace(
        network.VERSIONS[version], width=8, decoder_width=8, latent_channels=latents
    )
    theirs = wan_weights.tensors(sizes)
    file = tmp_path / "Wan_VAE.safetensors"
    own = {network.own_name(name, version): array for name, array in theirs.items()}
    tensor_files.write(file, own, {})
    stored = weights.load(file)
    model = stored.model
    assert isinstance(model, wan_vae.Config)
    assert (model.version, model.latent_channels, model.mean) == (
        version,
        latents,
        wan_vae.PUBLISHED[version][0],
    )
    assert model.to_transformers(stored.params).keys() == theirs.keys()
    written = model.to_weights(stored.params)
    assert written.keys() == own.keys()
    for name, array in own.items():
        np.testing.assert_array_equal(written[name], array)
    assert main.main(["import", str(file), str(tmp_path / "ours.safetensors")]) == 0
    again = weights.load(tmp_path / "ours.safetensors")
    assert again.model.mean == model.mean
    with pytest.raises(
        InputError, match=r"is a file: pass a folder of AutoencoderKLWan, which `imp"
    ):
        network.read(file, sizes, field="model.teacher.path")
    narrow = dataclasses.replace(model, latent_channels=4).sizes
    tensor_files.write(
        file,
        {network.own_name(n, version): a for n, a in wan_weights.tensors(narrow).items()},
        {},
    )
    with pytest.raises(
        InputError, match="the mean and deviation of the latents do not follow from"
    ):
        weights.load(file)


def test_a_network_with_other_colors_is_refused() -> None:
    """Such as a decoder of 12 channels that also enlarges the video."""
    sizes = network.VERSIONS["wan2.1"]
    settings = network.to_settings(sizes, *wan_vae.PUBLISHED["wan2.1"])
    wan_vae.Config.from_settings(settings, "x")
    with pytest.raises(InputError, match=r"\(out_channels 12 instead of 3\)"):
        wan_vae.Config.from_settings(settings | {"out_channels": 12}, "x")
