"""Runs of two real processes with four virtual devices each."""

import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from program import TINY_MLM, losses, records, train, two_processes, write_corpus

from jaxtrain.checkpoint import pointer

pytestmark = pytest.mark.slow

EIGHT = [
    *TINY_MLM,
    *["--data.path", "corpus", "--mesh.data", "2", "--mesh.fsdp", "4", "--mesh.shard", "params"],
    *["--simulate-devices", "8", "--data.workers", "1"],
    *["--loop.steps", "6", "--checkpoint.every", "3"],
    *["--loop.eval_every", "3", "--loop.eval_examples", "11"],
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Creates a directory with a corpus."""
    directory = tmp_path_factory.mktemp("processes")
    write_corpus(directory)
    return directory


def two(directory: Path, *arguments: object, **variables: Any) -> Any:
    """Starts both processes of a run on eight devices."""
    return two_processes(directory, *EIGHT, *arguments, **variables)


def wait_for_steps(started: list[subprocess.Popen[str]], directory: Path, count: int) -> None:
    """Waits until a run has recorded this many steps."""
    metrics = directory / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= count):
        for process in started:
            assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_processes_reproduce_the_metrics_of_one(place: Path) -> None:
    train(place, *EIGHT, "--output-dir", "one")
    with two(place, "--output-dir", "two") as started:
        outputs = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    one, both = records(place / "one"), records(place / "two")
    assert sorted(one) == sorted(both) == [1, 2, 3, 4, 5, 6]
    for step, record in one.items():
        assert both[step]["train/loss"] == pytest.approx(record["train/loss"], rel=1e-5), step
        validated = sorted(name for name in record if name.startswith("val/"))
        names = ["val/accuracy", "val/loss", "val/pseudo_perplexity"]
        assert validated == (names if step in (3, 6) else [])
        for name in validated:
            assert both[step][name] == pytest.approx(record[name], rel=1e-5), (step, name)
    steps = sorted(path.name for path in (place / "two" / "checkpoints").iterdir())
    assert steps == sorted(path.name for path in (place / "one" / "checkpoints").iterdir())
    assert (place / "two" / "log.txt").exists()
    assert (place / "two" / "log.1.txt").exists()
    assert "step 6/6" in outputs[0]
    assert "step 6/6" not in outputs[1]
    # One process resumes what two have saved.
    train(place, *EIGHT, "--loop.steps", 8, "--output-dir", "two", "--resume", "latest")
    assert sorted(losses(place / "two")) == [1, 2, 3, 4, 5, 6, 7, 8]


TWICE = """
import sys
import jaxtrain
from jaxtrain import config

if __name__ == "__main__":
    arguments = sys.argv[1:]
    for flag in ("--config", "--simulate-devices"):
        place = arguments.index(flag)
        del arguments[place : place + 2]
    run = config.load("demo_mlm", arguments)
    for number in range(2):
        trained = jaxtrain.train(run, output_dir=f"of-{number}", simulate_devices=8)
        assert trained.finished
"""


@pytest.mark.long
def test_a_program_trains_twice(place: Path) -> None:
    (place / "twice.py").write_text(TWICE)
    with two_processes(place, *EIGHT, program=["twice.py"]) as started:
        outputs = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    assert losses(place / "of-0") == losses(place / "of-1")


def test_wrong_input_ends_both_processes(place: Path) -> None:
    with two(place, "--output-dir", "wrong", "--data.path", "nowhere") as started:
        outputs = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [2, 2], "\n".join(outputs)
    for output in outputs:
        assert "nowhere" in output
        assert "Traceback" not in output


@pytest.mark.long
def test_nothing_outlives_a_killed_process(place: Path) -> None:
    """Neither the other process nor any worker, which would keep the pipes open.

    Here the coordinator dies; launch/test_real_run.py and the chaos tests kill the other one.
    """
    with two(place, "--output-dir", "killed", "--loop.steps", 1_000_000) as started:
        wait_for_steps(started, place / "killed", 3)
        started[0].send_signal(signal.SIGKILL)
        for process in reversed(started):
            output, _ = process.communicate(timeout=120)
            ends = (75, -signal.SIGABRT) if process is started[1] else (-signal.SIGKILL,)
            assert process.returncode in ends, output


@pytest.mark.long
def test_a_stopped_process_does_not_block_the_other(place: Path) -> None:
    stuck = ["--output-dir", "stuck", "--loop.steps", 1_000_000, "--loop.hang_timeout_s", 20]
    with two(place, *stuck) as started:
        wait_for_steps(started, place / "stuck", 5)
        started[1].send_signal(signal.SIGSTOP)
        output, _ = started[0].communicate(timeout=120)
        assert started[0].returncode == 75, output
        assert "hung: no step ended within 20 s after step" in output
    report = (place / "stuck" / "hang-0.txt").read_text()
    # The last status that process 1 published.
    assert re.search(r"process 1: [a-z]+, (no step|step \d+) done, heartbeat \d+ s ago", report)
    assert "Thread 0x" in report


@pytest.mark.long
def test_a_signal_while_one_process_compiles_ends_both(place: Path) -> None:
    cold = {"JAX_COMPILATION_CACHE_DIR": str(place / "cold-cache")}
    with two(place, "--output-dir", "early", both=cold) as started:
        log = place / "early" / "log.1.txt"
        deadline = time.monotonic() + 120
        while not (log.exists() and "examples per step" in log.read_text()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        started[1].send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=120)[0] for process in started]
    assert [process.returncode for process in started] == [75, 75], "\n".join(outputs)
    assert not (place / "early" / "checkpoints").exists()


@pytest.mark.long
def test_an_error_in_one_process_ends_both(place: Path) -> None:
    """Even before the run starts: here the second process cannot create its cache."""
    with two(place, "--output-dir", "torn", second={"JAXTRAIN_CACHE": "/proc/nowhere"}) as started:
        outputs = [process.communicate(timeout=60)[0] for process in reversed(started)]
        assert started[1].returncode == 2, outputs
        assert "/proc/nowhere" in outputs[0]
        assert started[0].returncode not in (0, None)


@pytest.mark.long
def test_a_signal_to_one_process_stops_and_saves_both(place: Path) -> None:
    with two(place, "--output-dir", "stopped", "--loop.steps", 1_000_000) as started:
        wait_for_steps(started, place / "stopped", 3)
        started[1].send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [75, 75], "\n".join(outputs)
    assert pointer.steps(place / "stopped/checkpoints")[-1] == max(losses(place / "stopped"))


UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
NOT_A_BYTE = (0, resource.RLIM_INFINITY)
OFTEN = ["--loop.steps", 1_000_000, "--checkpoint.every", 8, "--loop.eval_every", "None"]


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_a_save_that_fails_in_one_process_fails_in_both(place: Path, number: int) -> None:
    """Neither waits for the other in vain; the next save works in both, or both end."""
    run = place / f"fails-in-{number}"
    folder, log = run / "checkpoints", run / ("log.txt" if number else "log.1.txt")
    failed = f"(process {number}: File too large)"
    with two(place, "--output-dir", run, *OFTEN) as started:
        wait_for(started, lambda: bool(pointer.steps(folder)))
        resource.prlimit(started[number].pid, resource.RLIMIT_FSIZE, NOT_A_BYTE)
        wait_for(started, lambda: failed in log.read_text())  # the log of the other process
        resource.prlimit(started[number].pid, resource.RLIMIT_FSIZE, UNLIMITED)
        newest = max(pointer.steps(folder))
        wait_for(started, lambda: max(pointer.steps(folder), default=0) > newest)
        resource.prlimit(started[number].pid, resource.RLIMIT_FSIZE, NOT_A_BYTE)
        outputs = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [75, 75], "\n".join(outputs)
    for output in outputs:
        last = [line for line in output.splitlines() if line.startswith("error: ")]
        assert len(last) == 1, output
        assert last[0].startswith("error: 3 saves in a row have failed: ")
        assert failed in last[0]
        assert "Traceback" not in output
    kept = pointer.steps(folder)
    assert kept[-1] > newest
    assert [pointer.verify(folder / f"{step}.json") for step in kept] == [""] * len(kept)
    assert {path.name for path in folder.iterdir()} == {f"{step}.json" for step in kept}


@pytest.mark.long
def test_both_fall_back_to_the_same_checkpoint(place: Path) -> None:
    short = ["--output-dir", "spoilt", "--loop.eval_every", "None"]
    train(place, *EIGHT, *short)
    files = pointer.folder_of(place / "spoilt/checkpoints/6.json")
    data = max((files / "state").rglob("d/*"), key=lambda one: one.stat().st_size)
    data.write_bytes(bytes(data.stat().st_size))
    with two(place, *short, "--resume", "latest") as started:
        outputs = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    assert "/checkpoints/6 is damaged (" in outputs[0]
    for log in ("log.txt", "log.1.txt"):
        assert "resumed from" in (place / "spoilt" / log).read_text()
        assert (
            "checkpoints/3: step 3 of 6, 24 examples seen" in (place / "spoilt" / log).read_text()
        )
    assert pointer.steps(place / "spoilt" / "checkpoints") == [3, 6]
    assert (place / "spoilt/damaged/checkpoints/6.txt").exists()


def wait_for(started: list[subprocess.Popen[str]], condition: Callable[[], bool]) -> None:
    """Waits until the condition holds; both processes must run until then."""
    deadline = time.monotonic() + 120
    while not condition():
        assert [process.poll() for process in started] == [None, None]
        assert time.monotonic() < deadline
        time.sleep(0.02)
