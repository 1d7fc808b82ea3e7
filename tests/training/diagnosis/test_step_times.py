"""A process that delays the others is named, with what it is slow at."""

from pathlib import Path

import pytest
from program import CHECKOUT, TINY_MLM, two_processes, write_corpus

from jaxtrain import config
from jaxtrain.sharding import make_mesh
from jaxtrain.training.diagnosis.step_times import Seconds, Slow, SlowProcesses, StepTimes, slowest

QUICK = Seconds(0.001, 0.01, 0.0, 1.0)


def test_the_process_that_starts_its_steps_late_is_slow() -> None:
    input_ = QUICK._replace(input=0.4)
    program = QUICK._replace(program=0.6)
    assert slowest([QUICK, QUICK, QUICK]) is None
    assert slowest([QUICK, input_, QUICK]) == Slow(1, "input", 0.4, 0.001)
    assert slowest([program, QUICK]) == Slow(0, "program", 0.6, 0.01)
    assert slowest([input_, QUICK, program, QUICK]) == Slow(2, "program", 0.6, 0.01)  # the worst


def test_a_process_that_delays_no_others_is_not_slow() -> None:
    # All wait for the same storage.
    assert slowest([QUICK._replace(input=0.5), QUICK._replace(input=0.55)]) is None
    # Milliseconds of a tiny step.
    tiny = Seconds(0.0, 0.0, 0.0, 0.1)
    assert slowest([tiny, tiny._replace(input=0.02, program=0.02)]) is None
    # One waits for its input while the other one works.
    assert slowest([QUICK._replace(input=0.5), QUICK._replace(program=0.5)]) is None
    # The device had a step to compute meanwhile, for which the process then waited.
    assert slowest([QUICK, QUICK._replace(program=0.6, ahead=0.3)]) is None


def test_a_process_that_its_cpu_limit_stops_is_slow() -> None:
    limited = QUICK._replace(limited=0.5, program=0.6)
    assert slowest([QUICK, limited]) == Slow(1, "CPU limit", 0.5, 0.0)
    # All have the same limit.
    assert slowest([QUICK._replace(limited=0.5), QUICK._replace(limited=0.58)]) is None
    # GPUs had a step to compute meanwhile; CPUs computed it within the limit.
    ahead = QUICK._replace(limited=0.5, ahead=0.4)
    assert slowest([QUICK, ahead]) is None
    assert slowest([QUICK, ahead], on_cpu=True) == Slow(1, "CPU limit", 0.5, 0.0)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_medians_of_steps_ignore_pauses_and_single_late_steps() -> None:
    clock = Clock()
    times = StepTimes(clock)

    def step(program_s: float, input_s: float = 0.25) -> None:
        for what, seconds in (("devices", 2.0), ("pause", 8.0), ("ahead", 0.5)):
            with times.inside(what):
                clock.now += seconds
        clock.now += input_s + program_s
        times.stepped(input_s)

    step(64.0)
    times.forget()
    for program_s in (0.125, 32.0, 0.125, 32.0):
        step(program_s)
    assert times.medians() is None  # too few steps
    step(0.125)
    assert times.medians() == Seconds(0.25, 0.125, 0.5, 2.875)
    assert times.medians() is None  # each step counts once


def test_one_process_is_compared_with_nothing() -> None:
    said: list[str] = []
    slow = SlowProcesses(make_mesh(config.Mesh(data=1, fsdp=8, shard="none")), said.append)
    for _ in range(10):
        slow.stepped(0.0)
    slow.logged()
    assert len(slow.times) == 0  # the steps of a long run are not kept
    assert said == []


def _flags(directory: Path, steps: int, log_every: int) -> tuple[object, ...]:
    write_corpus(directory)
    mesh = ("--simulate-devices", 2, "--mesh.fsdp", 2, "--output-dir", "run")
    length = ("--loop.steps", steps, "--loop.log_every", log_every, "--checkpoint.every", steps)
    return (*TINY_MLM, *mesh, *length, "--data.path", "corpus")


def _output(directory: Path, **variables: dict[str, str]) -> str:
    """Returns what process 0 of a run of two processes prints."""
    with two_processes(directory, *_flags(directory, 20, 6), **variables) as started:
        outputs = [process.communicate(timeout=280)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    return outputs[0]


# Process 1 sleeps between steps, or while it waits for its examples.
_SLEEPS = """
import sys, threading, time
def later():
    while "jaxtrain.training.session" not in sys.modules:
        time.sleep(0.01)
    time.sleep(0.5)
    from jaxtrain.data.pipeline import TrainingBatches
    from jaxtrain.training.step_recorder import StepRecorder
    owner, name = (StepRecorder, "push") if KIND == "program" else (TrainingBatches, "__next__")
    real = getattr(owner, name)
    def sleeping(self, *arguments):
        time.sleep(0.5)
        if KIND == "input":
            self.wait_s += 0.5
        return real(self, *arguments)
    setattr(owner, name, sleeping)
threading.Thread(target=later, daemon=True).start()
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["program", "input"])
def test_a_slow_process_is_named_within_two_logging_intervals(tmp_path: Path, kind: str) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(f"KIND = {kind!r}\n{_SLEEPS}")
    said = _output(tmp_path, second={"PYTHONPATH": f"{tmp_path / 'slow'}:{CHECKOUT}"})
    named = [line for line in said.splitlines() if "slows down the others" in line]
    assert len(named) == 1, said
    assert "process 1 on host " in named[0]
    assert f"({kind})" in named[0]
    assert "step 12/20" not in said[: said.index(named[0])], said  # logged: 1, 6, 12, 18, 20
