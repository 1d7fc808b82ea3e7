"""Functions in real worker processes: their messages, their errors and their end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from program import wait_for

from jaxtrain.config import invocation
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.jobs.subprocess_worker import SubprocessWorker, WorkerFailed, environment

TESTS = str(Path(__file__).parents[1])


def worker(name: str, *, grace_s: float = 5.0, **request: Any) -> SubprocessWorker:
    variables = environment({**os.environ, "PYTHONPATH": TESTS})
    return SubprocessWorker(f"jobs.worker_functions:{name}", request, variables, grace_s)


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_messages_arrive_in_order() -> None:
    with worker("count", to=3) as running:
        received = list(running.messages(60))
    assert [one["number"] for one in received] == [0, 1, 2]
    assert received[0]["é"] == "\n"
    assert received[0]["start"] == ["imports", "interpreter"]
    assert not alive(running.pid)


@pytest.mark.parametrize(
    ("again", "kind", "args"),
    [(True, RunAgain, ("the disk is full",)), (False, InputError, ("a is 1", "b is 2"))],
)
def test_an_error_for_the_user_is_raised_in_the_parent(
    again: bool, kind: type[Exception], args: tuple[str, ...]
) -> None:
    with worker("refuse", again=again) as running:
        received = running.messages(60)
        assert next(received) == {"before": True}
        with pytest.raises(kind) as caught:
            next(received)
    assert caught.value.args == args


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fail", "ended with exit code 1: ValueError: odd"),
        ("kill_itself", "was ended by SIGKILL (out of host memory?)"),
        ("leave", "ended with exit code 3: line 8"),
        ("break_off", "ended with exit code 4"),
        (
            "nowhere",
            "ended with exit code 1: AttributeError: module 'jobs.worker_functions' has no ",
        ),
    ],
)
def test_another_failure_is_described(name: str, said: str) -> None:
    with worker(name) as running, pytest.raises(WorkerFailed) as caught:
        list(running.messages(60))
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
    assert caught.value.killed_by == ("SIGKILL" if name == "kill_itself" else "")
    if name == "leave":
        assert caught.value.last_lines == [f"line {number}" for number in range(4, 9)]


def test_an_interpreter_that_does_not_start_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with worker("count", to=1) as running, pytest.raises(WorkerFailed, match=r"^ended with exit"):
        next(running.messages(60))


@pytest.mark.parametrize("stuck", [False, True])
def test_a_slow_worker_is_terminated(stuck: bool, tmp_path: Path) -> None:
    """It has time to clean up, and is killed if it does not end."""
    tidied = tmp_path / "tidied"
    grace_s = 0.5 if stuck else 30.0
    with worker("sleep", grace_s=grace_s, tidied=str(tidied), stuck=stuck) as running:
        assert next(running.messages(60)) == {"pid": running.pid, "ignores": True}
        with pytest.raises(TimeoutError):
            next(running.messages(0.1))
        began = time.monotonic()
    assert time.monotonic() - began < 20
    assert not alive(running.pid)
    assert tidied.exists() is not stuck


def test_a_worker_ends_with_its_parent(tmp_path: Path) -> None:
    """Even if the parent was killed."""
    starter = (
        "import time\n"
        "from jobs.test_subprocess_worker import worker\n"
        f"running = worker('sleep', tidied={str(tmp_path / 'tidied')!r}, stuck=False)\n"
        "print(next(running.messages(60))['pid'], flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", starter],
        stdout=subprocess.PIPE,
        text=True,
        env=environment({**os.environ, "PYTHONPATH": TESTS}),
    )
    assert parent.stdout is not None
    process = int(parent.stdout.readline())
    assert alive(process)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: not alive(process), seconds=20)


def test_the_environment_is_that_of_the_parent_plus_changes() -> None:
    outside = {"A": "1", "B": "2", "PYTHONPATH": "/x", invocation.PROGRAM: "jaxtrain"}
    inside = environment(outside, without=("A",), C="3")
    assert inside["PYTHONPATH"].endswith(f"{os.pathsep}/x")
    assert (Path(inside.pop("PYTHONPATH").split(os.pathsep)[0]) / "jaxtrain").is_dir()
    level = {"TF_CPP_MIN_LOG_LEVEL": "2", invocation.PROGRAM: "jaxtrain"}
    assert inside == {"B": "2", "C": "3", **level}
