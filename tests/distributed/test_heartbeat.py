"""Liveness monitoring between processes, mostly over a key-value store in memory."""

import json
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from distributed.fake_key_value import FakeClient
from program import two_processes, wait_for

from jaxtrain.distributed import heartbeat
from jaxtrain.distributed.heartbeat import Heartbeat
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.distributed.signals import StopSignals


class Shared(FakeClient):
    """A store in which the test plays the other processes."""

    def beat(self, process: int, **status: Any) -> None:
        """Publishes a heartbeat as that process would."""
        known = {"beat": 1, "phase": "training", "step": 7, "stop": None} | status
        self.values[f"jaxtrain/heartbeat/0/{process}"] = f"={json.dumps(known)}"

    def status(self, process: int) -> Any:
        """Returns the status that a process has published."""
        return json.loads(self.values.get(f"jaxtrain/heartbeat/0/{process}", "={}")[1:])


def heartbeat_of(process: int, client: Shared, signals: StopSignals | None = None) -> Heartbeat:
    return Heartbeat(client.stores()[process], signals or StopSignals())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"BEAT_S": 0.02, "GRACE_S": 0.2, "LEAVE_S": 1.0}.items():
        monkeypatch.setattr(heartbeat, name, seconds)


@pytest.fixture
def store() -> Shared:
    return Shared()


def test_the_table_shows_every_process(store: Shared) -> None:
    with heartbeat_of(0, store) as zero, heartbeat_of(1, store) as one:
        zero.update("evaluation", 41)
        wait_for(lambda: "evaluation, step 41 done" in one.table()[0])
        assert one.table()[1] == "process 1: start, no step done, heartbeat 0 s ago"


def test_a_process_that_leaves_at_the_end_is_not_lost(store: Shared) -> None:
    reasons: list[str] = []
    with heartbeat_of(1, store) as one:
        one.when_lost(lambda reason, code: reasons.append(reason))
        one.ending()
        store.beat(0, left=75)
        time.sleep(1.5)
    assert reasons == []


def test_a_stop_signal_of_one_process_stops_all(store: Shared) -> None:
    with StopSignals() as signals:
        signals.hold()
        with heartbeat_of(1, store, signals) as one:
            one.when_lost(lambda reason, code: pytest.fail(reason))
            store.beat(0, stop="SIGTERM")
            wait_for(lambda: signals.requested)
            assert signals.requested == "SIGTERM"
            wait_for(lambda: store.status(1)["stop"] == "SIGTERM")
            one.ending()


def test_a_second_run_of_a_program_ignores_the_signals_of_the_first(store: Shared) -> None:
    with StopSignals() as signals:
        signals.hold()
        of_program = store.stores()[1]
        Heartbeat(of_program, signals)
        store.beat(0, stop="SIGTERM", left=75)
        with Heartbeat(of_program, signals) as second:
            second.when_lost(lambda reason, code: pytest.fail(reason))
            time.sleep(0.5)
        assert signals.requested is None


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


@pytest.mark.parametrize(("code", "own"), [(2, 2), (1, 75)])
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


GLOO = "UNKNOWN: Gloo AllGather failed: [pair.cc:538] Read error: Connection reset by peer"
NCCL = (
    "INTERNAL: NCCL operation ncclGroupEnd() failed: remote process exited or there was a network "
    "error. Last NCCL warning(error) log entry (may be unrelated) ''."
)


@pytest.mark.parametrize(
    ("kind", "text", "left", "reason", "code"),
    [
        (RuntimeError, GLOO, None, "another process is gone or unreachable (", 75),
        (ValueError, NCCL, None, "another process is gone or unreachable (", 75),
        (RuntimeError, NCCL, 1, "process 0 has ended with exit code 1", 75),
        (ValueError, GLOO, 2, "process 0 has ended with exit code 2", 2),
    ],
)
def test_a_collective_that_fails_because_of_another_process(
    store: Shared, kind: type[Exception], text: str, left: int | None, reason: str, code: int
) -> None:
    store.beat(0, **({} if left is None else {"left": left}))
    found: list[tuple[str, int]] = []
    one = heartbeat_of(1, store)
    one.when_lost(lambda *lost: found.append(lost))
    with pytest.raises(kind), one.collectives():
        raise kind(text)
    assert found == [(f"{reason}{text})" if left is None else reason, code)]


def test_other_errors_of_the_runtime_are_unexpected(store: Shared) -> None:
    alone, one = Heartbeat(KeyValueStore(), StopSignals()), heartbeat_of(1, store)
    for process, text in ((one, "RESOURCE_EXHAUSTED: Out of memory"), (alone, GLOO)):
        process.when_lost(lambda reason, code: pytest.fail(reason))
        with pytest.raises(RuntimeError), process.collectives():
            raise RuntimeError(text)


IN_A_COLLECTIVE = """
import os
from jaxtrain import config
from jaxtrain.distributed import key_value, process_group
from jaxtrain.distributed.heartbeat import Heartbeat
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.sharding import make_mesh

process_group.connect(os.environ, 2)
with Heartbeat(key_value.of_run(), StopSignals()) as heartbeat, heartbeat.collectives():
    mesh = make_mesh(config.Mesh(data=2, fsdp=1, shard="none"))
    exchange = process_group.Exchange(mesh, largest=("step",))
    for step in range(10_000_000):
        exchange.now({"step": step})
        if step == 3:
            print("three", flush=True)
"""


@pytest.mark.slow
def test_a_killed_process_is_a_temporary_failure_of_the_others(tmp_path: Path) -> None:
    """In a real collective."""
    with two_processes(tmp_path, program=["-c", IN_A_COLLECTIVE]) as started:
        other, killed = started
        assert other.stdout is not None
        output = ""
        while not output.endswith("three\n"):
            line = other.stdout.readline()
            assert line, output
            output += line
        killed.kill()
        output += other.communicate(timeout=120)[0]
        assert other.returncode == 75, output
        assert "another process is gone or unreachable (UNKNOWN: Gloo" in output
        assert "Traceback" not in output
