"""The watchdog, in processes of its own where it ends them."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jaxtrain.signals import RUN_AGAIN
from jaxtrain.watchdog import Watchdog


def run(tmp_path: Path, body: str) -> subprocess.CompletedProcess[str]:
    program = f"""
    import threading, time
    from pathlib import Path
    from jaxtrain.watchdog import Watchdog

    def stuck_here():
        threading.Event().wait(300)

    watchdog = Watchdog(0.5, Path({str(tmp_path)!r}), lambda text: print(text, flush=True))
    """
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program) + textwrap.dedent(body)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_hang_ends_the_process_and_leaves_the_stacks(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        """
        with watchdog:
            for step in range(5):
                time.sleep(0.2)  # longer than the limit together, shorter each
                watchdog.beat(step)
            print("five steps", flush=True)
            stuck_here()
        """,
    )
    assert ended.returncode == RUN_AGAIN, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[0] == "five steps"
    assert len(lines) == 2
    assert "no step ended within 0.5 s after update 4 in process 0" in lines[1]
    assert "stuck_here" in (tmp_path / "hang-0.txt").read_text()


def test_a_hang_ends_it_although_nothing_can_be_said(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        """
        import jaxtrain.watchdog
        jaxtrain.watchdog.LAST_WORDS_S = 0.3
        watchdog._say = lambda text: stuck_here()
        with watchdog, watchdog.pause("save", allowance_s=0.1):
            stuck_here()
        """,
    )
    assert ended.returncode == RUN_AGAIN, ended.stderr


def test_a_missing_directory_does_not_keep_it_alive(tmp_path: Path) -> None:
    ended = run(tmp_path / "gone", "with watchdog, watchdog.pause('save', 0.1): stuck_here()")
    assert ended.returncode == RUN_AGAIN, ended.stderr
    assert "save did not end within 0.5 s" in ended.stdout
    assert "no stacks" in ended.stdout


def test_a_pause_has_a_limit_of_its_own(tmp_path: Path) -> None:
    said: list[str] = []
    with Watchdog(0.2, tmp_path, said.append) as watchdog:
        with watchdog.pause("compile", allowance_s=60), watchdog.pause("save", allowance_s=60):
            time.sleep(0.5)
        watchdog.beat(1)
    assert said == []  # and this process is still here
    assert not list(tmp_path.iterdir())


def test_a_pause_may_have_no_limit(tmp_path: Path) -> None:
    with Watchdog(0.2, tmp_path, pytest.fail) as watchdog:
        with watchdog.pause("data", allowance_s=None):
            time.sleep(0.5)
        watchdog.beat(1)


def test_after_a_pause_the_step_has_its_whole_time(tmp_path: Path) -> None:
    with Watchdog(0.6, tmp_path, pytest.fail) as watchdog:
        time.sleep(0.4)
        with watchdog.pause("evaluation"):
            time.sleep(0.1)
        time.sleep(0.4)


def test_off(tmp_path: Path) -> None:
    with Watchdog(None, tmp_path, pytest.fail) as watchdog, watchdog.pause("save"):
        watchdog.beat()
