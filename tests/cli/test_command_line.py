"""What commands share: signals that end them."""

import os
import signal

import pytest

from jaxtrain.cli import command_line
from jaxtrain.errors import RUN_AGAIN, Stopped


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_through_finally_clauses(
    number: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A closed terminal sends SIGHUP."""
    before = signal.getsignal(number)
    with pytest.raises(Stopped) as stopped, command_line.resumable("runs"):
        os.kill(os.getpid(), number)
    assert stopped.value.code == RUN_AGAIN
    assert "finished runs are kept" in capsys.readouterr().err
    assert signal.getsignal(number) == before


def test_nohup_is_respected() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with command_line.cleaning_up():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
