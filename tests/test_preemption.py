"""SIGTERM at any moment: exit code 75, all finished updates saved, and the run goes on as if
nothing had been.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from program import TINY_MLM, command, environment, losses, records, run, train, write_corpus

from jaxtrain import checkpoint

pytestmark = pytest.mark.slow

ARGUMENTS = [
    *TINY_MLM,
    *["--data.path", "corpus", "--loop.steps", "12", "--checkpoint.every", "4"],
    *["--loop.eval_every", "4", "--loop.eval_examples", "64"],
]
# An idle machine takes two seconds; the program promises a step, a batch of an evaluation, a save,
# and where it compiles before the first update five seconds.
ENDS_WITHIN_S = 60


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a corpus and an undisturbed run."""
    directory = tmp_path_factory.mktemp("preemption")
    write_corpus(directory, files=12, words=1500)
    train(directory, *ARGUMENTS, "--output-dir", "undisturbed")
    return directory


def listens(process: subprocess.Popen[str], directory: Path) -> bool:
    """Whether the process has a handler for SIGTERM: it still imports most of the program."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    caught = int(re.findall(r"SigCgt:\s*(\w+)", status)[0], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def says(text: str) -> Callable[[subprocess.Popen[str], Path], bool]:
    """Whether the run has logged a line with this text."""

    def said(process: subprocess.Popen[str], directory: Path) -> bool:
        log = directory / "log.txt"
        return log.exists() and text in log.read_text()

    return said


def saves(process: subprocess.Popen[str], directory: Path) -> bool:
    """Whether a checkpoint is being written."""
    return any((directory / "checkpoints").glob("*"))


MOMENTS = {
    "imports": listens,
    "data": says("run directory"),
    "compilation": says("examples a step"),
    "the first step": says("compiled in"),
    "between steps": says("step 2/"),
    "evaluation": says("step 4/12 | loss"),
    "a save": saves,
    "the last steps": says("step 11/"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_sigterm_saves_what_is_done_and_the_run_goes_on(place: Path, moment: str) -> None:
    name = f"stopped in {moment}".replace(" ", "-")
    arguments = [*ARGUMENTS, "--output-dir", name, "--resume", "latest"]
    # An empty cache of programs where one is to be compiled: what was before would take no time.
    cache = {"JAX_COMPILATION_CACHE_DIR": str(place / f"{name}-compiled")}
    process = subprocess.Popen(
        command(*arguments),
        cwd=place,
        env=environment(place, **(cache if moment in ("compilation", "evaluation") else {})),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 200
    while process.poll() is None and not MOMENTS[moment](process, place / name):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    took_s = time.monotonic() - began
    assert process.returncode == 75, output
    assert took_s < ENDS_WITHIN_S, output
    assert "Traceback" not in output
    assert "leaked" not in output
    folder = place / name / "checkpoints"
    done = max(losses(place / name)) if (place / name / "metrics.jsonl").exists() else 0
    assert checkpoint.steps(folder)[-1:] == ([done] if done else [])
    assert not [path for path in folder.glob("*") if not path.name.isdigit()]

    train(place, *arguments)
    assert losses(place / name) == losses(place / "undisturbed")
    assert validations(place / name) == validations(place / "undisturbed")


def validations(directory: Path) -> dict[int, float]:
    return {
        step: record["val/loss"]
        for step, record in records(directory).items()
        if "val/loss" in record
    }


def test_the_validations_are_those_of_the_cadence(place: Path) -> None:
    assert sorted(validations(place / "undisturbed")) == [4, 8, 12]


def test_ctrl_c_before_the_first_update_leaves_nothing_behind(place: Path) -> None:
    process = subprocess.Popen(
        command(*ARGUMENTS, "--output-dir", "interrupted"),
        cwd=place,
        env=environment(place),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    while process.poll() is None and not says("run directory")(process, place / "interrupted"):
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    again = run(place, *ARGUMENTS, "--output-dir", "interrupted", "--loop.steps", 1)
    assert again.returncode == 0, again.stderr
