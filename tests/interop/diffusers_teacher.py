"""Teachers saved by diffusers.

Run by name, because PyTorch and diffusers are optional extras:

    python -m pytest tests/interop/diffusers_teacher.py
"""

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from jaxtrain.errors import InputError
from jaxtrain.inference import teachers
from jaxtrain.models import video_ae

pytestmark = pytest.mark.filterwarnings("default")  # other packages may warn


@pytest.fixture(scope="module")
def cogvideox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small AutoencoderKLCogVideoX with random weights, as diffusers saves it."""
    folder = tmp_path_factory.mktemp("vae") / "vae"
    torch.manual_seed(0)
    model = diffusers.AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        sample_height=32,
        sample_width=32,
        scaling_factor=0.7,
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vae") / "wan"
    torch.manual_seed(0)
    model = diffusers.AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        num_res_blocks=1,
        latents_mean=[0.1, 0.2, 0.3, 0.4],
        latents_std=[1.0, 2.0, 3.0, 4.0],
    )
    model.save_pretrained(folder)
    return folder


def _load(folder: Path, **more: Any) -> Any:
    settings = {"scaling": None, "sample_seed": None, "say": lambda line: None, **more}
    return teachers.load(str(folder), **settings)


def _video(frames: int) -> np.ndarray:
    return np.random.default_rng(0).random((2, frames, 32, 48, 3), np.float32)


@pytest.mark.parametrize("frames", [4, 9, 12, 19])
def test_latents_are_the_mode_times_the_scaling_factor(cogvideox: Path, frames: int) -> None:
    said: list[str] = []
    teacher = _load(cogvideox, say=said.append)
    assert "mode, times 0.7 (its scaling_factor)" in said[0]
    video = _video(frames)
    found = teacher.encode(video)
    latents = video_ae.Config(frames=frames, height=32, width=48, latent_channels=4).latent_shape
    assert (found.dtype, found.shape) == (np.float32, (2, *latents))
    model = diffusers.AutoencoderKLCogVideoX.from_pretrained(cogvideox)
    with torch.no_grad():
        x = torch.from_numpy(video).permute(0, 4, 1, 2, 3) * 2 - 1
        wanted = model.encode(x).latent_dist.mode().permute(0, 2, 3, 4, 1).numpy() * 0.7
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    given = _load(cogvideox, scaling=1.4)
    np.testing.assert_allclose(given.encode(video), 2 * found, atol=1e-5)
    assert given.name != teacher.name


def test_samples_depend_only_on_seed_and_clip(cogvideox: Path) -> None:
    video = _video(4)
    teacher = _load(cogvideox, sample_seed=5)
    found = teacher.encode(video)
    np.testing.assert_array_equal(found[1:], teacher.encode(video[1:]))
    other = _load(cogvideox, sample_seed=6)
    assert np.abs(other.encode(video) - found).max() > 1e-3
    assert len({teacher.name, other.name, _load(cogvideox).name}) == 3


def test_wan_latents_are_normalized_by_its_config(wan: Path) -> None:
    teacher = _load(wan)
    video = _video(9)
    model = diffusers.AutoencoderKLWan.from_pretrained(wan)
    with torch.no_grad():
        x = torch.from_numpy(video).permute(0, 4, 1, 2, 3) * 2 - 1
        mode = model.encode(x).latent_dist.mode().permute(0, 2, 3, 4, 1).numpy()
    wanted = (mode - np.array([0.1, 0.2, 0.3, 0.4])) / np.array([1.0, 2.0, 3.0, 4.0])
    np.testing.assert_allclose(teacher.encode(video), wanted, atol=1e-5)
    longer = np.concatenate([video, np.zeros((2, 3, 32, 48, 3), np.float32)], axis=1)
    np.testing.assert_array_equal(teacher.encode(longer), teacher.encode(video))


def test_incomplete_folders_are_input_errors(cogvideox: Path, tmp_path: Path) -> None:
    config = json.loads((cogvideox / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"cannot be loaded"):
        _load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"_class_name": "AutoencoderKL"}))
    with pytest.raises(
        InputError, match=r"holds the class AutoencoderKL; use AutoencoderKLCogVideoX"
    ):
        _load(tmp_path)
    for path in cogvideox.glob("*.safetensors"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"scaling_factor": None}))
    with pytest.raises(InputError, match=r"set it with --teacher-scaling"):
        _load(tmp_path)
