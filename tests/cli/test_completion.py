"""Completion of the command line, in a real bash."""

import contextlib
import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import program
import pytest

from jaxtrain import main
from jaxtrain.cli import completion


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        (["tr"], ["train"]),
        (["demo_"], ["demo_gpt", "demo_mlm"]),
        (["train", "h100_1"], ["h100_1", "h100_16"]),
        (["--config", "h100_6"], ["h100_64"]),
        (
            ["train", "demo", "--optim.warm"],
            [f"--optim.warm{n}" for n in ("down_fraction", "up_fraction", "up_steps")],
        ),
        (["plan", "--config", "demo_gpt", "--model.dep"], ["--model.depth"]),
        (["plan", "--config", "demo", "--fit"], ["--fit", "--fit-seconds"]),
        (["train", "demo", "--resu"], ["--resume"]),
        (["generate", "--temp"], ["--temperature"]),
        (["prepare", "cl"], ["clips"]),
        (["prepare", "clips", "--heig"], ["--height"]),
        (["configs", "show", "a6"], ["a6000_medium"]),
        (["help", "doc"], ["doctor"]),
        (["train", "no_such", "--output-d"], ["--output-dir"]),
        (["train", "demo", "--data.path", "clip"], []),  # the shell completes files
    ],
)
def test_the_last_word_is_completed(typed: list[str], found: list[str]) -> None:
    assert completion.candidates(typed) == found
    assert completion.candidates(typed) == found, "from the cache"


def test_run_directories_are_completed(tmp_path: Path) -> None:
    for name in ("demo/2026-01-01T00-00-00Z", "mine", "evil\x1b[2J"):
        (tmp_path / "output" / name).mkdir(parents=True)
        (tmp_path / "output" / name / "config.json").write_text("{}")
    runs = ["output/demo/2026-01-01T00-00-00Z", "output/mine"]
    assert completion.candidates(["report", "out"]) == runs
    assert completion.candidates(["train", "demo", "--resume", ""]) == ["latest", *runs]


def test_a_damaged_cache_is_replaced(tmp_path: Path) -> None:
    typed = ["plan", "--config", "demo", "--fit-s"]
    assert completion.candidates(typed) == ["--fit-seconds"]
    for path in (tmp_path / "cache/completion").iterdir():
        path.write_text('{"a": 1}')
    assert completion.candidates(typed) == ["--fit-seconds"]


def test_every_command_has_completed_flags() -> None:
    for command in main.COMMANDS:
        assert completion.candidates([command[:-1]])
    assert "--crf" in completion.candidates(["decode", "--"])


def with_command(tmp_path: Path, before: str = "") -> dict[str, str]:
    """Makes a command ``jaxtrain`` and returns variables with which a shell finds it."""
    shim = tmp_path / "bin/jaxtrain"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\n{before}exec {shlex.quote(sys.executable)} -m jaxtrain "$@"\n')
    shim.chmod(0o755)
    variables = program.environment(tmp_path)
    return variables | {"PATH": f"{shim.parent}{os.pathsep}{variables['PATH']}"}


def test_it_works_in_bash(tmp_path: Path) -> None:
    typed = """
        source <(jaxtrain completion bash)
        COMP_WORDS=(jaxtrain train demo_); COMP_CWORD=2; _jaxtrain
        printf "%s\n" "${COMPREPLY[@]}"
        complete -p jaxtrain
    """
    variables = with_command(tmp_path)
    found = subprocess.run(
        ["bash", "-c", typed], env=variables, capture_output=True, text=True, check=True
    )
    assert found.stdout.splitlines() == [
        "demo_gpt",
        "demo_mlm",
        "complete -o default -F _jaxtrain jaxtrain",
    ]


@pytest.mark.parametrize("name", ["a$(touch ran)", "it's; touch ran", "my run"])
def test_the_name_of_a_folder_stays_one_word_in_bash(name: str, tmp_path: Path) -> None:
    (tmp_path / "output" / name).mkdir(parents=True)
    (tmp_path / "output" / name / "config.json").write_text("{}")
    # Completes with the program; otherwise it records its last argument.
    shows = '[ "$1" = completion ] || { printf %s "$2" >got; exit; }\n'
    variables = with_command(tmp_path, shows) | {"INPUTRC": "/dev/null"}
    typed = b"source <(jaxtrain completion bash)\njaxtrain report out\t\nexit\n"
    terminal, inside = pty.openpty()
    with subprocess.Popen(
        ["timeout", "--foreground", "-s", "KILL", "20", "bash", "--norc", "--noprofile", "-i"],
        env=variables,
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
    ) as shell:
        os.close(inside)
        os.write(terminal, typed)
        with contextlib.suppress(OSError):  # at the end
            while os.read(terminal, 4096):
                pass
        shell.wait(timeout=60)
    os.close(terminal)
    assert (tmp_path / "got").read_text() == f"output/{name}/"
    assert not (tmp_path / "ran").exists()


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["completion", "fish"]) == 2
    assert "the shells are bash and zsh" in capsys.readouterr().err
