"""What a run says at its end."""

import dataclasses
import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import program
import pytest
import written_run

from jaxtrain import config, main
from jaxtrain.cli import command_line, plan
from jaxtrain.config import invocation
from jaxtrain.reporting import page
from jaxtrain.training import run_summary

RUN = config.named("demo")
PYTHON = "python -m jaxtrain.main"
TYPED = ["--config", "demo", "--loop.steps=8", "--data.blur_sigma", "0.1", "1.0", "--debug"]
DIRECTORY = Path("/runs/my run")


def said(run: config.Run = RUN, arguments: Any = TYPED, **how: Any) -> list[str]:
    lines: list[str] = []
    values: dict[str, Any] = {"first": {}, "last": {}, "samples": [], "stopped_early": False}
    values |= {"processes": 1, "since": 0}
    run_summary.print_summary(run, PYTHON, arguments, DIRECTORY, **(values | how), say=lines.append)
    return lines


SAMPLES = [Path(f"samples/{name}") for name in ("a_2.png", "b_2.mp4", "a_20.png", "b_20.mp4")]


def test_it_says_what_was_reached() -> None:
    first = {"val/loss": 2.0, "train/loss": 8.0, "train/mfu": 0.1}
    lines = said(first=first, last=first | {"train/loss": 0.5}, samples=SAMPLES)
    assert lines[:3] == ["train/loss: 8 -> 0.5", "val/loss: 2", lines[2]]
    assert lines[2] == "samples: samples/a_20.png, samples/b_20.mp4"  # those of the end
    assert lines[3:5] == [
        "checkpoints: /runs/my run/checkpoints",
        "curves (after pip install tensorboard): tensorboard --logdir '/runs/my run/tensorboard'",
    ]


def test_it_says_since_when_it_compares() -> None:
    first = {"val/loss": 2.0, "train/loss": 8.0}
    lines = said(first=first, last=first | {"train/loss": 0.5}, since=240)
    assert lines[:2] == ["train/loss: 8 -> 0.5 (first and last since update 240)", "val/loss: 2"]


@pytest.mark.parametrize("name", ["demo", "demo_mlm", "demo_gpt", "a6000_medium"])
def test_it_says_how_to_use_the_model(name: str) -> None:
    (line,) = (line for line in said(config.named(name)) if line.startswith("use it: "))
    command, run = line.removeprefix(f"use it: {PYTHON} ").split(" ", 1)
    assert command in main.COMMANDS
    assert run.startswith("'/runs/my run' ")


def test_what_to_type_next_names_each_flag_once() -> None:
    on, own = said()[-2:]
    again = "--output-dir '/runs/my run' --resume latest"
    kept = f"{PYTHON} --config demo"
    blur = "--data.blur_sigma 0.1 1.0"
    assert on == f"train on: {kept} {blur} {again} --loop.steps 320"
    assert own == f"train on your own data: {kept} --loop.steps 8 {blur} --data.path DIR"
    typed_again = [*TYPED, "--output-dir", "x", "--resume", "5", "--loop.steps", "9"]
    assert said(arguments=typed_again)[-2] == on
    assert run_summary.resume_command(PYTHON, typed_again, DIRECTORY) == (
        f"{kept} --loop.steps 9 {blur} {again}"
    )


def test_the_command_that_looks_for_ways_to_fit_is_accepted_by_plan() -> None:
    typed = ["--config", "my/own.py", "--simulate-devices", "8", "--debug", "--output-dir", "x"]
    found = run_summary.fit_command("jaxtrain", [*typed, "--loop.steps=9", "--resume", "latest"])
    assert found == "jaxtrain plan --config my/own.py --loop.steps 9 --fit"
    flags, rest = command_line.parse(plan._parser(), found.split()[2:])
    assert (flags.config, flags.fit, rest) == ("my/own.py", True, ["--loop.steps", "9"])


def test_each_of_several_processes_wants_the_command() -> None:
    alone, several = said()[-2:], said(processes=2)[-2:]
    words = " (in each of 2 processes, or with the launcher): "
    assert several == [line.replace(": ", words, 1) for line in alone]


def test_whoever_has_data_needs_no_hint_and_an_early_stop_asks_for_patience() -> None:
    run = dataclasses.replace(
        RUN,
        data=dataclasses.replace(RUN.data, path="clips"),
        loop=dataclasses.replace(RUN.loop, early_stop_patience=3),
    )
    *_, last = said(run, stopped_early=True)
    assert last.startswith("train on: ")
    assert last.endswith("--loop.early_stop_patience 6")


def reported(directory: Path) -> list[str]:
    lines: list[str] = []
    run_summary.write_report(directory, lines.append)
    return lines


def test_a_run_that_ends_writes_its_report_and_says_where(tmp_path: Path) -> None:
    assert reported(tmp_path) == []  # nothing to report
    written_run.write(tmp_path, history=written_run.whole_history())
    assert reported(tmp_path) == [f"report: {tmp_path / 'report.html'}"]
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


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


SLOW_REPORT = """
import sys, time
from jaxtrain import main
from jaxtrain.reporting import page

page.write = lambda *how, **more: time.sleep(18)
sys.exit(main.main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_slow_report_is_no_hang(tmp_path: Path) -> None:
    corpus = program.write_corpus(tmp_path)
    given = [*program.TINY_MLM, "--data.path", corpus, "--output-dir", "run", "--loop.steps", 2]
    ended = subprocess.run(
        [sys.executable, "-c", SLOW_REPORT, *map(str, given), "--loop.hang_timeout_s", "15"],
        cwd=tmp_path,
        env=program.environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == f"report: {tmp_path / 'run/report.html'}"


def test_a_run_built_in_python_is_resumed_by_its_program_and_no_command() -> None:
    lines = said(arguments=())
    assert not any("--resume" in line or "--data.path" in line for line in lines)
    (found,) = [line for line in lines if "built in Python" in line]
    assert "output_dir='/runs/my run', resume=\"latest\" and loop.steps=" in found
    assert run_summary.fit_command(PYTHON, ()) == ""
