"""The key-value store: threads stand for processes, and a dictionary for the service."""

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from distributed.fake_key_value import FakeClient

from jaxtrain.distributed import key_value
from jaxtrain.distributed.key_value import (
    FailedElsewhere,
    KeyValueStore,
    NoAnswer,
    Votes,
    announced,
)
from jaxtrain.errors import InputError, RunAgain


def in_all(work: Callable[[KeyValueStore], Any], processes: int = 2) -> list[Any]:
    """Returns what the function returns or raises in each process."""

    def caught(store: KeyValueStore) -> Any:
        try:
            return work(store)
        except Exception as error:
            return (type(error), str(error))

    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(caught, FakeClient(processes).stores()))


def test_a_long_wait_is_announced_repeatedly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_value, "ANNOUNCE_AFTER_S", 0.3)
    monkeypatch.setattr(key_value, "ANNOUNCE_AGAIN_S", 0.1)
    lines: list[str] = []
    missing = [3]
    with announced(lambda: f"process {missing[-1]}", lines.append):
        time.sleep(0.35)
        missing.append(7)
        time.sleep(0.4)
    assert lines[0].startswith("waiting for process 3 (0 s so far)")
    assert lines[-1].startswith("waiting for process 7 (")
    count = len(lines)
    time.sleep(0.2)
    assert len(lines) == count


def test_one_process_does_not_wait() -> None:
    store = KeyValueStore()
    assert store.gather("host", "a", 0) == ["a"]
    assert store.decide("decision", lambda: "b", 0) == "b"
    store.barrier("start", 0)
    assert key_value.of_run() == KeyValueStore()  # these tests are not connected


def test_texts_are_gathered_in_process_order_repeatedly() -> None:
    def work(store: KeyValueStore) -> list[list[str]]:
        return [store.gather("host", text * store.index, 10) for text in ("a", "b")]

    assert in_all(work, 3) == [[["", "a", "aa"], ["", "b", "bb"]]] * 3


def test_a_process_that_publishes_nothing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the others wait for it, and in the error."""
    monkeypatch.setattr(key_value, "ANNOUNCE_AFTER_S", 0.1)

    def work(store: KeyValueStore) -> Any:
        return None if store.index in (1, 3) else store.gather("host name", "here", 0.3)

    begin = "process 1 did not publish its host name within 0 s (DEADLINE_"
    results = in_all(work, 4)
    for number in (0, 2):
        kind, message = results[number]
        assert kind is NoAnswer
        assert message.startswith(begin)
        assert "\n" not in message
    assert "waiting for processes 1, 3 of 4 (host name) (0 s so far)" in capsys.readouterr().err


def test_a_barrier_waits_for_all_and_names_the_missing() -> None:
    came = []

    def work(store: KeyValueStore) -> None:
        time.sleep(0.2 * store.index)
        came.append(store.index)
        store.barrier("start", 10)
        assert sorted(came) == [0, 1, 2]
        if store.index < 2:
            store.barrier("end", 0.3)

    first, second, third = in_all(work, 3)
    assert third is None
    begin = "process 2 of 3 did not reach the barrier 'end' within 0 s (DEADLINE_EXCEE"
    for kind, message in (first, second):
        assert issubclass(kind, RunAgain)
        assert message.startswith(begin)


def test_a_lost_service_is_reported_as_missing_processes() -> None:
    client = FakeClient()

    def fail(*_: object) -> None:
        raise RuntimeError("UNAVAILABLE: connection refused\nmore")

    store = client.stores()[1]
    client.key_value_dir_get = fail  # type: ignore[assignment,method-assign]
    client.wait_at_barrier = fail  # type: ignore[method-assign]
    with pytest.raises(NoAnswer, match=r"^the other processes did not .*refused\): see what"):
        store.barrier("start", 1)


def _fail(error: Exception) -> str:
    raise error


@pytest.mark.parametrize(
    ("decision", "raised"),
    [
        (lambda: "a folder", None),
        (lambda: "", None),
        (functools.partial(_fail, InputError("wrong")), InputError),
        (functools.partial(_fail, RunAgain("a full disk")), RunAgain),
    ],
)
def test_every_process_gets_the_decision_of_process_zero(
    decision: Any, raised: type[Exception] | None
) -> None:
    """Either its text or its error."""

    def work(store: KeyValueStore) -> str:
        return store.decide("decision", pytest.fail if store.index else decision, 10)

    first, second = in_all(work)
    assert first == second
    assert first == decision() if raised is None else first[0] is raised


@pytest.fixture
def client() -> FakeClient:
    return FakeClient(3)


def voters(client: FakeClient, timeout_s: float = 60.0) -> list[Votes]:
    return [Votes(store, timeout_s) for store in client.stores()]


def test_a_failure_in_one_process_is_one_in_all(client: FakeClient) -> None:
    processes = voters(client)

    def save(votes: Votes) -> list[str]:
        votes.begin()
        failure = "full" if votes is processes[1] else ""
        return [votes.agree("prepare", ""), votes.agree("written", failure)]

    with ThreadPoolExecutor(3) as pool:
        for _ in range(4):
            assert list(pool.map(save, processes)) == [["", "process 1: full"]] * 3
    assert {key.split("/")[3] for key in client.values} == {"3", "4"}  # older ones are deleted


def test_a_process_that_fails_early_releases_those_that_wait_for_it(client: FakeClient) -> None:
    """Orbax's threads wait at barriers that the failed process never reaches."""
    processes = voters(client)
    released = []

    def save(votes: Votes) -> str:
        votes.begin()
        if votes is processes[2]:
            time.sleep(0.2)
            return votes.agree("written", "full")
        try:
            votes.barrier(key="commit", timeout_ms=1)
        except FailedElsewhere as error:
            released.append(str(error))
            return votes.agree("written", str(error))
        return votes.agree("written", "")

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(save, processes)) == ["process 2: full"] * 3
    assert released == ["process 2: full"] * 2


def test_a_later_failure_does_not_fail_an_earlier_part(client: FakeClient) -> None:
    """A process that is slow to count a part that all passed still passes it."""
    processes = voters(client)
    for votes in processes:
        votes.begin()
        votes._vote("prepare", "")
    processes[0]._vote("mounted", "gone")
    assert processes[1]._count("prepare", give_up_early=False) == ""


def test_the_others_wait_for_a_slow_process_zero(client: FakeClient) -> None:
    """It may hash a large checkpoint between two votes."""
    processes = voters(client, timeout_s=0.1)

    def save(votes: Votes) -> str:
        votes.begin()
        if votes is processes[0]:
            while len(client.values) < 2:
                time.sleep(0.01)
            time.sleep(0.5)
        return votes.agree("end", "")

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(save, processes)) == [""] * 3


def test_a_vote_that_is_too_late_gets_the_failed_outcome(client: FakeClient) -> None:
    """Although the late process then sees the votes of all."""
    processes = voters(client, timeout_s=1.0)

    def save(votes: Votes) -> str:
        votes.begin()
        if votes is processes[2]:
            while not any("/outcome/" in key for key in client.values):
                time.sleep(0.01)
        return votes.agree("end", "")

    with ThreadPoolExecutor(3) as pool:
        outcomes = list(pool.map(save, processes))
    assert outcomes == ["process 2 did not answer within 1 s"] * 3


def test_a_process_that_does_not_answer_is_named(client: FakeClient) -> None:
    first, second, _ = voters(client, timeout_s=0.2)
    first.begin()
    second.begin()
    second._vote("written", "")
    assert first.agree("written", "") == "process 2 did not answer within 0.2 s"
