"""Wan's autoencoders, compared with diffusers' on narrow networks with random weights.

Latents, frames, the training loss and its gradients, and exported folders.

Run by name, because PyTorch and diffusers are optional extras:

    python -m pytest tests/interop/diffusers_wan.py
"""

import dataclasses
from pathlib import Path
from typing import Any

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders import autoencoder_kl_wan
from models.wan import wan_weights

from jaxtrain.errors import InputError
from jaxtrain.inference import export_check
from jaxtrain.interop import huggingface, weights
from jaxtrain.models.wan import network as wan_network
from jaxtrain.training.state import ModelDefinition

pytestmark = pytest.mark.filterwarnings("default")  # other packages may warn


@pytest.fixture(scope="module", params=wan_weights.NARROW)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns diffusers' model and ours, from the folder that diffusers saved."""
    sizes = wan_weights.NARROW[request.param]
    folder: Path = tmp_path_factory.mktemp("wan") / "vae"
    settings = wan_weights.settings(sizes)
    del settings["_class_name"]
    theirs = diffusers.AutoencoderKLWan(**settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, one in theirs.named_parameters():  # norms are ones and biases small by default
            noise = torch.randn(one.shape, generator=generator)
            one.add_(noise * (0.3 if name.endswith("gamma") else 0.02))
    theirs.save_pretrained(folder)
    return theirs.eval(), wan_weights.module(folder, sizes), folder


def _statistics(theirs: Any) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.array(theirs.config[name]) for name in ("latents_mean", "latents_std"))


def _nchw(x: np.ndarray) -> Any:
    return torch.from_numpy(np.ascontiguousarray(x.transpose(0, 4, 1, 2, 3), np.float32))


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("frames", [1, 12])
def test_latents_equal(pair: Any, frames: int, chunk: int | None) -> None:
    """Frames beyond 4 n + 1 are not encoded: 12 frames have the latents of 9."""
    theirs, ours, _ = pair
    video = np.random.default_rng(frames).random((2, frames, 32, 48, 3), np.float32)
    with torch.no_grad():
        mode = theirs.encode(_nchw(2 * video - 1)).latent_dist.mode()
    mean, deviation = _statistics(theirs)
    wanted = (mode.numpy().transpose(0, 2, 3, 4, 1) - mean) / deviation
    assert wanted.shape[1] == wan_network.latent_frames(frames)
    encode = jax.jit(lambda x: ours.encode(x, jnp.float32, chunk=chunk))
    found = np.asarray(encode(jnp.asarray(video)))
    assert found.shape == wanted.shape
    assert np.abs(wanted).max() > 0.3
    np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("latents", [1, 3])
def test_frames_equal(pair: Any, latents: int, chunk: int | None) -> None:
    theirs, ours, _ = pair
    mean, deviation = _statistics(theirs)
    z = np.random.default_rng(latents).standard_normal((2, latents, 4, 6, len(mean)))
    with torch.no_grad():
        sample = theirs.decode(_nchw(z * deviation + mean)).sample
    wanted = (sample.numpy().transpose(0, 2, 3, 4, 1) + 1) / 2
    decode = jax.jit(lambda x: wan_weights.decode(ours, x, chunk))
    found = np.asarray(decode(jnp.asarray(z, jnp.float32))).clip(0, 1)
    assert found.shape == wanted.shape
    assert wanted.std() > 0.05
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def _unclamped(theirs: Any, latents: Any) -> Any:
    """Decodes as AutoencoderKLWan does, but does not clamp, which would stop gradients."""
    theirs.clear_cache()
    x, parts = theirs.post_quant_conv(latents), []
    for number in range(x.shape[2]):
        theirs._conv_idx = [0]
        found = theirs.decoder(
            x[:, :, number : number + 1],
            feat_cache=theirs._feat_map,
            feat_idx=theirs._conv_idx,
            first_chunk=number == 0,
        )
        parts.append(found)
    video = torch.cat(parts, dim=2)
    side = theirs.config.patch_size
    return autoencoder_kl_wan.unpatchify(video, side) if side else video


@pytest.mark.parametrize(
    ("remat", "chunk", "frozen"), [("none", None, ("encoder",)), ("chunk", 1, ())]
)
def test_loss_and_gradients_equal(
    pair: Any, remat: Any, chunk: int | None, frozen: tuple[str, ...]
) -> None:
    """Of the decoder, all latents at once; and of both, latent by latent."""
    theirs, _, folder = pair
    frames = 9
    loaded = weights.load(folder)
    sizes = {"frames": frames, "height": 32, "width": 32}
    model = dataclasses.replace(loaded.model, **sizes, chunk=chunk, remat=remat, freeze=frozen)
    pixels = np.random.default_rng(0).integers(0, 256, (2, frames, 32, 32, 3), np.uint8)
    batch = {
        "video": jnp.asarray(pixels),
        "weight": jnp.ones(2),
    }
    definition = ModelDefinition(model.build, model.freeze)
    params = {name: jnp.asarray(loaded.params[name]) for name in definition.params}
    fixed = {name: params[name] for name in definition.frozen}

    def loss(trained: Any) -> Any:
        module = definition.module(trained | fixed, {})
        total, weight, _ = module.loss(batch, jax.random.split(jax.random.key(0), 2))
        return total / weight

    found, grads = jax.jit(jax.value_and_grad(loss))(definition.trained(params))

    theirs.zero_grad()
    target = _nchw(pixels.astype(np.float32) / 255)
    latents = theirs.encode(2 * target - 1).latent_dist.mode()
    wanted = 20 * torch.square((_unclamped(theirs, latents) + 1) / 2 - target).mean()
    wanted.backward()
    assert float(found) == pytest.approx(wanted.item(), rel=1e-5)
    named = {name: one.grad.numpy() for name, one in theirs.named_parameters()}
    ours = model.weight_tables()[-1].outward(params | grads)
    table = {row.ours: row.names[0] for row in model.weight_tables()[-1].rows}
    for name in map(table.__getitem__, grads):
        grad = ours[name]
        error = np.abs(grad - named[name]).max()
        assert error <= 1e-4 * np.abs(named[name]).max(), (name, error)


def test_an_exported_folder_opens_in_diffusers(pair: Any, tmp_path: Path) -> None:
    """Equal to the bit, and export itself compares latents and frames."""
    theirs, _, folder = pair
    loaded = weights.load(folder)
    huggingface.write_diffusers(tmp_path / "vae", loaded.model, loaded.params)
    reread = diffusers.AutoencoderKLWan.from_pretrained(tmp_path / "vae")
    for name, one in theirs.state_dict().items():
        assert torch.equal(one, reread.state_dict()[name]), name
    for name in wan_network.to_settings(loaded.model.sizes, (), ()):
        if name != "_class_name":
            assert reread.config[name] == theirs.config[name] or "scale_factor" in name, name
    said = export_check.check(tmp_path / "vae", loaded.model, loaded.params)
    assert "Read by diffusers: it computes the same as jaxtrain" in said[-1]
    damaged = loaded.params | {"decoder.conv_out.bias": loaded.params["decoder.conv_out.bias"] + 1}
    huggingface.write_diffusers(tmp_path / "other", loaded.model, damaged)
    with pytest.raises(InputError, match="differs from the exported model"):
        export_check.check(tmp_path / "other", loaded.model, loaded.params)


def test_a_slice_opens_in_diffusers(pair: Any, tmp_path: Path) -> None:
    """Of half the widths: the same latents and frames, up to rounding."""
    _, _, folder = pair
    stored = weights.load(folder).model
    narrow = dataclasses.replace(stored, encoder_width=4, decoder_width=4, freeze=())
    params, _ = weights.params_for(folder, narrow, ModelDefinition(narrow.build).params)
    huggingface.write_diffusers(tmp_path / "vae", narrow, params)
    reread = diffusers.AutoencoderKLWan.from_pretrained(tmp_path / "vae")
    assert reread.config["base_dim"] == narrow.encoder_width == 4
    assert reread.config["decoder_base_dim"] == 4
    said = export_check.check(tmp_path / "vae", narrow, params)
    assert "Read by diffusers: it computes the same as jaxtrain" in said[-1]
