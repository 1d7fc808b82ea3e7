"""Tests which models a file may name, and that a file cannot make other code run."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.video.sample_videos import busy, write
from models.small_params import write_run

from jaxtrain import config, main
from jaxtrain.config import files, record
from jaxtrain.errors import InputError
from jaxtrain.interop import weights
from jaxtrain.models import from_file, gpt, llama, mlm, modern_bert, video_ae, wan_vae
from jaxtrain.storage import tensor_files

MODELS = {
    "gpt": gpt,
    "llama": llama,
    "mlm": mlm,
    "modern_bert": modern_bert,
    "video_ae": video_ae,
    "wan_vae": wan_vae,
}
FULL = video_ae.Config(
    frames=12,
    height=480,
    width=720,
    adversary=video_ae.Adversary(weight=0.5, crop=256),
    perceptual=video_ae.Perceptual(weights="lpips.pth"),
    teacher=video_ae.Teacher(encoder_weight=0.1),
)
RECORDED = {
    "class": "video_ae",
    "frames": 4,
    "height": 16,
    "width": 16,
    "time_downscale": [True, True, False],
    "teacher": {"encoder_weight": 0.5},
}


def attack(marker: Path) -> dict[str, dict[str, Any]]:
    """Malicious contents; each once ran a command or function, or caused a traceback."""
    shell = {
        "class": "subprocess.run",
        "args": ["sh", "-c", f"touch {marker}"],
        "timeout": 5,
    }
    tiny = config.to_dict(gpt.Config.tiny())
    return {
        "a function": shell,
        "a nested function": {**config.to_dict(video_ae.Config.tiny()), "teacher": shell},
        "a function where no section is": {**tiny, "depth": shell},
        "a config file": {"class": "jaxtrain.config.named", "name_or_path": f"{marker}.py"},
        "a removal": {"class": "jaxtrain.doctor.examination._remove", "folder": str(marker)},
        "a class that is not a config": {"class": "jaxtrain.models.gpt.GPT"},
        "another module's config": {"class": "jaxtrain.config.Mesh", "data": 1, "fsdp": 1},
        "a module without a model": {"class": "weight_table"},
        "this module": {"class": "from_file"},
        "a path inside": {"class": "gpt.Config"},
        "a relative path": {"class": "..errors"},
        "the standard library": {"class": "os.system", "command": f"touch {marker}"},
        "no class": {key: value for key, value in tiny.items() if key != "class"},
        "a list for a class": {**tiny, "class": ["gpt"]},
        "another section": {
            **RECORDED,
            "teacher": {"weights": "x"},
        },
        "a text for a number": {**tiny, "vocab_size": "12"},
        "a number for a text": {**tiny, "init_from": 7},
        "a switch for a number": {**tiny, "depth": True},
        "a list for a number": {**tiny, "depth": [1]},
        "an unknown field": {**tiny, "colour": 1},
        "a lacking field": {key: value for key, value in RECORDED.items() if key != "frames"},
        "infinity": {**tiny, "depth": float("inf")},
        "a number of 400 digits": {**tiny, "depth": 10**400},
        "zero": {**tiny, "depth": 0},
    }


ATTACKS = sorted(attack(Path("x")))


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_short_name_and_is_read_back(name: str) -> None:
    model = MODELS[name].Config.tiny()
    saved = json.loads(json.dumps(config.to_dict(model)))
    assert saved["class"] == name
    assert from_file.model_config(saved, "x") == model


def test_the_names_match_the_models() -> None:
    assert from_file.names() == sorted(MODELS)


@pytest.mark.parametrize("name", files.names())
def test_every_shipped_model_is_read_back(name: str) -> None:
    model = config.named(name).model
    assert from_file.model_config(json.loads(json.dumps(config.to_dict(model))), "x") == model


def test_sections_are_read_back_without_class_names() -> None:
    saved = json.loads(json.dumps(config.to_dict(FULL)))
    assert "class" not in saved["teacher"]
    assert from_file.model_config(saved, "x") == FULL


def test_a_new_model_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxtrain import models

    (tmp_path / "brand_new.py").write_text(
        "import dataclasses\nfrom jaxtrain.models.contract import ModelConfig\n"
        "@dataclasses.dataclass(frozen=True)\nclass Config(ModelConfig):\n    size: int\n"
    )
    monkeypatch.setattr(models, "__path__", [*models.__path__, str(tmp_path)])
    found = from_file.model_config({"class": "brand_new", "size": 3}, "x")
    assert dataclasses.asdict(found) == {"size": 3}
    assert config.to_dict(found) == {"class": "brand_new", "size": 3}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("kind", ["safetensors", "checkpoint"])
def test_no_file_runs_code(
    name: str, kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Runs the real commands on a weights file and on a checkpoint with valid checksums."""
    marker = tmp_path / "marker"
    (tmp_path / "marker.py").write_text(f"open({str(marker)!r}, 'w')")
    said = attack(marker)[name]
    out, video = str(tmp_path / "out.safetensors"), str(write(tmp_path / "in.mp4", busy(4)))
    if kind == "safetensors":
        source = str(tmp_path / "x.safetensors")
        about = {weights.ABOUT: json.dumps(said)}
        tensor_files.write(Path(source), {"a": np.ones(2, np.float32)}, about)
        commands = [["import", source, out], ["export", source, out]]
        commands += [["reconstruct", source, video, str(tmp_path / "out.mp4")]]
    else:
        source = str(tmp_path / "run")
        write_run(Path(source), None, 8, {"a": np.ones(2, np.float32)}, stored=said)
        commands = [
            ["export", source, out],
            ["generate", source, "Once"],
            ["fill", source, "[MASK]"],
        ]
        commands += [["generate", source], ["evaluate", source, "--data", video]]
        commands += [["encode", source, video, out]]
    for command in commands:
        before = sorted(tmp_path.rglob("*"))
        assert main.main(command) == 2, command
        lines = capfd.readouterr().err.splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith(f"error: {source}")
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, "null", "[]", '"gpt"', "1e999", '{"class": 1}', "\ud800"]
)
def test_json_without_a_valid_model_is_refused(text: str, tmp_path: Path) -> None:
    about = {weights.ABOUT: text.encode("utf-8", "replace").decode()}
    tensor_files.write(tmp_path / "x.safetensors", {"a": np.ones(2, np.float32)}, about)
    undescribed = (
        r"^.*x\.safetensors (describes its model in invalid JSON|does not name its model): "
    )
    with pytest.raises(InputError, match=undescribed):
        weights.load(tmp_path / "x.safetensors")


def test_data_are_read_back_as_a_section() -> None:
    data = config.named("demo").data
    saved = json.loads(json.dumps(config.to_dict(data)))
    assert saved["class"] == "video"
    assert record.section(type(data), saved, "x", "data") == data


def test_errors_name_the_wrong_value() -> None:
    tiny = config.to_dict(gpt.Config.tiny())
    with pytest.raises(InputError, match=r"x: its model 'os.system' is not part of jaxtrain: pass"):
        from_file.model_config({"class": "os.system"}, "x")
    with pytest.raises(InputError, match=r"x: model has no field 'colour': .* another version of"):
        from_file.model_config({**tiny, "colour": 1}, "x")
    with pytest.raises(InputError, match=r"x: model.vocab_size takes a whole number, not '12'"):
        from_file.model_config({**tiny, "vocab_size": "12"}, "x")
    with pytest.raises(InputError, match=r"x: model.teacher.encoder_weight takes a number, not "):
        from_file.model_config({**RECORDED, "teacher": {"encoder_weight": "much"}}, "x")
    with pytest.raises(InputError, match=r"x: model.teacher has no field 'class'"):
        from_file.model_config({**RECORDED, "teacher": {"class": "os.system"}}, "x")
    with pytest.raises(InputError, match=r"x: model.frames is missing"):
        from_file.model_config(
            {key: value for key, value in RECORDED.items() if key != "frames"}, "x"
        )
