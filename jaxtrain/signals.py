"""Ctrl-C and SIGTERM as a wish that the loop reads, and the exit codes of the program."""

import os
import signal
from types import FrameType, TracebackType
from typing import Any, Literal, Self

DONE = 0  # the run reached its end
WRONG_USE = 2  # wrong use or wrong input
RUN_AGAIN = 75  # preempted or hung: the same command with --resume latest goes on (EX_TEMPFAIL)
INTERRUPTED = 130  # Ctrl-C (128 + SIGINT)

TERMINATING = b"\nSIGTERM: stopping after this step\n"
STOPPING = b"\nstopping after this step; press Ctrl-C again to stop at once, without saving\n"


class StopSignals:
    """While entered, SIGTERM and SIGINT set a flag and interrupt nothing.

    The first signal is kept; a SIGINT that follows any earlier one raises ``KeyboardInterrupt`` at
    once. Enter it in the main thread. Python runs a handler between two bytecodes of that thread,
    so a signal that falls into a long call, as a compilation, counts when the call returns.

    ``jax.distributed.initialize`` puts its own SIGTERM handler over whatever is there (measured:
    this one is then never called): call :meth:`listen` after it.
    """

    def __init__(self) -> None:
        self.requested: Literal["SIGTERM", "SIGINT"] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.getsignal(number)
        self.listen()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            # None: it was installed from outside Python, and cannot be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def listen(self) -> None:
        """Puts the handlers in place, also over those that something else has put there since."""
        for number in self._before:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            if self.requested is None:  # launchers repeat it
                self.requested = "SIGTERM"
                os.write(2, TERMINATING)
            return
        if self.requested is not None:
            raise KeyboardInterrupt
        self.requested = "SIGINT"
        os.write(2, STOPPING)  # print() is not safe in a handler
