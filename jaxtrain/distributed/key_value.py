"""What the processes of a run tell each other beside their devices: one client of one store.

jax's coordination service, which runs in process 0, stores texts by key for all processes. It works
before the devices do and while they are busy, from any thread, and it has no short time limit of
its own (collectives between CPUs have one of 30 s). Everything that processes publish goes through
:class:`KeyValueStore`, under ``jaxtrain/<topic>/<process>``:

- :meth:`~KeyValueStore.publish` and :meth:`~KeyValueStore.published`: a text of each process, and
  those that are there now;
- :meth:`~KeyValueStore.gather`: the texts of all processes;
- :meth:`~KeyValueStore.decide`: process 0 decides, all processes take its decision or its error;
- :meth:`~KeyValueStore.barrier`: all processes have come;
- :class:`Votes`: all processes agree on whether each part of a save worked.

Whatever waits has a deadline, and prints after 30 s what it waits for, and for whom.
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
    what: Callable[[], str], say: Callable[[str], None] = terminal.warn
) -> Iterator[None]:
    """Prints what is waited for when the body takes long, and again every minute.

    Args:
        what: what is waited for, such as ``"process 3 of 4"``; called from another thread.
        say: takes a line.
    """
    began, over = time.monotonic(), threading.Event()

    def watch() -> None:
        pause_s = ANNOUNCE_AFTER_S
        while not over.wait(pause_s):
            say(f"waiting for {what()} ({time.monotonic() - began:.0f} s so far)")
            pause_s = ANNOUNCE_AGAIN_S

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


class Client(Protocol):
    """The part of jax's client of its coordination service that is used here.

    What fails raises a RuntimeError (jax.errors.JaxRuntimeError is one), also after a time limit.
    """

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Sets a key for all processes; the value must not be empty."""

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """All keys below this one, and their values."""

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """A key's value, once it has one."""

    def key_value_delete(self, key: str) -> None:
        """Deletes all keys that begin with this one."""

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None:
        """Returns when all processes have called it."""


class NoAnswer(RunAgain):
    """A process did not answer in time, or the service is gone."""


class FailedElsewhere(Exception):
    """Another process has failed in what this one waits for; names it and the reason."""


@dataclasses.dataclass(frozen=True)
class KeyValueStore:
    """The processes of a run as one of them sees them, and the store that they share.

    A topic names what is exchanged. :meth:`gather`, :meth:`decide` and :meth:`barrier` number the
    calls with the same topic, so all processes must call them alike.

    Attributes:
        index: number of this process.
        count: processes of the run.
        client: of jax's service; None in a run of one process.
        calls: topic -> how often it was used.
    """

    index: int = 0
    count: int = 1
    client: Client | None = None
    calls: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def publish(self, topic: str, text: str, *, again: bool = False) -> None:
        """Publishes a text of this process; without ``again`` a topic can be used once."""
        key = f"{_ROOT}/{topic}/{self.index}"
        self._service.key_value_set(key, f"={text}", allow_overwrite=again)

    def published(self, topic: str) -> dict[int, str]:
        """Process -> its text, of those that have published one by now."""
        texts = self.below(topic)
        return {number: texts[str(number)] for number in range(self.count) if str(number) in texts}

    def below(self, topic: str) -> dict[str, str]:
        """All texts below a topic by the rest of their key, such as ``"part/3"``."""
        prefix = f"{_ROOT}/{topic}/"
        pairs = self._service.key_value_dir_get(prefix)
        return {key.removeprefix(prefix): value[1:] for key, value in pairs}

    def wait_for(self, topic: str, process: int, timeout_s: float) -> str:
        """The text of another process.

        Raises:
            NoAnswer: it has published none in this time.
        """
        with announced(lambda: f"process {process} of {self.count} ({_name(topic)})"):
            return self._wait_for(topic, process, timeout_s)

    def collect(self, topic: str, timeout_s: float) -> list[str]:
        """The texts of all processes, in their order.

        Args:
            topic: that all of them publish.
            timeout_s: for each of them.

        Raises:
            NoAnswer: one has published nothing in this time.
        """
        with announced(lambda: f"{self._missing(topic)} ({_name(topic)})"):
            return [self._wait_for(topic, process, timeout_s) for process in range(self.count)]

    def gather(self, topic: str, text: str, timeout_s: float) -> list[str]:
        """Publishes a text and returns those of all processes, in their order.

        Raises:
            NoAnswer: a process has published nothing in this time.
        """
        if self.client is None:
            return [text]
        topic = self.numbered(topic)
        self.publish(topic, text)
        return self.collect(topic, timeout_s)

    def decide(self, topic: str, decision: Callable[[], str], timeout_s: float) -> str:
        """Runs ``decision`` in process 0; every process returns its text or raises its error.

        Raises:
            InputError: ``decision`` raised it.
            RunAgain: likewise; or as NoAnswer in the others, when process 0 took too long.
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
            outcome = self.wait_for(topic, 0, timeout_s)
        if outcome.startswith("!"):
            raise InputError(outcome[1:])
        if outcome.startswith("?"):
            raise RunAgain(outcome[1:])
        return outcome[1:]

    def barrier(self, topic: str, timeout_s: float) -> None:
        """Returns when all processes have come here.

        Raises:
            NoAnswer: one did not come in this time.
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
                f"{self._missing(topic)} did not come to {_name(topic)!r} within "
                f"{_duration(timeout_s)} ({first_line(error)}): see what the others printed, and "
                "start all processes at the same time"
            ) from error

    def forget(self, topic: str) -> None:
        """Deletes all texts below a topic."""
        self._service.key_value_delete(f"{_ROOT}/{topic}/")

    def numbered(self, topic: str) -> str:
        """A topic of its own for each call with this one, such as ``"host/0"``."""
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
                f"{_duration(timeout_s)} ({first_line(error)}): see what it printed, and start all "
                "processes at the same time"
            ) from error

    def _missing(self, topic: str) -> str:
        """The processes that have published nothing, in words."""
        try:
            there = self.published(topic)
        except RuntimeError:  # the service is gone
            return "the other processes"
        missing = [str(process) for process in range(self.count) if process not in there]
        if not missing:  # all came, and the service failed them
            return "the other processes"
        more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
        plural = "" if len(missing) == 1 else "es"
        return f"process{plural} {', '.join(missing[:_LISTED])}{more} of {self.count}"


_calls_of_run: collections.Counter[str] = collections.Counter()


def of_run() -> KeyValueStore:
    """The store of this run; call it after :func:`jaxtrain.distributed.process_group.connect`.

    ``jax.process_count()`` would start the devices, and wait for those of all processes.
    """
    from jax._src import distributed  # jax has no public way to its coordination service

    joined = distributed.global_state
    if joined.client is None:
        return KeyValueStore()
    return KeyValueStore(joined.process_id, joined.num_processes, joined.client, _calls_of_run)


class Votes:
    """How the processes of a run agree on whether a save worked, in threads beside the training.

    A save that fails in one process must fail in all of them: else one would try again, or end,
    while another waits for it for ever. A collective cannot do this (the training uses those), so
    they vote in the store. Process 0 counts the votes and publishes the outcome: were each process
    to count, one could give up waiting for what another still sees come.

    All processes call the methods alike.

    Args:
        store: of the run.
        timeout_s: longest time for process 0 to wait for a vote. The others wait for process 0 as
            long as it takes, which hashes a large checkpoint meanwhile: if it is gone or stuck,
            :mod:`jaxtrain.distributed.heartbeat` or the watchdog ends them.
    """

    def __init__(self, store: KeyValueStore, timeout_s: float) -> None:
        self._store = store
        self._alone = store.client is None
        self._topic = store.numbered("save")
        self._timeout_s = timeout_s
        self._save = 0

    def begin(self) -> None:
        """A save begins: votes on the one before no longer count."""
        self._save += 1
        if self._store.index == 0 and not self._alone:
            # No process can still read these: all have voted at the start of the save after them.
            self._store.forget(f"{self._topic}/{self._save - 2}")

    def agree(self, part: str, failure: str) -> str:
        """Votes on how a part went in this process, and returns how it went in all of them.

        Args:
            part: name of this part of the save, the same in all processes.
            failure: why it failed in this process; "" where it worked.

        Returns:
            The failure of the first process that has one; "" where it worked everywhere.
        """
        if self._alone:
            return failure
        self._vote(part, failure)
        topic, outcome = f"{self._topic}/{self._save}", f"{part}/outcome"
        if self._store.index == 0:
            failure = self._count(part, give_up_early=False)
            self._store.publish(f"{topic}/{outcome}", failure)
            return failure
        pauses = _pauses()
        while f"{outcome}/0" not in (texts := self._store.below(topic)):
            time.sleep(next(pauses))
        return texts[f"{outcome}/0"]

    def barrier(self, *, key: str, timeout_ms: int) -> None:
        """For Orbax, which waits here for the other processes in its own thread.

        Raises:
            FailedElsewhere: a process has failed, so it will not come.
        """
        del timeout_ms
        if self._alone:
            return
        self._vote(key, "")
        failure = self._count(key, give_up_early=True)
        if failure:
            raise FailedElsewhere(failure)

    def _vote(self, part: str, failure: str) -> None:
        if failure and not failure.startswith("process "):
            failure = f"process {self._store.index}: {failure}"
        self._store.publish(f"{self._topic}/{self._save}/{part}", failure)

    def _count(self, part: str, *, give_up_early: bool) -> str:
        deadline, pauses = time.monotonic() + self._timeout_s, _pauses()
        while True:
            texts = self._store.below(f"{self._topic}/{self._save}")
            votes = {
                process: texts[vote]
                for process in range(self._store.count)
                if (vote := f"{part}/{process}") in texts
            }
            complete = len(votes) == self._store.count
            # A process that failed in an earlier part does not vote on what the others wait for.
            counted = texts if give_up_early else votes if complete else {}
            failure = next(filter(None, counted.values()), "")
            if failure or complete:
                return failure
            if time.monotonic() > deadline:
                silent = min(set(range(self._store.count)) - votes.keys())
                return f"process {silent} did not answer within {self._timeout_s:g} s"
            time.sleep(next(pauses))


def _pauses() -> Iterator[float]:
    """Seconds between two looks at the store: short at first."""
    pause_s, longest_s = _POLL_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, longest_s)


def _name(topic: str) -> str:
    """A topic without the numbers of its calls."""
    return topic.partition("/")[0]


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.0f} h" if seconds >= 3600 else f"{seconds:.0f} s"
