"""Wan's autoencoders, compared with diffusers' on narrow networks with random weights.

Run by name, because PyTorch and diffusers are optional extras:

    python -m pytest tests/interop/diffusers_wan.py
"""

from pathlib import Path
from typing import Any

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from models import wan_weights

from jaxtrain.models import wan_network

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
    return theirs.eval(), wan_weights.module(folder, sizes)


def _statistics(theirs: Any) -> tuple[np.ndarray, np.ndarray]:
    return tuple(np.array(theirs.config[name]) for name in ("latents_mean", "latents_std"))


def _nchw(x: np.ndarray) -> Any:
    return torch.from_numpy(np.ascontiguousarray(x.transpose(0, 4, 1, 2, 3), np.float32))


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("frames", [1, 12])
def test_latents_equal(pair: Any, frames: int, chunk: int | None) -> None:
    """Frames beyond 4 n + 1 are not encoded: 12 frames have the latents of 9."""
    theirs, ours = pair
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
    theirs, ours = pair
    mean, deviation = _statistics(theirs)
    z = np.random.default_rng(latents).standard_normal((2, latents, 4, 6, len(mean)))
    with torch.no_grad():
        sample = theirs.decode(_nchw(z * deviation + mean)).sample
    wanted = (sample.numpy().transpose(0, 2, 3, 4, 1) + 1) / 2
    decode = jax.jit(lambda x: ours.decode(x, jnp.float32, chunk=chunk))
    found = np.asarray(decode(jnp.asarray(z, jnp.float32))).clip(0, 1)
    assert found.shape == wanted.shape
    assert wanted.std() > 0.05
    np.testing.assert_allclose(found, wanted, atol=1e-4)
