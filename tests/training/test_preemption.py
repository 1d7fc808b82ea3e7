"""Ctrl-C before the first step, and a terminal that goes away; tests/chaos sends SIGTERM."""

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from program import TINY_MLM, command, environment, losses, started, write_corpus

from jaxtrain.checkpoint import pointer

pytestmark = pytest.mark.slow

ARGUMENTS = [*TINY_MLM, *["--data.path", "corpus", "--output-dir", "run"]]


def last_step(directory: Path) -> int:
    return max(losses(directory)) if (directory / "metrics.jsonl").exists() else 0


def test_ctrl_c_before_the_first_step_has_nothing_to_save(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    process = started(tmp_path, *ARGUMENTS)
    log = tmp_path / "run" / "log.txt"
    while process.poll() is None and not (log.exists() and "run directory" in log.read_text()):
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert "stopped by SIGINT; there was nothing to save" in log.read_text()


def test_a_closed_terminal_stops_a_run_that_saves(tmp_path: Path) -> None:
    """Such as that of an ssh session; the run can no longer print anything."""
    write_corpus(tmp_path)
    ours, terminal = pty.openpty()
    arguments = [*ARGUMENTS, "--data.workers", 1, "--loop.eval_every", "None"]
    arguments += ["--loop.steps", 10**6, "--checkpoint.every", 10**6]
    in_it = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.argv[1], sys.argv[1:])"
    process = subprocess.Popen(
        [sys.executable, "-c", in_it, *command(*arguments)],
        cwd=tmp_path,
        env=environment(tmp_path, TERM="xterm"),
        start_new_session=True,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    os.set_blocking(ours, False)
    deadline = time.monotonic() + 120
    while not last_step(tmp_path / "run"):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
        with contextlib.suppress(BlockingIOError):
            os.read(ours, 2**16)
    os.close(ours)
    assert process.wait(60) == 75
    assert pointer.steps(tmp_path / "run/checkpoints") == [last_step(tmp_path / "run")]
    assert not (tmp_path / "run" / pointer.ASIDE).exists()  # no step was bad
    assert "stopped because the terminal" in (tmp_path / "run/log.txt").read_text()
