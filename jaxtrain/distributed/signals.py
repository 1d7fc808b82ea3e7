"""Handles Ctrl-C, SIGTERM, and a closed terminal at any time, even during a long call."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from jaxtrain.errors import (
    CODES,
    INTERRUPTED,
    RUN_AGAIN,
    WRONG_USE,
    InputError,
    RunAgain,
    Stopped,
    Wish,
)

# Before the first step: time for the main thread to close files and workers. It cannot while it
# compiles; then the process ends without that.
UNWIND_S = 5.0
# How often the thread looks whether Python dropped the stop, and then sends a signal again.
_AGAIN_S = 0.02
# The same as UNWIND_S after a second Ctrl-C, when a step or a save may hold the main thread.
AT_ONCE_S = 1.0

_HELD: dict[Wish, str] = {
    "SIGTERM": "SIGTERM: stopping after this step",
    "SIGHUP": "SIGHUP: stopping after this step",
    "SIGINT": "stopping after this step; press Ctrl-C again to stop at once, without saving",
}
_ENDING: dict[Wish, str] = {
    "SIGTERM": "SIGTERM: the last step is done; finishing the run",
    "SIGHUP": "SIGHUP: the last step is done; finishing the run",
    "SIGINT": "the last step is done; finishing the run; press Ctrl-C again to stop at once",
}
_SIGNALS: tuple[Wish, ...] = ("SIGTERM", "SIGHUP", "SIGINT")
_NOT_HELD = "{}: stopping; nothing to save (no step has completed)"


def why(error: BaseException) -> str:
    """Describes in one line the error that ends a run."""
    if isinstance(error, Stopped):
        return f"stopped by {error}; there was nothing to save"
    if isinstance(error, KeyboardInterrupt):
        return "stopped at once by Ctrl-C, without saving"
    message = " ".join(str(error).split())
    if isinstance(error, InputError | RunAgain):
        return message
    return f"{type(error).__name__}: {message}"


def exit_code(error: BaseException) -> int:
    """Returns the exit code for the error that ends a run; 1 for an unexpected one."""
    if isinstance(error, Stopped):
        return error.code
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, InputError):
        return WRONG_USE
    return RUN_AGAIN if isinstance(error, RunAgain) else 1


class StopSignals:
    """Makes SIGTERM, SIGHUP and SIGINT end the run at once or, after :meth:`hold`, request its end.

    A closed terminal or connection sends SIGHUP, unless ``nohup`` started the run.

    Python runs a handler only between two bytecodes of the main thread, so a signal during a long
    compilation would take effect only after it. But the C part of the handler writes to a socket at
    once, and a thread reads that.

    - Before :meth:`hold` there is nothing to save: the main thread gets :class:`Stopped`, and if
      it does not return from a long call within ``UNWIND_S``, the thread ends the process.
    - After it, a signal interrupts nothing: the loop reads ``received_signal``.
    - After :meth:`no_more_steps`, a signal only reports that the run is ending.

    Only the first signal counts. A second SIGINT raises ``KeyboardInterrupt``; if the main thread
    then does not return from a long call, or from closing things, within ``AT_ONCE_S``, the thread
    ends the process. After another signal, a first SIGINT changes nothing: when ssh.sh is
    killed, a host gets both a typed Ctrl-C and SIGHUP, in any order, and when a Ctrl-C stops all
    processes, one may learn of it from another before its own SIGINT arrives.
    Enter this context manager in the main thread.

    Args:
        ends_process: whether the thread may end the process. A run inside a notebook or another
            program only waits: its kernel outlives the run.

    Attributes:
        requested: the first signal, once the main thread has received it.
        received_signal: the first signal, even while the main thread is in a long call.
        began: the start of the program, or of the run inside another program; monotonic seconds.
    """

    def __init__(self, *, ends_process: bool = True) -> None:
        self.ends_process = ends_process
        self.began = time.monotonic()
        self.requested: Wish | None = None
        self.received_signal: Wish | None = None
        self._exit_actions: list[Callable[[int], None]] = []
        self._then: Callable[[], None] = lambda: None
        self._held = False
        self._ending = False
        self._at_once = False
        self._dropped = False  # Python dropped the stop, in a finalizer or a garbage collection
        self._of_another: Wish | None = None  # what another process of the run asked for
        # Signals that the main thread and the listener have received.
        self._received: tuple[list[int], list[int]] = ([], [])
        self._left = threading.Event()
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise InputError("a run must be started in the main thread: signals reach no other")
        self._ear, self._mouth = socket.socketpair()
        self._mouth.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._mouth.fileno(), warn_on_full_buffer=False)
        for number in map(signal.Signals.__getitem__, _SIGNALS):
            before = signal.getsignal(number)
            if number != signal.SIGHUP or before != signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self._on_signal)
        self._hook_before = sys.unraisablehook
        sys.unraisablehook = self._on_unraisable
        self._thread = threading.Thread(target=self._listen, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        sys.unraisablehook = self._hook_before
        signal.set_wakeup_fd(self._wakeup_before)
        # At once: the listener stays, since the interpreter waits for threads, such as a save's.
        if not (self._at_once and kind is KeyboardInterrupt):
            self._dropped = False  # what the listener still sends interrupts nothing
            self._left.set()
            self._mouth.close()
            self._thread.join()  # it sends no signal after the handlers are gone
            self._ear.close()
        for number, handler in self._before.items():
            # None: a handler that was not installed from Python cannot be restored from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def hold(self) -> None:
        """Marks that there are steps to save: from here on a signal waits for the loop."""
        self._held = True

    def no_more_steps(self) -> None:
        """Marks that the last step is done: a first signal no longer stops the run earlier."""
        self._ending = True

    def before_exit(self, action: Callable[[int], None]) -> None:
        """Registers an action to call with the exit code before the thread ends the process.

        Actions run in reverse order of registration, as in an ``ExitStack``.
        """
        self._exit_actions.append(action)

    def run_exit_actions(self, code: int) -> None:
        """Runs the registered actions, newest first. One that fails does not stop the others."""
        for action in reversed(self._exit_actions):
            with contextlib.suppress(Exception):
                action(code)

    def request(self, wish: Wish) -> None:
        """Acts as if the signal had arrived; another process of the run got it."""
        if self.received_signal is None:
            self._of_another = wish
            # SIGHUP may be ignored here, and a SIGINT would make this process's own a second one.
            os.kill(os.getpid(), signal.SIGTERM)

    def when_received(self, then: Callable[[], None]) -> None:
        """Calls ``then`` when the first signal arrives; at once if one already has."""
        self._then = then
        if self.received_signal is not None:
            then()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_second_ctrl_c(number, self._received[0]):
            self._at_once = True
            raise KeyboardInterrupt
        if self.requested is not None:  # launchers repeat SIGTERM
            if self._dropped and not self._held:
                self._dropped = False
                raise Stopped(self.requested)
            return
        self.requested = self._wish(number)
        if not self._held:
            raise Stopped(self.requested)

    def _is_second_ctrl_c(self, number: int, received: list[int]) -> bool:
        """Adds a signal to those that a thread received; returns whether it ends the run now."""
        is_second = number == signal.SIGINT and signal.SIGINT in received
        received.append(number)
        return is_second

    def _wish(self, number: int) -> Wish:
        if number == signal.SIGTERM and self._of_another is not None:
            return self._of_another
        return next(name for name in _SIGNALS if signal.Signals[name] == number)

    def _on_unraisable(self, unraisable: "sys.UnraisableHookArgs") -> None:
        """Has a stop raised again that Python dropped in a finalizer or a garbage collection."""
        if not isinstance(unraisable.exc_value, Stopped):
            self._hook_before(unraisable)
            return
        # The listener raises it. Nothing may follow here: Python runs handlers after a call, and a
        # stop that is raised in this hook is lost.
        self._dropped = True

    def _listen(self) -> None:
        while number := self._ear.recv(1):
            if number[0] not in self._before:
                continue
            if self._is_second_ctrl_c(number[0], self._received[1]):
                self._end_within(AT_ONCE_S, INTERRUPTED)
            if self.received_signal is not None:  # launchers repeat SIGTERM
                continue
            wish, is_held = self._wish(number[0]), self._held
            # Not print(): the main thread may hold the stream's lock.
            waiting = _ENDING if self._ending else _HELD
            text = waiting[wish] if is_held else _NOT_HELD.format(wish)
            with contextlib.suppress(OSError):
                os.write(2, f"\n{text}\n".encode())
            self.received_signal = wish
            self._then()
            if not is_held:
                self._end_unless_held(CODES[wish])

    def _end_unless_held(self, code: int) -> None:
        """Waits until the main thread has left or holds; after ``UNWIND_S``, ends the process.

        Raises the stop again if Python dropped it.
        """
        deadline = time.monotonic() + UNWIND_S
        while not self._held and not self._left.wait(_AGAIN_S):
            if self._dropped:  # not SIGINT, which would be a second Ctrl-C
                os.kill(os.getpid(), signal.SIGTERM)
            if time.monotonic() > deadline:
                self._end_within(0, code)

    def _end_within(self, limit_s: float, code: int) -> None:
        if self.ends_process and not self._left.wait(limit_s):
            self.run_exit_actions(code)
            os._exit(code)
