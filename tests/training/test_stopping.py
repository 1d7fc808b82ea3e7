"""Stops of a run: by early stopping, ``loop.max_hours``, and gates, in all processes together."""

import json
from pathlib import Path
from typing import Any

import pytest
from program import TINY_MLM, losses, run, train, write_corpus

from jaxtrain import config
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.sharding import make_mesh
from jaxtrain.training import run_directory, stopping
from jaxtrain.training.stopping import Stopping

DATA = ("--data.path", "corpus", "--loop.steps", "6", "--checkpoint.every", "3")


class NoneBroken:
    """The data of a run without broken files."""

    def stop_reason(self) -> str:
        return ""


def at(hours: float, limit: float | None = None, save_every_s: float | None = None) -> Stopping:
    """Returns the decision maker of a program that started this many hours ago."""
    signals = StopSignals()
    signals.began -= hours * 3600
    mesh = make_mesh(config.Mesh(data=1, fsdp=8, shard="none"))
    broken: Any = NoneBroken()
    return Stopping(signals, broken, mesh, limit, save_every_s)


def test_max_hours_count_from_the_start_of_the_program() -> None:
    for hours, limit, stops in ((1.9, 2.0, False), (2.1, 2.0, True), (1e6, None, False)):
        decides = at(hours, limit)
        assert decides.agreed() is stops, (hours, limit)
        assert decides.decision == (stopping.STOP_MAX_HOURS if stops else stopping.CONTINUE)


def test_max_total_hours_count_all_starts(tmp_path: Path) -> None:
    began = 1_700_000_000.0
    lines = [  # two starts of 3 and 5 hours, and the one that asks
        {"event": "start", "time": began + 60, "began": began, "step": 0},
        {"event": "end", "time": began + 3 * 3600, "step": 9, "code": 75, "why": "SIGTERM"},
        {"event": "start", "time": began + 50_000, "began": began + 49_990, "step": 9},
        {"event": "phase", "time": began + 49_990 + 5 * 3600, "step": 20, "seconds": 1},
        {"event": "start", "time": began + 90_000, "began": began + 89_000, "step": 20},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "history.jsonl").write_text(text)
    for limits, expected in (
        ((None, None), None),
        ((3.0, None), 3.0),
        ((3.0, 10.0), 2.0),
        ((1.0, 10.0), 1.0),
        ((None, 8.0), 0.0),
    ):
        typed = ("--loop.max_hours", str(limits[0]), "--loop.max_total_hours", str(limits[1]))
        left = run_directory.hours_left(config.load("demo_mlm", typed), tmp_path)
        assert left == (None if expected is None else pytest.approx(expected)), limits


def test_a_save_is_due_once_in_each_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the loop has saved: a step may be bad, and another good one follows."""
    now = 1000.0
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now)
    decides = at(0.0, save_every_s=60.0)
    saved = []
    for _ in range(40):
        now += 7.0
        decides.after_step()
        if decides.save_due and now != 1000.0 + 63.0:  # the step there was bad
            saved.append(now - 1000.0)
            decides.save_due = False
    assert saved == [70.0, 126.0, 189.0, 252.0]
    decides = at(0.0)
    now += 1e6
    assert not decides.after_step()
    assert not decides.save_due


def test_after_max_hours_no_launcher_restarts_the_run() -> None:
    """Not even if SIGTERM, whose exit code asks for a restart, arrives at the same time."""
    decides = at(3.0, 2.0)
    assert not decides.signaled()
    decides._signals.received_signal = "SIGTERM"
    assert decides.signaled()
    assert decides.after_step()
    assert stopping.CODE_OF_STOP[decides.decision] == 130


def test_a_lost_worker_ends_the_run_for_a_restart_unless_another_reason_is_there() -> None:
    for signal, code in ((None, 75), ("SIGTERM", 75), ("SIGINT", 130)):
        decides = at(0.0)
        assert not decides.agreed()
        decides._lost = lambda: "one of 2 processes was killed"
        decides._signals.received_signal = signal
        assert decides.agreed()
        assert stopping.CODE_OF_STOP[decides.decision] == code
        assert decides.why == ("" if signal else "one of 2 processes was killed")


def test_only_what_the_other_processes_do_not_know_is_printed_by_each() -> None:
    decides = at(0.0)
    decides.end("gate val/loss < 1 at 3 is not met")
    assert decides.why
    assert not decides.why_here, "each of 16 hosts would print it"
    decides = at(0.0)
    decides._lost = lambda: "one of 2 processes was killed"
    assert decides.agreed()
    assert decides.why_here == "one of 2 processes was killed"


@pytest.mark.long  # the tests above decide
def test_max_hours_and_then_a_gate_end_a_run_that_is_saved(tmp_path: Path) -> None:
    """A run that a gate has ended is not continued unnoticed."""
    write_corpus(tmp_path)
    arguments = (*TINY_MLM, *DATA, "--loop.eval_every", 2, "--output-dir", "run")
    stopped = run(tmp_path, *arguments, "--loop.max_hours", 1e-6)
    assert stopped.returncode == 130, stopped.stdout + stopped.stderr
    assert "stopped because loop.max_hours or loop.max_total_hours is over; " in stopped.stdout
    (again,) = [line for line in stopped.stdout.splitlines() if "resume with" in line]
    assert "--loop.max_hours" in again

    gates = ("--loop.gates", "val/loss < 90 at 2", "val/loss < 0.01 at 3", "--resume", "latest")
    ended = run(tmp_path, *arguments, *gates)
    assert ended.returncode == 4, ended.stderr
    assert "gate val/loss < 0.01 at 3 is not met: val/loss is" in ended.stdout
    assert "4 of 6 steps are done and saved" in ended.stdout
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4]
    assert (tmp_path / "run/checkpoints/4.json").exists()
    continued = run(tmp_path, *arguments, *gates)
    assert continued.returncode == 4
    assert "nothing to do: gate val/loss < 0.01 at 3 was not met after 4 steps" in continued.stdout


@pytest.mark.long
def test_early_stopping_uses_the_named_metric(tmp_path: Path) -> None:
    """Without a learning rate nothing improves: the run ends after two more validations.

    The best state is that of the first validation, although later ones were equally good.
    """
    write_corpus(tmp_path)
    still = ("--optim.peak_lr", 1e-12, "--simulate-devices", 2, "--mesh.fsdp", 2)
    best = ("--checkpoint.best_metric", "val/pseudo_perplexity")
    patience = ("--loop.early_stop_patience", 2, "--loop.eval_every", 2, "--loop.steps", 12)
    data = ("--data.path", "corpus", "--output-dir", "early")
    text = train(tmp_path, *TINY_MLM, *data, *still, *best, *patience)
    assert "stopped early: 2 validations without a better val/pseudo_perplexity" in text
    assert max(losses(tmp_path / "early")) == 6
    assert [path.name for path in (tmp_path / "early/best").iterdir()] == ["2.json"]


@pytest.mark.slow
def test_max_total_hours_end_a_run_that_is_started_again(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    arguments = (*TINY_MLM, *DATA, "--loop.eval_every", "None", "--output-dir", "run")
    budget = ("--loop.max_total_hours", 1e-6)
    stopped = run(tmp_path, *arguments, *budget)
    assert stopped.returncode == 130, stopped.stdout + stopped.stderr
    assert "loop.max_total_hours is over; 1 of 6 steps" in stopped.stdout
    again = run(tmp_path, *arguments, *budget, "--resume", "latest")
    assert again.returncode == 130, again.stdout + again.stderr
    assert "raise --loop.max_total_hours 1e-06" in again.stdout
    assert "compiled in" not in again.stdout
    assert sorted(losses(tmp_path / "run")) == [1]
    often = ("--checkpoint.every", "0.001s", "--checkpoint.keep", 9)
    done = run(tmp_path, *arguments, *often, "--resume", "latest")
    assert done.returncode == 0, done.stdout + done.stderr
    saved = {int(path.stem) for path in (tmp_path / "run/checkpoints").glob("*.json")}
    assert saved == {1, 3, 4, 5, 6}, "due after step 2, saved after the next one, and then always"
