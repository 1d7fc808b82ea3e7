"""Tests that a directory allows one run at a time, with real processes, one of which is killed."""

import errno
import fcntl
import json
import os
import socket
from pathlib import Path

import pytest
from checkpoint import small_checkpoint
from program import lock_held

from jaxtrain.errors import RunAgain
from jaxtrain.storage import lock
from jaxtrain.training import run_directory


def test_a_second_run_is_rejected_until_the_first_ends(tmp_path: Path) -> None:
    small_checkpoint.mark(tmp_path)
    with lock_held(tmp_path) as holder:
        half = tmp_path / small_checkpoint.files_folder(7) / "state"  # of a save in progress
        half.mkdir(parents=True)
        named = rf"is using {tmp_path} \(process {holder.pid} on {socket.gethostname()}\)"
        for resume in ("latest", "7", None):
            with pytest.raises(RunAgain, match=named):
                run_directory.prepare("demo", str(tmp_path), resume, tmp_path)
        assert half.is_dir()
        holder.kill()
        holder.wait()
        assert run_directory.prepare("demo", str(tmp_path), None, tmp_path) == tmp_path
        assert not half.exists()
    said = json.loads((tmp_path / ".lock").read_text())
    assert said == {"host": socket.gethostname(), "pid": os.getpid()}


def test_a_process_may_lock_twice(tmp_path: Path) -> None:
    for _ in range(2):
        lock.hold(tmp_path, print)
    assert list(lock._held).count(tmp_path) == 1


def test_a_program_releases_the_lock_of_a_run_that_has_ended(tmp_path: Path) -> None:
    with lock.released():
        lock.hold(tmp_path, print)
        with pytest.raises(AssertionError), lock_held(tmp_path):
            pass
    with lock_held(tmp_path):
        pass


def test_a_file_system_without_locks_causes_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, command: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    said: list[str] = []
    lock.hold(tmp_path, said.append)
    assert said == [
        f"warning: {tmp_path / '.lock'} cannot be locked (No locks available): do not start a "
        "second run in this directory, as it would not be detected"
    ]


def test_a_command_that_waits_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    flock = fcntl.flock

    def busy(file: object, how: int) -> None:
        if how & fcntl.LOCK_NB:
            raise BlockingIOError
        flock(file, how)  # type: ignore[arg-type]

    monkeypatch.setattr(fcntl, "flock", busy)
    with lock.locked(tmp_path / "file", said.append, "reading s3://bucket/run") as alone:
        assert alone
    assert said == ["another process is reading s3://bucket/run: waiting for it"]


def test_a_machine_is_known_by_its_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lock.machine() == lock.boot()

    def unknown() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(lock, "boot", unknown)
    assert lock.machine() == socket.gethostname()
