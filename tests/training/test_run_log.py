"""The end of a run is logged, whether by an error or by a signal during a long call."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxtrain import config
from jaxtrain.config.run_length import Position
from jaxtrain.distributed.heartbeat import Heartbeat
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.distributed.watchdog import Watchdog
from jaxtrain.errors import RUN_AGAIN, BadSteps, InputError, Stopped
from jaxtrain.telemetry import history
from jaxtrain.telemetry.console import Console
from jaxtrain.training.run_log import RunLog


class RecordingHeartbeat(Heartbeat):
    """Records the exit code of this process."""

    left: int | None = None

    def leave(self, code: int) -> None:
        self.left = code


def begin(
    directory: Path,
    arguments: tuple[str, ...] = ("--debug",),
) -> tuple[RunLog, StopSignals, RecordingHeartbeat]:
    signals = StopSignals()
    heartbeat = RecordingHeartbeat(KeyValueStore(), signals)
    watchdog = Watchdog(None, heartbeat)
    signals.before_exit(heartbeat.leave)
    log = RunLog(signals, watchdog)
    log.__enter__()
    log.open(config.named("demo_mlm"), directory, None, Position(), arguments)
    return log, signals, heartbeat


def end(directory: Path) -> tuple[int, str]:
    text = (directory / history.NAME).read_text()
    last: dict[str, Any] = json.loads(text.splitlines()[-1])
    assert last["event"] == "end"
    return last["code"], last["why"]


def test_an_error_is_logged_once_before_the_files_are_copied(tmp_path: Path) -> None:
    log, _, _ = begin(tmp_path)
    error = InputError("--data.path nowhere: no such folder")
    log.failed(InputError, error, None)
    written = (tmp_path / "log.txt").read_text()
    assert f"run directory {tmp_path}\n" in written
    assert written.endswith("error: --data.path nowhere: no such folder\n")
    assert end(tmp_path) == (2, "--data.path nowhere: no such folder")
    log.__exit__(InputError, error, None)
    assert (tmp_path / "log.txt").read_text() == written


@pytest.mark.parametrize(
    ("error", "diverged"), [(BadSteps("10 bad steps"), True), (InputError("no data"), False)]
)
def test_the_history_says_whether_a_run_diverged(
    tmp_path: Path, error: InputError, diverged: bool
) -> None:
    log, _, _ = begin(tmp_path)
    log.failed(type(error), error, None)
    last = json.loads((tmp_path / history.NAME).read_text().splitlines()[-1])
    assert (last["code"], last.get("diverged", False)) == (2, diverged)
    log.__exit__(type(error), error, None)


def test_a_signal_that_ends_the_process_at_once_is_in_the_history(tmp_path: Path) -> None:
    log, signals, heartbeat = begin(tmp_path)
    signals.run_exit_actions(130)
    assert heartbeat.left == 130
    words = "stopped by a signal during a long call: progress since the last checkpoint is lost"
    assert end(tmp_path) == (130, words)
    assert (tmp_path / "log.txt").read_text().endswith(f"{words}\n")
    log.__exit__(None, None, None)


def test_a_signal_before_the_first_step_is_in_the_log(tmp_path: Path) -> None:
    """Even if a library has wrapped it in another error."""
    log, _, _ = begin(tmp_path)
    wrapped = RuntimeError("reading failed")
    wrapped.__cause__ = Stopped("SIGTERM")
    log.__exit__(RuntimeError, wrapped, None)
    written = (tmp_path / "log.txt").read_text()
    assert written.endswith("stopped by SIGTERM; there was nothing to save\n")
    assert "Traceback" not in written
    assert end(tmp_path) == (75, "stopped by SIGTERM; there was nothing to save")


def test_the_watchdogs_last_message_is_in_the_log_and_in_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    def close(console: Console) -> None:
        closed.append((tmp_path / history.NAME).read_text().splitlines()[-1])

    monkeypatch.setattr(Console, "close", close)
    log, _, _ = begin(tmp_path)
    log._watchdog._say("no step ended within 5 s", RUN_AGAIN)
    assert json.loads(closed[0])["why"] == "no step ended within 5 s"  # before the close
    assert (tmp_path / "log.txt").read_text().endswith("no step ended within 5 s\n")
    assert end(tmp_path) == (75, "no step ended within 5 s")
    log.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [(("--debug",), "raise --data.workers"), ((), "raise data.workers")],
)
def test_notes_of_a_run_from_python_name_its_arguments(
    tmp_path: Path, arguments: tuple[str, ...], advice: str
) -> None:
    log, _, _ = begin(tmp_path, arguments=arguments)
    log.say("the data is too slow: raise --data.workers (now 2)")
    log.__exit__(None, None, None)
    assert f"Z the data is too slow: {advice} (now 2)\n" in (tmp_path / "log.txt").read_text()
