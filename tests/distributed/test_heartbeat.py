"""What the processes of a run know of each other, over a store in memory."""

import json
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxtrain.distributed import heartbeat
from jaxtrain.distributed.heartbeat import Peers
from jaxtrain.distributed.signals import StopSignals


class Memory:
    """A key-value store that all see; it can be made to fail and to hang."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.before: Callable[[], None] = lambda: None

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        assert allow_overwrite
        self.before()
        self.values[key] = value

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        self.before()
        return [pair for pair in self.values.items() if pair[0].startswith(key)]

    def tell(self, process: int, **told: Any) -> None:
        """As another process would."""
        known = {"beat": 1, "phase": "training", "step": 7, "stop": None} | told
        self.values[f"jaxtrain/peers/{process}"] = json.dumps(known)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"BEAT_S": 0.02, "SILENCE_S": 1.0, "GRACE_S": 0.2, "LEAVE_S": 1.0}.items():
        monkeypatch.setattr(heartbeat, name, seconds)


@pytest.fixture
def store() -> Memory:
    return Memory()


@pytest.fixture
def lost(store: Memory) -> Iterator[list[str]]:
    """Process 1 of two; what it is told when process 0 is lost."""
    told: list[str] = []
    with Peers(1, 2, store, StopSignals()) as one:
        one.when_lost(told.append)
        yield told


def wait_for(holds: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 20
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_each_knows_where_the_others_are(store: Memory) -> None:
    with Peers(0, 2, store, StopSignals()) as zero, Peers(1, 2, store, StopSignals()) as one:
        zero.tell("evaluation", 41)
        wait_for(lambda: "evaluation, update 41 done" in one.table()[0])
        assert one.table()[1] == "process 1: start, no update done, heard of 0 s ago"


def test_a_silent_process_is_lost(store: Memory, lost: list[str]) -> None:
    store.tell(0)
    said = wait_for(lambda: lost and lost[0])
    assert said.startswith("process 0 was not heard of for 1 s (training, update 7 done")


def test_one_that_never_came_is_lost_too(lost: list[str]) -> None:
    assert "process 0 was not heard of for 1 s (unheard)" in wait_for(lambda: lost and lost[0])


def test_a_beating_process_is_not_lost(store: Memory, lost: list[str]) -> None:
    for beat in range(30):
        store.tell(0, beat=beat)
        time.sleep(0.05)
    assert lost == []


def test_a_service_that_fails_is_a_lost_process_zero(store: Memory, lost: list[str]) -> None:
    def fail() -> None:
        raise RuntimeError("UNAVAILABLE: connection refused\nmore")

    store.before = fail
    said = wait_for(lambda: lost and lost[0])
    assert said == "process 0 is gone (UNAVAILABLE: connection refused)"


def test_a_service_that_hangs_is_a_lost_process_zero(store: Memory, lost: list[str]) -> None:
    go_on = threading.Event()
    store.before = lambda: go_on.wait(30) and None
    said = wait_for(lambda: lost and lost[0])
    go_on.set()
    assert said.startswith("process 0 was not heard of for 1 s")


def test_one_that_has_left_is_followed(store: Memory, lost: list[str]) -> None:
    store.tell(0, left=75)
    assert wait_for(lambda: lost and lost[0]) == "process 0 has ended with exit code 75"


def test_nobody_is_missed_at_the_end(store: Memory) -> None:
    told: list[str] = []
    with Peers(1, 2, store, StopSignals()) as one:
        one.when_lost(told.append)
        one.ending()
        store.tell(0, left=75)
        time.sleep(1.5)
    assert told == []


def test_a_signal_of_one_is_a_signal_of_all(store: Memory) -> None:
    with StopSignals() as signals:
        signals.hold()
        with Peers(1, 2, store, signals) as one:
            one.when_lost(pytest.fail)
            store.tell(0, stop="SIGTERM")
            wait_for(lambda: signals.requested)
            assert signals.requested == "SIGTERM"
            wait_for(lambda: json.loads(store.values["jaxtrain/peers/1"])["stop"] == "SIGTERM")
            one.ending()


def test_process_zero_leaves_last(store: Memory) -> None:
    zero = Peers(0, 3, store, StopSignals())
    store.tell(1, left=75)
    leaving = threading.Thread(target=zero.leave, args=(75,))
    leaving.start()
    time.sleep(0.3)
    assert leaving.is_alive()  # process 2 is still here
    store.tell(2, left=75)
    began = time.monotonic()
    leaving.join()
    assert time.monotonic() - began < 0.5
    assert json.loads(store.values["jaxtrain/peers/0"])["left"] == 75


def test_but_it_does_not_wait_for_ever(store: Memory) -> None:
    began = time.monotonic()
    Peers(0, 2, store, StopSignals()).leave(75)
    assert 0.9 < time.monotonic() - began < 5


@pytest.mark.parametrize(("code", "own"), [(2, 2), (130, 130), (1, 75), (75, 75)])
def test_the_exit_code_that_follows(code: int, own: int) -> None:
    """What a person has to mend ends all of them alike; the rest can be run again."""
    program = f"""
    import sys, time
    sys.path[:0] = ["tests"]
    from distributed.test_heartbeat import Memory
    from jaxtrain.distributed import heartbeat as peers
    from jaxtrain.distributed.signals import StopSignals
    peers.BEAT_S = peers.GRACE_S = 0.05
    store = Memory()
    store.tell(0, left={code})
    with peers.Peers(1, 2, store, StopSignals()):
        time.sleep(60)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == own, ended.stderr
    assert f"process 0 has ended with exit code {code}" in ended.stderr
