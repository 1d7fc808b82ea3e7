"""Wrong input ends with one clear line and exit code 2, before anything is compiled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sample_videos
from program import TINY_MLM, write_corpus

from jaxtrain import main
from jaxtrain.training import step
from jaxtrain.xla import options

EIGHT_DEVICES = ["--mesh.fsdp", "8"]  # as many as the tests have


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, where no program may be compiled."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("compiled, though the input is wrong")

    monkeypatch.setattr(step, "jit_train_step", refuse)
    monkeypatch.setattr(options, "use_cache", lambda *_: None)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_a_file_in_the_way(place: Path) -> list[str]:
    (place / "taken").write_text("a file")
    return ["--data.path", str(write_corpus(place)), "--output-dir", "taken"]


def in_a_place_where_nothing_can_be_written(place: Path) -> list[str]:
    return ["--data.path", str(write_corpus(place)), "--output-dir", "/proc/run"]


def without_data(place: Path) -> list[str]:
    return ["--data.path", str(place / "nowhere")]


def with_an_empty_folder(place: Path) -> list[str]:
    (place / "empty").mkdir()
    return ["--data.path", "empty"]


def with_files_that_are_no_text(place: Path) -> list[str]:
    (place / "pictures").mkdir()
    (place / "pictures/a.png").write_bytes(b"\x89PNG")
    return ["--data.path", "pictures"]


def with_too_little_text(place: Path) -> list[str]:
    (place / "short").mkdir()
    (place / "short/a.txt").write_text("Three words only.")
    return ["--data.path", "short"]


def with_nothing_to_resume_from(place: Path) -> list[str]:
    return ["--data.path", str(write_corpus(place)), "--resume", str(place / "nowhere")]


def with_a_step_that_was_never_saved(place: Path) -> list[str]:
    (place / "run").mkdir()
    return ["--data.path", str(write_corpus(place)), "--output-dir", "run", "--resume", "700"]


def with_parameters_from_nowhere(place: Path) -> list[str]:
    return ["--data.path", str(write_corpus(place)), "--model.init_from", "nothing"]


def with_a_trace_behind_the_end(place: Path) -> list[str]:
    return ["--data.path", str(write_corpus(place)), "--profile", "50:60"]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (with_a_file_in_the_way, "taken"),
        (in_a_place_where_nothing_can_be_written, "/proc/run"),
        (without_data, "nowhere"),
        (with_an_empty_folder, "empty"),
        (with_files_that_are_no_text, "pictures"),
        (with_too_little_text, "a.txt"),
        (with_nothing_to_resume_from, "nowhere"),
        (with_a_step_that_was_never_saved, "700"),
        (with_parameters_from_nowhere, "nothing: nothing is there"),
        (with_a_trace_behind_the_end, "50:60"),
    ],
)
def test_wrong_input_is_one_line(
    place: Path,
    capsys: pytest.CaptureFixture[str],
    wrong: Callable[[Path], list[str]],
    named: str,
) -> None:
    arguments = [*TINY_MLM, *EIGHT_DEVICES, "--loop.steps", "2", *wrong(place)]
    assert main.main(arguments) == 2
    said = capsys.readouterr().err
    assert named in said
    assert said.count("\n") == 1
    assert not list((place / "output").glob("*/*")), "the directory of a run that never was"


def test_everything_that_is_wrong_is_reported_at_once(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The config's own fields, devices, data, and what the model starts from."""
    wrong = ["--optim.peak_lr", "-1", "--loop.log_every", "0", "--mesh.fsdp", "4"]
    files = ["--data.path", "gone", "--model.init_from", "nothing", "--data.tokenizer", "no.json"]
    assert main.main([*TINY_MLM, *wrong, *files]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in said] == ["error"] * 6
    named = ("optim.peak_lr", "loop.log_every", "wants 4", "init_from nothing", "gone", "no.json")
    for part, line in zip(named, said, strict=True):
        assert part in line


def test_all_wrong_overrides_are_reported_at_once(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = ["--optim.peak_lrr", "1", "--data.pth", "x"]
    assert main.main([*TINY_MLM, *unknown]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    misfits = ["--optim.peak_lr", "high", "--loop.steps", "1.5"]
    assert main.main([*TINY_MLM, *misfits]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_what_keeps_a_video_model_from_being_trained(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lpips = ["--model.perceptual.weights", "lpips.pth", "--model.perceptual.backbone", "alex.pth"]
    preview = ["--model.time_upscale", "True", "False", "--data.batch_size", "8"]
    assert main.main(["--config", "demo", *EIGHT_DEVICES, *lpips, *preview]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 3
    for part, line in zip(("time_upscale", "lpips.pth", "alex.pth"), said, strict=True):
        assert part in line


def test_a_config_without_data_of_its_own_names_the_override(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    eight = ["--config", "mlm_h200_8"]
    assert main.main(eight) == 2
    assert "--data.path" in capsys.readouterr().err


def test_a_best_metric_that_the_model_does_not_give(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["--checkpoint.best_metric", "val/acuracy", "--loop.eval_every", "1"]
    path = ["--data.path", str(write_corpus(place)), "--loop.steps", "2"]
    assert main.main([*TINY_MLM, *EIGHT_DEVICES, *path, *wrong]) == 2
    said = capsys.readouterr().err
    assert "'val/acuracy'" in said
    assert "val/accuracy, val/loss" in said


def test_another_number_of_devices_names_the_ways_out(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main([*TINY_MLM, "--data.path", str(write_corpus(place)), "--mesh.fsdp", "4"]) == 2
    said = capsys.readouterr().err
    for part in ("wants 4 devices", "this machine has 8", "--mesh.fsdp 8", "--simulate-devices 4"):
        assert part in said


def test_too_many_broken_videos_stop_the_run(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample_videos.write(place / "videos/good.mp4")
    sample_videos.write(place / "videos/fine.mp4", 31)
    (place / "videos/bad.mp4").write_bytes(b"no video")
    arguments = ["--config", "demo", "--data.path", "videos", "--data.batch_size", "8"]
    assert main.main([*arguments, *EIGHT_DEVICES]) == 2
    said = capsys.readouterr().err
    assert "--data.max_bad_share" in said
    assert said.count("\n") == 1
