"""Wrong input gives a one-line error and exit code 2, before anything is compiled."""

from pathlib import Path
from typing import Any

import pytest
from data.video import sample_videos
from program import TINY_MLM, write_corpus

from jaxtrain import main
from jaxtrain.training import step
from jaxtrain.xla import options

EIGHT_DEVICES = ["--mesh.fsdp", "8"]  # as many as the tests have


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory; compiling a step fails the test."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("compiled, though the input is wrong")

    monkeypatch.setattr(step, "jit_train_step", refuse)
    monkeypatch.setattr(options, "use_cache", lambda *_: None)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("--data.path corpus --output-dir taken", "taken"),
        ("--data.path corpus --output-dir /proc/run", "/proc/run"),
        ("--data.path nowhere", "nowhere"),
        ("--data.path empty", "empty"),
        ("--data.path pictures", "pictures"),
        ("--data.path short", "short has 1 document"),
        ("--data.path corpus --resume nowhere", "nowhere"),
        ("--data.path corpus --output-dir run --resume 700", "700"),
        ("--data.path corpus --model.init_from nothing", "nothing does not exist"),
        ("--data.path corpus --profile 50:60", "50:60"),
    ],
)
def test_wrong_input_is_one_line(
    place: Path, capsys: pytest.CaptureFixture[str], wrong: str, expected: str
) -> None:
    write_corpus(place)
    (place / "taken").write_text("a file")
    for folder in ("empty", "pictures", "short", "run"):
        (place / folder).mkdir()
    (place / "pictures/a.png").write_bytes(b"\x89PNG")
    (place / "short/a.txt").write_text("Three words only.")
    assert main.main([*TINY_MLM, *EIGHT_DEVICES, "--loop.steps", "2", *wrong.split()]) == 2
    printed = capsys.readouterr().err
    assert expected in printed
    assert printed.count("\n") == 1


def test_all_wrong_input_is_reported_at_once(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Config fields, devices, data, and the source of the initial parameters."""
    wrong = ["--optim.peak_lr", "-1", "--loop.log_every", "0", "--mesh.fsdp", "4"]
    files = ["--data.path", "gone", "--model.init_from", "nothing", "--data.tokenizer", "no.json"]
    assert main.main([*TINY_MLM, *wrong, *files]) == 2
    printed = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in printed] == ["error"] * 6
    expected = (
        "optim.peak_lr",
        "loop.log_every",
        "mesh.fsdp 4 needs 4",
        "init_from nothing",
        "gone",
        "no.json",
    )
    for part, line in zip(expected, printed, strict=True):
        assert part in line


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ("--optim.peak_lr -1 --profile 50:60", ["peak_lr", "--profile 50:60 begins after"]),
        (
            "--resume 7 --output-dir new --data.path /nope",
            ["--resume 7: new does not exist", "/nope"],
        ),
        ("--optim.peak_lr -1 --output-dir /proc/run", ["peak_lr", "directory /proc/run"]),
        (
            "--optim.peak_lr -1 --output-dir s3://b",
            ["peak_lr", "s3://b is not a folder in a bucket"],
        ),
        (
            "--optim.peak_lr -1 --model.init_from s3://b",
            ["peak_lr", "error: model.init_from s3://b is not a folder in a bucket"],
        ),
        (
            "--optim.peak_lrr 1 --loop.log_every 0 --data.path /nope",
            ["unknown field --optim.peak_lrr", "loop.log_every", "/nope"],
        ),
        (
            "--loop.steps 1.5 --optim.peak_lr -1 --data.path /nope",
            ["--loop.steps takes", "peak_lr", "/nope"],
        ),
        (
            "stray --data.workers many --optim.peak_lr -1 --profile 1:0 --resume gone",
            ["'stray'", "--data.workers", "peak_lr", "--profile 1:0", "--resume gone"],
        ),
    ],
)
def test_flags_and_overrides_are_reported_with_the_rest(
    place: Path, capsys: pytest.CaptureFixture[str], wrong: str, expected: list[str]
) -> None:
    (place / "taken").write_text("a file")
    arguments = [*TINY_MLM, *EIGHT_DEVICES, "--loop.steps", "20", "--data.path", str(place)]
    flags = wrong.split()
    if not flags[0].startswith("--"):
        arguments, flags = [*arguments[:2], flags[0], *arguments[2:]], flags[1:]
    assert main.main([*arguments, *flags]) == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == len(expected), printed
    for part in expected:
        assert sum(part in line for line in printed) == 1, printed
    assert sorted(path.name for path in place.iterdir()) == ["taken"]


@pytest.mark.parametrize(
    ("wrong", "lines"),
    [
        ("--data.pth x", 1),  # the data then has no path
        ("--loop.steps 2e --optim.warmup_steps 500", 1),  # the config has fewer steps
        ("--loop.steps 2e --profile 500:501", 1),
        ("--mesh.fsdp eight", 1),  # the config has another number of devices
    ],
)
def test_consequences_of_a_wrong_override_are_not_reported(
    place: Path, capsys: pytest.CaptureFixture[str], wrong: str, lines: int
) -> None:
    fits = [] if "mesh" in wrong else EIGHT_DEVICES
    path = [] if "data" in wrong else ["--data.path", str(write_corpus(place))]
    assert main.main([*TINY_MLM, *fits, *path, *wrong.split()]) == 2
    assert len(capsys.readouterr().err.splitlines()) == lines


def test_an_unknown_best_metric_is_reported_with_the_known_ones(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["--checkpoint.best_metric", "val/psnr", "--loop.eval_every", "1"]
    path = ["--data.path", str(write_corpus(place)), "--loop.steps", "2"]
    assert main.main([*TINY_MLM, *EIGHT_DEVICES, *path, *wrong]) == 2
    printed = capsys.readouterr().err
    assert "val/psnr is not a metric of this model's validation" in printed
    assert "val/accuracy, val/loss" in printed


def test_too_many_broken_videos_stop_the_run(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sample_videos.write(place / "videos/good.mp4")
    sample_videos.write(place / "videos/fine.mp4", 31)
    (place / "videos/bad.mp4").write_bytes(b"no video")
    arguments = ["--config", "demo", "--data.path", "videos", "--data.batch_size", "8"]
    assert main.main([*arguments, *EIGHT_DEVICES]) == 2
    printed = capsys.readouterr().err
    assert "--data.max_bad_share" in printed
    assert printed.count("\n") == 1
