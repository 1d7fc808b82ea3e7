"""The status of each process of a run, as the others know it.

A thread in each process publishes its status to the key-value store every two seconds and reads the
status of the others: the phase and step, for the report of a hang; a stop signal, which then stops
all; and whether one has left, which ends the others with an exit code that means the same.

A process that is killed publishes nothing. The launcher then ends the others, and so does jax: its
client aborts the process (from C++, exit code 134) at once if process 0 is gone, and after
``SILENCE_S`` if another one is. A process that is alive but stuck is found by the watchdog.
"""

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Self

from jaxtrain import terminal
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.errors import INTERRUPTED, RUN_AGAIN, WRONG_USE, first_line

BEAT_S = 2.0
# jax's own limit for a process that sends it no heartbeat; its default is 100.
SILENCE_S = 60
# After another process left: time for this process to fail with an error of its own that explains
# why, or to stop because both got a signal (signals.UNWIND_S).
GRACE_S = 6.0
# Process 0 runs the service and leaves last. So long it waits for the others: after an error, one
# of which may be gone; after an error with an exit code that they must take over, which they do
# after GRACE_S; and at the end of a run, when they may still be writing.
LEAVE_S = 5.0
FOLLOW_S = 12.0
FINISH_S = 90.0

_TOPIC = "heartbeat"
_FINAL = (WRONG_USE, INTERRUPTED)  # exit codes that a retry would not change
# What gloo and NCCL report if a process that takes part in a collective is gone.
_LOST_PEER = re.compile(
    r"Gloo .* failed: |NCCL .*(remote process exited|Connection (closed|reset|refused))", re.DOTALL
)


class Heartbeat:
    """Publishes the status of this process, and follows another one that leaves.

    A context manager that starts and ends its thread; a run of one process has none.

    Args:
        signals: requested to stop when another process got a stop signal.
    """

    def __init__(self, store: KeyValueStore, signals: StopSignals) -> None:
        self.process = store.index
        self._store = store
        self._topic = store.numbered(_TOPIC)  # an earlier run of this program has used others
        self._signals = signals
        self._lock = threading.Lock()
        self._own: dict[str, Any] = {"beat": 0, "phase": "start", "step": None}
        # Process -> its last status, and when this process first read it.
        self._others: dict[int, tuple[dict[str, Any], float]] = {}
        self._ending = False
        self._closed = threading.Event()
        self._on_lost: Callable[[str, int], None] = _exit
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        if self._store.client is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(BEAT_S)

    def update(self, phase: str, step: int | None) -> None:
        """Sets the status of this process; the next heartbeat publishes it."""
        with self._lock:
            self._own |= {"phase": phase, "step": step}

    def when_lost(self, then: Callable[[str, int], None]) -> None:
        """Sets what to call when another process is gone, with the reason and the exit code.

        It must exit.
        """
        self._on_lost = then

    @contextlib.contextmanager
    def collectives(self) -> Iterator[None]:
        """Ends this process if a collective inside fails because another process is gone."""
        try:
            yield
        except Exception as error:  # jax 0.10.2 raises a ValueError if the call itself fails
            if self._store.client is not None and _LOST_PEER.search(str(error)):
                reader = threading.Thread(target=self._try_to_read, daemon=True)
                reader.start()
                reader.join(BEAT_S)  # it may wait forever for a process 0 that is stuck
                reason = f"another process is gone or unreachable ({first_line(error)})"
                self._on_lost(*(self._left() or (reason, RUN_AGAIN)))
            raise

    def ending(self) -> None:
        """Marks the end of the run: from here on a process that leaves is not reported."""
        self._ending = True

    def table(self) -> list[str]:
        """Returns a line per process: its phase, its last step, and its heartbeat's age."""
        now = time.monotonic()
        with self._lock:
            known = {**self._others, self.process: (self._own, now)}
        never = "no heartbeat yet"
        return [
            f"process {process}: " + (_line(*known[process], now) if process in known else never)
            for process in range(self._store.count)
        ]

    def leave(self, code: int) -> None:
        """Publishes that this process ends now; process 0 waits until the others have, too.

        Returns after at most ``LEAVE_S``, ``FOLLOW_S`` or ``FINISH_S``, even if the service is
        gone.
        """
        after_error_s = FOLLOW_S if code in _FINAL else LEAVE_S
        limit_s, self._ending = FINISH_S if self._ending else after_error_s, True
        if self._store.client is None:
            return
        worker = threading.Thread(target=self._leave, args=(code, limit_s), daemon=True)
        worker.start()
        worker.join(limit_s)

    def _leave(self, code: int, limit_s: float) -> None:
        with self._lock:
            self._own |= {"left": code}
        deadline = time.monotonic() + limit_s
        with contextlib.suppress(Exception):  # the service may be gone; it has its own errors
            self._publish()
            while self.process == 0 and time.monotonic() < deadline:
                self._read()
                left = sum("left" in status for status, _ in self._others.values())
                if left == self._store.count - 1:
                    return
                time.sleep(0.05)

    def _beat(self) -> None:
        left_since: float | None = None
        while not self._closed.wait(BEAT_S):
            with contextlib.suppress(Exception):  # of the service: then jax ends this process
                self._publish()
                self._read()
            for status, _ in list(self._others.values()):
                if status.get("stop") and not self._ending:
                    self._signals.request(status["stop"])
            if (left := self._left()) and not self._ending:
                left_since = left_since or time.monotonic()
                if time.monotonic() - left_since > GRACE_S:
                    self._on_lost(*left)

    def _publish(self) -> None:
        with self._lock:
            self._own["beat"] += 1
            text = json.dumps(self._own | {"stop": self._signals.received_signal})
        self._store.publish(self._topic, text, again=True)

    def _read(self) -> None:
        now = time.monotonic()
        for process, text in self._store.published(self._topic).items():
            if process == self.process:
                continue
            status, before = json.loads(text), self._others.get(process)
            if before is None or before[0]["beat"] != status["beat"]:
                with self._lock:
                    self._others[process] = (status, now)

    def _try_to_read(self) -> None:
        with contextlib.suppress(Exception):  # of the service
            self._read()

    def _left(self) -> tuple[str, int] | None:
        """Returns why this process ends, and its exit code, if another process has left."""
        with self._lock:
            left = [
                (f"process {process} has ended with exit code {status['left']}", status["left"])
                for process, (status, _) in sorted(self._others.items())
                if "left" in status
            ]
        final = [code for code in left if code[1] in _FINAL]
        return final[0] if final else (left[0][0], RUN_AGAIN) if left else None


def _line(status: dict[str, Any], beat_at: float, now: float) -> str:
    step = "no step" if status["step"] is None else f"step {status['step']}"
    left = f", left with exit code {status['left']}" if "left" in status else ""
    return f"{status['phase']}, {step} done, heartbeat {now - beat_at:.0f} s ago{left}"


def _exit(reason: str, code: int) -> None:
    """Exits without writing stacks: there is no run directory yet."""
    terminal.warn(f"{reason}; exit code {code}")
    os._exit(code)
