"""Liveness monitoring between processes, over a key-value store in memory."""

import json
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_key_value import FakeClient

from jaxtrain.distributed import heartbeat
from jaxtrain.distributed.heartbeat import Heartbeat
from jaxtrain.distributed.signals import StopSignals


class Shared(FakeClient):
    """A store in which the test plays the other processes."""

    def beat(self, process: int, **status: Any) -> None:
        """Publishes a heartbeat as that process would."""
        known = {"beat": 1, "phase": "training", "step": 7, "stop": None} | status
        self.values[f"jaxtrain/heartbeat/{process}"] = f"={json.dumps(known)}"

    def status(self, process: int) -> Any:
        """Returns the status that a process has published."""
        return json.loads(self.values.get(f"jaxtrain/heartbeat/{process}", "={}")[1:])


def heartbeat_of(process: int, client: Shared, signals: StopSignals | None = None) -> Heartbeat:
    return Heartbeat(client.stores()[process], signals or StopSignals())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"BEAT_S": 0.02, "SILENCE_S": 1.0, "GRACE_S": 0.2, "LEAVE_S": 1.0}.items():
        monkeypatch.setattr(heartbeat, name, seconds)


@pytest.fixture
def store() -> Shared:
    return Shared()


@pytest.fixture
def lost(store: Shared) -> Iterator[list[str]]:
    """Yields the reasons with which process 1 of two loses process 0."""
    reasons: list[str] = []
    with heartbeat_of(1, store) as one:
        one.when_lost(reasons.append)
        yield reasons


def wait_for(holds: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 20
    while not (found := holds()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found


def test_the_table_shows_every_process(store: Shared) -> None:
    with heartbeat_of(0, store) as zero, heartbeat_of(1, store) as one:
        zero.update("evaluation", 41)
        wait_for(lambda: "evaluation, step 41 done" in one.table()[0])
        assert one.table()[1] == "process 1: start, no step done, heartbeat 0 s ago"


def test_a_silent_process_is_lost(store: Shared, lost: list[str]) -> None:
    store.beat(0)
    reason = wait_for(lambda: lost and lost[0])
    assert reason.startswith("process 0 sent no heartbeat for 1 s (training, step 7 done")


def test_a_process_without_any_heartbeat_is_lost(lost: list[str]) -> None:
    assert "process 0 sent no heartbeat for 1 s (no heartbeat yet)" in wait_for(
        lambda: lost and lost[0]
    )


def test_a_beating_process_is_not_lost(store: Shared, lost: list[str]) -> None:
    for beat in range(30):
        store.beat(0, beat=beat)
        time.sleep(0.05)
    assert lost == []


def test_a_service_that_fails_is_a_lost_process_zero(store: Shared, lost: list[str]) -> None:
    def fail() -> None:
        raise RuntimeError("UNAVAILABLE: connection refused\nmore")

    store.before = fail
    reason = wait_for(lambda: lost and lost[0])
    assert reason == "process 0 is gone (UNAVAILABLE: connection refused)"


def test_a_service_that_hangs_is_a_lost_process_zero(store: Shared, lost: list[str]) -> None:
    ends = threading.Event()
    store.before = lambda: ends.wait(30) and None
    reason = wait_for(lambda: lost and lost[0])
    ends.set()
    assert reason.startswith("process 0 sent no heartbeat for 1 s")


def test_a_process_that_left_ends_the_others(store: Shared, lost: list[str]) -> None:
    store.beat(0, left=75)
    assert wait_for(lambda: lost and lost[0]) == "process 0 has ended with exit code 75"


def test_a_process_that_leaves_at_the_end_is_not_lost(store: Shared) -> None:
    reasons: list[str] = []
    with heartbeat_of(1, store) as one:
        one.when_lost(reasons.append)
        one.ending()
        store.beat(0, left=75)
        time.sleep(1.5)
    assert reasons == []


def test_a_stop_signal_of_one_process_stops_all(store: Shared) -> None:
    with StopSignals() as signals:
        signals.hold()
        with heartbeat_of(1, store, signals) as one:
            one.when_lost(pytest.fail)
            store.beat(0, stop="SIGTERM")
            wait_for(lambda: signals.requested)
            assert signals.requested == "SIGTERM"
            wait_for(lambda: store.status(1)["stop"] == "SIGTERM")
            one.ending()


def test_process_zero_leaves_last(store: Shared) -> None:
    store.processes = 3
    zero = heartbeat_of(0, store)
    store.beat(1, left=75)
    leaving = threading.Thread(target=zero.leave, args=(75,))
    leaving.start()
    time.sleep(0.3)
    assert leaving.is_alive()  # process 2 is still here
    store.beat(2, left=75)
    began = time.monotonic()
    leaving.join()
    assert time.monotonic() - began < 0.5
    assert store.status(0)["left"] == 75


def test_process_zero_does_not_wait_forever(store: Shared) -> None:
    began = time.monotonic()
    heartbeat_of(0, store).leave(75)
    assert 0.9 < time.monotonic() - began < 5


@pytest.mark.parametrize(("code", "own"), [(2, 2), (130, 130), (1, 75), (75, 75)])
def test_the_exit_code_after_another_process_left(code: int, own: int) -> None:
    """Errors that you must fix end all processes alike; the others are temporary failures."""
    program = f"""
    import sys, time
    sys.path[:0] = ["tests"]
    from distributed.test_heartbeat import Shared, heartbeat_of
    from jaxtrain.distributed import heartbeat
    heartbeat.BEAT_S = heartbeat.GRACE_S = 0.05
    store = Shared()
    store.beat(0, left={code})
    with heartbeat_of(1, store):
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
