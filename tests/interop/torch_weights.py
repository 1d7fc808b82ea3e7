"""Weights to and from PyTorch: the same network written in PyTorch computes the same with them.

Run by name: ``python -m pytest tests/interop/torch_weights.py``; requires the extra ``interop``.
The file's name keeps it out of the ordinary suite.

Layout of videos in PyTorch: NTCHW.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
from flax import nnx
from models import small_autoencoder
from torch import nn
from torch.nn import functional

from jaxtrain import main
from jaxtrain.errors import InputError
from jaxtrain.interop import weights
from jaxtrain.models import video_ae
from jaxtrain.storage import tensor_files
from jaxtrain.training import state

VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "cogvideox": {"trim": "odd_latents"},
    "patch2": {"patch_size": 2, "latent_channels": 32},
    "super": {"decoder": "super", "patch_size": 2, "latent_channels": 48},
    "time8": {
        "patch_size": 4,
        "latent_channels": 128,
        "time_downscale": (True, True, True),
    },
    "h3": {"patch_size": 2, "latent_channels": 24, "trim": "h3"},
}
NAMES = {"cogvideox": "taecvx.pth", "h3": "taeh3.pth"}
COUNTS = {"base": 11_315_539, "patch2": 11_372_012}


class Memory(nn.Module):
    """A block that also sees its own input for the previous frame."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        past = functional.pad(x, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1]
        return self.after(
            x, self.conv(torch.cat([x, past], 2).flatten(0, 1)).unflatten(0, x.shape[:2])
        )


class Narrow(Memory):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(2 * c, c, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(c, c, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(c, c, 3, padding=1),
        )

    def after(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + y)


class Wide(Memory):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(2 * c, 2 * c, 7, padding=3, groups=2 * c, bias=False),
            nn.Conv2d(2 * c, 4 * c, 1),
            nn.ReLU(),
            nn.Conv2d(4 * c, c, 1, bias=False),
        )

    def after(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


class Pool(nn.Module):
    def __init__(self, c: int, stride: int) -> None:
        super().__init__()
        self.stride, self.conv = stride, nn.Conv2d(stride * c, c, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, c, h, w = x.shape
        return self.conv(x.reshape(-1, self.stride * c, h, w)).unflatten(0, (n, t // self.stride))


class Grow(nn.Module):
    def __init__(self, c: int, stride: int) -> None:
        super().__init__()
        self.stride, self.conv = stride, nn.Conv2d(c, stride * c, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, c, h, w = x.shape
        return self.conv(x.flatten(0, 1)).reshape(n, t * self.stride, c, h, w)


class Clamp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * torch.tanh(x / 3)


def conv(inputs: int, outputs: int, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, **options)


class Network(nn.Module):
    """The reference network, with its numbering of layers and none of our code."""

    def __init__(self, config: video_ae.Config) -> None:
        super().__init__()
        self.config = config
        e, z, colours = config.encoder_width, config.latent_channels, 3 * config.patch_size**2
        layers: list[nn.Module] = [conv(colours, e), nn.ReLU()]
        for stride in config.pools:
            layers += [Pool(e, stride), conv(e, e, stride=2, bias=False)]
            layers += [Narrow(e) for _ in range(3)]
        self.encoder = nn.Sequential(*layers, conv(e, z))
        f = config.widths
        if config.decoder == "super":
            layers = [nn.Conv2d(z, f[0], 1, bias=False)]
            for this, following, stride in zip(f, f[1:], config.grows, strict=False):
                layers += [*(Wide(this) for _ in range(3)), conv(this, 4 * following), nn.ReLU()]
                layers += [nn.PixelShuffle(2), Grow(following, stride)]
        else:
            layers = [Clamp(), conv(z, f[0]), nn.ReLU()]
            for this, following, stride in zip(f, f[1:], config.grows, strict=False):
                layers += [*(Narrow(this) for _ in range(3)), nn.Upsample(scale_factor=2)]
                layers += [Grow(this, stride), conv(this, following, bias=False)]
            layers.append(nn.ReLU())
        self.decoder = nn.Sequential(*layers, conv(f[3], colours))

    def encode(self, video: torch.Tensor) -> torch.Tensor:
        h3 = self.config.trim == "h3"
        missing = -video.shape[1] % (17 if h3 else 2 ** sum(self.config.time_downscale))
        filled = torch.cat([video, video[:, -1:].expand(-1, missing, -1, -1, -1)], 1)
        pixels = functional.pixel_unshuffle(filled, self.config.patch_size)
        if not h3:
            return run(self.encoder, pixels)
        black = torch.zeros_like(pixels[:, :3])
        chunks = [torch.cat([black, chunk], 1) for chunk in pixels.split(17, 1)]
        return torch.cat([run(self.encoder, chunk) for chunk in chunks], 1)[:, :-3]

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        found = functional.pixel_shuffle(run(self.decoder, latents), self.config.patch_size)
        even = latents.shape[1] % 2 == 0
        if self.config.trim == "h3":
            missing = -found.shape[1] % 20
            filled = torch.cat(
                [found, torch.zeros_like(found[:, :1]).expand(-1, missing, -1, -1, -1)], 1
            )
            return torch.cat([chunk[:, 3:] for chunk in filled.split(20, 1)], 1)[:, :-12]
        dropped = 2 ** sum(self.config.time_downscale) - 1
        return found if self.config.trim == "odd_latents" and even else found[:, dropped:]


def run(layers: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        whole = isinstance(layer, (Memory, Pool, Grow))
        x = layer(x) if whole else layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])
    return x


def command(*arguments: Any) -> int:
    return main.main([*map(str, arguments)])


def config_of(variant: str) -> video_ae.Config:
    fields = VARIANTS[variant]
    side = 16 * fields.get("patch_size", 1)
    frames = 5 if fields.get("trim") == "h3" else 9
    return video_ae.Config(frames=frames, height=side, width=2 * side, **fields)


def loaded(model: Network, path: Path) -> Network:
    state_dict = torch.load(path, weights_only=True)
    model.load_state_dict(state_dict, strict=True)
    return model.eval()


def both_ways(config: video_ae.Config, module: Any, model: Network) -> None:
    """Runs the same video through our network and PyTorch's: latents and frames must be equal."""
    rng = np.random.default_rng(0)
    for frames in (22, 5) if config.trim == "h3" else (9, 8):
        video = rng.random((1, frames, config.height, config.width, 3)).astype(np.float32)
        with torch.no_grad():
            latents = model.encode(torch.from_numpy(video).permute(0, 1, 4, 2, 3))
            found = model.decode(latents).permute(0, 1, 3, 4, 2).numpy()
        ours = nnx.jit(lambda m, x: m.encode(x))(module, jnp.asarray(video))
        np.testing.assert_allclose(ours, latents.permute(0, 1, 3, 4, 2).numpy(), atol=1e-4)
        decoded = np.asarray(nnx.jit(lambda m, x: m.decode(x))(module, ours))
        assert decoded.shape == found.shape
        np.testing.assert_allclose(decoded, found, atol=1e-4)
        assert found.std() > 0.02


@pytest.mark.parametrize("variant", VARIANTS)
def test_pytorch_loads_exported_weights(variant: str, tmp_path: Path) -> None:
    config = config_of(variant)
    params = small_autoencoder.params(config)
    weights.save(tmp_path / "ours.safetensors", config, params)
    assert command("export", tmp_path / "ours.safetensors", tmp_path / "out.pth") == 0
    model = loaded(Network(config), tmp_path / "out.pth")
    if variant in COUNTS:
        assert sum(one.numel() for one in model.parameters()) == COUNTS[variant]
    arrays = {name: jnp.asarray(array) for name, array in params.items()}
    both_ways(config, state.ModelDefinition(config.build).module(arrays, {}), model)
    assert command("export", tmp_path / "ours.safetensors", tmp_path / "out.safetensors") == 0
    safetensors.torch.load_model(model, tmp_path / "out.safetensors", strict=True)
    for name, tensor in torch.load(tmp_path / "out.pth", weights_only=True).items():
        assert torch.equal(tensor, model.state_dict()[name])


REFERENCE = """
from jaxtrain.models import video_ae
from torch_weights import Network

class TAEHV(Network):
    def __init__(self, checkpoint_path, encoder_time_downscale, decoder_time_upscale, **sizes):
        assert decoder_time_upscale == (False, True, True)
        super().__init__(video_ae.Config(
            time_downscale=encoder_time_downscale, frames=9, height=32, width=32, **sizes))
    def encode_video(self, pixels, show_progress_bar):
        return self.encode(pixels)
    def decode_video(self, latents, show_progress_bar):
        return self.decode(latents).clamp(0, 1)FAULT
"""


@pytest.mark.parametrize(
    ("variant", "fault", "words"),
    [
        ("base", "", "it computes the same as jaxtrain"),
        ("patch2", "", "it computes the same as jaxtrain"),
        ("base", ".flip(4)", "computes other frames than jaxtrain"),
        ("base", "[:, 1:]", "computes frames of shape"),
        ("super", "", "cannot run"),
    ],
)
def test_export_compares_with_a_given_implementation(
    variant: str,
    fault: str,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # for the stand-in of taehv.py
    config = config_of(variant)
    weights.save(tmp_path / "ours.safetensors", config, small_autoencoder.params(config))
    (tmp_path / "taehv.py").write_text(REFERENCE.replace("FAULT", fault))
    flags = ("--reference", tmp_path / "taehv.py")
    code = command("export", tmp_path / "ours.safetensors", tmp_path / "out.pth", *flags)
    printed = capsys.readouterr()
    assert words in printed.out + printed.err
    assert code == (0 if words.startswith("it computes") else 2)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_weights_saved_by_pytorch_are_imported(
    variant: str, wrapped: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(variant)
    torch.manual_seed(0)
    model = Network(config).eval()
    name = NAMES.get(variant, "taehv.pth")
    saved = {"state_dict": model.state_dict(), "epoch": 3} if wrapped else model.state_dict()
    torch.save(saved, tmp_path / name)
    assert command("import", tmp_path / name, tmp_path / "ours.safetensors") == 0
    assert f"{config.latent_channels} latent channels" in capsys.readouterr().out
    found = weights.load(tmp_path / "ours.safetensors").model
    for field in ("patch_size", "latent_channels", "decoder", "trim", "pools", "grows"):
        assert getattr(found, field) == getattr(config, field)
    both_ways(config, small_autoencoder.module(tmp_path / "ours.safetensors"), model)
    assert command("export", tmp_path / "ours.safetensors", tmp_path / "back.pth") == 0
    back = torch.load(tmp_path / "back.pth", weights_only=True)
    model.load_state_dict(back, strict=True)
    assert [*back] == [*model.state_dict()]


def test_half_precision_is_converted_to_float32(tmp_path: Path) -> None:
    config = config_of("base")
    model = Network(config).to(torch.bfloat16)
    torch.save(model.state_dict(), tmp_path / "taehv.pth")
    assert command("import", tmp_path / "taehv.pth", tmp_path / "ours.safetensors") == 0
    found = weights.load(tmp_path / "ours.safetensors").params
    assert {str(array.dtype) for array in found.values()} == {"float32"}
    head = model.encoder[0].weight.detach().float().numpy().transpose(2, 3, 1, 0)
    np.testing.assert_array_equal(found["encoder.head.kernel"], head)


@pytest.mark.parametrize("content", ["text", "module", "torn", "numbers"])
def test_other_files_are_rejected(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "theirs.pth"
    if content == "text":
        path.write_text("no weights")
    elif content == "module":  # a pickled module could run anything
        torch.save(nn.Conv2d(3, 3, 1), path)
    elif content == "torn":
        torch.save({"a": torch.zeros(1000)}, path)
        path.write_bytes(path.read_bytes()[:-700])
    else:
        torch.save({"a": 1, "b": 2}, path)
    assert command("import", path, tmp_path / "ours.safetensors") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "theirs.pth" in line
    assert "not a PyTorch file of arrays" in line or "not a state dict" in line
    assert not (tmp_path / "ours.safetensors").exists()


def refusal(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        tensor_files.read(path)
    (line,) = str(caught.value).splitlines()
    return line


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.eye(4).to_sparse(), "a is sparse and not supported"),
        (lambda: torch.zeros(4, device="meta"), "a is on the device 'meta', without data,"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
            "a is quantized and not supported",
        ),
        (lambda: torch.zeros(4, dtype=torch.complex64), "a is of type complex64"),
        (lambda: torch.zeros(1).expand(10**12), "would take 4,000,000,000,000 bytes in float32"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_tensors_other_than_plain_arrays_are_rejected(
    make: Callable[[], torch.Tensor], words: str, tmp_path: Path
) -> None:
    torch.save({"a": make()}, tmp_path / "x.pth")
    assert words in refusal(tmp_path / "x.pth")


def test_odd_but_plain_tensors_are_read(tmp_path: Path) -> None:
    held = torch.arange(6.0).reshape(2, 3)
    content = {
        "transposed": held.T,
        "eight": held.to(torch.float8_e4m3fn),
        "parameter": nn.Parameter(held),
        "flag": torch.ones(2, dtype=torch.bool),
        "empty": torch.zeros(0, 5),
        "u16": torch.ones(2, dtype=torch.uint16),
    }
    torch.save(content, tmp_path / "x.pth")
    found, _ = tensor_files.read(tmp_path / "x.pth")
    np.testing.assert_array_equal(found["transposed"], held.numpy().T)
    np.testing.assert_array_equal(found["eight"], held.numpy())
    np.testing.assert_array_equal(found["parameter"], held.numpy())
    assert [str(found[name].dtype) for name in ("flag", "empty", "u16")] == [
        "bool",
        "float32",
        "uint16",
    ]


def test_views_of_one_storage_cannot_exhaust_memory(tmp_path: Path) -> None:
    shared = torch.zeros(2**20, dtype=torch.bfloat16)
    torch.save({str(number): shared[:] for number in range(2000)}, tmp_path / "x.pth")
    assert "bytes in float32, but the file has only" in refusal(tmp_path / "x.pth")


def test_a_file_of_older_pytorch_is_read(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(4)}, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert tensor_files.read(tmp_path / "old.pth")[0]["a"].shape == (4,)


def test_names_other_than_printable_strings_are_rejected(tmp_path: Path) -> None:
    for name in (7, "a\nb", "a\x1b[2J"):
        torch.save({name: torch.zeros(1)}, tmp_path / "x.pth")
        assert "is not a valid array name" in refusal(tmp_path / "x.pth")
