"""What the processes of a run know of each other while each is busy.

A process that is stuck or gone leaves the others waiting in a collective that never ends; the
runtime notices that after 100 s, or not at all
(https://github.com/jax-ml/jax/issues/38503). So a thread of each process tells the others, every
other second, through the coordination service where it is, and hears where they are: that one got
a stop signal, that one has left, that one is silent.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

from jaxtrain import terminal
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.errors import INTERRUPTED, RUN_AGAIN, WRONG_USE, first_line

BEAT_S = 2.0
# A process that was not heard of for so long is stuck or gone. jax's own limit is 100 s.
SILENCE_S = 60.0
# A thread that wakes up so much too late was stopped, and the whole process with it (SIGSTOP).
OVERSLEPT_S = 1.0
# After another process left: time to find out why by an error of this process's own, or to stop
# over the signal that both got (signals.UNWIND_S).
GRACE_S = 6.0
# Process 0 carries the service; it goes last, but does not wait longer than this for the others.
LEAVE_S = 5.0

_KEYS = "jaxtrain/peers/"


class Store(Protocol):
    """The part of the client of jax's coordination service that is used here."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        """Sets a key for all processes."""

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """All keys that begin with this one, and their values."""


class Peers:
    """Tells the other processes where this one is, and notices when one of them is gone.

    Without others it only remembers. Enter it to start the thread, leave it to end it.

    Args:
        process: number of this process.
        processes: of the run.
        store: shared by all of them; None in a run of one process.
        signals: told when another process got a stop signal.
    """

    def __init__(
        self, process: int, processes: int, store: Store | None, signals: StopSignals
    ) -> None:
        self.process = process
        self._processes = processes
        self._store = store
        self._signals = signals
        self._lock = threading.Lock()
        self._own: dict[str, Any] = {"beat": 0, "phase": "start", "step": None}
        self._heard: dict[int, tuple[dict[str, Any], float]] = {}
        self._began = time.monotonic()
        self._ending = False
        self._closed = threading.Event()
        self._lost: Callable[[str], None] = _end_without_words
        # Two threads: the first may wait for ever for a service whose process is stuck.
        self._threads = [
            threading.Thread(target=work, name="peers", daemon=True)
            for work in (self._talk, self._watch)
        ]

    def __enter__(self) -> Self:
        if self._store is not None:
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._closed.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(BEAT_S)

    def tell(self, phase: str, step: int | None) -> None:
        """Where this process is now; the others hear of it with the next beat."""
        with self._lock:
            self._own |= {"phase": phase, "step": step}

    def when_lost(self, then: Callable[[str], None]) -> None:
        """Has ``then`` called, with the reason, when another process is gone; it ends this one."""
        self._lost = then

    def ending(self) -> None:
        """All processes end now, each when it is ready: from here on none misses another."""
        self._ending = True

    def table(self) -> list[str]:
        """A line for each process: its phase, its last update, and when it was heard of."""
        now = time.monotonic()
        with self._lock:
            known = {**self._heard, self.process: (self._own, now)}
        return [
            f"process {number}: " + (_line(*known[number], now) if number in known else "unheard")
            for number in range(self._processes)
        ]

    def leave(self, code: int) -> None:
        """Says that this process ends now; process 0 waits until the others have said so too.

        Returns after ``LEAVE_S`` at the latest, also where the service is gone.

        Args:
            code: exit code.
        """
        self._ending = True
        if self._store is None:
            return
        worker = threading.Thread(target=self._leave, args=(code,), daemon=True)
        worker.start()
        worker.join(LEAVE_S)

    def _leave(self, code: int) -> None:
        with self._lock:
            self._own |= {"left": code}
        deadline = time.monotonic() + LEAVE_S
        with contextlib.suppress(Exception):  # the service may be gone, whose errors are its own
            self._publish()
            while self.process == 0 and time.monotonic() < deadline:
                self._listen()
                if sum("left" in told for told, _ in self._heard.values()) == self._processes - 1:
                    return
                time.sleep(0.05)

    def _talk(self) -> None:
        failing_since: float | None = None
        while not self._closed.wait(BEAT_S):
            try:
                self._publish()
                self._listen()
                failing_since = None
            except Exception as error:  # of the service: its type is the runtime's own
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > GRACE_S and not self._ending:
                    self._lost(f"process 0 is gone ({first_line(error)})")

    def _watch(self) -> None:
        while True:
            began = time.monotonic()
            if self._closed.wait(BEAT_S):
                return
            overslept_s = time.monotonic() - began - BEAT_S
            if overslept_s > OVERSLEPT_S:
                # This process was stopped itself, and heard nothing: that time does not count.
                with self._lock:
                    self._began += overslept_s
                    for number, (told, heard) in self._heard.items():
                        self._heard[number] = (told, heard + overslept_s)
            self._judge()

    def _publish(self) -> None:
        assert self._store is not None, "there is one where there are several processes"
        with self._lock:
            self._own["beat"] += 1
            text = json.dumps(self._own | {"stop": self._signals.heard})
        self._store.key_value_set(f"{_KEYS}{self.process}", text, allow_overwrite=True)

    def _listen(self) -> None:
        assert self._store is not None, "there is one where there are several processes"
        now = time.monotonic()
        for key, text in self._store.key_value_dir_get(_KEYS):
            number, told = int(key.rsplit("/", 1)[1]), json.loads(text)
            if number == self.process:
                continue
            before = self._heard.get(number)
            if before is None or before[0]["beat"] != told["beat"]:
                with self._lock:
                    self._heard[number] = (told, now)

    def _judge(self) -> None:
        """Takes over another's stop signal, and ends this process when another is gone."""
        now = time.monotonic()
        for number in range(self._processes):
            if self._ending or number == self.process:
                continue
            told, heard = self._heard.get(number, ({}, self._began))
            if told.get("stop"):
                self._signals.request(told["stop"])
            if "left" in told:
                self._follow(number, told["left"])
            elif now - heard > SILENCE_S:
                last = _line(told, heard, now) if told else "unheard"
                self._lost(
                    f"process {number} was not heard of for {SILENCE_S:g} s ({last}): it is stuck "
                    "or gone"
                )

    def _follow(self, number: int, code: int) -> None:
        if self._closed.wait(GRACE_S) or self._ending:
            return
        reason = f"process {number} has ended with exit code {code}"
        if code in (WRONG_USE, INTERRUPTED):  # not to be run again
            terminal.warn(f"error: {reason}, and this one with it")
            self.leave(code)
            os._exit(code)
        self._lost(reason)


def _line(told: dict[str, Any], heard: float, now: float) -> str:
    step = "no update" if told["step"] is None else f"update {told['step']}"
    left = f", left with exit code {told['left']}" if "left" in told else ""
    return f"{told['phase']}, {step} done, heard of {now - heard:.0f} s ago{left}"


def _end_without_words(reason: str) -> None:
    """While there is no directory to write stacks into."""
    terminal.warn(f"{reason}; exit code {RUN_AGAIN}")
    os._exit(RUN_AGAIN)
