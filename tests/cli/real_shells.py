"""Completion typed with the Tab key into interactive shells on a terminal: bash and zsh.

CI's step `launchers` runs these tests, because it can install zsh.
"""

import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import program
import pytest

SHELLS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}
TIMEOUT_S = 60.0


class Terminal:
    """A shell on a terminal of its own."""

    def __init__(self, shell: str, folder: Path, variables: dict[str, str]) -> None:
        self._file, theirs = pty.openpty()
        self._process = subprocess.Popen(
            SHELLS[shell],
            cwd=folder,
            env=variables,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._file, text.encode())

    def wait_for(self, text: str) -> str:
        """Reads until the screen has shown a text; returns everything since the last call."""
        seen, ends = "", time.monotonic() + TIMEOUT_S
        while text not in seen:
            ready, _, _ = select.select([self._file], [], [], max(0.0, ends - time.monotonic()))
            assert ready, f"{text!r} did not appear within {TIMEOUT_S:.0f} s, but: {seen!r}"
            seen += os.read(self._file, 65536).decode(errors="replace")
        return seen

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._file)


@pytest.fixture(params=sorted(SHELLS))
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Terminal]:
    """A shell in which completion is set up as the help says; output/mine is a run."""
    name: str = request.param
    assert shutil.which(name), f"{name} is not installed"
    shim = tmp_path / "bin/jaxtrain"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m jaxtrain "$@"\n')
    shim.chmod(0o755)
    (tmp_path / "output/mine").mkdir(parents=True)
    (tmp_path / "output/mine/config.json").write_text("{}")
    variables = program.environment(tmp_path) | {"TERM": "dumb", "PS1": "$ ", "HOME": str(tmp_path)}
    variables["PATH"] = f"{shim.parent}{os.pathsep}{variables['PATH']}"
    variables["JAXTRAIN_CACHE"] = str(tmp_path / "cache")
    terminal = Terminal(name, tmp_path, variables)
    terminal.type(f"source <(jaxtrain completion {name}) && echo set''up\n")
    terminal.wait_for("setup")
    yield terminal
    terminal.close()


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("jaxtrain trai", "jaxtrain train "),
        ("jaxtrain train demo_g", "demo_gpt"),
        ("jaxtrain train demo --optim.peak", "--optim.peak_lr"),
        ("jaxtrain plan --config h100_16 --price", "--price-per-gpu-hour"),
        ("jaxtrain report output/mi", "output/mine"),
    ],
)
def test_tab_completes(shell: Terminal, typed: str, shown: str) -> None:
    shell.type(f"{typed}\t")
    shell.wait_for(shown)


def test_two_tabs_list_what_is_possible(shell: Terminal) -> None:
    shell.type("jaxtrain train demo_\t\t")
    text = shell.wait_for("demo_mlm")
    assert "demo_gpt" in text
