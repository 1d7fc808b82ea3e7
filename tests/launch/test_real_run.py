"""local.sh with the real program: two processes train, one is killed, the run ends all the same."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launch.stub import LAUNCH
from program import TINY_MLM, environment, losses, write_corpus

pytestmark = pytest.mark.slow

FLAGS = [
    *TINY_MLM,
    *["--data.path", "corpus", "--mesh.data", "2", "--mesh.shard", "none"],
    *["--simulate-devices", "2", "--checkpoint.every", "5"],
]


def launched(directory: Path, *arguments: str) -> "subprocess.Popen[str]":
    import sys

    return subprocess.Popen(
        [str(LAUNCH / "local.sh"), "2", *FLAGS, "--output-dir", "run", *arguments],
        cwd=directory,
        env=environment(directory, PYTHON=sys.executable, RESTART_DELAY_S="0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_checkpoint(launcher: "subprocess.Popen[str]", directory: Path) -> None:
    deadline = time.monotonic() + 240
    folder = directory / "run" / "checkpoints"
    while not any(path.parent.name.isdigit() for path in folder.glob("*/manifest.json")):
        assert launcher.poll() is None, launcher.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def process(index: int, launcher: "subprocess.Popen[str]") -> int:
    """The number of the process that the launcher started as process ``index``."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            variables = (path / "environ").read_bytes().split(b"\0")
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == launcher.pid and f"JAX_PROCESS_ID={index}".encode() in variables:
            return int(path.name)
    raise AssertionError(f"process {index} does not run")


def test_a_killed_process_costs_no_manual_step(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    with launched(tmp_path, "--loop.steps", "150") as launcher:
        wait_for_checkpoint(launcher, tmp_path)
        os.kill(process(1, launcher), signal.SIGKILL)
        output = launcher.communicate(timeout=380)[0]
    assert launcher.returncode == 0, output
    assert "process 1 ended with 137 (SIGKILL)" in output
    assert output.count("restart 1 of at most 5") == 1
    assert "resumed from" in output
    assert sorted(losses(tmp_path / "run")) == list(range(1, 151))


def test_sigterm_saves_and_asks_to_be_run_again(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    with launched(tmp_path, "--loop.steps", "1000000") as launcher:
        wait_for_checkpoint(launcher, tmp_path)
        launcher.send_signal(signal.SIGTERM)
        output = launcher.communicate(timeout=200)[0]
    assert launcher.returncode == 75, output
    newest = max(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert newest == max(losses(tmp_path / "run"))
