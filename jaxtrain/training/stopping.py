"""Decides whether a run stops: each process has a request, and all agree on one decision."""

from jaxtrain.data.pipeline import BadShare
from jaxtrain.distributed.process_group import Agreement
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.errors import DONE, INTERRUPTED, RUN_AGAIN, WRONG_USE

# The requests of a process; the largest request of all processes is the decision.
CONTINUE, STOP_SIGTERM, STOP_SIGINT, STOP_BAD_DATA = range(4)
EXIT_CODES = {
    CONTINUE: DONE,
    STOP_SIGTERM: RUN_AGAIN,
    STOP_SIGINT: INTERRUPTED,
    STOP_BAD_DATA: WRONG_USE,
}
REASONS = {
    STOP_SIGTERM: "stopped by SIGTERM",
    STOP_SIGINT: "stopped by Ctrl-C",
    STOP_BAD_DATA: "stopped: too many broken input files (quarantine.jsonl names them)",
}


class Stopping:
    """Decides after each step, and during a validation, whether the run stops.

    Args:
        signals: of this process.
        bad_share: limits the fraction of broken input files.
        agreement: exchanges requests between all processes.

    Attributes:
        decision: of all processes; ``CONTINUE`` until one of them requests a stop.
    """

    def __init__(self, signals: StopSignals, bad_share: BadShare, agreement: Agreement) -> None:
        self._signals = signals
        self._bad_share = bad_share
        self._agreement = agreement
        self.decision = CONTINUE

    def wanted(self) -> bool:
        """Returns whether this process received a signal, without asking the others."""
        return self._signals.heard is not None

    def after_step(self) -> bool:
        """Returns whether all processes stop.

        It does not wait: it uses the request that each process made after the previous step.
        """
        self.decision = int(self._agreement.exchange(self._request()) or CONTINUE)
        return self.decision != CONTINUE

    def agreed(self) -> bool:
        """Returns whether all processes stop now; waits until all of them call it."""
        self.decision = int(self._agreement.now(self._request()))
        return self.decision != CONTINUE

    def no_more_steps(self) -> None:
        """The loop has ended: a signal no longer stops it."""
        self._signals.no_more_steps()

    def _request(self) -> int:
        if self._bad_share.complaint():
            return STOP_BAD_DATA
        return {None: CONTINUE, "SIGTERM": STOP_SIGTERM, "SIGINT": STOP_SIGINT}[self._signals.heard]
