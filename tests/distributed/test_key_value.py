"""What processes tell each other: threads stand for them, and a dictionary for the service."""

import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fake_key_value import FakeClient

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
    """What the function returns or raises in each process."""

    def caught(store: KeyValueStore) -> Any:
        try:
            return work(store)
        except Exception as error:
            return (type(error), str(error))

    with ThreadPoolExecutor(processes) as pool:
        return list(pool.map(caught, FakeClient(processes).stores()))


def test_a_long_wait_is_announced_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_value, "ANNOUNCE_AFTER_S", 0.3)
    monkeypatch.setattr(key_value, "ANNOUNCE_AGAIN_S", 0.1)
    said: list[str] = []
    missing = [3]
    with announced(lambda: f"process {missing[-1]}", said.append):
        time.sleep(0.35)
        missing.append(7)
        time.sleep(0.4)
    assert said[0].startswith("waiting for process 3 (0 s so far)")
    assert said[-1].startswith("waiting for process 7 (")
    count = len(said)
    time.sleep(0.2)
    assert len(said) == count


def test_a_short_wait_is_silent() -> None:
    said: list[str] = []
    with announced(lambda: "nothing", said.append):
        pass
    assert said == []


def test_alone_nothing_waits() -> None:
    store = KeyValueStore()
    assert store.gather("host", "a", 0) == ["a"]
    assert store.decide("decision", lambda: "b", 0) == "b"
    store.barrier("start", 0)
    assert key_value.of_run() == KeyValueStore()  # these tests are not connected


def test_texts_are_gathered_in_the_order_of_the_processes_again_and_again() -> None:
    def work(store: KeyValueStore) -> list[list[str]]:
        return [store.gather("host", text * store.index, 10) for text in ("a", "b")]

    assert in_all(work, 3) == [[["", "a", "aa"], ["", "b", "bb"]]] * 3


def test_a_process_that_publishes_nothing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the others wait for it, and in the end."""
    monkeypatch.setattr(key_value, "ANNOUNCE_AFTER_S", 0.1)

    def work(store: KeyValueStore) -> Any:
        return None if store.index in (1, 3) else store.gather("host name", "here", 0.3)

    gone, said = (NoAnswer, "process 1 did not publish its host name within 0 s (DEADLINE_"), ""
    results = in_all(work, 4)
    for number in (0, 2):
        kind, said = results[number]
        assert kind is gone[0]
        assert said.startswith(gone[1])
        assert "\n" not in said
    assert "waiting for processes 1, 3 of 4 (host name) (0 s so far)" in capsys.readouterr().err


def test_a_barrier_waits_for_all_and_names_who_does_not_come() -> None:
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
    for kind, said in (first, second):
        assert issubclass(kind, RunAgain)
        assert said.startswith("process 2 of 3 did not come to 'end' within 0 s (DEADLINE_EXCEE")


def test_a_service_that_is_gone_is_a_process_that_does_not_come() -> None:
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
def test_every_process_takes_the_decision_of_process_zero(
    decision: Any, raised: type[Exception] | None
) -> None:
    """Its text, or its error."""

    def work(store: KeyValueStore) -> str:
        return store.decide("decision", pytest.fail if store.index else decision, 10)

    first, second = in_all(work)
    assert first == second
    assert first == decision() if raised is None else first[0] is raised


def test_keys_of_no_process_are_not_read() -> None:
    client = FakeClient()
    store = client.stores()[0]
    store.publish("status", "mine")
    client.values |= {"jaxtrain/status/x": "=?", "jaxtrain/status/2": "=?", "jaxtrain/other/1": "="}
    assert store.published("status") == {0: "mine"}


@pytest.fixture
def client() -> FakeClient:
    return FakeClient(3)


def voters(client: FakeClient, timeout_s: float = 60.0) -> list[Votes]:
    return [Votes(store, timeout_s) for store in client.stores()]


def test_alone_nobody_votes() -> None:
    alone = Votes(KeyValueStore(), 0.0)
    alone.begin()
    assert alone.agree("prepare", "") == ""
    assert alone.agree("written", "full") == "full"
    alone.barrier(key="commit", timeout_ms=0)


def test_what_fails_in_one_has_failed_in_all(client: FakeClient) -> None:
    processes = voters(client)

    def save(votes: Votes) -> list[str]:
        votes.begin()
        failure = "full" if votes is processes[1] else ""
        return [votes.agree("prepare", ""), votes.agree("written", failure)]

    with ThreadPoolExecutor(3) as pool:
        for _ in range(4):
            assert list(pool.map(save, processes)) == [["", "process 1: full"]] * 3
    assert {key.split("/")[3] for key in client.values} == {"3", "4"}  # older ones are deleted


def test_who_fails_early_releases_those_who_wait_for_it(client: FakeClient) -> None:
    """As Orbax's threads do at its barriers: the failed one never comes there."""
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


def test_an_early_failure_does_not_reach_back(client: FakeClient) -> None:
    """Who is slow to look at a part that all passed still passes it."""
    processes = voters(client)
    for votes in processes:
        votes.begin()
        votes._vote("prepare", "")
    processes[0]._vote("there", "gone")
    assert processes[1]._count("prepare", give_up_early=False) == ""


def test_a_process_zero_that_works_long_is_waited_for(client: FakeClient) -> None:
    """As it hashes a large checkpoint between two votes."""
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


def test_who_comes_too_late_learns_that_it_is(client: FakeClient) -> None:
    """Though it finds the votes of all when it looks."""
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
