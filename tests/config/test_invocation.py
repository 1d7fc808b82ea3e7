"""Commands that the program prints run when they are pasted, however it was started."""

import os
import re
import subprocess
import sys
from pathlib import Path

import program
import pytest

from jaxtrain.config import invocation

SCRIPT = """#!/bin/sh
exec {python} -c 'import sys; sys.argv[0] = "{script}"
from jaxtrain import main; main.console()' "$@"
"""


def printed(place: Path, command: list[str], path: str = "") -> str:
    """The command in an error, which stands between a semicolon and "lists"."""
    variables = program.environment(place)
    variables["PATH"] = path + variables["PATH"]
    ended = subprocess.run(command, cwd=place, env=variables, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    (found,) = re.findall(r"; (.*) lists what is there", ended.stderr)
    again = subprocess.run(
        found, shell=True, cwd=place, env=variables, capture_output=True, text=True
    )
    assert "no checkpoints" in again.stderr + again.stdout, "it did not run when pasted"
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working directory with an empty run, and a jaxtrain in bin/, as pip installs it."""
    (tmp_path / "run").mkdir()
    script = tmp_path / "bin/jaxtrain"
    script.parent.mkdir()
    script.write_text(SCRIPT.format(python=sys.executable, script=script))
    script.chmod(0o755)
    return tmp_path


WRONG = ["export", "run", "out.safetensors"]


def test_as_jaxtrain(place: Path) -> None:
    assert printed(place, ["jaxtrain", *WRONG], f"{place}/bin:") == "jaxtrain checkpoints run"


def test_as_a_script_that_is_not_on_the_path(place: Path) -> None:
    assert printed(place, ["bin/jaxtrain", *WRONG]) == "bin/jaxtrain checkpoints run"


def test_as_a_module(place: Path) -> None:
    found = printed(place, [sys.executable, "-m", "jaxtrain.main", *WRONG])
    assert found.endswith(" -m jaxtrain.main checkpoints run")


def test_from_python(place: Path) -> None:
    code = f"import sys; from jaxtrain import main; sys.exit(main.main({WRONG}))"
    found = printed(place, [sys.executable, "-c", code])
    assert found.endswith(" -m jaxtrain.main checkpoints run")


def test_a_process_that_is_started_says_what_the_user_typed() -> None:
    typed = "/my env/bin/jaxtrain"
    assert invocation.program({invocation.PROGRAM: typed}) == typed
    assert invocation.program({}) == invocation.program(os.environ)
