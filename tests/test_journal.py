"""All that a run tells hears how it ends: by an error, or by a signal in the midst of a call."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxtrain import config, history
from jaxtrain.errors import InputError
from jaxtrain.history import History
from jaxtrain.journal import Journal
from jaxtrain.peers import Peers
from jaxtrain.phases import Phases
from jaxtrain.run_length import Position
from jaxtrain.signals import StopSignals
from jaxtrain.watchdog import Watchdog


class Told(Peers):
    """Peers that keep the code with which this process left."""

    left: int | None = None

    def leave(self, code: int) -> None:
        self.left = code


def begin(directory: Path, *, named: bool = True) -> tuple[Journal, StopSignals, Told]:
    signals = StopSignals()
    peers = Told(0, 1, None, signals)
    watchdog = Watchdog(None, peers)
    journal = Journal(Phases(watchdog), signals, peers, watchdog)
    journal.__enter__()
    assert signals.before_exit == journal._leave
    journal.open(config.named("demo_mlm"), directory, None, Position(), ("--debug",), named=named)
    return journal, signals, peers


def end(directory: Path) -> tuple[int, str]:
    text = (directory / history.NAME).read_text()
    last: dict[str, Any] = json.loads(text.splitlines()[-1])
    assert last["event"] == "end"
    return last["code"], last["why"]


def test_an_error_is_in_the_log_and_in_the_history(tmp_path: Path) -> None:
    journal, _, _ = begin(tmp_path)
    error = InputError("--data.path nowhere: no such folder")
    journal.__exit__(InputError, error, None)
    log = (tmp_path / "log.txt").read_text()
    assert f"run directory {tmp_path}\n" in log
    assert log.endswith("error: --data.path nowhere: no such folder\n")
    assert end(tmp_path) == (2, "--data.path nowhere: no such folder")


@pytest.mark.parametrize("named", [False, True])
def test_a_directory_that_was_not_named_goes_if_nothing_came_of_the_run(
    tmp_path: Path, named: bool
) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    journal, _, _ = begin(directory, named=named)
    journal.__exit__(InputError, InputError("wrong"), None)
    assert directory.exists() == named


def test_a_signal_that_ends_the_process_at_once_is_in_the_history(tmp_path: Path) -> None:
    journal, signals, peers = begin(tmp_path)
    signals.before_exit(130)
    assert peers.left == 130
    assert end(tmp_path) == (
        130,
        "stopped by a signal, in the midst of a call that nothing breaks off",
    )
    journal.__exit__(None, None, None)


def test_what_ended_the_run_is_told_where_the_history_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise TypeError("not JSON")

    journal, _, _ = begin(tmp_path)
    monkeypatch.setattr(History, "_write", fail)
    with pytest.raises(InputError, match="the real one"), journal._stack:
        raise InputError("the real one")
    log = (tmp_path / "log.txt").read_text()
    assert "history.jsonl does not say how the run ended: not JSON\n" in log
    assert log.endswith("error: the real one\n")
