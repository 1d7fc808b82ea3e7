"""Decides whether a run stops, or saves: processes have requests, and all agree on one decision."""

import math
import time
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from jaxtrain.data.quarantine import BrokenFileLimit
from jaxtrain.distributed.process_group import Exchange
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.errors import DONE, HOPELESS, INTERRUPTED, RUN_AGAIN, WRONG_USE

# The requests of a process; the largest request of all processes is the decision.
CONTINUE, STOP_LOST_WORKER, STOP_SIGTERM, STOP_SIGHUP = range(4)
STOP_MAX_HOURS, STOP_SIGINT, STOP_BAD_DATA = range(4, 7)
STOP_HOPELESS = 7  # decided at a validation, not requested
_BY_SIGNAL = {None: CONTINUE, "SIGTERM": STOP_SIGTERM, "SIGHUP": STOP_SIGHUP, "SIGINT": STOP_SIGINT}
CODE_OF_STOP = {
    CONTINUE: DONE,
    STOP_LOST_WORKER: RUN_AGAIN,
    STOP_SIGTERM: RUN_AGAIN,
    STOP_SIGHUP: RUN_AGAIN,
    STOP_MAX_HOURS: INTERRUPTED,  # not RUN_AGAIN: a launcher would start the run again
    STOP_SIGINT: INTERRUPTED,
    STOP_BAD_DATA: WRONG_USE,
    STOP_HOPELESS: HOPELESS,
}
REASONS = {
    STOP_LOST_WORKER: "stopped, because loading examples failed",
    STOP_SIGTERM: "stopped by SIGTERM",
    STOP_SIGHUP: "stopped because the terminal or the connection was closed (SIGHUP)",
    STOP_MAX_HOURS: "stopped because loop.max_hours or loop.max_total_hours is over",
    STOP_SIGINT: "stopped by Ctrl-C",
    STOP_BAD_DATA: "stopped: too many broken input files (quarantine.jsonl names them)",
    STOP_HOPELESS: "ended, because it cannot succeed",
}
_REQUEST, _SAVE = "request", "save"


class Stopping:
    """Decides after each step, and during a validation, whether the run stops.

    Args:
        mesh: over all devices; the processes exchange their requests through it.
        hours: time limit since the start of the program; None for no limit.
        save_every_s: seconds between checkpoints, by the clock of process 0; None if they are due
            at certain steps.

    Attributes:
        decision: of all processes; ``CONTINUE`` until one of them requests a stop.
        save_due: whether process 0's clock asks for a checkpoint; the loop resets it.
        why: what :meth:`end` was given, or why this process's workers have ended.
    """

    def __init__(
        self,
        signals: StopSignals,
        broken_file_limit: BrokenFileLimit,
        mesh: Mesh,
        hours: float | None = None,
        save_every_s: float | None = None,
        lost: Callable[[], str] = str,
    ) -> None:
        self._signals = signals
        self._broken_file_limit, self._lost = broken_file_limit, lost
        self._end_at = math.inf if hours is None else signals.began + hours * 3600
        self._requests = Exchange(mesh, largest=[_REQUEST, _SAVE])
        self._save_every_s = save_every_s if jax.process_index() == 0 else None
        self._save_at = time.monotonic() + (self._save_every_s or 0.0)
        self.decision, self.why, self.save_due = CONTINUE, "", False

    def signaled(self) -> bool:
        """Returns whether this process received a signal, without asking the others."""
        return self._signals.received_signal is not None

    def after_step(self) -> bool:
        """Returns whether all processes stop.

        It does not wait: it uses the request that each process made after the previous step.
        """
        if self.decision != CONTINUE:  # by agreed() or end()
            return True
        own = self._own()
        if self._save_every_s is not None and (now := time.monotonic()) >= self._save_at:
            own[_SAVE], self._save_at = 1.0, now + self._save_every_s
        requests = self._requests.delayed(own)
        self.save_due = self.save_due or bool(requests.get(_SAVE))
        return self._decided(requests.get(_REQUEST, CONTINUE))

    def agreed(self) -> bool:
        """Returns whether all processes stop now; waits until all of them call it."""
        return self._decided(self._requests.now(self._own())[_REQUEST])

    def end(self, why: str) -> None:
        """Ends the run for a reason that all processes have found alike."""
        self.decision, self.why = STOP_HOPELESS, why

    @property
    def why_here(self) -> str:
        """What only this process knows: why its workers have ended; "" for other reasons."""
        return self.why if self.decision == STOP_LOST_WORKER else ""

    def no_more_steps(self) -> None:
        """Notes that the loop has ended, so that a signal no longer stops it."""
        self._signals.no_more_steps()

    def _decided(self, request: float) -> bool:
        self.decision = int(request)
        if self.decision == STOP_LOST_WORKER:
            self.why = self._lost()
        return self.decision != CONTINUE

    def _own(self) -> dict[str, float]:
        if self._broken_file_limit.stop_reason():
            return {_REQUEST: STOP_BAD_DATA}
        by_time = STOP_MAX_HOURS if time.monotonic() >= self._end_at else CONTINUE
        by_worker = STOP_LOST_WORKER if self._lost() else CONTINUE
        return {_REQUEST: max(by_time, by_worker, _BY_SIGNAL[self._signals.received_signal])}
