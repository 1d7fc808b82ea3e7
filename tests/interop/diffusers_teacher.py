"""Teachers saved by diffusers.

Run by name, because PyTorch and diffusers are optional extras:

    python -m pytest tests/interop/diffusers_teacher.py
"""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import safetensors.numpy
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


@pytest.fixture(scope="module")
def hunyuan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vae") / "hunyuan"
    torch.manual_seed(0)
    model = diffusers.AutoencoderKLHunyuanVideo(
        latent_channels=4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=2,
    )
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["LTX", "LTX2"])
def ltx(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small AutoencoderKLLTXVideo or AutoencoderKLLTX2Video, with statistics in its weights."""
    folder = tmp_path_factory.mktemp("vae") / "ltx"
    torch.manual_seed(0)
    kinds: dict[str, Any] = {
        "LTX": lambda: diffusers.AutoencoderKLLTXVideo(
            latent_channels=4,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
            scaling_factor=0.5,
        ),
        "LTX2": lambda: diffusers.AutoencoderKLLTX2Video(
            latent_channels=4,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1),
            spatial_compression_ratio=32,
            temporal_compression_ratio=8,
        ),
    }
    model = kinds[request.param]()
    model.latents_mean += torch.tensor([0.1, 0.2, 0.3, 0.4])
    model.latents_std *= torch.tensor([1.0, 2.0, 3.0, 4.0])
    model.save_pretrained(folder)
    return folder


MODEL = video_ae.Config(frames=12, height=32, width=32, latent_channels=4)
LTX_MODEL = dataclasses.replace(MODEL, patch_size=4, time_downscale=(True,) * 3)


def _load(folder: Path, model: Any = MODEL, **more: Any) -> Any:
    settings = {"scaling": None, "sample_seed": None, "say": lambda line: None, **more}
    teacher = teachers.load(str(folder), **settings)
    teacher.check(f"--teacher {folder}", model, model.frames, "--model.frames")
    return teacher


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
    np.testing.assert_allclose(found, 0.7 * _mode(model, video), atol=1e-5)
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
    wanted = (_mode(model, video) - [0.1, 0.2, 0.3, 0.4]) / [1.0, 2.0, 3.0, 4.0]
    np.testing.assert_allclose(teacher.encode(video), wanted, atol=1e-5)
    longer = np.concatenate([video, np.zeros((2, 3, 32, 48, 3), np.float32)], axis=1)
    np.testing.assert_array_equal(teacher.encode(longer), teacher.encode(video))


def _mode(model: Any, video: np.ndarray) -> np.ndarray:
    """Calls diffusers; returns [B, L, h, w, C]."""
    with torch.no_grad():
        x = torch.from_numpy(video).permute(0, 4, 1, 2, 3) * 2 - 1
        mode: np.ndarray = model.encode(x).latent_dist.mode().permute(0, 2, 3, 4, 1).numpy()
    return mode


@pytest.mark.parametrize(("frames", "encoded"), [(1, 1), (9, 9), (12, 9), (21, 21)])
def test_hunyuan_encodes_four_n_plus_one_frames(hunyuan: Path, frames: int, encoded: int) -> None:
    said: list[str] = []
    teacher = _load(hunyuan, say=said.append)
    assert "mode, times 0.476986 (its scaling_factor)" in said[0]
    video = _video(frames)
    model = diffusers.AutoencoderKLHunyuanVideo.from_pretrained(hunyuan)
    found = teacher.encode(video)
    shape = dataclasses.replace(MODEL, frames=frames, width=48).latent_shape
    assert (found.dtype, found.shape) == (np.float32, (2, *shape))
    np.testing.assert_allclose(found, _mode(model, video[:, :encoded]) * 0.476986, atol=1e-5)


@pytest.mark.parametrize(("frames", "encoded"), [(1, 1), (9, 9), (12, 9), (17, 17)])
def test_ltx_encodes_eight_n_plus_one_frames(ltx: Path, frames: int, encoded: int) -> None:
    said: list[str] = []
    teacher = _load(ltx, model=LTX_MODEL, say=said.append)
    assert "normalized by latents_mean and latents_std (its weights)" in said[0]
    video = np.random.default_rng(0).random((2, frames, 32, 64, 3), np.float32)
    factor = 0.5 if "LTXVideo" in said[0] else 1.0
    model = getattr(diffusers, said[0].split()[2]).from_pretrained(ltx)
    found = teacher.encode(video)
    shape = dataclasses.replace(LTX_MODEL, frames=frames, width=64).latent_shape
    assert (found.dtype, found.shape) == (np.float32, (2, *shape))
    mean, deviation = np.array([0.1, 0.2, 0.3, 0.4]), np.array([1.0, 2.0, 3.0, 4.0])
    wanted = (_mode(model, video[:, :encoded]) - mean) * factor / deviation
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    given = _load(ltx, model=LTX_MODEL, scaling=2.0)
    np.testing.assert_allclose(given.encode(video), 2 * _mode(model, video[:, :encoded]), atol=1e-5)


def test_a_model_with_other_latents_is_refused(cogvideox: Path, hunyuan: Path, ltx: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"LTX2?Video makes latents of 8 frames and 32x32 pixels with 4 channels, but the "
        r"model makes latents of 4 frames and 8x8 pixels with 4 channels: set --model.patch_size 4 "
        r"--model.time_downscale True True True$",
    ):
        _load(ltx)
    more = dataclasses.replace(MODEL, latent_channels=16)
    for folder in (cogvideox, hunyuan):
        with pytest.raises(InputError, match=r"but the model .*: set --model.latent_channels 4$"):
            _load(folder, model=more)
    with pytest.raises(InputError, match=r"set --model.time_downscale True True False$"):
        _load(hunyuan, model=dataclasses.replace(LTX_MODEL, patch_size=1))


def test_a_number_of_frames_that_does_not_fit_is_refused(hunyuan: Path) -> None:
    chunked = dataclasses.replace(MODEL, trim="h3", frames=23)
    with pytest.raises(
        InputError,
        match=r"makes 6 latents of model.frames=23 frames, which cover 21, but the model's 7 cover "
        r"22 \(model.trim\): use --model.frames 8$",
    ):
        _load(hunyuan, model=chunked)
    _load(hunyuan, model=dataclasses.replace(MODEL, trim="h3", frames=8))


def test_pickles_are_not_read(
    cogvideox: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """jaxtrain does not check them, and a file of a kilobyte can take any amount of memory."""
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it unpickles a file"))
    shutil.copy(cogvideox / "config.json", tmp_path)
    torch.save({"a": torch.zeros(1)}, tmp_path / "diffusion_pytorch_model.bin")
    with pytest.raises(InputError, match=r"has no weights.*pickled files.* are not read"):
        _load(tmp_path)
    weights = tmp_path / "a.safetensors"
    safetensors.numpy.save_file({"a": np.zeros(1)}, weights, {"format": "pt"})
    with pytest.raises(InputError, match=r"cannot be loaded"):
        _load(tmp_path)
    index = tmp_path / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "diffusion_pytorch_model.bin"}}))
    with pytest.raises(InputError, match=r"lists 'diffusion_pytorch_model.bin', but only"):
        _load(tmp_path)


def test_incomplete_folders_are_input_errors(cogvideox: Path, tmp_path: Path) -> None:
    config = json.loads((cogvideox / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"has no weights: it lacks diffusion_pytorch_model.safet"):
        _load(tmp_path)
    weights = tmp_path / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(b"no tensors")
    with pytest.raises(InputError, match=r"cannot be loaded"):
        _load(tmp_path)
    tensors = safetensors.numpy.load_file(cogvideox / weights.name)
    del tensors["encoder.conv_in.conv.bias"]
    safetensors.numpy.save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(
        InputError, match=r"its weights lack 1 arrays of Auto.*, such as encoder.conv_in.conv.bias"
    ):
        _load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"_class_name": "AutoencoderKL"}))
    with pytest.raises(
        InputError, match=r"holds the class AutoencoderKL; use AutoencoderKLCogVideoX, "
    ):
        _load(tmp_path)
    for path in cogvideox.glob("*.safetensors"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"scaling_factor": None}))
    with pytest.raises(InputError, match=r"set it with --teacher-scaling"):
        _load(tmp_path)
