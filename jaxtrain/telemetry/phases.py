"""Which phase of a run is open, and how far the run is.

The watchdog gives each phase its limit, ``history.jsonl`` has what each took, and the console
shows the one that is open. The loop says it here once, and knows none of them.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from jaxtrain.distributed.watchdog import PAUSE_ALLOWANCE_S, Watchdog
from jaxtrain.telemetry.events import PhaseEnded

# What a run is in where no phase is open: before its first step, from then on, and behind its last.
START, TRAINING, END = "start", "training", "end"

# Between two phases lies a little of the loop itself; less than this is counted to the next one.
_SLIVER_S = 0.001
# Share of the newest step in what a step took of late.
_NEW_STEP_COUNTS = 0.1


class Now(NamedTuple):
    """Where the run is.

    Attributes:
        phase: that is open.
        began: when it was opened, seconds of the clock.
        step: completed updates; None before that is known.
        total: updates of the whole run; None before that is known.
        step_began: when the last step ended, or the last phase that was none, seconds of the clock.
        step_s: how long a step took of late; None before the second one has ended.
        values: the newest metrics by full name.
    """

    phase: str
    began: float
    step: int | None
    total: int | None
    step_began: float
    step_s: float | None
    values: Mapping[str, float]


class Phases:
    """Told by the main thread; :attr:`now` may be read by any.

    Args:
        watchdog: gives each phase its limit, and is told of each step.
        emit: takes a :class:`PhaseEnded` at the end of each phase; may be set later.
        clock: seconds, monotonic.

    Attributes:
        now: where the run is.
        clock: seconds; the clock of all times in ``now``.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        emit: Callable[[PhaseEnded], None] = lambda event: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._watchdog = watchdog
        self.emit = emit
        self.clock = clock
        self._lock = threading.RLock()
        began = self._cut_at = clock()
        self._open = [(START, began)]
        self._from_step: int | None = None
        self._waited_s = 0.0
        self.now = Now(START, began, None, None, began, None, {})

    @contextlib.contextmanager
    def within(self, name: str, allowance_s: float | None = PAUSE_ALLOWANCE_S) -> Iterator[None]:
        """Opens a phase; it may be inside another one, which then goes on behind it.

        Args:
            name: of the phase.
            allowance_s: as :meth:`jaxtrain.distributed.watchdog.Watchdog.pause` takes it.
        """
        with self._watchdog.pause(name, allowance_s):
            self._change([*self._open, (name, self.clock())])
            try:
                yield
            finally:
                self._change(self._open[:-1])

    def training(self) -> None:
        """From here on the run trains where no phase is open."""
        self._change([(TRAINING, self.clock())])

    def ending(self) -> None:
        """The last step is done: from here on only what is open is closed."""
        self._change([(END, self.clock())])

    def at(self, step: int, total: int | None = None) -> None:
        """Where the run goes on; nothing was done to get there.

        Args:
            step: completed updates.
            total: of the whole run; None leaves it.
        """
        with self._lock:
            self._from_step = step if self._from_step is None else self._from_step
            self.now = self.now._replace(step=step, total=total or self.now.total)

    def stepped(self, done: int, waited_s: float, values: Mapping[str, float]) -> None:
        """A step has ended.

        Args:
            done: completed updates.
            waited_s: that the loop has waited for input since the call before.
            values: its metrics by full name.
        """
        self._watchdog.beat(done)
        with self._lock:
            self._waited_s += waited_s
            now, step_s = self.clock(), None
            if "train/loss" in self.now.values:  # the first step waits for workers to start
                lasted_s = now - self.now.step_began
                before_s = lasted_s if self.now.step_s is None else self.now.step_s
                step_s = before_s + _NEW_STEP_COUNTS * (lasted_s - before_s)
            values = {**self.now.values, **values}
            self.now = self.now._replace(step=done, step_began=now, step_s=step_s, values=values)

    def logged(self, values: Mapping[str, float]) -> None:
        """A step was recorded: here the training is cut, so that its course can be seen later.

        Args:
            values: the record.
        """
        with self._lock:
            self.now = self.now._replace(values={**self.now.values, **values})
        self.cut()

    def cut(self) -> None:
        """Ends a piece here; the phase goes on."""
        self._change(self._open)

    def _change(self, phases: list[tuple[str, float]]) -> None:
        with self._lock:
            now = self.clock()
            seconds, step = now - self._cut_at, self.now.step
            loop_itself = len(self._open) == 1 and step == self._from_step
            same = phases is not self._open and phases[-1][0] == self._open[-1][0]
            if seconds > 0 and not same and not (loop_itself and seconds < _SLIVER_S):
                ended = PhaseEnded(
                    self._open[-1][0], time.time(), seconds, self._from_step, step, self._waited_s
                )
                self._cut_at, self._from_step, self._waited_s = now, step, 0.0
                self.emit(ended)
            if phases is not self._open:
                self._open = phases
                phase, began = phases[-1]
                self.now = self.now._replace(phase=phase, began=began, step_began=now)
