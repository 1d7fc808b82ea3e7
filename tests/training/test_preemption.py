"""SIGTERM at any moment: exit code 75, no completed step is lost, and the run resumes exactly."""

import contextlib
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from program import TINY_MLM, command, environment, losses, records, run, train, write_corpus

from jaxtrain.checkpoint import pointer

pytestmark = pytest.mark.slow

STEPS = 24
ARGUMENTS = [
    *TINY_MLM,
    *["--data.path", "corpus", "--loop.steps", STEPS, "--checkpoint.every", "4"],
    *["--loop.eval_every", "4", "--loop.eval_examples", "64"],
]
# It takes two seconds on an idle machine. A run may need a step, a batch of a validation and a
# save, and five seconds if it compiles before the first step.
ENDS_WITHIN_S = 60


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a corpus and an uninterrupted run."""
    directory = tmp_path_factory.mktemp("preemption")
    write_corpus(directory, files=12, words=1500)
    train(directory, *ARGUMENTS, "--output-dir", "uninterrupted")
    return directory


class Start:
    """A run that starts or resumes in a directory, and its progress since then."""

    def __init__(self, place: Path, name: str, cache: dict[str, str]) -> None:
        self._directory = place / name
        self.done = done(self._directory)
        self._logged = len(self._log())
        self._saved = self._checkpoints()
        self.process = subprocess.Popen(
            command(*ARGUMENTS, "--output-dir", name, "--resume", "latest"),
            cwd=place,
            env=environment(place, **cache),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def listens(self) -> bool:
        """Returns whether the process handles SIGTERM; it is still importing most modules then."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        caught = int(re.findall(r"SigCgt:\s*(\w+)", status)[0], 16)
        return bool(caught >> (signal.SIGTERM - 1) & 1)

    def says(self, text: str) -> bool:
        """Returns whether it has logged this text."""
        return text in self._log()[self._logged :]

    def saves(self) -> bool:
        """Returns whether it has begun to write a checkpoint."""
        return self._checkpoints() != self._saved

    def _log(self) -> str:
        log = self._directory / "log.txt"
        return log.read_text() if log.exists() else ""

    def _checkpoints(self) -> set[str]:
        return {path.name for path in (self._directory / "checkpoints").glob("*")}


def done(directory: Path) -> int:
    """Returns the last recorded step."""
    return max(losses(directory)) if (directory / "metrics.jsonl").exists() else 0


# One run is stopped at each of these moments, in this order.
MOMENTS: dict[str, Callable[[Start], bool]] = {
    "imports": Start.listens,
    "data": lambda run: run.says("run directory"),
    "compilation": lambda run: run.says("examples per step"),
    "the first step": lambda run: run.says("compiled in"),
    "between steps": lambda run: run.says(f"step {run.done + 1}/"),
    "evaluation": lambda run: run.says(f"step {run.done // 4 * 4 + 4}/{STEPS} | loss"),
    "a save": Start.saves,
    "the last steps": lambda run: run.says(f"step {STEPS - 1}/"),
}
# These moments use an empty compilation cache; otherwise compilation would take no time.
COLD = ("compilation", "evaluation")


@pytest.mark.long
def test_sigterm_saves_all_completed_steps_and_the_run_resumes(place: Path) -> None:
    for moment, reached in MOMENTS.items():
        cache = {"JAX_COMPILATION_CACHE_DIR": str(place / f"{moment}-compiled")}
        started = Start(place, "stopped", cache if moment in COLD else {})
        stop_when(started, reached, moment)
        folder, last = place / "stopped" / "checkpoints", done(place / "stopped")
        assert pointer.steps(folder)[-1:] == ([last] if last else []), moment
        assert not [path for path in folder.glob("*") if not path.name.isdigit()], moment
    train(place, *ARGUMENTS, "--output-dir", "stopped", "--resume", "latest")
    assert losses(place / "stopped") == losses(place / "uninterrupted")
    assert validations(place / "stopped") == validations(place / "uninterrupted")


def stop_when(started: Start, reached: Callable[[Start], bool], moment: str) -> None:
    """Sends SIGTERM at a moment, and checks the end of the run."""
    process = started.process
    deadline = time.monotonic() + 200
    while process.poll() is None and not reached(started):
        assert time.monotonic() < deadline, moment
        time.sleep(0.002)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    took_s = time.monotonic() - began
    assert process.returncode == 75, f"{moment}: {output}"
    assert took_s < ENDS_WITHIN_S, f"{moment}: {output}"
    assert "Traceback" not in output
    assert "leaked" not in output


def validations(directory: Path) -> dict[int, float]:
    return {
        step: record["val/loss"]
        for step, record in records(directory).items()
        if "val/loss" in record
    }


@pytest.mark.long
def test_validations_take_place_every_eval_every_steps(place: Path) -> None:
    assert sorted(validations(place / "uninterrupted")) == [4, 8, 12, 16, 20, 24]


def test_ctrl_c_before_the_first_step_leaves_nothing_behind(place: Path) -> None:
    process = subprocess.Popen(
        command(*ARGUMENTS, "--output-dir", "interrupted"),
        cwd=place,
        env=environment(place),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    log = place / "interrupted" / "log.txt"
    while process.poll() is None and not (log.exists() and "run directory" in log.read_text()):
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    again = run(place, *ARGUMENTS, "--output-dir", "interrupted", "--loop.steps", 1)
    assert again.returncode == 0, again.stderr


@pytest.mark.long
def test_an_abandoned_compilation_does_not_crash_the_exit(place: Path, tmp_path: Path) -> None:
    """It continues in XLA's threads, and XLA would crash in an ordinary exit."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
    process = subprocess.Popen(
        command("--config", "demo", "--data.workers", "0", "--output-dir", tmp_path / "run"),
        cwd=place,
        env=environment(place, **cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    log = tmp_path / "run" / "log.txt"
    while not (log.exists() and " parameters; " in log.read_text()):
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(4)  # the initialization is traced for a second or two, then compiled
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=ENDS_WITHIN_S)
    assert process.returncode == 75, said
    assert "compiled in" not in said


def test_a_closed_terminal_stops_a_run_that_saves(tmp_path: Path) -> None:
    """Such as that of an ssh session; the run can no longer print anything."""
    write_corpus(tmp_path)
    ours, terminal = pty.openpty()
    arguments = [*TINY_MLM, "--data.path", "corpus", "--data.workers", 1]
    arguments += ["--loop.steps", 10**6, "--checkpoint.every", 10**6, "--loop.eval_every", "None"]
    arguments += ["--output-dir", "closed"]
    in_it = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.argv[1], sys.argv[1:])"
    started = subprocess.Popen(
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
    while not done(tmp_path / "closed"):
        assert time.monotonic() < deadline
        assert started.poll() is None
        time.sleep(0.05)
        with contextlib.suppress(BlockingIOError):
            os.read(ours, 2**16)
    os.close(ours)
    assert started.wait(60) == 75
    assert pointer.steps(tmp_path / "closed/checkpoints") == [done(tmp_path / "closed")]
    assert "stopped because the terminal" in (tmp_path / "closed/log.txt").read_text()
