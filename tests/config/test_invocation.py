"""Printed commands run when they are pasted, however jaxtrain was started."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import program
import pytest

from jaxtrain import config
from jaxtrain.checkpoint import resume
from jaxtrain.cli import command_line
from jaxtrain.config import invocation, overrides
from jaxtrain.doctor import machine
from jaxtrain.errors import InputError
from jaxtrain.interop import weights
from jaxtrain.training import run_summary

SCRIPT = """#!/bin/sh
exec {python} -c 'import sys; sys.argv[0] = "{script}"
from jaxtrain import main; main.console()' "$@"
"""


def printed(place: Path, command: list[str], path: str = "") -> str:
    """Returns the command in an error, ``(run COMMAND to see what is there)``, after running it."""
    variables = program.environment(place)
    variables["PATH"] = path + variables["PATH"]
    ended = subprocess.run(command, cwd=place, env=variables, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    (found,) = re.findall(r"\(run (.*) to see what is there\)", ended.stderr)
    again = subprocess.run(
        found, shell=True, cwd=place, env=variables, capture_output=True, text=True
    )
    assert "no checkpoints" in again.stderr + again.stdout, "it did not run when pasted"
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A working directory with an empty run, and with bin/jaxtrain as pip installs it."""
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
    printed(place, [sys.executable, "-m", "jaxtrain.main", *WRONG])


def test_from_python(place: Path) -> None:
    printed(place, [sys.executable, "-c", f"from jaxtrain import main; exit(main.main({WRONG}))"])


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


def _refused(call: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        call()
    return str(caught.value)


def _no_checkpoint(run: Path) -> str:
    return _refused(lambda: weights.load(run))


def _none_intact(run: Path) -> str:
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints/9.json").write_text("{}")
    return _refused(lambda: resume.choose("latest", run, run.parent))


def _flags_help(_: Path) -> str:
    return _refused(lambda: command_line.parse("export", ["out", "--more"]))


def _ways_to_fit(place: Path) -> str:
    return run_summary.fit_command(invocation.program(), config.as_typed(_own_config(place)))


def _resume(place: Path) -> str:
    return run_summary.resume_command(
        invocation.program(), config.as_typed(_own_config(place)), place
    )


def _doctor(place: Path) -> str:
    return machine.plan_command(_own_config(place), "NVIDIA H200")


def _own_config(place: Path) -> config.Run:
    file = place / "own.py"
    file.write_text("from jaxtrain import config\nrun = config.named('demo_gpt')\n")
    return config.load(str(file), ["--loop.steps", "7"])


@pytest.mark.long
@pytest.mark.parametrize(
    ("message_of", "pattern", "expected"),
    [
        (_no_checkpoint, r"\(run (.*) to see what is there\)", "no checkpoints"),
        (_none_intact, r"; ([^;]*) lists them", "checkpoints/9"),
        (_flags_help, r"see (.*)", "jaxtrain export"),
        # The flag added to these commands ends them early, once all other arguments are parsed.
        (_ways_to_fit, r"(.*) --fit", "--fit-seconds -1"),
        (_doctor, r"(.*)", "--fit-seconds -1"),
        (_resume, r"(.*)", "Number of"),
    ],
)
def test_printed_commands_run_in_a_folder_with_a_space(
    message_of: Callable[[Path], str],
    pattern: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = tmp_path / "my runs"
    place.mkdir()
    monkeypatch.chdir(place)
    text = message_of(place)
    found = re.search(pattern, text)
    assert found, text
    command = found[1]
    if expected == "--fit-seconds -1":
        command += f" {expected}"
    elif expected == "Number of":
        command, expected = command + " --loop.stepss 1", "did you mean --loop.steps?"
    ended = subprocess.run(
        command,
        shell=True,
        cwd=place,
        env=program.environment(place),
        capture_output=True,
        text=True,
    )
    assert expected in ended.stdout + ended.stderr, command


@pytest.mark.parametrize("flag", ["--debug", "--output-dir", "--resume", "--profile"])
def test_a_flag_is_not_suggested_for_itself(flag: str) -> None:
    with pytest.raises(InputError) as caught:
        overrides.apply(config.named("demo"), [flag, "x"])
    assert "did you mean" not in str(caught.value)
    assert f"{flag} is a flag" in str(caught.value)
