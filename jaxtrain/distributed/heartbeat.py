"""Liveness monitoring: how the processes of a run detect each other's failure.

A process that is stuck or gone leaves the others waiting in a collective that never ends; the
runtime notices that after 100 s, or not at all
(https://github.com/jax-ml/jax/issues/38503). So a thread in each process publishes its status to
the key-value store every two seconds and reads the status of the others: whether one got a stop
signal, has left, or is silent.

If process 0 is gone, jax's client aborts the process from C++ (jax 0.10 to 0.12; their callback for
this raises std::bad_cast). A handler of SIGABRT then ends it as any other loss does.
"""

import contextlib
import ctypes
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
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
# After process 0 has left: time for this process to finish its own end.
FINISH_S = 90.0

_TOPIC = "heartbeat"
_NEVER = "no heartbeat yet"

_FINAL = (WRONG_USE, INTERRUPTED)  # exit codes that a retry would not change
# What gloo and NCCL report if a process that takes part in a collective is gone.
_LOST_PEER = re.compile(
    r"Gloo .* failed: |NCCL .*(remote process exited|Connection (closed|reset|refused))", re.DOTALL
)
_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)


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
        self._topic = store.numbered(_TOPIC)  # an earlier run of this program has used others
        self._signals = signals
        self._lock = threading.Lock()
        self._own: dict[str, Any] = {"beat": 0, "phase": "start", "step": None}
        # Process -> its last status, and when this process first read it.
        self._others: dict[int, tuple[dict[str, Any], float]] = {}
        self._began = time.monotonic()
        self._ending = False
        self._closed = threading.Event()
        self._on_lost: Callable[[str, int], None] = _exit
        self._on_abort, self._before = _Handler(self._aborting), ctypes.c_void_p()
        # Two threads: the first may wait forever for a service whose process is stuck.
        self._threads = [
            threading.Thread(target=work, name="heartbeat", daemon=True)
            for work in (self._beat, self._watch)
        ]

    def __enter__(self) -> Self:
        if self._store.client is not None:
            for thread in self._threads:
                thread.start()
            self._before = _handle_abort(ctypes.cast(self._on_abort, ctypes.c_void_p))
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        if self._store.client is not None:
            _handle_abort(self._before)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(BEAT_S)

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
                self._answers()  # reads the last status of the others
                self._lose(f"another process is gone or unreachable ({first_line(error)})")
            raise

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
                    self._on_lost(f"process 0 is gone ({first_line(error)})", RUN_AGAIN)

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
                    "stuck or gone",
                    RUN_AGAIN,
                )

    def _follow(self, process: int, code: int) -> None:
        if not (self._closed.wait(GRACE_S) or self._ending):
            self._on_lost(*_left(process, code))

    def _lose(self, reason: str) -> None:
        """Ends this process because another is gone: with ``reason``, unless that one gave one."""
        with self._lock:
            known = {process: status.get("left") for process, (status, _) in self._others.items()}
        left = [_left(process, code) for process, code in known.items() if code is not None]
        final = [one for one in left if one[1] in _FINAL]
        self._on_lost(*[*final, *left, (reason, RUN_AGAIN)][0])

    def _answers(self) -> bool:
        """Reads the status of the others; returns whether the service answers in time."""
        answers: list[bool] = []

        def read() -> None:
            with contextlib.suppress(Exception):  # from the service
                self._read()
                answers.append(True)

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        reader.join(BEAT_S)
        return bool(answers)

    def _aborting(self, number: int) -> None:
        """Handles SIGABRT in the thread that raised it; afterwards, the process aborts."""
        del number
        # If memory is corrupt, what follows may wait forever. SIGALRM then ends the process.
        signal.alarm(round(2 * FINISH_S))
        if self._answers():  # so it is not about process 0
            return
        if self._ending:
            time.sleep(FINISH_S)
        else:
            self._lose("process 0 is gone")


def _line(status: dict[str, Any], since: float, now: float) -> str:
    step = "no step" if status["step"] is None else f"step {status['step']}"
    left = f", left with exit code {status['left']}" if "left" in status else ""
    return f"{status['phase']}, {step} done, heartbeat {now - since:.0f} s ago{left}"


def _left(process: int, code: int) -> tuple[str, int]:
    """Returns why this process ends after another one has left with ``code``, and its own code."""
    own = code if code in _FINAL else RUN_AGAIN
    return f"process {process} has ended with exit code {code}", own


def _handle_abort(handler: ctypes.c_void_p) -> ctypes.c_void_p:
    """Sets the handler of SIGABRT and returns the one before. Python's would return at once."""
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    return ctypes.c_void_p(set_handler(signal.SIGABRT, handler))


def _exit(reason: str, code: int) -> None:
    """Exits without writing stacks: there is no run directory yet."""
    terminal.warn(f"{reason}; exit code {code}")
    os._exit(code)
