"""local.sh with real training: two processes train, one is killed, and the run still completes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch.stub import LAUNCH
from program import TINY_MLM, environment, losses, wait_for, write_corpus

pytestmark = pytest.mark.slow

FLAGS = [
    *TINY_MLM,
    *["--data.path", "corpus", "--mesh.data", "2", "--mesh.shard", "none"],
    *["--simulate-devices", "2", "--checkpoint.every", "5"],
]


def launched(directory: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [str(LAUNCH / "local.sh"), "2", *FLAGS, "--output-dir", "run", *arguments],
        cwd=directory,
        env=environment(directory, PYTHON=sys.executable, RESTART_DELAY_S="0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def newest_checkpoint(folder: Path) -> int:
    """Returns the step of the newest complete checkpoint, or 0."""
    return max((int(path.stem) for path in folder.glob("*.json") if path.stem.isdigit()), default=0)


def process(index: int, launcher: "subprocess.Popen[str]") -> int:
    """The PID of the process that the launcher started as process ``index``."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            variables = (path / "environ").read_bytes().split(b"\0")
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == launcher.pid and f"JAX_PROCESS_ID={index}".encode() in variables:
            return int(path.name)
    raise AssertionError(f"process {index} does not run")


@pytest.mark.long
def test_a_run_recovers_from_a_killed_process_and_sigterm_ends_all(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    folder = tmp_path / "run/checkpoints"
    with launched(tmp_path, "--loop.steps", "1000000") as launcher:
        wait_for(lambda: newest_checkpoint(folder), launcher)
        os.kill(process(1, launcher), signal.SIGKILL)
        before = newest_checkpoint(folder)
        wait_for(lambda: newest_checkpoint(folder) > before, launcher)
        launcher.send_signal(signal.SIGTERM)
        output = launcher.communicate(timeout=200)[0]
    assert launcher.returncode == 75, output
    assert "process 1 ended with 137 (SIGKILL)" in output
    assert output.count("restart 1 of at most 5") == 1
    assert "resumed from" in output
    made = sorted(losses(tmp_path / "run"))
    assert made == list(range(1, made[-1] + 1))
    assert newest_checkpoint(folder) == made[-1]
