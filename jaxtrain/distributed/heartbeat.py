"""Liveness monitoring: how the processes of a run detect each other's failure.

A process that is stuck or gone leaves the others waiting in a collective that never ends; the
runtime notices that after 100 s, or not at all
(https://github.com/jax-ml/jax/issues/38503). So a thread in each process publishes its status to
the key-value store every two seconds and reads the status of the others: whether one got a stop
signal, has left, or is silent.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from jaxtrain import terminal
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.errors import INTERRUPTED, RUN_AGAIN, WRONG_USE, first_line

BEAT_S = 2.0
# A process whose heartbeat is older is stuck or gone. jax's own limit is 100 s.
SILENCE_S = 60.0
# A thread that wakes up this much too late was stopped along with its process (SIGSTOP).
OVERSLEPT_S = 1.0
# After another process left: time for this process to fail with an error of its own that explains
# why, or to stop because both got a signal (signals.UNWIND_S).
GRACE_S = 6.0
# Process 0 runs the service and leaves last, but waits no longer than this for the others.
LEAVE_S = 5.0

_TOPIC = "heartbeat"
_NEVER = "no heartbeat yet"


class Heartbeat:
    """Publishes the status of this process, and notices when another process is gone.

    A context manager that starts and ends its threads; a run of one process has none.

    Args:
        store: the run's key-value store.
        signals: requested to stop when another process got a stop signal.

    Attributes:
        process: number of this process.
    """

    def __init__(self, store: KeyValueStore, signals: StopSignals) -> None:
        self.process = store.index
        self._store = store
        self._signals = signals
        self._lock = threading.Lock()
        self._own: dict[str, Any] = {"beat": 0, "phase": "start", "step": None}
        # Process -> its last status, and when this process first read it.
        self._others: dict[int, tuple[dict[str, Any], float]] = {}
        self._began = time.monotonic()
        self._ending = False
        self._closed = threading.Event()
        self._on_lost: Callable[[str], None] = _exit
        # Two threads: the first may wait forever for a service whose process is stuck.
        self._threads = [
            threading.Thread(target=work, name="heartbeat", daemon=True)
            for work in (self._beat, self._watch)
        ]

    def __enter__(self) -> Self:
        if self._store.client is not None:
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(BEAT_S)

    def update(self, phase: str, step: int | None) -> None:
        """Sets the status of this process; the next heartbeat publishes it."""
        with self._lock:
            self._own |= {"phase": phase, "step": step}

    def when_lost(self, then: Callable[[str], None]) -> None:
        """Sets what to call, with the reason, when another process is gone; it must exit."""
        self._on_lost = then

    def ending(self) -> None:
        """Marks the end of the run: from here on a process that leaves is not reported."""
        self._ending = True

    def table(self) -> list[str]:
        """Returns a line per process: its phase, its last step, and its heartbeat's age."""
        now = time.monotonic()
        with self._lock:
            known = {**self._others, self.process: (self._own, now)}
        return [
            f"process {process}: " + (_line(*known[process], now) if process in known else _NEVER)
            for process in range(self._store.count)
        ]

    def leave(self, code: int) -> None:
        """Publishes that this process ends now; process 0 waits until the others have, too.

        Returns after at most ``LEAVE_S``, even if the service is gone.

        Args:
            code: the exit code of this process.
        """
        self._ending = True
        if self._store.client is None:
            return
        worker = threading.Thread(target=self._leave, args=(code,), daemon=True)
        worker.start()
        worker.join(LEAVE_S)

    def _leave(self, code: int) -> None:
        with self._lock:
            self._own |= {"left": code}
        deadline = time.monotonic() + LEAVE_S
        with contextlib.suppress(Exception):  # the service may be gone; it has its own errors
            self._publish()
            while self.process == 0 and time.monotonic() < deadline:
                self._read()
                left = sum("left" in status for status, _ in self._others.values())
                if left == self._store.count - 1:
                    return
                time.sleep(0.05)

    def _beat(self) -> None:
        failing_since: float | None = None
        while not self._closed.wait(BEAT_S):
            try:
                self._publish()
                self._read()
                failing_since = None
            except Exception as error:  # from the service; the type belongs to the runtime
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > GRACE_S and not self._ending:
                    self._on_lost(f"process 0 is gone ({first_line(error)})")

    def _watch(self) -> None:
        while True:
            began = time.monotonic()
            if self._closed.wait(BEAT_S):
                return
            overslept_s = time.monotonic() - began - BEAT_S
            if overslept_s > OVERSLEPT_S:
                # This process itself was stopped and read nothing: that time does not count.
                with self._lock:
                    self._began += overslept_s
                    for process, (status, since) in self._others.items():
                        self._others[process] = (status, since + overslept_s)
            self._check_others()

    def _publish(self) -> None:
        with self._lock:
            self._own["beat"] += 1
            text = json.dumps(self._own | {"stop": self._signals.heard})
        self._store.publish(_TOPIC, text, again=True)

    def _read(self) -> None:
        now = time.monotonic()
        for process, text in self._store.published(_TOPIC).items():
            if process == self.process:
                continue
            status, before = json.loads(text), self._others.get(process)
            if before is None or before[0]["beat"] != status["beat"]:
                with self._lock:
                    self._others[process] = (status, now)

    def _check_others(self) -> None:
        """Adopts another process's stop signal; ends this process when another is gone."""
        now = time.monotonic()
        for process in range(self._store.count):
            if self._ending or process == self.process:
                continue
            status, since = self._others.get(process, ({}, self._began))
            if status.get("stop"):
                self._signals.request(status["stop"])
            if "left" in status:
                self._follow(process, status["left"])
            elif now - since > SILENCE_S:
                last = _line(status, since, now) if status else _NEVER
                self._on_lost(
                    f"process {process} sent no heartbeat for {SILENCE_S:g} s ({last}): it is "
                    "stuck or gone"
                )

    def _follow(self, process: int, code: int) -> None:
        if self._closed.wait(GRACE_S) or self._ending:
            return
        reason = f"process {process} has ended with exit code {code}"
        if code in (WRONG_USE, INTERRUPTED):  # a retry would not help
            terminal.warn(f"error: {reason}; ending this process, too")
            self.leave(code)
            os._exit(code)
        self._on_lost(reason)


def _line(status: dict[str, Any], since: float, now: float) -> str:
    step = "no step" if status["step"] is None else f"step {status['step']}"
    left = f", left with exit code {status['left']}" if "left" in status else ""
    return f"{status['phase']}, {step} done, heartbeat {now - since:.0f} s ago{left}"


def _exit(reason: str) -> None:
    """Exits without writing stacks: there is no run directory yet."""
    terminal.warn(f"{reason}; exit code {RUN_AGAIN}")
    os._exit(RUN_AGAIN)
