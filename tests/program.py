"""Runs jaxtrain in separate processes, on tiny real inputs."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain.checkpoint import pointer
from jaxtrain.checkpoint.restore import restore

CHECKOUT = Path(__file__).resolve().parent.parent

# demo_mlm, reduced so that it compiles in a few seconds. Tests should not change other values that
# affect compilation, including the learning rate: then they share the compilation cache.
TINY_MLM = [
    *("--config", "demo_mlm"),
    *("--model.hidden", "32", "--model.ff", "64", "--model.layers", "1"),
    *("--model.heads", "2", "--model.vocab_size", "300", "--model.sequence_length", "32"),
    *("--model.dropout", "0.1"),
    *("--data.batch_size", "8", "--data.workers", "0"),
    *("--optim.peak_lr", "1e-2", "--optim.schedule", "constant", "--optim.warmup_steps", "0"),
    *("--optim.warmup_fraction", "None"),
    *("--loop.epochs", "None", "--loop.log_every", "1", "--loop.eval_every", "None"),
    *("--checkpoint.best_metric", "None"),
    *("--mesh.min_shard_elements", "64"),
]
# The same, where almost the usual norm counts as bad, so that some steps are bad, and two in a row
# roll back: a config file in the run's folder, which `write_often_bad` writes.
OFTEN_BAD = ["--config", "often_bad.py", *TINY_MLM[2:], "--optim.peak_lr", "1e-3"]
_OFTEN_BAD = """
from jaxtrain import config
from jaxtrain.training import skip_step, step_recorder

skip_step.LARGEST_NORM, step_recorder.MOST_IN_A_ROW = 0.945, 2
run = config.named("demo_mlm")
"""


PROGRAM = ("-m", "jaxtrain.main")


def write_often_bad(directory: Path) -> None:
    """Writes the config file of :data:`OFTEN_BAD`."""
    (directory / "often_bad.py").write_text(_OFTEN_BAD)


def command(*arguments: object) -> list[str]:
    """Returns the command line of jaxtrain with the Python of the tests."""
    return [sys.executable, *PROGRAM, *map(str, arguments)]


def environment(directory: Path, **more: str) -> dict[str, str]:
    """Returns environment variables for a run with its caches in ``directory``."""
    return dict(os.environ) | {
        "PYTHONPATH": str(CHECKOUT),
        "JAXTRAIN_CACHE": str(directory / "cache"),
        "PYTHONWARNINGS": "default",
        **more,
    }


def run(directory: Path, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs jaxtrain in ``directory`` and waits for its end."""
    return execute(directory, *command(*arguments), **more)


def execute(
    directory: Path, *words: str, timeout: float = 300, **more: str
) -> subprocess.CompletedProcess[str]:
    """Runs another command in ``directory`` as :func:`run` does; ``timeout`` is in seconds."""
    return subprocess.run(
        words,
        cwd=directory,
        env=environment(directory, **more),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def started(directory: Path, *arguments: object, **more: str) -> subprocess.Popen[str]:
    """Starts jaxtrain as :func:`run` does, in its own session, with one pipe for its output."""
    return subprocess.Popen(
        command(*arguments),
        cwd=directory,
        env=environment(directory, **more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def lock_held(run: Path) -> Iterator[subprocess.Popen[str]]:
    """Locks a run directory in another process, as a run does, until the block ends."""
    hold = (
        "import pathlib, sys; from jaxtrain.storage import lock; "
        "lock.hold(pathlib.Path(sys.argv[1]), print); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", hold, str(run)],
        env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def wait_for(
    condition: Callable[[], Any], *processes: subprocess.Popen[str], seconds: float = 240.0
) -> Any:
    """Returns what the condition returns once that is true; the processes must run until then."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        for process in processes:
            assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def free_port() -> int:
    """Returns a port of 127.0.0.1 at which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def train(directory: Path, *arguments: object, **more: str) -> str:
    """Runs jaxtrain, which must succeed; returns its standard output."""
    found = run(directory, *arguments, **more)
    assert found.returncode == 0, f"{found.stdout}\n{found.stderr}"
    assert "leaked" not in found.stderr, found.stderr  # shared memory of Grain's workers
    return found.stdout


@contextlib.contextmanager
def two_processes(
    directory: Path,
    *arguments: object,
    first: dict[str, str] | None = None,
    second: dict[str, str] | None = None,
    both: dict[str, str] | None = None,
    only_second: Sequence[object] = (),
    second_directory: Path | None = None,
    program: Sequence[str] = PROGRAM,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts jaxtrain as processes 0 and 1 of a run; kills both at the end of the block.

    Args:
        program: arguments of Python, before those of jaxtrain.
    """
    port = free_port()
    both_started = [
        subprocess.Popen(
            [sys.executable, *program, *map(str, (*arguments, *(only_second if number else ())))],
            cwd=(second_directory if number else None) or directory,
            env=environment(
                directory,
                JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}",
                JAX_NUM_PROCESSES="2",
                JAX_PROCESS_ID=str(number),
                **((both or {}) | ((second if number else first) or {})),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        yield both_started
    finally:
        for process in both_started:
            process.kill()
            process.communicate()


def records(run_directory: Path) -> dict[int, dict[str, Any]]:
    """Returns step -> its merged record in metrics.jsonl."""
    merged: dict[int, dict[str, Any]] = {}
    for line in (run_directory / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        merged.setdefault(record["step"], {}).update(record)
    return merged


def losses(run_directory: Path) -> dict[int, float]:
    """Returns step -> training loss, with all digits."""
    return {
        step: record["train/loss"]
        for step, record in sorted(records(run_directory).items())
        if "train/loss" in record
    }


def example_ids(run_directory: Path) -> dict[int, tuple[int, list[int]]]:
    """Returns step -> (examples seen before it, its examples, ordered by process)."""
    found: dict[int, tuple[int, list[int]]] = {}
    files = run_directory.glob("examples*.jsonl")
    for path in sorted(files, key=lambda path: path.name.count(".")):  # process 0 first
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            position, ids = found.get(entry["step"], (entry["position"], []))
            assert position == entry["position"]
            found[entry["step"]] = position, ids + entry["ids"]
    return dict(sorted(found.items()))


def arrays(run_directory: Path) -> dict[str, np.ndarray]:
    """Returns dotted path -> array, of a run's newest checkpoint."""
    newest = pointer.newest_complete(run_directory / pointer.CHECKPOINTS)
    assert newest is not None
    return arrays_of(newest)


def kill_and_resume(place: Path, *arguments: object) -> dict[str, np.ndarray]:
    """Kills a run after step 4 and resumes it: it must equal the run ``straight`` bit for bit.

    Returns:
        The arrays of both.
    """
    arguments = (*arguments, "--output-dir", "killed", "--resume", "latest")
    process = started(place, *arguments)
    wait_for((place / "killed/checkpoints/4.json").exists, process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert "examples seen" in train(place, *arguments)
    assert losses(place / "killed") == losses(place / "straight")
    straight, killed = arrays(place / "straight"), arrays(place / "killed")
    assert straight.keys() == killed.keys()
    for name, array in straight.items():
        np.testing.assert_array_equal(array, killed[name], err_msg=name)
    return straight


def arrays_of(checkpoint: Path) -> dict[str, np.ndarray]:
    """Returns dotted path -> array, of a checkpoint."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=here)
        for name, array in pointer.read_shapes(checkpoint).items()
    }
    restored = restore(checkpoint, wanted)
    return {name: np.asarray(array) for name, array in restored.items()}


def write_corpus(directory: Path, files: int = 6, words: int = 600, seed: int = 0) -> Path:
    """Writes a folder of small texts with a small vocabulary, always the same."""
    rng = random.Random(seed)
    vocabulary = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 7))) for _ in range(150)]
    folder = directory / "corpus"
    folder.mkdir(exist_ok=True)
    for number in range(files):
        sentences = (
            " ".join(rng.choices(vocabulary, k=rng.randint(4, 12))) + "." for _ in range(words // 8)
        )
        (folder / f"text{number}.txt").write_text(" ".join(sentences))
    return folder
