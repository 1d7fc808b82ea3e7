"""The Python API, in a script without ``if __name__ == "__main__"``."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import program
import pytest
from checkpoint import small_checkpoint
from data.text import small_text
from models.video_ae import small_autoencoder

import jaxtrain
from jaxtrain import comparison
from jaxtrain.config import invocation
from jaxtrain.data.input_rate import Host
from jaxtrain.inference.video import reading
from jaxtrain.planning import planner
from jaxtrain.reporting.result import TrainResult

TINY_GPT = {
    "model.vocab_size": 300,
    "model.sequence_length": 32,
    "model.depth": 1,
    "model.width": 32,
    "model.heads": 1,
    "data.batch_size": 8,
    "data.workers": 1,
    "optim.muon": None,
    "loop.log_every": 1,
    "loop.eval_every": None,
    "checkpoint.best_metric": None,
    "mesh.min_shard_elements": 64,
}
SCRIPT = """
import contextlib, io, json, os, signal, subprocess, sys, threading
import jaxtrain
from jaxtrain import comparison

heavy = {"jax", "numpy", "flax"} & set(sys.modules)
assert not heavy, heavy

tiny = json.loads(sys.argv[1]) | {"data.path": "texts"}
first = jaxtrain.train("demo_gpt", steps=3, output_dir="run", overrides=tiny)
assert first.finished and first.exit_code == 0, first
assert [record["step"] for record in first.metrics] == [1, 2, 3], first.metrics
assert [path.name for path in first.checkpoints] == ["3.json"], first.checkpoints
assert first.report.is_file() and first.best is None
assert "<table>" in first._repr_html_() and "train/loss" in repr(first)
lock = "import fcntl; fcntl.lockf(open('run/.lock', 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
subprocess.run([sys.executable, "-c", lock], check=True)  # another process may resume it

def stop():  # as a notebook's stop button does
    while "train/loss" not in (open("run/metrics.jsonl").readlines()[-1]) or watched() < 5:
        pass
    os.kill(os.getpid(), signal.SIGINT)

def watched():
    return len(open("run/metrics.jsonl").readlines())

threading.Thread(target=stop, daemon=True).start()
again = {"output_dir": "run", "resume": "latest", "overrides": tiny}
second = jaxtrain.train("demo_gpt", steps=100_000, **again)
assert not second.finished and second.exit_code == 130, second
reached = int(second.checkpoints[-1].stem)
assert 5 <= reached < 100_000, reached
assert "Ctrl-C" in repr(second), second

with contextlib.redirect_stdout(io.StringIO()) as printed:
    third = jaxtrain.train("demo_gpt", steps=reached + 1, quiet=True, **again)
assert printed.getvalue() == "", printed.getvalue()
assert third.finished and third.metrics[-1]["step"] == reached + 1, third
assert [record["step"] for record in third.metrics] == list(range(1, reached + 2))

model = jaxtrain.load_model(third)
text = model.generate("a beginning", tokens=5, seed=3)
assert text.startswith("a beginning")
assert text == model.generate("a beginning", tokens=5, seed=3)
assert 0 < model.evaluate("texts/0.txt", max_tokens=40).bits_per_byte < 20
try:
    model.fill_mask("a [MASK]")
except jaxtrain.InputError as error:
    assert "mlm" in str(error), error
else:
    raise AssertionError("a GPT filled a mask")
print("all of it")
"""


@pytest.mark.slow
def test_a_script_trains_stops_resumes_and_uses_the_model(tmp_path: Path) -> None:
    small_text.write(tmp_path / "texts")
    (tmp_path / "script.py").write_text(SCRIPT)
    found = program.execute(tmp_path, sys.executable, "script.py", json.dumps(TINY_GPT))
    assert found.returncode == 0, f"{found.stdout}\n{found.stderr}"
    assert found.stdout.endswith("all of it\n")


def test_an_autoencoder_takes_arrays_and_files(tmp_path: Path) -> None:
    model = jaxtrain.load_model(small_autoencoder.save(tmp_path / "weights.safetensors"))
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (8, 16, 16, 3), np.uint8)
    latents = model.encode(frames)
    assert latents.dtype == np.float32
    assert latents.shape == (latents.shape[0], 2, 2, 4)
    decoded = model.decode(latents)
    assert decoded.dtype == np.uint8
    assert decoded.shape[1:] == (16, 16, 3)
    for count in (1, 4, 5, 12, 13):  # the lengths that the docstrings state
        long = np.tile(frames, (2, 1, 1, 1))[:count]
        latents = model.encode(long)
        assert len(latents) == -(-(count - 1) // 4) + 1
        assert count <= len(model.decode(latents)) == 4 * (len(latents) - 1) + 1
    expected = small_autoencoder.reconstructed(tmp_path / "weights.safetensors", frames)
    assert np.abs(decoded[: len(expected)].astype(int) - expected).max() <= 1
    video = small_autoencoder.with_sound(tmp_path / "a.mp4", list(frames), 0.3)
    pixels = np.stack([one.pixels for one in reading.Video(video).images()])
    np.testing.assert_array_equal(model.encode(video), model.encode(pixels))
    with pytest.raises(jaxtrain.InputError, match=r"pass uint8 \[T, H, W, 3\]"):
        model.encode(frames.astype(np.float32))
    with pytest.raises(jaxtrain.InputError, match="has no tokenizer"):
        model.generate("a")


def test_configs_are_overridden_from_python(tmp_path: Path) -> None:
    """Values of numpy and paths are taken, too."""
    run = jaxtrain.load_config("demo_gpt", {"loop.steps": "1k", "optim.average.decay": 0.9})
    assert (run.loop.steps, run.optim.average.decay) == (1000, 0.9)
    assert run.override({"optim.muon": None}).optim.muon is None
    with pytest.raises(jaxtrain.InputError, match=r"unknown field .*; did you mean optim.peak_lr"):
        run.override({"optim.peek_lr": 1})
    with pytest.raises(jaxtrain.InputError, match=r"loop.steps takes .*, not 'soon'"):
        run.override({"loop.steps": "soon"})
    with pytest.raises(jaxtrain.InputError, match="exactly one of"):
        run.override({"loop.epochs": 2})
    widths = {"data.path": tmp_path, "model.decoder_widths": [32, 16, 16, 8]}
    run = jaxtrain.load_config("demo").override(
        {"loop.steps": np.int64(5), "optim.peak_lr": np.float32(0.5), **widths}
    )
    assert (run.loop.steps, run.optim.peak_lr) == (5, 0.5)
    assert (run.data.path, run.model.decoder_widths) == (str(tmp_path), (32, 16, 16, 8))
    assert type(run.loop.steps) is int


def test_a_folder_of_the_same_name_does_not_hide_the_package(tmp_path: Path) -> None:
    """As beside a clone of the repository."""
    (tmp_path / "jaxtrain" / "jaxtrain").mkdir(parents=True)
    (tmp_path / "script.py").write_text("import jaxtrain; print(jaxtrain.train.__name__)")
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    printed = subprocess.check_output(
        [sys.executable, "script.py"], cwd=tmp_path, env=alone, text=True
    )
    assert printed == "train\n"


def test_a_result_ignores_what_a_kill_left(tmp_path: Path) -> None:
    samples = tmp_path / "samples"
    samples.mkdir()
    for name in ("text_9.txt", "text_10.txt", ".text_10.txt.tmp", "notes.txt"):
        (samples / name).write_text("a")
    for step in (20, 100):  # their files are lost
        shutil.rmtree(
            small_checkpoint.data_of(
                small_checkpoint.write(tmp_path, step, ("checkpoints", "best"))
            )
        )
    result = TrainResult(tmp_path, 130)
    assert [path.name for path in result.samples] == ["text_9.txt", "text_10.txt"]
    assert result.checkpoints == []
    assert result.best is None
    assert "Ctrl-C, step 0" in repr(result)


def test_a_result_without_records_has_a_report(tmp_path: Path) -> None:
    """Its run was stopped before the first step was recorded."""
    (tmp_path / "config.json").write_text("{}")
    result = TrainResult(tmp_path, 75)
    for _ in range(2):
        assert result.report == tmp_path / "report.html"
        assert result.report.is_file()


def test_folders_of_a_comparison_are_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    asked: list[Any] = []

    def compared(*arguments: Any) -> list[str]:
        asked.append(arguments)
        return ["the answer"]

    monkeypatch.setattr(comparison, "compare", compared)
    changes = {"optim.peak_lr": 0.02, "model.decoder_widths": [64, 32, 32, 32]}
    answer = jaxtrain.compare(
        "demo", change=changes, output_dir="~/cmp", runs="~/runs", fit_time="2m", quiet=True
    )
    assert answer == "the answer"
    ((question, *folders, _),) = asked
    assert folders == [tmp_path / "cmp", tmp_path / "runs"]
    assert question.fit_s == 120
    assert question.sides[1].overrides == (
        *("--optim.peak_lr", "0.02", "--model.decoder_widths", "64", "32", "32", "32"),
    )


def test_the_package_names_its_functions() -> None:
    assert jaxtrain.__doc__ is not None
    functions = [name for name in jaxtrain.__all__ if name[0].islower()]
    assert all(f":func:`{name}`" in jaxtrain.__doc__ for name in functions)


def test_a_run_starts_in_the_main_thread_only() -> None:
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(jaxtrain.train, "demo", steps=1)
        with pytest.raises(jaxtrain.InputError, match="in the main thread"):
            started.result()


def test_a_plan_takes_a_run_that_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []

    class Recorded:
        def __init__(self, *arguments: object) -> None:
            *most, efficiency = arguments
            assert efficiency is None
            asked.append(tuple(most))

        def plan(self) -> None: ...

    monkeypatch.setattr(planner, "Planner", Recorded)
    run = jaxtrain.load_config("demo_gpt", {"loop.steps": 7})
    jaxtrain.plan(run, gpu="h100", overrides={"data.batch_size": np.int32(8)})
    jaxtrain.plan(
        "demo",
        gpus="1x2",
        overrides={"model.decoder_widths": [64, 32, 16, 16]},
        cores=26,
    )
    assert asked == [
        ("demo_gpt", ["--loop.steps", "7", "--data.batch_size", "8"], "h100", None, None, Host()),
        (
            "demo",
            ["--model.decoder_widths", "64", "32", "16", "16"],
            None,
            "1x2",
            None,
            Host(cores=26),
        ),
    ]
    with pytest.raises(jaxtrain.InputError, match="was not loaded from a config"):
        jaxtrain.plan(dataclasses.replace(run, model=None))
    with pytest.raises(jaxtrain.InputError, match="cores 0: use at least 1"):
        jaxtrain.plan("demo", cores=0)


def _refused(call: Callable[..., object], *given: Any, **named: Any) -> str:
    with pytest.raises(jaxtrain.InputError) as caught:
        call(*given, **named)
    return str(caught.value)


def test_errors_name_arguments_instead_of_flags(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    for message, start in (
        (_refused(jaxtrain.train, "demo", resume=4000), "resume 4000 requires output_dir, the"),
        (_refused(jaxtrain.train, "demo", resume=gone), f"resume {gone}: no such folder"),
        (_refused(jaxtrain.train, "demo", track="wandbb"), "track 'wandbb': unknown tracker; did"),
        (_refused(jaxtrain.plan, "demo", gpu="h1000"), "gpu h1000 is unknown; did you mean h100?"),
        (_refused(jaxtrain.plan, "demo", gpus="two"), "gpus two: use NODESxGPUS, such as 2x8"),
        (_refused(jaxtrain.plan, "demo", price_per_gpu_hour=-1), "price_per_gpu_hour -1: use 0"),
        (_refused(jaxtrain.load_config, "demo", {"loop.step": 1}), "unknown field loop.step; did"),
    ):
        assert message.startswith(start)
        assert "--" not in message
    text = "resume with --resume latest, or choose another --output-dir"
    assert invocation.with_arguments(text) == (
        'resume with resume="latest", or choose another output_dir'
    )


def test_wrong_types_are_one_error_before_anything_starts() -> None:
    assert _refused(jaxtrain.plan, "demo", price_per_gpu_hour="x", cores=1.5) == (
        "price_per_gpu_hour takes a number or None, not 'x'; also: "
        "cores takes a whole number or None, not 1.5"
    )
    assert _refused(jaxtrain.train, 3) == "config takes text or a Run, not 3"
    assert _refused(jaxtrain.train, "demo", steps="9", overrides=[1]) == (
        "steps takes a whole number or None, not '9'; also: overrides takes a dict or None, not [1]"
    )
    assert _refused(jaxtrain.load_model, "x", precision="half") == (
        "precision takes one of bfloat16, float32, not 'half'"
    )
    assert _refused(jaxtrain.load_model, None) == "source takes text, not None"
    assert _refused(jaxtrain.load_config, None) == "name takes text, not None"
