"""Processes agree on a save: threads stand for them, and a dictionary for the service."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxtrain.distributed.agreement import FailedElsewhere, Votes


class Store:
    """A dictionary that threads share."""

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}
        self._lock = threading.Lock()

    def key_value_set(self, key: str, value: str) -> None:
        with self._lock:
            assert key not in self.notes
            self.notes[key] = value

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        with self._lock:
            folder = key.rstrip("/") + "/"  # as the service does: never the key itself
            return [(name, value) for name, value in self.notes.items() if name.startswith(folder)]

    def key_value_delete(self, key: str) -> None:
        with self._lock:
            self.notes = {name: one for name, one in self.notes.items() if not name.startswith(key)}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(Votes, "_made", iter([0] * 100))  # these are processes, not runs
    return Store()


def three(store: Store, timeout_s: float = 60.0) -> list[Votes]:
    return [Votes(process, 3, store, timeout_s) for process in range(3)]


def test_alone_nobody_is_asked() -> None:
    alone = Votes(0, 1, None, 0.0)
    alone.begin()
    assert alone.agree("prepare", "") == ""
    assert alone.agree("written", "full") == "full"
    alone.barrier(key="commit", timeout_ms=0)


def test_what_fails_in_one_has_failed_in_all(store: Store) -> None:
    processes = three(store)

    def save(votes: Votes) -> list[str]:
        votes.begin()
        failure = "full" if votes is processes[1] else ""
        return [votes.agree("prepare", ""), votes.agree("written", failure)]

    with ThreadPoolExecutor(3) as pool:
        for _ in range(4):
            assert list(pool.map(save, processes)) == [["", "process 1: full"]] * 3
    assert {key.split("/")[3] for key in store.notes} == {"3", "4"}  # older ones are deleted


def test_who_fails_early_releases_those_who_wait_for_it(store: Store) -> None:
    """As Orbax's threads do at its barriers: the failed one never comes there."""
    processes = three(store)
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


def test_an_early_failure_does_not_reach_back(store: Store) -> None:
    """Who is slow to look at a part that all passed still passes it."""
    processes = three(store)
    for votes in processes:
        votes.begin()
        votes._vote("prepare", "")
    processes[0]._vote("there", "gone")
    assert processes[1]._outcome("prepare", give_up_early=False) == ""


def test_a_process_zero_that_works_long_is_waited_for(store: Store) -> None:
    """As it hashes a large checkpoint between two votes."""
    processes = three(store, timeout_s=0.1)

    def save(votes: Votes) -> str:
        votes.begin()
        if votes is processes[0]:
            while len(store.notes) < 2:
                time.sleep(0.01)
            time.sleep(0.5)
        return votes.agree("end", "")

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(save, processes)) == [""] * 3


def test_who_comes_too_late_learns_that_it_is(store: Store) -> None:
    """Though it finds the votes of all when it looks."""
    processes = three(store, timeout_s=1.0)

    def save(votes: Votes) -> str:
        votes.begin()
        if votes is processes[2]:
            while not any(key.endswith("/outcome") for key in store.notes):
                time.sleep(0.01)
        return votes.agree("end", "")

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(save, processes))
    assert found == ["process 2 did not answer within 1 s"] * 3


def test_a_process_that_does_not_answer_is_named(store: Store) -> None:
    first, second, _ = three(store, timeout_s=0.2)
    first.begin()
    second.begin()
    second._vote("written", "")
    assert first.agree("written", "") == "process 2 did not answer within 0.2 s"
