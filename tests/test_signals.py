"""Stop signals, sent to this very process."""

import os
import signal
import time

import pytest

from jaxtrain.signals import DONE, INTERRUPTED, RUN_AGAIN, WRONG_USE, StopSignals


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # the handler runs between two bytecodes


def test_exit_codes() -> None:
    assert (DONE, WRONG_USE, RUN_AGAIN, INTERRUPTED) == (0, 2, 75, 130)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_a_wish(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignals() as signals:
        assert signals.requested is None
        send(number)
        assert signals.requested == number.name
    assert signal.getsignal(number) is before


def test_the_first_signal_counts(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals() as signals:
        send(signal.SIGTERM)
        send(signal.SIGTERM)  # launchers repeat it
        assert signals.requested == "SIGTERM"
    assert capfd.readouterr().err.strip() == "SIGTERM: stopping after this step"


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_ctrl_c_after_a_signal_stops_at_once(
    first: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    with StopSignals() as signals:
        send(first)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
        assert signals.requested == first.name
    said = capfd.readouterr().err
    assert ("press Ctrl-C again" in said) == (first == signal.SIGINT)


def test_listens_again_after_something_else_took_the_signal() -> None:
    with StopSignals() as signals:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        send(signal.SIGTERM)
        assert signals.requested is None
        signals.listen()
        send(signal.SIGTERM)
        assert signals.requested == "SIGTERM"
