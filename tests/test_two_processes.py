"""Two real processes with four virtual devices each are one run."""

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from program import TINY_MLM, command, environment, losses, records, train, write_corpus

pytestmark = pytest.mark.slow

EIGHT = [
    *TINY_MLM,
    *["--data.path", "corpus", "--mesh.data", "2", "--mesh.fsdp", "4", "--mesh.shard", "params"],
    *["--simulate-devices", "8", "--data.workers", "1", "--optim.peak_lr", "1e-2"],
    *["--loop.steps", "6", "--checkpoint.every", "3"],
    *["--loop.eval_every", "3", "--loop.eval_examples", "11"],
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a corpus."""
    directory = tmp_path_factory.mktemp("processes")
    write_corpus(directory)
    return directory


@contextlib.contextmanager
def two(
    directory: Path,
    *arguments: object,
    second: dict[str, str] | None = None,
    only_second: Sequence[object] = (),
    second_directory: Path | None = None,
) -> Iterator[list[subprocess.Popen[str]]]:
    """The program as processes 0 and 1 of a run; none outlives the block.

    Args:
        directory: where they run.
        arguments: of both.
        second: further variables of process 1.
        only_second: further arguments of process 1.
        second_directory: where process 1 runs, if that is another place.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # a port that nobody listens on
        port: int = probe.getsockname()[1]
    started = [
        subprocess.Popen(
            command(*EIGHT, *arguments, *(only_second if number else ())),
            cwd=(second_directory if number else None) or directory,
            env=environment(
                directory,
                JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}",
                JAX_NUM_PROCESSES="2",
                JAX_PROCESS_ID=str(number),
                **(second if second and number else {}),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def wait_for_steps(started: list[subprocess.Popen[str]], directory: Path, count: int) -> None:
    """Returns when a run has recorded so many steps."""
    metrics = directory / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= count):
        assert [process.poll() for process in started] == [None, None]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_processes_give_the_numbers_of_one(place: Path) -> None:
    train(place, *EIGHT, "--output-dir", "one")
    with two(place, "--output-dir", "two") as started:
        outputs = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    one, both = records(place / "one"), records(place / "two")
    assert sorted(one) == sorted(both) == [1, 2, 3, 4, 5, 6]
    for step, record in one.items():
        assert both[step]["train/loss"] == pytest.approx(record["train/loss"], rel=1e-5), step
        validated = sorted(name for name in record if name.startswith("val/"))
        assert validated == (["val/accuracy", "val/loss"] if step in (3, 6) else [])
        for name in validated:
            assert both[step][name] == pytest.approx(record[name], rel=1e-5), (step, name)
    steps = sorted(path.name for path in (place / "two" / "checkpoints").iterdir())
    assert steps == sorted(path.name for path in (place / "one" / "checkpoints").iterdir())
    assert (place / "two" / "log.txt").exists()
    assert (place / "two" / "log.1.txt").exists()
    assert "step 6/6" in outputs[0]
    assert "step 6/6" not in outputs[1]
    # And one process goes on with what two have saved.
    train(place, *EIGHT, "--loop.steps", 8, "--output-dir", "two", "--resume", "latest")
    assert sorted(losses(place / "two")) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_wrong_input_ends_both(place: Path) -> None:
    with two(place, "--output-dir", "wrong", "--data.path", "nowhere") as started:
        outputs = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [2, 2], "\n".join(outputs)
    for output in outputs:
        assert "nowhere" in output
        assert "Traceback" not in output


def test_two_configs_are_refused_by_both(place: Path) -> None:
    with two(place, "--output-dir", "unequal", only_second=["--optim.peak_lr", 0.5]) as started:
        outputs = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [2, 2], "\n".join(outputs)
    for output in outputs:
        assert "optim.peak_lr is 0.01 in process 0 and 0.5 in process 1" in output
        assert "Traceback" not in output
    assert not (place / "unequal").exists()


def test_a_directory_that_is_another_one_for_each_is_refused_by_both(
    place: Path, tmp_path: Path
) -> None:
    """The same path means another folder for each, as a local disk's does on two hosts."""
    (tmp_path / "corpus").symlink_to(place / "corpus")
    directory = "/proc/self/cwd/apart"
    with two(place, "--output-dir", directory, second_directory=tmp_path) as started:
        outputs = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [2, 2], "\n".join(outputs)
    for output in outputs:
        assert f"{directory} is not one folder for all processes" in output
        assert "process 1 " in output
        assert "Traceback" not in output
    assert not list(place.glob("apart/.shared*"))


def test_nothing_outlives_a_killed_coordinator(place: Path) -> None:
    """Neither the other process nor any worker; they would hold the pipes open."""
    with two(place, "--output-dir", "killed", "--loop.steps", 1_000_000) as started:
        wait_for_steps(started, place / "killed", 3)
        started[0].send_signal(signal.SIGKILL)
        for process in reversed(started):
            output, _ = process.communicate(timeout=60)
            assert process.returncode not in (0, None), output


def test_an_error_of_one_process_ends_both(place: Path) -> None:
    """Also before there is a run: here the second one's cache cannot be made."""
    with two(place, "--output-dir", "torn", second={"JAXTRAIN_CACHE": "/proc/nowhere"}) as started:
        outputs = [process.communicate(timeout=60)[0] for process in reversed(started)]
        assert started[1].returncode == 2, outputs
        assert "/proc/nowhere" in outputs[0]
        assert started[0].returncode not in (0, None)


def test_a_signal_to_one_process_stops_and_saves_both(place: Path) -> None:
    with two(place, "--output-dir", "stopped", "--loop.steps", 1_000_000) as started:
        wait_for_steps(started, place / "stopped", 3)
        started[1].send_signal(signal.SIGTERM)
        outputs = [process.communicate(timeout=60)[0] for process in started]
    assert [process.returncode for process in started] == [75, 75], "\n".join(outputs)
    (step,) = sorted(int(path.name) for path in (place / "stopped" / "checkpoints").iterdir())[-1:]
    assert step == max(losses(place / "stopped"))
