"""A group that hangs or crashes is the last finding, in real processes."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from doctor.examined import with_exit_code
from program import TINY_MLM

from jaxtrain.doctor import examination
from jaxtrain.doctor.examination import LIMIT_S
from jaxtrain.doctor.finding import Finding

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yields an output directory that must be empty at the end."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "output").mkdir()
    yield tmp_path / "output"
    assert not list((tmp_path / "output").iterdir())
    assert not list((tmp_path / "tmp").glob("jaxtrain-doctor-*"))
    monkeypatch.setattr("tempfile.tempdir", None)


def request(place: Path, *overrides: str) -> dict[str, Any]:
    return {
        "config": "demo_mlm",
        "overrides": (*TINY_MLM[2:], *overrides),
        "output_dir": str(place),
        "resume": None,
        "simulate_devices": 1,
    }


def worker() -> int:
    """Returns the pid of the process that runs the checks, a child of this one."""
    listed = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", "jaxtrain.doctor.examination:run_groups"],
        capture_output=True,
        text=True,
        check=True,
    )
    (found,) = listed.stdout.split()
    return int(found)


def examined(
    place: Path, in_group: str, fault: Callable[[int], None], limit_s: float = LIMIT_S
) -> tuple[list[Finding], list[str]]:
    """Returns findings and groups, with a fault in the worker when it begins a group."""
    groups: list[str] = []
    findings = []
    for event in examination.examine(request(place), limit_s):
        if isinstance(event, Finding):
            findings.append(event)
        elif "group" in event:
            groups.append(event["group"])
            if event["group"] == in_group:
                fault(worker())
    return findings, groups


@pytest.mark.long
def test_a_hang_is_the_last_finding(place: Path) -> None:
    """A stopped process does not respond, not even to SIGTERM."""
    findings, groups = examined(place, "data", lambda pid: os.kill(pid, signal.SIGSTOP), 45.0)
    hang = findings[-1]
    assert [one for one in findings if one.level == "problem"] == [hang]
    assert (hang.group, hang.check) == ("data", "time")
    assert hang.seen == "'data' did not end within 45 s; no later check was made"
    assert "ls" in hang.cure
    assert groups == ["processes", "devices", "system", "collective", "data"]
    assert with_exit_code(findings)[1] == 1


@pytest.mark.long
def test_files_of_a_killed_process_are_removed(place: Path) -> None:
    """It has no time to clean up, but it has reported its folder."""

    def kill_when_it_has_written(pid: int) -> None:
        deadline = time.monotonic() + 60
        while not list(place.glob(".jaxtrain-doctor-*/checkpoints")):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        os.kill(pid, signal.SIGKILL)

    findings, _ = examined(place, "checkpoint", kill_when_it_has_written)
    assert "SIGKILL" in findings[-1].seen
