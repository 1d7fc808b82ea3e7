"""Tests the reasons given for disk errors, for example when saving a checkpoint."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxtrain import main
from jaxtrain.cli import configs
from jaxtrain.errors import BadExample, InputError, RunAgain
from jaxtrain.storage import disks

# TensorStore 0.1's message for a full disk; the notes at its end come in either order.
FULL = (
    'RESOURCE_EXHAUSTED: Error opening "zarr" driver: Error writing local file "/disk/x/.zarray": '
    'Failed writing: "/disk/x/.zarray.__lock": Failed to write 209 bytes to file 3: No space left '
    "on device"
)
CODE = " [os_error_code='28']"
SPEC = (
    """ [tensorstore_spec='{\\"create\\":true,\\"input_exclusive_max\\":[[10]],\\"zarr\\":true}']"""
)


@pytest.mark.parametrize("notes", [CODE, CODE + SPEC, SPEC + CODE], ids=["code", "first", "last"])
def test_the_reason_is_the_systems_message(notes: str) -> None:
    error = RuntimeError("save failed")
    error.__cause__ = ValueError(FULL + notes)
    assert disks.reason(error) == "No space left on device"


def test_other_reasons_have_one_line() -> None:
    assert disks.reason(OSError(5, "Input/output error")) == "Input/output error"
    assert disks.reason(ValueError("bad\nworse")) == "ValueError: bad"
    assert disks.reason(KeyError()) == "KeyError"


@pytest.mark.parametrize(
    ("number", "kind", "code"), [(errno.ENOSPC, RunAgain, 75), (errno.EACCES, InputError, 2)]
)
def test_only_a_full_disk_is_temporary(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    kind: type[Exception],
    code: int,
) -> None:
    words = os.strerror(number)
    found = disks.unwritable(Path("x/y"), words)
    assert type(found) is kind
    assert str(found).startswith("x/y cannot be written")

    def fail(arguments: list[str]) -> int:
        raise OSError(number, words, "out.json")

    monkeypatch.setattr(configs, "main", fail)  # any command
    assert main.main(["configs", "list"]) == code
    assert f"configs: out.json cannot be read or written: {words}" in capsys.readouterr().err


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOMEM])
def test_a_file_that_cannot_be_read_now_is_not_broken(number: int) -> None:
    found = disks.unreadable("x/y", OSError(number, os.strerror(number)))
    assert isinstance(found, disks.DiskAway)
    assert str(found).startswith(f"x/y cannot be read ({os.strerror(number)}): ")


def test_a_missing_file_is_broken_unless_its_disk_is_not_mounted(tmp_path: Path) -> None:
    """An empty folder above the file is the mount point of a disk that is away."""
    missing = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    mount = tmp_path / "mount"
    (mount / "other").mkdir(parents=True)
    deep, path = str(mount / "video" / "clip.mp4"), str(mount / "gone")
    for gone in (deep, path):
        assert isinstance(disks.unreadable(gone, missing, existed=True), BadExample)
    tar, folder = str(mount / "a.tar" / "v.mp4"), str(mount)
    assert isinstance(disks.unreadable(tar, missing, existed=True, folder=folder), BadExample)
    (mount / "other").rmdir()
    for gone in (deep, path):
        assert isinstance(disks.unreadable(gone, missing, existed=True), disks.DiskAway)
    assert isinstance(disks.unreadable(path, missing), BadExample)


def test_reading_waits_for_a_disk_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    now, failures = [0.0], [5]
    fake = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)
    )
    monkeypatch.setattr(disks, "time", fake)

    def read() -> str:
        if failures[0]:
            failures[0] -= 1
            raise disks.DiskAway("away")
        return "content"

    assert disks.when_readable(read) == "content"
    assert 0 < now[0] < 10
    failures[0] = 1000
    with pytest.raises(RunAgain, match="away"):
        disks.when_readable(read)
    assert disks.OUTAGE_S - 10 < now[0] < disks.OUTAGE_S + 10
