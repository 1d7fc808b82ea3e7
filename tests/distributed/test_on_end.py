"""The command of ``--on-end``: once, with the outcome, without influence on the exit code."""

import functools
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from jaxtrain.distributed import key_value
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.distributed.on_end import OnEnd
from jaxtrain.errors import InputError, RunAgain, Stopped

SHOW = 'echo "$JAXTRAIN_OUTCOME $JAXTRAIN_EXIT_CODE $JAXTRAIN_REASON" >> '


def test_the_command_gets_the_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "seen"
    ends = (
        lambda one: one.returned(0),
        lambda one: one.returned(75),
        lambda one: one.returned(2),
        lambda one: one.failed(InputError("data.path is None")),
        lambda one: one.failed(RunAgain("the disk\nis full")),
        lambda one: one.failed(Stopped("SIGTERM")),
        lambda one: one.failed(KeyError("x")),
        lambda one: one.hung("hung: no step"),
        lambda one: one.hung("process 1 has ended with exit code 2", 2),
        lambda one: one.hung("process 1 has ended with exit code 130", 130),
        lambda one: one.stopped(130),
    )
    for end in ends:
        one = OnEnd(f"{SHOW}{file}")
        one.describe = lambda: (tmp_path, "known")
        end(one)
        end(one)  # only the first has an effect
    assert file.read_text().splitlines() == [
        "done 0 known",
        "stopped 75 known",
        "failed 2 known",
        "failed 2 data.path is None",
        "failed 75 the disk is full",
        "stopped 75 stopped by SIGTERM; there was nothing to save",
        "failed 1 KeyError: 'x'",
        "hung 75 hung: no step",
        "failed 2 process 1 has ended with exit code 2",
        "stopped 130 process 1 has ended with exit code 130",
        "stopped 130 known",
    ]
    assert str(file) not in capsys.readouterr().err  # the command may contain a secret


def test_one_process_of_each_host_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    here = socket.gethostname()
    hosts = ["other", here, here, "other"]
    runs = []
    for process in (1, 2):  # both on this host
        monkeypatch.setattr(key_value, "of_run", functools.partial(KeyValueStore, process, 4))
        one = OnEnd("true")
        one.agree(lambda what, text: hosts)
        runs.append(one.command is not None)
    assert runs == [True, False]


def test_a_command_that_takes_too_long_is_killed_with_its_children(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    began = time.monotonic()
    OnEnd(f"(sleep 60; touch {tmp_path}/late) & sleep 60", limit_s=0.3).returned(0)
    assert time.monotonic() - began < 20
    assert "the command took more than 0.3 s and was killed" in capsys.readouterr().err
    listed = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    assert f"touch {tmp_path}/late" not in listed.stdout


def test_a_second_end_waits_for_the_command(tmp_path: Path) -> None:
    """The watchdog would otherwise end the process, and with it the command."""
    one = OnEnd(f"sleep 0.5; touch {tmp_path}/ran")
    first = threading.Thread(target=one.returned, args=(0,))
    first.start()
    while not one._claimed.locked():
        time.sleep(0.01)
    one.hung("late")
    assert (tmp_path / "ran").exists()
    first.join()


def test_it_runs_after_a_hang(tmp_path: Path) -> None:
    """The main thread is stuck, and the watchdog ends the process."""
    program = """
    import sys, threading
    from pathlib import Path
    from jaxtrain.distributed.heartbeat import Heartbeat
    from jaxtrain.distributed.key_value import KeyValueStore
    from jaxtrain.distributed.on_end import OnEnd
    from jaxtrain.distributed.signals import StopSignals
    from jaxtrain.distributed.watchdog import Watchdog

    on_end = OnEnd(sys.argv[1])
    with Watchdog(0.3, Heartbeat(KeyValueStore(), StopSignals())) as watchdog:
        watchdog.before_exit(on_end.hung)
        watchdog.report_to(Path(sys.argv[2]), lambda line, code: print(line))
        threading.Event().wait(300)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), f"{SHOW}{tmp_path}/seen", tmp_path],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 75, ended.stderr
    assert (tmp_path / "seen").read_text().startswith("hung 75 hung: no step ended within 0.3 s")
