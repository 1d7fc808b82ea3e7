"""Printed commands run when they are pasted, however jaxtrain was started."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import program
import pytest

from jaxtrain import config
from jaxtrain.config import invocation
from jaxtrain.doctor import machine
from jaxtrain.training import run_summary

SCRIPT = """#!/bin/sh
exec {python} -c 'import sys; sys.argv[0] = "{script}"
from jaxtrain import main; main.console()' "$@"
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working directory with an empty run, and with bin/jaxtrain as pip installs it."""
    (tmp_path / "run").mkdir()
    script = tmp_path / "bin/jaxtrain"
    script.parent.mkdir()
    script.write_text(SCRIPT.format(python=sys.executable, script=script))
    script.chmod(0o755)
    return tmp_path


def test_a_command_in_an_error_runs_when_it_is_pasted(place: Path) -> None:
    variables = program.environment(place)
    variables["PATH"] = f"{place}/bin:{variables['PATH']}"

    def ended(arguments: Any, **how: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            arguments, cwd=place, env=variables, capture_output=True, text=True, **how
        )

    refused = ended(["jaxtrain", "export", "run", "out.safetensors"])
    assert refused.returncode == 2, refused.stderr
    (command,) = re.findall(r"\(in a run directory, (.*) shows what is there\)", refused.stderr)
    assert command == "jaxtrain checkpoints run"
    assert "no checkpoints" in ended(command, shell=True).stderr, "it did not run when pasted"


@pytest.mark.parametrize(
    ("started", "has_script", "on_path", "expected"),
    [
        ("-c", True, True, "jaxtrain"),
        ("-c", True, False, "bin/jaxtrain"),
        ("lib/jaxtrain/main.py", True, False, "bin/jaxtrain"),
        ("bin/jaxtrain", True, True, "jaxtrain"),
        ("-c", False, False, "bin/python -m jaxtrain.main"),
    ],
)
def test_the_script_of_this_environment(
    started: str,
    has_script: bool,
    on_path: bool,
    expected: str,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", [started])
    monkeypatch.setattr(sys, "executable", str(place / "bin/python"))
    other = place / "other/jaxtrain"  # of another environment
    other.parent.mkdir()
    shutil.copy(place / "bin/jaxtrain", other)
    monkeypatch.setenv("PATH", str(place / "bin" if on_path else other.parent))
    if not has_script:
        (place / "bin/jaxtrain").unlink()
    assert invocation.program({}) == expected


def test_a_child_process_prints_the_program_that_the_user_typed() -> None:
    typed = "/my env/bin/jaxtrain"
    assert invocation.program({invocation.PROGRAM: typed}) == typed
    assert invocation.program({}) == invocation.program(os.environ)


def test_a_printed_command_quotes_its_arguments(tmp_path: Path) -> None:
    file = tmp_path / "my runs/own.py"
    file.parent.mkdir()
    file.write_text("from jaxtrain import config\nrun = config.named('demo_gpt')\n")
    run = config.load(str(file), ["--loop.steps", "7"])
    typed = [str(file), "--loop.steps", "7"]
    for command in (
        run_summary.fit_command("jaxtrain", config.equivalent_arguments(run)),
        run_summary.resume_command("jaxtrain", config.equivalent_arguments(run), file.parent),
        machine.plan_command(run, "NVIDIA H200"),
    ):
        assert shlex.split(command)[2:5] == typed
