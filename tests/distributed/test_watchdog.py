"""The watchdog, in separate processes where it ends them."""

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from jaxtrain.distributed.heartbeat import Heartbeat
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.distributed.watchdog import Watchdog
from jaxtrain.errors import RUN_AGAIN


class Harmless(Watchdog):
    """Records reasons instead of ending the process, which is that of the tests."""

    def __init__(self, timeout_s: float | None) -> None:
        super().__init__(timeout_s, Heartbeat(KeyValueStore(), StopSignals()))
        self.reasons: list[str] = []

    def end(self, reason: str, code: int = RUN_AGAIN) -> None:
        self.reasons.append(reason)


PROGRAM = """
import sys, threading, time
from pathlib import Path
from jaxtrain.distributed import watchdog as watchdogs
from jaxtrain.distributed.heartbeat import Heartbeat
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.distributed.watchdog import Watchdog

def stuck_here():
    threading.Event().wait(300)

heartbeat = Heartbeat(KeyValueStore(), StopSignals())
say = lambda text, code: print(text, flush=True)
watchdog = Watchdog(0.5, heartbeat)
directory = Path(sys.argv[1])
watchdog.report_to(directory, say)
"""


def command(directory: Path, body: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM + textwrap.dedent(body), str(directory)]


def run(directory: Path, body: str) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(
        command(directory, body), capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == RUN_AGAIN, ended.stderr
    return ended


def test_a_hang_ends_the_process_and_leaves_the_stacks(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        """
        patient = Watchdog(2.0, heartbeat)
        patient.report_to(directory, say)
        with patient as watchdog:
            for step in range(5):
                time.sleep(0.5)  # each is below the limit, their sum is above it
                watchdog.beat(step)
            print("five steps", flush=True)
            stuck_here()
        """,
    )
    lines = ended.stdout.splitlines()
    assert lines[0] == "five steps"
    assert len(lines) == 2
    assert "no step ended within 2 s after step 4 in process 0" in lines[1]
    report = (tmp_path / "hang-0.txt").read_text()
    assert "stuck_here" in report
    assert "process 0: training, step 4 done" in report


def test_a_hang_ends_the_process_even_if_printing_hangs(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        watchdogs.REPORT_S = 0.3
        watchdog._say = lambda text, code: stuck_here()
        with watchdog, watchdog.pause("save", allowance_s=0.1):
            stuck_here()
        """,
    )


def test_stacks_go_to_stderr_without_a_run_directory(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        """
        with Watchdog(0.5, heartbeat) as watchdog:
            stuck_here()
        """,
    )
    assert "stuck_here" in ended.stderr
    assert "no step ended within 0.5 s in process 0; stacks of all threads above" in ended.stderr


def test_a_missing_run_directory_does_not_keep_the_process_alive(tmp_path: Path) -> None:
    ended = run(tmp_path / "gone", "with watchdog, watchdog.pause('save', 0.1): stuck_here()")
    assert "save did not end within 0.5 s" in ended.stdout
    assert "no stacks" in ended.stdout


def test_a_pause_has_a_limit_of_its_own() -> None:
    with Harmless(0.5) as watchdog:
        with watchdog.pause("compile", allowance_s=60), watchdog.pause("save", allowance_s=60):
            time.sleep(1.5)
        watchdog.beat(1)
        assert watchdog.reasons == []
        time.sleep(1.5)
    assert watchdog.reasons == ["hung: no step ended within 0.5 s after step 1 in process 0"]


def test_after_a_pause_a_step_has_its_full_time_limit() -> None:
    with Harmless(3.0) as watchdog:
        time.sleep(1.0)
        with watchdog.pause("evaluation"):
            time.sleep(0.1)
        time.sleep(1.0)
        with watchdog.pause("save"):
            time.sleep(0.1)
        time.sleep(1.2)
        assert watchdog.reasons == []


def test_time_while_the_process_is_stopped_does_not_count(tmp_path: Path) -> None:
    body = """
    with Watchdog(3.0, heartbeat) as watchdog:
        print("watching", flush=True)
        time.sleep(1.5)
        watchdog.beat(1)
    """
    process = subprocess.Popen(command(tmp_path, body), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "watching\n"
    process.send_signal(signal.SIGSTOP)
    time.sleep(6)
    process.send_signal(signal.SIGCONT)
    assert process.communicate(timeout=30)[0] == ""
    assert process.returncode == 0


def test_end_within_limits_every_phase(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        """
        with Watchdog(None, heartbeat) as watchdog:
            watchdog.report_to(directory, say)
            with watchdog.pause("save", allowance_s=60):
                watchdog.end_within(0.3)
                stuck_here()
        """,
    )
    assert "did not end within loop.stop_timeout_s" in ended.stdout
