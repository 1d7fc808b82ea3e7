"""Teachers saved by diffusers.

Run by name, because PyTorch and diffusers are optional extras:

    python -m pytest tests/interop/diffusers_teacher.py
"""

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
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
    settings = {"scaling": None, "say": lambda line: None, **more}
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


STATISTICS = {"latents_mean": [0.1, 0.2, 0.3, 0.4], "latents_std": [1.0, 2.0, 3.0, 4.0]}
QWEN = {"base_dim": 8, "z_dim": 4, "num_res_blocks": 1, **STATISTICS}
NEWER: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {  # frames, pixels of a latent
    "AutoencoderKLFlux2": (
        {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 2},
        (1, 8, 4),
    ),
    "AutoencoderKLHunyuanImage": (
        {
            "in_channels": 3,
            "out_channels": 3,
            "block_out_channels": (32,) * 5,
            "layers_per_block": 1,
            "spatial_compression_ratio": 16,  # a norm of the two latents at 32 would be unstable
            "sample_size": 64,
            "scaling_factor": 0.7,
        },
        (1, 16, 4),
    ),
    "AutoencoderKLHunyuanVideo15": (
        {"block_out_channels": (8, 16, 16, 16, 16), "layers_per_block": 1, "scaling_factor": 0.7},
        (4, 16, 4),
    ),
    "AutoencoderKLMiniMaxH3": (
        {
            "block_out_channels": (4,) * 6,
            "layers_per_block": 1,
            "norm_num_groups": 2,
            "decoder_num_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_attention_head_dim": 16,
            **STATISTICS,
        },
        (4, 16, 4),
    ),
    "AutoencoderKLQwenImage": (QWEN, (4, 8, 4)),
    "AutoencoderKLQwenImage21": (QWEN | {"decoder_base_dim": 8}, (1, 16, 4)),
}


@pytest.fixture(scope="module", params=NEWER)
def newer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of one of the newer classes, with random weights and statistics."""
    folder = tmp_path_factory.mktemp("vae") / "newer"
    torch.manual_seed(0)
    settings = NEWER[request.param][0]
    channels = {} if "z_dim" in settings else {"latent_channels": 4}
    model = getattr(diffusers, request.param)(**settings, **channels)
    if request.param == "AutoencoderKLFlux2":
        model.bn.running_mean += torch.linspace(-1, 1, 16)
        model.bn.running_var *= torch.linspace(0.5, 2, 16)
    model.save_pretrained(folder)
    return folder


def _model_for(name: str, frames: int, height: int, width: int) -> Any:
    """Returns a student with the latents of a class."""
    in_time, in_space, _ = NEWER[name][1]
    return video_ae.Config(
        frames=frames,
        height=height,
        width=width,
        latent_channels=4,
        patch_size=in_space // 8,
        time_downscale=(in_time == 4,) * 2 + (False,),
        trim="h3" if name == "AutoencoderKLMiniMaxH3" else "always",
    )


def _reference(folder: Path) -> Any:
    """Returns the model of a folder; ``from_pretrained`` of MiniMax H3 requires accelerate."""
    settings = json.loads((folder / "config.json").read_text())
    model = getattr(diffusers, settings["_class_name"]).from_config(settings)
    (weights,) = folder.glob("*.safetensors")
    model.load_state_dict(safetensors.torch.load_file(weights))
    return model.eval()


def _as_pipelines_do(name: str, model: Any, video_BTHWC: np.ndarray) -> np.ndarray:
    """Encodes as diffusers' pipeline of the class; returns [B, L, h, w, C]."""
    x = torch.from_numpy(video_BTHWC).permute(0, 4, 1, 2, 3)
    mean, deviation = (0.5,) * 3, (0.5,) * 3
    if name == "AutoencoderKLMiniMaxH3":
        mean, deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    x = (x - torch.tensor(mean).view(3, 1, 1, 1)) / torch.tensor(deviation).view(3, 1, 1, 1)
    if name == "AutoencoderKLQwenImage21":
        x = torch.cat([x, torch.ones_like(x[:, :1])], 1)  # opaque
    with torch.no_grad():
        if name == "AutoencoderKLFlux2":
            return np.stack([_of_flux2(model, images) for images in x.unbind(2)], 1)
        if name == "AutoencoderKLHunyuanImage":
            images = [model.encode(images).latent_dist.mode() for images in x.unbind(2)]
            latents = torch.stack(images, 2) * 0.7
        elif name == "AutoencoderKLQwenImage21":
            parts = [model.encode(part).latent_dist.mode() for part in x.split(1, 2)]
            latents = torch.cat(parts, 2)
        else:  # the attention of HunyuanVideo 1.5 takes one clip at a time
            latents = torch.cat([model.encode(clip[None]).latent_dist.mode() for clip in x])
    if name == "AutoencoderKLHunyuanVideo15":
        latents = latents * 0.7
    elif name != "AutoencoderKLHunyuanImage":
        shift, scale = (torch.tensor(part).view(-1, 1, 1, 1) for part in STATISTICS.values())
        latents = (latents - shift) / scale
    return np.asarray(latents.permute(0, 2, 3, 4, 1).numpy())


def _of_flux2(model: Any, images: torch.Tensor) -> np.ndarray:
    pipeline = diffusers.Flux2Pipeline
    packed = pipeline._patchify_latents(model.encode(images).latent_dist.mode())
    mean, variance = (
        part.view(1, -1, 1, 1) for part in (model.bn.running_mean, model.bn.running_var)
    )
    packed = (packed - mean) / torch.sqrt(variance + model.config.batch_norm_eps)
    return np.asarray(pipeline._unpatchify_latents(packed).permute(0, 2, 3, 1).numpy())


@pytest.mark.parametrize(("frames", "encoded"), [(9, 9), (12, 9)])
def test_newer_classes_make_the_latents_of_their_pipelines(
    newer: Path, frames: int, encoded: int
) -> None:
    name = str(json.loads((newer / "config.json").read_text())["_class_name"])
    if NEWER[name][1][0] == 1:
        encoded = frames = frames % 8  # images
    elif name == "AutoencoderKLMiniMaxH3":
        encoded = frames = 17 + frames  # only 5 of the last 17 have latents
    height, width = (32, 288) if frames == 26 else (32, 64)  # of MiniMax H3: two tiles
    student = _model_for(name, frames, height, width)
    teacher = _load(newer, model=student)
    assert (teacher.frames, teacher.pixels, teacher.channels) == NEWER[name][1]
    video = np.random.default_rng(0).random((2, frames, height, width, 3), np.float32)
    model = _reference(newer)
    found = teacher.encode(video)
    assert (found.dtype, found.shape) == (np.float32, (2, *student.latent_shape))
    wanted = _as_pipelines_do(name, model, video[:, :encoded])
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    if "tiles" in teacher.name:
        model.disable_tiling()
        untiled = _as_pipelines_do(name, model, video)
        assert (np.abs(untiled - wanted).max() > 1e-3) == (width > 256)
    assert ("-tiles256-" in teacher.name) == (name == "AutoencoderKLMiniMaxH3")


def test_newer_classes_decode_their_latents(newer: Path) -> None:
    name = str(json.loads((newer / "config.json").read_text())["_class_name"])
    frames = 22 if name == "AutoencoderKLMiniMaxH3" else 5
    teacher = _load(newer, model=_model_for(name, frames, 32, 64))
    video = np.random.default_rng(0).random((1, frames, 32, 64, 3), np.float32)
    decoded = teacher.decode(teacher.encode(video))
    assert decoded.shape == video.shape
    model = _reference(newer)
    colors = 4 if name == "AutoencoderKLQwenImage21" else 3
    x = torch.from_numpy(video).permute(0, 4, 1, 2, 3)
    x = torch.cat([x, torch.ones_like(x[:, :1])], 1)[:, :colors] * 2 - 1
    scale, shift = 0.5, 0.5
    if name == "AutoencoderKLMiniMaxH3":
        shift, scale = (
            torch.tensor(part) for part in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        )
        x = ((x + 1) / 2 - shift.view(3, 1, 1, 1)) / scale.view(3, 1, 1, 1)
    flat = name in ("AutoencoderKLFlux2", "AutoencoderKLHunyuanImage")
    parts = x.split(1, 2) if teacher.frames == 1 else (x,)
    with torch.no_grad():
        both = [
            model.decode(model.encode(part[:, :, 0] if flat else part).latent_dist.mode()).sample
            for part in parts
        ]
    wanted = torch.cat([one[:, :, None] if flat else one for one in both], 2)
    wanted = wanted[:, :3].permute(0, 2, 3, 4, 1) * scale + shift
    np.testing.assert_allclose(decoded, wanted.numpy(), atol=1e-4)
    if name == "AutoencoderKLMiniMaxH3":
        with pytest.raises(InputError, match=r"decodes 7 latents or more, not 2: use at least 22"):
            teacher.decode(np.zeros((1, 2, 2, 2, 4), np.float32))
        with pytest.raises(InputError, match=r"cover 21 \(model.trim\): set --model.trim h3$"):
            _load(newer, dataclasses.replace(_model_for(name, 22, 32, 64), trim="always"))


def test_the_guide_has_the_sizes_of_each_class() -> None:
    """As the classes have them by default, if they do."""
    guide = Path(__file__).parents[2] / "docs/guides/distill.md"
    row = r"`(AutoencoderKL\w+)` \| (\d+)x\2(?:x(\d+))? \| (\d+) \|"
    written: dict[str, list[tuple[int, int, int]]] = {}
    for name, pixels, frames, channels in re.findall(row, guide.read_text()):
        sizes = (int(frames or 1), int(pixels), int(channels))
        written.setdefault(name, []).append(sizes)
    kinds = teachers._kinds(diffusers)
    assert sorted(written) == sorted(kinds)
    for name in kinds.keys() - {"AutoencoderKLHunyuanImage", "AutoencoderKLLTX2Video"}:
        with torch.device("meta"):
            model = kinds[name].of()
        assert teachers._sizes(kinds[name], model) == written[name][0]


def test_a_qwen_image_with_transparency_sees_opaque_frames(tmp_path: Path) -> None:
    """Qwen-Image-Layered's autoencoder has four colors."""
    torch.manual_seed(0)
    model = diffusers.AutoencoderKLQwenImage(**QWEN, input_channels=4)
    model.save_pretrained(tmp_path)
    video = _video(5)
    opaque = np.concatenate([video, np.ones_like(video[..., :1])], -1)
    shift, scale = STATISTICS.values()
    wanted = (_mode(model, opaque) - np.array(shift)) / np.array(scale)
    np.testing.assert_allclose(_load(tmp_path).encode(video), wanted, atol=1e-5)


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
