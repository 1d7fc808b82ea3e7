"""A gate that is not met ends a run, however it is written and wherever the run was stopped."""

import os
import signal
from pathlib import Path

import pytest
from program import TINY_MLM, losses, run, started, wait_for, write_corpus

pytestmark = pytest.mark.slow

ARGUMENTS = (*TINY_MLM, "--data.path", "corpus", "--output-dir", "run")
LATEST = ("--resume", "latest")


@pytest.mark.long  # test_run_progress.py decides the same
def test_a_stop_before_the_validation_that_decides_a_gate_does_not_skip_it(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    gate = ("--loop.gates", "val/loss < 0.01 at 3")
    never = ("--loop.steps", 10**6, "--loop.eval_every", 10**6, "--checkpoint.every", 10**6)
    process = started(tmp_path, *ARGUMENTS, *gate, *never)
    metrics = tmp_path / "run/metrics.jsonl"
    wait_for(lambda: metrics.exists() and max(losses(tmp_path / "run"), default=0) > 4, process)
    os.kill(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 75, output
    total = max(losses(tmp_path / "run")) + 2
    ended = run(tmp_path, *ARGUMENTS, *gate, *LATEST, *never, "--loop.steps", total)
    assert ended.returncode == 4, ended.stdout + ended.stderr
    assert "gate val/loss < 0.01 at 3 is not met: val/loss is" in ended.stdout


@pytest.mark.long
def test_a_gate_is_a_value_and_is_judged_again_where_the_run_goes_back_to(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    gates = ("--loop.gates", "val/loss<1e-2 at 3", "val/loss < 24.0 at 2", "val/loss<=0.010 at 4")
    every = ("--loop.steps", 6, "--loop.eval_every", 2, "--checkpoint.every", 2)
    for resumed, words in (
        ((), "gate val/loss < 0.01 at 3 is not met"),
        (LATEST, "nothing to do: gate val/loss < 0.01 at 3 was not met after 4 steps"),
        # Its gate is judged again, at its own step.
        (("--resume", 2, "--optim.peak_lr", 1e-4), "gate val/loss < 0.01 at 3 is not met"),
    ):
        ended = run(tmp_path, *ARGUMENTS, *gates, *every, *resumed)
        assert ended.returncode == 4, ended.stdout + ended.stderr
        assert words in ended.stdout
    assert "resumed from run/checkpoints/2" in ended.stdout.replace(f"{tmp_path}/", "")
    met = ("--loop.gates", "val/loss < 24.0 at 2")
    continued = run(tmp_path, *ARGUMENTS, *met, *every, *LATEST)
    assert continued.returncode == 0, continued.stdout + continued.stderr
    assert "done: 6 of 6 steps" in continued.stdout
