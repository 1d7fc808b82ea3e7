"""Tests temporary folders in the cache."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from jaxtrain.storage import temporary_folders


def test_without_locks_temporary_folders_go_by_their_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with temporary_folders.temporary_folder(tmp_path) as folder:
        temporary_folders.clean(tmp_path)
        assert folder.exists()
        os.utime(folder.with_suffix(".lock"), (1, 1))
        temporary_folders.clean(tmp_path)
        assert not folder.exists()


def test_on_nfs_temporary_folders_are_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It locks only files that are open for writing: a live folder of 8 days was removed."""
    real = fcntl.flock

    def lock(file: Any, kind: int) -> None:
        if not file.writable():
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(file, kind)

    monkeypatch.setattr(fcntl, "flock", lock)
    killed = tmp_path / "scratch" / "killed"
    with temporary_folders.temporary_folder(tmp_path) as folder:
        killed.mkdir()
        killed.with_suffix(".lock").touch()
        os.utime(folder.with_suffix(".lock"), (1, 1))
        temporary_folders.clean(tmp_path)
        assert folder.exists()
        assert not killed.exists()


def test_a_lock_that_fails_for_another_reason_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fail)
    with temporary_folders.temporary_folder(tmp_path) as folder:
        os.utime(folder.with_suffix(".lock"), (1, 1))
        temporary_folders.clean(tmp_path)
        assert folder.exists()
