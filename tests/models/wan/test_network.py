"""Wan's autoencoders: chunks, folders, FLOPs. tests/interop compares them with diffusers."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models.wan import wan_weights

from jaxtrain.errors import InputError
from jaxtrain.models.wan import network

OLD, NEW = wan_weights.NARROW["wan2.1"], wan_weights.NARROW["wan2.2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return wan_weights.write(tmp_path_factory.mktemp("wan") / "vae", NEW)


def video(frames: int, side: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).random((1, frames, side, side, 3), np.float32))


LAYERS = {
    "residual block": lambda: network.ResidualBlock(4, 8),
    "down": lambda: network.Down(4, True),
    "up": lambda: network.Up(4, 2, True),
    "down block": lambda: network.DownBlock(4, 8, space=2, time=2),
    "up block": lambda: network.UpBlock(8, 4, space=2, time=2, residual=True),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_steps_through_parts_as_through_the_whole(name: str) -> None:
    """First one frame, then four, two, and two."""
    graph, weights = nnx.split(nnx.eval_shape(LAYERS[name]))
    rng = np.random.default_rng(0)
    filled = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) / 4), weights)

    @jax.jit
    def both(weights: Any, x: jax.Array) -> Any:
        layer: Any = nnx.merge(graph, weights)
        whole, _ = layer.step(x, None)
        parts, memory = [], None
        for part in jnp.split(x, (1, 5, 7), axis=1):
            y, memory = layer.step(part, memory)
            parts.append(y)
        return whole, jnp.concatenate(parts, axis=1)

    x = rng.normal(size=(1, 9, 4, 4, 4 if "up" not in name or name == "up" else 8))
    whole, parts = both(filled, jnp.asarray(x, jnp.float32))
    assert np.asarray(whole)[:, -1].std() > 0.1
    np.testing.assert_allclose(parts, whole, atol=1e-4)


@pytest.mark.parametrize(("space", "time"), [(2, 2), (2, 1)])
def test_an_up_block_adds_repeated_channels(space: int, time: int) -> None:
    """With weights of zero, only the skip is left: channel, frame, row, column in this order."""
    block = network.UpBlock(8, 4, space=space, time=time, residual=True)
    x = np.random.default_rng(0).normal(size=(1, 3, 2, 2, 8)).astype(np.float32)
    wanted = np.zeros((1, 3 * time, 4, 4, 4), np.float32)
    repeats = 4 * time * 4 // 8
    for place in np.ndindex(4, time, 2, 2):
        channel, frame, row, column = place
        source = np.ravel_multi_index(place, (4, time, 2, 2)) // repeats
        wanted[:, frame::time, row::2, column::2, channel] = x[..., source]
    first, memory = block.step(jnp.asarray(x[:, :2]), None)
    np.testing.assert_array_equal(first, wanted[:, time - 1 : 2 * time])
    np.testing.assert_array_equal(block.step(jnp.asarray(x[:, 2:]), memory)[0], wanted[:, -time:])


def test_a_down_block_adds_means_over_channels() -> None:
    """With weights of zero, only the skip is left; before the first frame is one of zeros."""
    block = network.DownBlock(4, 8, space=2, time=2)
    x = np.random.default_rng(0).normal(size=(1, 3, 4, 4, 4)).astype(np.float32)
    before = np.concatenate([np.zeros_like(x[:, :1]), x], axis=1)
    parts = [
        before[:, frame::2, row::2, column::2, channel]
        for channel, frame, row, column in np.ndindex(4, 2, 2, 2)
    ]
    wanted = np.stack(parts, axis=-1).reshape(1, 2, 2, 2, 8, 4).mean(-1)
    np.testing.assert_allclose(block.step(jnp.asarray(x), None)[0], wanted, atol=1e-6)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("sizes", [OLD, NEW])
def test_a_video_in_parts_has_the_latents_and_frames_of_the_whole(sizes: Any) -> None:
    table, shapes = network.table(sizes, decodes=True)
    arrays = table.inward(wan_weights.tensors(sizes), shapes, "wan", "")
    statistics = {name: np.full(4, 0.5, np.float32) for name in ("latents_mean", "latents_std")}
    module = wan_weights.filled(sizes, arrays | statistics)

    @jax.jit
    def both(x: jax.Array) -> Any:
        latents = [module.encode(x, jnp.float32, chunk=chunk) for chunk in (None, 1, 2)]
        frames = [wan_weights.decode(module, latents[0], chunk) for chunk in (None, 1, 2)]
        return latents, frames

    latents, frames = both(video(12, 16))
    assert latents[0].shape[1] == 3
    assert frames[0].shape == (1, 9, 16, 16, 3)
    assert np.asarray(latents[0]).std() > 0.1
    for number in (1, 2):
        np.testing.assert_allclose(latents[0], latents[number], atol=1e-4)
        np.testing.assert_allclose(frames[0], frames[number], atol=1e-4)


def test_weights_in_several_files_are_those_of_one(folder: Path, tmp_path: Path) -> None:
    split = wan_weights.write(tmp_path / "split", NEW, parts=3)
    assert len(list(split.glob("*.safetensors"))) == 3
    found = [network.read(one, NEW, decodes=True, field="f") for one in (folder, split)]
    assert found[0].keys() == found[1].keys()
    for name, array in found[0].items():
        np.testing.assert_array_equal(array, found[1][name], err_msg=name)


def test_a_teacher_needs_only_the_encoder(folder: Path) -> None:
    found = network.read(folder, NEW, field="f")
    assert {name.partition(".")[0] for name in found} == {
        *("encoder", "latents_mean", "latents_std")
    }


def changed(folder: Path, target: Path, **settings: Any) -> Path:
    """Copies a folder with other settings."""
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    found = json.loads((folder / network.SETTINGS).read_text())
    (target / network.SETTINGS).write_text(json.dumps(found | settings))
    return target


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"_class_name": "AutoencoderKL"}, r"class 'AutoencoderKL': pass a folder of Autoen"),
        ({"z_dim": 16}, r"\(z_dim 16 instead of 4\): pass the folder of wan2.2's autoencoder"),
        (
            {
                "is_residual": False,
                "patch_size": None,
                "z_dim": 16,
                "base_dim": 96,
                "in_channels": 3,
                "out_channels": 3,
            },
            r"is_residual .* pass --model.teacher.network wan2.1 --model.latent_channels 16 "
            r"--model.patch_size 1",
        ),
        (
            {"z_dim": 48, "base_dim": 160, "attn_scales": [0.5]},  # of no version
            r"attn_scales \[0.5\] instead of \[\]\): pass the folder of wan2.2's autoencoder",
        ),
        ({"latents_mean": [0.0]}, r"latents_mean in its config.json is not a list of 4 numbers"),
        ({"latents_std": [1, 1, 0, 1]}, r"latents_std in its config.json has values of 0 or less"),
    ],
)
def test_other_folders_are_refused(
    folder: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    other = changed(folder, tmp_path / "other", **settings)
    with pytest.raises(InputError, match=rf"^field={other}.*{message}"):
        network.read(other, NEW, field="field")


def test_incomplete_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no config.json: pass a folder of AutoencoderKLWan"):
        network.read(tmp_path, NEW, field="field")
    with pytest.raises(InputError, match=rf"has no config.json: pass {folder}"):
        network.read(folder.parent, NEW, field="field")  # of a pipeline, with vae/ in it
    empty = changed(folder, tmp_path / "empty")
    (empty / network.ARRAYS).unlink()
    (empty / "diffusion_pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"has no weights: it lacks diffusion_pytorch_model.safet"):
        network.read(empty, NEW, field="field")
