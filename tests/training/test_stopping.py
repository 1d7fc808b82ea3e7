"""Stops of a run: by early stopping, ``loop.max_hours``, and gates, in all processes together."""

from pathlib import Path

import pytest
from program import TINY_MLM, losses, run, train, write_corpus

from jaxtrain import config
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.sharding import make_mesh
from jaxtrain.training import stopping
from jaxtrain.training.stopping import Stopping

DATA = ("--data.path", "corpus", "--loop.steps", "6", "--checkpoint.every", "3")


class NoneBroken:
    """The data of a run without broken files."""

    def stop_reason(self) -> str:
        return ""


def at(hours: float, max_hours: float | None) -> Stopping:
    """Returns the decision maker of a program that started this many hours ago."""
    signals = StopSignals()
    signals.began -= hours * 3600
    mesh = make_mesh(config.Mesh(data=1, fsdp=8, shard="none"))
    return Stopping(signals, NoneBroken(), mesh, max_hours)  # type: ignore[arg-type]


def test_max_hours_count_from_the_start_of_the_program() -> None:
    for hours, limit, stops in ((1.9, 2.0, False), (2.1, 2.0, True), (1e6, None, False)):
        decides = at(hours, limit)
        assert decides.agreed() is stops, (hours, limit)
        assert decides.decision == (stopping.STOP_MAX_HOURS if stops else stopping.CONTINUE)


def test_after_max_hours_no_launcher_restarts_the_run() -> None:
    """Not even if SIGTERM, whose exit code asks for a restart, arrives at the same time."""
    decides = at(3.0, 2.0)
    assert not decides.signaled()
    decides._signals.received_signal = "SIGTERM"
    assert decides.signaled()
    assert decides.after_step()
    assert stopping.EXIT_CODES[decides.decision] == 130


def test_a_lost_worker_ends_the_run_for_a_restart_unless_another_reason_is_there() -> None:
    for signal, code in ((None, 75), ("SIGTERM", 75), ("SIGINT", 130)):
        decides = at(0.0, None)
        assert not decides.agreed()
        decides._lost = lambda: "one of 2 processes was killed"
        decides._signals.received_signal = signal
        assert decides.agreed()
        assert stopping.EXIT_CODES[decides.decision] == code
        assert decides.why == ("" if signal else "one of 2 processes was killed")


def test_only_what_the_other_processes_do_not_know_is_printed_by_each() -> None:
    decides = at(0.0, None)
    decides.end("gate val/loss < 1 at 3 is not met")
    assert decides.why
    assert not decides.why_here, "each of 16 hosts would print it"
    decides = at(0.0, None)
    decides._lost = lambda: "one of 2 processes was killed"
    assert decides.agreed()
    assert decides.why_here == "one of 2 processes was killed"


@pytest.mark.long  # the tests above decide; test_gates.py in memory
def test_max_hours_and_then_a_gate_end_a_run_that_is_saved(tmp_path: Path) -> None:
    """A run that a gate has ended is not continued unnoticed."""
    write_corpus(tmp_path)
    arguments = (*TINY_MLM, *DATA, "--loop.eval_every", 2, "--output-dir", "run")
    stopped = run(tmp_path, *arguments, "--loop.max_hours", 1e-6)
    assert stopped.returncode == 130, stopped.stdout + stopped.stderr
    assert "stopped because loop.max_hours is over; " in stopped.stdout
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
