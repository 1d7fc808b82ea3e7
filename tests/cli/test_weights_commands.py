"""``jaxtrain import`` and ``export`` of weights files."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from flax import nnx
from models.small_params import random_params, write_run
from models.video_ae import small_autoencoder

from jaxtrain import main, versions
from jaxtrain.errors import InputError
from jaxtrain.inference.video import autoencoder
from jaxtrain.interop import hub, weights
from jaxtrain.models import gpt, mlm, video_ae, wan_vae
from jaxtrain.models.wan import network as wan_network
from jaxtrain.training import state

FIXTURES = {
    "taehv_base": (
        "TAEHV, patches of 1x1, 16 latent channels per 4 frames, first 3 frames dropped; "
        "11,315,539 parameters (encoder 1,470,928, decoder 9,844,611)"
    ),
    "taehv_patch2_z32": (
        "TAEHV, patches of 2x2, 32 latent channels per 4 frames, first 3 frames dropped; "
    ),
    "taehv_patch4_z128_time8": "128 latent channels per 8 frames, first 7 frames dropped; ",
    "taehv_h3": "24 latent channels per 4 frames, chunks of 17 frames (MiniMax H3); ",
    "taehv_super_patch2_z48": "TAEHV with the super decoder, patches of 2x2, 48 latent channels",
}


def run(*arguments: Any) -> int:
    return main.main([*map(str, arguments)])


def published(checkout: Path, name: str, to: Path) -> dict[str, np.ndarray]:
    """Writes noise with a fixture's names and shapes; as when published, without a model config."""
    with np.load(checkout / f"tests/fixtures/{name}.npz") as file:
        shapes = json.loads(str(file["params"]))
    rng = np.random.default_rng(0)
    tensors = {n: rng.standard_normal(shape, np.float32) for n, shape in shapes.items()}
    safetensors.numpy.save_file(tensors, to)
    return tensors


@pytest.mark.parametrize("name", FIXTURES)
def test_import_and_export_change_nothing(
    checkout: Path, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = tmp_path / ("taeh3.safetensors" if name == "taehv_h3" else "taehv.safetensors")
    tensors = published(checkout, name, theirs)
    assert run("import", theirs, tmp_path / "ours.safetensors") == 0
    assert FIXTURES[name] in capsys.readouterr().out
    assert run("export", tmp_path / "ours.safetensors", tmp_path / "out.safetensors") == 0
    found = safetensors.numpy.load_file(tmp_path / "out.safetensors")
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        np.testing.assert_array_equal(found[key], tensor)


def test_the_trim_rule_comes_from_the_file_name_or_a_flag(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    published(checkout, "taehv_base", tmp_path / "taecvx.safetensors")
    target = tmp_path / "ours.safetensors"
    assert run("import", tmp_path / "taecvx.safetensors", target) == 0
    assert (
        "first 3 frames dropped only for an odd number of latents (CogVideoX)"
        in capsys.readouterr().out
    )
    assert weights.load(target).model.trim == "odd_latents"
    assert run("import", tmp_path / "taecvx.safetensors", target, "--trim", "always") == 0
    assert weights.load(target).model.trim == "always"


@pytest.mark.parametrize(
    ("fixture", "rule", "family"),
    [("taehv_base", "odd_latents", "CogVideoX"), ("taehv_h3", "h3", "MiniMax H3")],
)
def test_a_file_that_fits_two_variants_is_refused_with_both(
    checkout: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    fixture: str,
    rule: str,
    family: str,
) -> None:
    source, target = tmp_path / "model.safetensors", tmp_path / "ours.safetensors"
    published(checkout, fixture, source)
    printed = error(capsys, "import", source, target)
    assert "model.safetensors fits two variants" in printed
    assert "--trim always (Hunyuan, Wan, and others)" in printed
    assert f"--trim {rule} ({family})" in printed
    assert not target.exists()
    with pytest.raises(InputError, match=rf"--trim {rule} .*import .*model\.safetensors OUT"):
        weights.load(source, "video_ae")
    for given in ("always", rule):
        assert run("import", source, target, "--trim", given) == 0
        assert weights.load(target).model.trim == given


def test_every_width_is_inferred_from_the_arrays(tmp_path: Path) -> None:
    """Also widths that the reference never had; the file has none of our metadata."""
    wide = {"decoder": "super", "decoder_widths": (16, 8, 8, 16)}
    for number, fields in enumerate(({"decoder_widths": (24, 16, 8, 8)}, wide)):
        ours = small_autoencoder.save(tmp_path / f"{number}.safetensors", **fields)
        theirs, back = tmp_path / "theirs.safetensors", tmp_path / f"{number}-back.safetensors"
        safetensors.numpy.save_file(safetensors.numpy.load_file(ours), theirs)
        assert run("import", theirs, back) == 0
        before, after = (weights.load(path) for path in (ours, back))
        assert after.model.widths == before.model.widths
        for name, array in before.params.items():
            np.testing.assert_array_equal(array, after.params[name], err_msg=name)


def test_a_file_that_export_wrote_for_wans_autoencoder_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = wan_vae.Config.tiny()
    shapes = state.ModelDefinition(model.build).params
    params = {name: np.zeros(array.shape, np.float32) for name, array in shapes.items()}
    weights.save(tmp_path / "wan.safetensors", model, params)
    target = tmp_path / "out.safetensors"
    message = error(capsys, "import", tmp_path / "wan.safetensors", target, "--trim", "h3")
    assert "is not a small video autoencoder: drop --trim" in message
    assert not target.exists()
    assert run("import", tmp_path / "wan.safetensors", target) == 0
    assert "wan.safetensors: wan_vae, version wan2.2" in capsys.readouterr().out
    assert weights.load(target).model == weights.load(tmp_path / "wan.safetensors").model


def error(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """Returns the one line that a refused command prints."""
    assert run(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = small_autoencoder.save(tmp_path / "ours.safetensors")
    theirs = tmp_path / "theirs.safetensors"
    safetensors.numpy.save_file(safetensors.numpy.load_file(ours), theirs)
    out = tmp_path / "out.safetensors"
    (tmp_path / "torn.safetensors").write_bytes(ours.read_bytes()[:-5])
    for arguments, message in (
        (("import", ours, tmp_path / "o.pth"), "does not end with .safetensors"),
        (("import", tmp_path, out), "the name of a weights file must end with"),
        (("import", tmp_path / "torn.safetensors", out), "is not a complete .safetensors file"),
        (("import", theirs, theirs), f"OUT {theirs} is the same file as IN"),
        (("export", theirs, out), f" import {theirs} OUT.safetensors"),
        (("export", ours, tmp_path / "no" / "o.safetensors"), "does not exist: create it"),
    ):
        assert message in error(capsys, *arguments)
        assert not out.exists()


def test_without_pytorch_a_pth_prints_the_install_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    ours = small_autoencoder.save(tmp_path / "ours.safetensors")
    (tmp_path / "theirs.pth").write_bytes(b"PK")
    printed = error(capsys, "import", tmp_path / "theirs.pth", tmp_path / "o.safetensors")
    assert f"theirs.pth requires PyTorch: {versions.install('interop')}" in printed
    assert "'.[interop]'" in error(capsys, "export", ours, tmp_path / "o.pth")
    assert not (tmp_path / "o.pth").exists()


def test_a_run_and_its_checkpoint_are_exported(tmp_path: Path) -> None:
    model = small_autoencoder.config()
    params = small_autoencoder.params(model)
    run_ = write_run(tmp_path / "run", model, 3, params)
    for source in (run_, run_ / "checkpoints" / "3"):
        assert run("export", source, tmp_path / "out.safetensors") == 0
        found = weights.load(tmp_path / "out.safetensors")
        assert found.model == model
        assert found.params.keys() == params.keys()
        for name, array in params.items():
            np.testing.assert_array_equal(found.params[name], array)


def test_export_warns_if_taehv_cannot_load_the_widths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "small.safetensors"
    model = small_autoencoder.config()
    params = small_autoencoder.params(model)
    weights.save(source, model, params)
    assert run("export", source, tmp_path / "out.safetensors") == 0
    warning = capsys.readouterr().err
    assert "warning: TAEHV and ComfyUI cannot load these weights" in warning
    assert "their fixed widths, 64 and 256 128 64 64" in warning
    published_widths = dataclasses.replace(model, encoder_width=64, decoder_widths=None)
    assert published_widths.export_note() is None


def test_a_model_that_was_trained_with_an_adversary_loads(tmp_path: Path) -> None:
    """Its discriminator is not loaded."""
    bare = small_autoencoder.save(tmp_path / "bare.safetensors")
    trained = small_autoencoder.save(
        tmp_path / "trained.safetensors",
        frames=12,
        adversary=video_ae.Adversary(replay=4),
        teacher=video_ae.Teacher(),
    )
    one, other = (autoencoder.Autoencoder(path) for path in (bare, trained))
    assert other.model.adversary is other.model.teacher is None
    names = [
        [(path, leaf.get_value().shape) for path, leaf in nnx.to_flat_state(nnx.state(made.module))]
        for made in (one, other)
    ]
    assert names[0] == names[1]


COMFYUI: dict[str, dict[str, Any]] = {
    "taehv": {"latent_channels": 16},
    "taeh3": {"latent_channels": 24, "patch_size": 2, "trim": "h3", "frames": 22},
    "lighttaew2_2": {"latent_channels": 48, "patch_size": 2},
    "taeltx_2": {
        "latent_channels": 128,
        "patch_size": 4,
        "frames": 8,
        "time_downscale": (True, True, True),
    },
}


def full_width(**fields: Any) -> video_ae.Config:
    return small_autoencoder.config(**{"encoder_width": 64, "decoder_widths": None, **fields})


@pytest.mark.parametrize("name", COMFYUI)
def test_comfyui_and_stable_diffusion_cpp_find_every_array(
    name: str, tmp_path: Path, checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = full_width(**COMFYUI[name])
    source = tmp_path / "source.safetensors"
    params = small_autoencoder.params(model)
    weights.save(source, model, params)
    (tmp_path / "vae_approx").mkdir()
    assert run("export", source, tmp_path / "vae_approx", "--format", "comfyui") == 0
    path = tmp_path / "vae_approx" / f"{name}.safetensors"
    printed = capsys.readouterr().out
    assert f"models/vae_approx, as {name}.safetensors, for previews" in printed
    assert printed.endswith(f"wrote {path}\n")
    arrays = safetensors.numpy.load_file(path)
    assert {array.dtype for array in arrays.values()} == {np.dtype(np.float16)}
    channels = {"latents": model.latent_channels, "pixels": 3 * model.patch_size**2}
    for stage in range(3):
        channels[f"pool{stage}"] = 64 * model.pools[stage]
        channels[f"grow{stage}"] = (256, 128, 64)[stage] * model.grows[stage]
    expected = json.loads((checkout / "tests/fixtures/taehv_loaders.json").read_text())["arrays"]
    shapes = {
        key: tuple(channels.get(size, size) for size in shape) for key, shape in expected.items()
    }
    assert {key: array.shape for key, array in arrays.items()} == shapes
    read = weights.load(path).params
    for key, array in params.items():
        np.testing.assert_array_equal(read[key], array.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"encoder_width": 8, "decoder_widths": (8, 8, 8, 8)}, "fixed widths, 64 and 256 128 64"),
        ({"latent_channels": 4}, "model.latent_channels=4: ComfyUI supports 16, 24, 48, 128"),
        ({"latent_channels": 32, "patch_size": 2}, "ComfyUI uses LeakyReLU in networks with 32"),
        ({"latent_channels": 16, "patch_size": 2}, "model.patch_size=2: ComfyUI assumes 1"),
        ({"latent_channels": 16, "trim": "odd_latents"}, "model.trim=odd_latents: ComfyUI assumes"),
        ({"decoder": "super", "latent_channels": 48, "patch_size": 2}, "only the base decoder"),
    ],
)
def test_what_comfyui_lacks_is_refused(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        full_width(**fields).comfyui_name()


def test_latents_that_comfyui_does_not_pass_are_reported() -> None:
    model = full_width(**COMFYUI["lighttaew2_2"])
    assert model.comfyui_note() is None
    taught = dataclasses.replace(
        model, teacher=video_ae.Teacher(network="wan2.2", weights="vae"), frames=12
    )
    assert "model.teacher.network=wan2.2 are scaled" in str(taught.comfyui_note())


@pytest.mark.parametrize(
    ("network", "name", "std", "scaled"),
    [
        ("wan2.2", "lighttaew2_2", 1, False),
        ("wan2.2", "lighttaew2_2", 2, True),
        ("wan2.1", "taehv", 1, True),
    ],
)
def test_a_teacher_whose_folder_scales_nothing_fits_comfyui(
    network: Any, name: str, std: float, scaled: bool, tmp_path: Path
) -> None:
    """ComfyUI's network with 48 channels reads Wan 2.2's latents as its autoencoder makes them."""
    model = full_width(**COMFYUI[name])
    channels = model.latent_channels
    sizes = dataclasses.replace(wan_network.VERSIONS[network], latent_channels=channels)
    settings = wan_network.to_settings(sizes, [0] * channels, [std] * channels)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    teacher = video_ae.Teacher(network=network, weights=str(tmp_path))
    note = dataclasses.replace(model, teacher=teacher, frames=13).comfyui_note()
    assert (note is not None) == scaled


def test_comfyui_takes_a_safetensors_file_of_a_video_autoencoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    weights.save(Path("mlm.safetensors"), mlm.Config.tiny(), random_params(mlm.Config.tiny()))
    model = full_width(latent_channels=16)
    params = small_autoencoder.params(model)
    weights.save(Path("large.safetensors"), model, params | {"encoder.head.bias": np.full(64, 7e4)})
    for source, target, words in (
        ("mlm.safetensors", "out.safetensors", "--format comfyui is for the model video_ae"),
        ("large.safetensors", "out.pth", "is not a folder that exists"),
        ("large.safetensors", "out.safetensors", "encoder.head.bias has values above 65504"),
    ):
        assert run("export", source, target, "--format", "comfyui") == 2
        assert words in capsys.readouterr().err
        assert not Path(target).exists()


def test_a_language_model_without_a_folder_is_not_pushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A weights file alone lacks the tokenizer, so it could not be used from the Hub."""
    monkeypatch.setattr(hub, "check_login", lambda repository: None)
    model = gpt.Config.of_2026(vocab_size=32, sequence_length=8, depth=2, width=32, heads=2)
    source = write_run(tmp_path / "run", model, 3, random_params(model))
    assert run("export", source, "--push", "me/gpt") == 2
    assert "--push uploads a language model as a folder" in capsys.readouterr().err
    with_folder = mlm.Config.tiny()
    trained = write_run(tmp_path / "mlm", with_folder, 3, random_params(with_folder))
    assert run("export", trained, "--push", "me/mlm", "--format", "file") == 2
    assert "for transformers; omit --format" in capsys.readouterr().err
    assert run("export", source, tmp_path / "folder", "--format", "hf") == 2
    error = capsys.readouterr().err
    assert "transformers and diffusers have no network like this gpt" in error
    assert "omit --format hf, for a weights file" in error
    assert run("export", source, tmp_path / "gpt.safetensors") == 0
