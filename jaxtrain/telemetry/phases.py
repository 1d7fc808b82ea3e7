"""Tracks the current phase of a run and its progress.

The watchdog has a time limit for each phase, ``history.jsonl`` records their durations, and the
console shows the current one. The training loop reports phases only here.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from jaxtrain.distributed.watchdog import PAUSE_ALLOWANCE_S, Watchdog
from jaxtrain.telemetry.events import PhaseEnded

# The phase while no other one is open: before the first step, from then on, after the last step.
START, TRAINING, END = "start", "training", "end"

# Time between two phases shorter than this counts for the next phase.
_MIN_GAP_S = 0.001
# Weight of the newest step in the moving average of the step time.
_NEW_STEP_WEIGHT = 0.1


class Now(NamedTuple):
    """The current phase and progress of a run.

    Attributes:
        began: when it began, seconds of the clock.
        step: completed steps; None if not known yet.
        total: steps of the complete run; None if not known yet.
        step_began: when the last step or the last other phase ended, seconds of the clock.
        step_s: moving average of the step time; None before the second step has ended.
    """

    phase: str
    began: float
    step: int | None
    total: int | None
    step_began: float
    step_s: float | None
    values: Mapping[str, float]


class Phases:
    """Tracks phases; only the main thread calls its methods, but any thread may read :attr:`now`.

    Args:
        watchdog: limits each phase, and receives a heartbeat with each step.
        emit: receives a :class:`PhaseEnded` at the end of each phase.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        emit: Callable[[PhaseEnded], None] = lambda event: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watchdog = watchdog
        self._emit = emit
        self._ended = False
        self.clock = clock
        self._lock = threading.RLock()
        began = self._cut_at = clock()
        self._open = [(START, began)]
        self._from_step: int | None = None
        self._waited_s = 0.0
        self.now = Now(START, began, None, None, began, None, {})

    @contextlib.contextmanager
    def within(self, name: str, allowance_s: float | None = PAUSE_ALLOWANCE_S) -> Iterator[None]:
        """Opens a phase; an outer phase continues after it.

        Args:
            allowance_s: see :meth:`jaxtrain.distributed.watchdog.Watchdog.pause`.
        """
        with self._watchdog.pause(name, allowance_s):
            self._change([*self._open, (name, self.clock())])
            try:
                yield
            finally:
                self._change(self._open[:-1])

    def training(self) -> None:
        """Marks the start of training, the default phase from here on."""
        self._change([(TRAINING, self.clock())])

    def ending(self) -> None:
        """Marks the end of the last step."""
        self._change([(END, self.clock())])

    def at(self, step: int, total: int | None = None) -> None:
        """Sets the position of the run after a resume or a rollback."""
        with self._lock:
            self._from_step = step if self._from_step is None else self._from_step
            self.now = self.now._replace(step=step, total=total or self.now.total)

    def stepped(self, step: int, waited_s: float, values: Mapping[str, float]) -> None:
        """Reports the end of a step.

        Args:
            waited_s: seconds that the loop has waited for data since the last call.
        """
        self._watchdog.beat(step)
        with self._lock:
            self._waited_s += waited_s
            now, step_s = self.clock(), None
            if "train/loss" in self.now.values:  # the first step waits for workers to start
                lasted_s = now - self.now.step_began
                before_s = lasted_s if self.now.step_s is None else self.now.step_s
                step_s = before_s + _NEW_STEP_WEIGHT * (lasted_s - before_s)
            values = {**self.now.values, **values}
            self.now = self.now._replace(step=step, step_began=now, step_s=step_s, values=values)

    def logged(self, values: Mapping[str, float]) -> None:
        """Reports a logged step; splits the phase here, so that the history has its progress."""
        with self._lock:
            self.now = self.now._replace(values={**self.now.values, **values})
        self.cut()

    def cut(self) -> None:
        """Splits the current phase here."""
        self._change(self._open)

    def end(self) -> None:
        """Ends the current phase; later phases are shown, but not emitted."""
        self.cut()
        self._ended = True

    def _change(self, phases: list[tuple[str, float]]) -> None:
        with self._lock:
            now = self.clock()
            seconds, step = now - self._cut_at, self.now.step
            between_phases = len(self._open) == 1 and step == self._from_step
            same = phases is not self._open and phases[-1][0] == self._open[-1][0]
            if seconds > 0 and not same and not (between_phases and seconds < _MIN_GAP_S):
                ended = PhaseEnded(
                    self._open[-1][0], time.time(), seconds, self._from_step, step, self._waited_s
                )
                self._cut_at, self._from_step, self._waited_s = now, step, 0.0
                if not self._ended:
                    self._emit(ended)
            if phases is not self._open:
                self._open = phases
                phase, began = phases[-1]
                self.now = self.now._replace(phase=phase, began=began, step_began=now)
