"""Exchanges texts between the processes of a run without using their devices.

jax's coordination service, which runs in process 0, is a key-value store for all processes. It
works before the devices do and while they are busy, from any thread, and has no short time limit
of its own (collectives between CPUs have one of 30 s). All exchange goes through
:class:`KeyValueStore`, under ``jaxtrain/<topic>/<process>``:

- :meth:`~KeyValueStore.publish` and :meth:`~KeyValueStore.published`: publish a text, and read
  those published so far;
- :meth:`~KeyValueStore.gather`: the texts of all processes;
- :meth:`~KeyValueStore.decide`: process 0 decides; all processes get its decision or its error;
- :meth:`~KeyValueStore.barrier`: waits for all processes;
- :class:`Votes`: all processes agree on whether each part of a save worked.

Every wait has a deadline, and after 30 s prints which processes it waits for, and why.
"""

import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from jaxtrain import terminal
from jaxtrain.errors import InputError, RunAgain, first_line

ANNOUNCE_AFTER_S, ANNOUNCE_AGAIN_S = 30.0, 60.0

_ROOT = "jaxtrain"
_LISTED = 16  # processes in a message
_POLL_S = (0.01, 0.5)  # at first, and at most


@contextlib.contextmanager
def announced(
    describe: Callable[[], str], say: Callable[[str], None] = terminal.warn
) -> Iterator[None]:
    """Prints what the body waits for if it takes long, and again every minute.

    Args:
        describe: describes it, such as ``"process 3 of 4"``; called from another thread.
    """
    began, over = time.monotonic(), threading.Event()

    def watch() -> None:
        pause_s = ANNOUNCE_AFTER_S
        while not over.wait(pause_s):
            say(f"waiting for {describe()} ({time.monotonic() - began:.0f} s so far)")
            pause_s = ANNOUNCE_AGAIN_S

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


class Client(Protocol):
    """The methods used here of jax's client for its coordination service.

    Failures and timeouts raise a RuntimeError (such as jax.errors.JaxRuntimeError).
    """

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Sets a key for all processes; the value must not be empty."""

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Returns all keys below this one, and their values."""

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Returns a key's value, once it has one."""

    def key_value_delete(self, key: str) -> None:
        """Deletes all keys that begin with this one."""

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None:
        """Returns when all processes have called it."""


NO_VOTE = "did not answer within"
"""In the outcome of a vote, after the first process that did not vote."""


class NoAnswer(RunAgain):
    """A process did not answer in time, or the service is gone."""


class FailedElsewhere(Exception):
    """Another process failed, so this one would wait forever; the message names it and the
    reason."""


@dataclasses.dataclass(frozen=True)
class KeyValueStore:
    """The store that the processes of a run share, as seen by one of them.

    A topic names what is exchanged. :meth:`gather`, :meth:`decide` and :meth:`barrier` number the
    calls with the same topic, so all processes must make the same calls in the same order.

    Attributes:
        client: client of jax's service; None in a run of one process.
    """

    index: int = 0
    count: int = 1
    client: Client | None = None
    calls: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def publish(self, topic: str, text: str, *, again: bool = False) -> None:
        """Publishes a text of this process; publishing to a topic twice requires ``again``."""
        key = f"{_ROOT}/{topic}/{self.index}"
        self._service.key_value_set(key, f"={text}", allow_overwrite=again)

    def published(self, topic: str) -> dict[int, str]:
        """Returns process -> text, for the processes that have published one so far."""
        texts = self.below(topic)
        return {number: texts[str(number)] for number in range(self.count) if str(number) in texts}

    def below(self, topic: str) -> dict[str, str]:
        """Returns all texts below a topic by the rest of their key, such as ``"part/3"``."""
        prefix = f"{_ROOT}/{topic}/"
        pairs = self._service.key_value_dir_get(prefix)
        return {key.removeprefix(prefix): value[1:] for key, value in pairs}

    def gather(self, topic: str, text: str, timeout_s: float) -> list[str]:
        """Publishes a text and returns those of all processes, in process order.

        Raises:
            NoAnswer: a process published nothing in this time.
        """
        if self.client is None:
            return [text]
        topic = self.numbered(topic)
        self.publish(topic, text)
        with announced(lambda: f"{self._missing(topic)} ({_name(topic)})"):
            return [self._wait_for(topic, process, timeout_s) for process in range(self.count)]

    def decide(self, topic: str, decision: Callable[[], str], timeout_s: float) -> str:
        """Runs ``decision`` in process 0; every process returns its text or raises its error.

        Raises:
            RunAgain: ``decision`` raised it; or as NoAnswer in the others, if process 0 took too
                long.
        """
        if self.client is None:
            return decision()
        topic = self.numbered(topic)
        if self.index == 0:
            try:
                outcome = "=" + decision()
            except (InputError, RunAgain) as error:
                outcome = ("!" if isinstance(error, InputError) else "?") + str(error)
            self.publish(topic, outcome)
        else:
            with announced(lambda: f"process 0 of {self.count} ({_name(topic)})"):
                outcome = self._wait_for(topic, 0, timeout_s)
        if outcome.startswith("!"):
            raise InputError(outcome[1:])
        if outcome.startswith("?"):
            raise RunAgain(outcome[1:])
        return outcome[1:]

    def barrier(self, topic: str, timeout_s: float) -> None:
        """Waits until all processes have called this.

        Raises:
            NoAnswer: a process did not call it in this time.
        """
        if self.client is None:
            return
        topic = self.numbered(topic)
        self.publish(topic, "")
        try:
            with announced(lambda: f"{self._missing(topic)} ({_name(topic)})"):
                self.client.wait_at_barrier(f"{_ROOT}/{topic}", int(timeout_s * 1000))
        except RuntimeError as error:
            raise NoAnswer(
                f"{self._missing(topic)} did not reach the barrier {_name(topic)!r} within "
                f"{timeout_s:,.0f} s ({first_line(error)}): see what the others printed, and "
                "start all processes at the same time"
            ) from error

    def forget(self, topic: str) -> None:
        """Deletes all texts below a topic."""
        self._service.key_value_delete(f"{_ROOT}/{topic}/")

    def numbered(self, topic: str) -> str:
        """Returns a new topic for each call, such as ``"host/0"`` for the first with "host"."""
        number = self.calls[topic]
        self.calls[topic] += 1
        return f"{topic}/{number}"

    @property
    def _service(self) -> Client:
        assert self.client is not None, "a run of one process has no service"
        return self.client

    def _wait_for(self, topic: str, process: int, timeout_s: float) -> str:
        key = f"{_ROOT}/{topic}/{process}"
        try:
            return self._service.blocking_key_value_get(key, int(timeout_s * 1000))[1:]
        except RuntimeError as error:
            raise NoAnswer(
                f"process {process} did not publish its {_name(topic)} within "
                f"{timeout_s:,.0f} s ({first_line(error)}): see what it printed, and start all "
                "processes at the same time"
            ) from error

    def _missing(self, topic: str) -> str:
        try:
            published = self.published(topic)
        except RuntimeError:  # the service is gone
            return "the other processes"
        missing = [str(process) for process in range(self.count) if process not in published]
        if not missing:  # all have published, so the service itself failed
            return "the other processes"
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        plural = "" if len(missing) == 1 else "es"
        return f"process{plural} {', '.join(missing[:_LISTED])}{more} of {self.count}"


_calls_of_run: collections.Counter[str] = collections.Counter()


def of_run() -> KeyValueStore:
    """Returns this run's store; call :func:`jaxtrain.distributed.process_group.connect` first.

    Unlike ``jax.process_count()``, it neither starts the devices nor waits for other processes.
    """
    from jax._src import distributed  # jax has no public access to its coordination service

    joined = distributed.global_state
    if joined.client is None:
        return KeyValueStore()
    return KeyValueStore(joined.process_id, joined.num_processes, joined.client, _calls_of_run)


class Votes:
    """Agrees between processes on whether a save worked, in threads beside the training.

    A save that fails in one process must fail in all of them: otherwise one would retry or end
    while another waits for it forever. A collective cannot do this (the training uses those), so
    the processes vote in the store. Process 0 counts the votes and publishes the outcome: if every
    process counted, one could give up on a vote that another still sees arrive.

    All processes must call the methods in the same order.

    Args:
        timeout_s: longest time for process 0 to wait for a vote. The others wait for process 0
            without a limit, since it may be hashing a large checkpoint: if it is gone or stuck,
            :mod:`jaxtrain.distributed.heartbeat` or the watchdog ends them.
    """

    def __init__(self, store: KeyValueStore, timeout_s: float) -> None:
        self._store = store
        self._alone = store.client is None
        self._topic = store.numbered("save")
        self._timeout_s = timeout_s
        self._save = 0

    def begin(self) -> None:
        """Begins a save: votes on the one before no longer count."""
        self._save += 1
        if self._store.index == 0 and not self._alone:
            # No process reads these any more: all have voted at the start of the save after them.
            self._store.forget(f"{self._topic}/{self._save - 2}")

    def agree(self, stage: str, failure: str) -> str:
        """Votes on whether a stage worked in this process; returns whether it did in all of them.

        Returns:
            The failure of the first process that has one; "" if it worked everywhere.
        """
        if self._alone:
            return failure
        self._vote(stage, failure)
        topic, outcome = f"{self._topic}/{self._save}", f"{stage}/outcome"
        if self._store.index == 0:
            failure = self._count(stage, give_up_early=False)
            self._store.publish(f"{topic}/{outcome}", failure)
            return failure
        pauses = _pauses()
        while f"{outcome}/0" not in (texts := self._store.below(topic)):
            time.sleep(next(pauses))
        return texts[f"{outcome}/0"]

    def barrier(self, *, key: str, timeout_ms: int) -> None:
        """Waits for the other processes; Orbax calls it in its own thread.

        Raises:
            FailedElsewhere: a process failed, so it will not call this.
        """
        del timeout_ms
        if self._alone:
            return
        self._vote(key, "")
        failure = self._count(key, give_up_early=True)
        if failure:
            raise FailedElsewhere(failure)

    def _vote(self, stage: str, failure: str) -> None:
        if failure and not failure.startswith("process "):
            failure = f"process {self._store.index}: {failure}"
        self._store.publish(f"{self._topic}/{self._save}/{stage}", failure)

    def _count(self, stage: str, *, give_up_early: bool) -> str:
        deadline, pauses = time.monotonic() + self._timeout_s, _pauses()
        while True:
            texts = self._store.below(f"{self._topic}/{self._save}")
            votes = {
                process: texts[vote]
                for process in range(self._store.count)
                if (vote := f"{stage}/{process}") in texts
            }
            complete = len(votes) == self._store.count
            # A process that failed in an earlier stage does not vote on this one.
            counted = texts if give_up_early else votes if complete else {}
            failure = next(filter(None, counted.values()), "")
            if failure or complete:
                return failure
            if time.monotonic() > deadline:
                silent = min(set(range(self._store.count)) - votes.keys())
                return f"process {silent} {NO_VOTE} {self._timeout_s:g} s"
            time.sleep(next(pauses))


def _pauses() -> Iterator[float]:
    """Yields the pauses between two polls of the store, in seconds: short at first."""
    pause_s, longest_s = _POLL_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, longest_s)


def _name(topic: str) -> str:
    return topic.partition("/")[0]
