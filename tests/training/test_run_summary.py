"""The end-of-run summary."""

import dataclasses
import errno
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from reporting import written_run

from jaxtrain import config, main
from jaxtrain.cli import command_line
from jaxtrain.config import invocation
from jaxtrain.reporting import page
from jaxtrain.training import run_summary

RUN = config.named("demo")
PYTHON = "python -m jaxtrain.main"
TYPED = ["--config", "demo", "--loop.steps=8", "--data.crop", "32", "48", "--debug"]
DIRECTORY = Path("/runs/my run")


def summary_lines(run: config.Run = RUN, arguments: Any = TYPED, **how: Any) -> list[str]:
    lines: list[str] = []
    values: dict[str, Any] = {
        "results": run_summary.Results(0),
        "validations": [],
        "example_file": "",
    }
    values |= {"processes": 1, "stopped_early": False}
    run_summary.print_summary(
        run,
        PYTHON,
        arguments,
        DIRECTORY,
        **(values | how),
        say=lambda line: lines.append(str(line)),
    )
    return lines


def results(train: Sequence[float], val: Sequence[float] = (), since: int = 0) -> list[str]:
    found = run_summary.Results(since)
    for loss in train:
        found.add({"train/loss": loss, "train/mfu": 0.1})
    return list(map(str, found.lines([{"val/loss": loss} for loss in val])))


def test_the_summary_prints_results_and_the_run_directory() -> None:
    found = run_summary.Results(0)
    for loss in (9.0, 8.0, 7.0, 0.75, 0.5, 0.25):
        found.add({"train/loss": loss, "train/psnr": 20.0, "train/mfu": 0.1})
    validations = [{"val/loss": loss, "val/ssim": 0.5} for loss in (2.0, 1.75, 1.5)]
    lines = summary_lines(results=found, validations=validations)
    assert lines[:3] == [
        "train/loss 8 -> 0.5, train/psnr 20 (means of 3 steps)",
        "val/loss 2 -> 1.5, val/ssim 0.5",
        "run directory: /runs/my run",
    ]
    assert len(lines) <= 6


@pytest.mark.parametrize(
    ("steps", "shown"), [(1, "train/loss 0.35"), (5, "train/loss 0.266 (mean of 5 steps)")]
)
def test_the_summary_claims_no_trend_over_a_few_batches(steps: int, shown: str) -> None:
    losses = [0.17, 0.2, 0.3, 0.31, 0.35][-steps:]
    assert results(losses, [2.0]) == [shown, "val/loss 2"]
    assert results([]) == []


def test_the_summary_of_a_resumed_run_names_the_step_it_began_at() -> None:
    assert results([8.0] * 3 + [0.5] * 3, [2.0, 1.0], since=240) == [
        "train/loss 8 -> 0.5 (means of 3 steps since step 240)",
        "val/loss 2 -> 1",
    ]


@pytest.mark.parametrize("name", ["demo", "demo_mlm", "demo_gpt", "a6000_medium"])
def test_the_summary_prints_a_command_that_uses_the_model(name: str) -> None:
    lines = summary_lines(config.named(name), example_file="/cache/my scenes/a.mp4")
    (line,) = (line for line in lines if line.startswith("try it: "))
    command, *words = shlex.split(line.removeprefix(f"try it: {PYTHON} "))
    assert command in main.COMMANDS
    assert words[0] == "/runs/my run"
    if command == "reconstruct":
        assert words[1] == "/cache/my scenes/a.mp4"


def test_each_command_has_each_flag_once() -> None:
    on, own = summary_lines()[-2:]
    again = "--output-dir '/runs/my run' --resume latest"
    kept = f"{PYTHON} train demo"
    crop = "--data.crop 32 48"
    assert on == f"resume for longer: {kept} {crop} {again} --loop.steps 512"
    assert own == f"train on your own data: {kept} --loop.steps 8 {crop} --data.path DIR"
    typed_again = [*TYPED, "--output-dir", "x", "--resume", "5", "--loop.steps", "9"]
    assert summary_lines(arguments=typed_again)[-2] == on
    assert run_summary.resume_command(PYTHON, typed_again, DIRECTORY) == (
        f"{kept} --loop.steps 9 {crop} {again}"
    )


def test_plan_accepts_the_command_that_finds_overrides_that_fit() -> None:
    typed = ["--config", "my/own.py", "--simulate-devices", "8", "--debug", "--output-dir", "x"]
    found = run_summary.fit_command("jaxtrain", [*typed, "--loop.steps=9", "--resume", "latest"])
    assert found == "jaxtrain plan my/own.py --loop.steps 9 --fit"
    flags = command_line.parse("plan", found.split()[2:])
    assert (flags.config, flags.fit) == ("my/own.py", True)
    assert flags.overrides == ("--loop.steps", "9")


def test_with_your_own_data_the_summary_suggests_export_and_more_patience() -> None:
    run = dataclasses.replace(
        RUN,
        data=dataclasses.replace(RUN.data, path="clips"),
        loop=dataclasses.replace(RUN.loop, early_stop_patience=3, eval_every=40),
    )
    *_, longer, last = summary_lines(run, stopped_early=True)
    assert longer.startswith("resume for longer: ")
    assert longer.endswith("--loop.early_stop_patience 6")
    few = dataclasses.replace(run, loop=dataclasses.replace(run.loop, eval_every=60))
    *_, longer, _ = summary_lines(few, stopped_early=True)
    assert longer.endswith("--loop.early_stop_patience None"), "with 6 validations 6 is too much"
    export = f"export the weights: {PYTHON} export '/runs/my run' '/runs/my run'/"
    assert last == f"{export}model.safetensors"
    for name, library in (("demo_mlm", "transformers"), ("wan2_2_decoder_h100_1", "diffusers")):
        folder = dataclasses.replace(run, model=config.named(name).model)
        assert summary_lines(folder)[-1] == f"{export}{library} --format hf"


def test_commands_for_a_model_of_your_own_have_its_config() -> None:
    kind = type("Own", (type(RUN.model),), {"__module__": __name__})
    own = dataclasses.replace(RUN, model=kind(**vars(RUN.model)))
    typed = ["--config", "my {run}.py", "--loop.steps", "8"]
    line = next(line for line in summary_lines(own, arguments=typed) if line.startswith("try it: "))
    assert line.endswith("--side-by-side --config 'my {run}.py'")
    assert not [
        line for line in summary_lines(arguments=typed) if "try it" in line and "--config" in line
    ]


def reported(directory: Path) -> list[str]:
    lines: list[str] = []
    run_summary.write_report(directory, lines.append)
    return lines


def test_a_run_writes_its_report_at_the_end_and_prints_its_path(tmp_path: Path) -> None:
    assert reported(tmp_path) == []  # nothing to report
    written_run.write(tmp_path, history=written_run.full_history())
    assert reported(tmp_path) == [f"report: {tmp_path / 'report.html'}"]
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_a_stopped_run_writes_no_report_that_takes_long(tmp_path: Path) -> None:
    run, lines = written_run.write(tmp_path), list[str]()
    run_summary.write_report(run, lines.append, largest=10)
    assert lines == []
    assert not (run / "report.html").exists()


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "(No space left on device)"),
        (ZeroDivisionError("a mistake"), "(ZeroDivisionError: a mistake)"),
    ],
)
def test_a_report_that_fails_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, why: str
) -> None:
    def fail(*how: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr(page, "write", fail)
    (line,) = reported(written_run.write(tmp_path))
    assert line.startswith("warning: ")
    assert why in line
    assert f"`{invocation.program()} report {tmp_path}`" in line


def test_a_run_built_in_python_is_resumed_in_python_and_by_no_command() -> None:
    lines = summary_lines(arguments=())
    assert not any("--resume" in line or "--data.path" in line for line in lines)
    (found,) = [line for line in lines if "built in Python" in line]
    assert 'output_dir=\'/runs/my run\', resume="latest", overrides={"loop.steps": ' in found
    assert run_summary.fit_command(PYTHON, ()) == ""
