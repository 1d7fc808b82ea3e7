"""Whether a run goes on: the wish of each process, and the decision of all."""

from jaxtrain.data.pipeline import BadShare
from jaxtrain.distributed.process_group import Agreement
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.errors import DONE, INTERRUPTED, RUN_AGAIN, WRONG_USE

# What a process asks for when it wants the run to stop; the largest wins.
GO_ON, STOP_SIGTERM, STOP_SIGINT, STOP_BAD_DATA = range(4)
EXIT_CODES = {
    GO_ON: DONE,
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
    """Asked after each step, and within what is no step: shall the run stop?

    Args:
        signals: of this process.
        bad_share: of the input.
        agreement: between all processes.

    Attributes:
        decision: of all processes; ``GO_ON`` until one of them wants to stop.
    """

    def __init__(self, signals: StopSignals, bad_share: BadShare, agreement: Agreement) -> None:
        self._signals = signals
        self._bad_share = bad_share
        self._agreement = agreement
        self.decision = GO_ON

    def wanted(self) -> bool:
        """Whether this process got a signal; asks nobody."""
        return self._signals.heard is not None

    def after_step(self) -> bool:
        """Whether all processes stop, by what each wished after the step before: no waiting."""
        self.decision = int(self._agreement.exchange(self._wish()) or GO_ON)
        return self.decision != GO_ON

    def agreed(self) -> bool:
        """Whether all processes stop now; waits for all of them to ask."""
        self.decision = int(self._agreement.now(self._wish()))
        return self.decision != GO_ON

    def no_more_steps(self) -> None:
        """The loop has ended: a signal no longer stops it."""
        self._signals.no_more_steps()

    def _wish(self) -> int:
        if self._bad_share.complaint():
            return STOP_BAD_DATA
        return {None: GO_ON, "SIGTERM": STOP_SIGTERM, "SIGINT": STOP_SIGINT}[self._signals.heard]
