"""Tests reading untrusted files."""

import contextlib
import errno
import os
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxtrain.errors import InputError
from jaxtrain.storage import atomic


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"{", "it is not JSON"),
        (b"{\xff}", "it is not UTF-8 text"),
        (b'{"a": "\\ud800"}', "it is not UTF-8 text"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, "its JSON is nested too deeply"),
        (b"[1, 2]", "it is not a JSON object"),
        (b'{"a": ' + b"9" * 5000 + b"}", "it contains a number with thousands of digits"),
    ],
)
def test_invalid_json_is_rejected(content: bytes, why: str, tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=why):
        atomic.read_json(path)


def test_valid_json_is_read(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    path.write_bytes('{"a": [1, {"b": "ü"}], "n": NaN}'.encode())
    (tmp_path / "link.json").symlink_to(path)
    found = atomic.read_json(tmp_path / "link.json")
    assert found["a"] == [1, {"b": "ü"}]
    with pytest.raises(ValueError, match="the limit is 10"):
        atomic.read_json(path, limit_bytes=10)


def test_only_regular_files_are_read_without_blocking(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    began = time.monotonic()
    for name in ("pipe", "endless"):
        with pytest.raises(ValueError, match="not a regular file"):
            atomic.read_json(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        atomic.read_json(tmp_path)
    with pytest.raises(FileNotFoundError):
        atomic.read_json(tmp_path / "none")
    assert time.monotonic() - began < 5


def test_a_run_directory_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "latest").symlink_to("run")
    atomic.Appended(tmp_path / "latest" / "log.txt").append(b"one\n")
    assert (tmp_path / "run" / "log.txt").read_text() == "one\n"


def test_an_output_file_that_cannot_be_written_is_rejected_early(tmp_path: Path) -> None:
    gone = tmp_path / "gone" / "o.json"
    for path, words in (
        (gone, f"--json {gone}: the folder {gone.parent} does not exist: create it"),
        (tmp_path, f"is a folder: pass a file in it, such as {tmp_path / 'found.json'}"),
        (Path("/dev/null"), "is a device or a pipe: pass a regular file"),
    ):
        with pytest.raises(InputError) as caught:
            atomic.check_writable("--json", path)
        assert words in str(caught.value)


@pytest.mark.parametrize("links", [True, False])
def test_one_of_several_creates_a_file(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Path) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "token"
    assert atomic.create_whole(path, "first")
    assert not atomic.create_whole(path, "second")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]
    path.unlink()
    barrier = threading.Barrier(8)

    def create(number: int) -> bool:
        barrier.wait()
        return atomic.create_whole(path, str(number))

    for _ in range(20):
        with ThreadPoolExecutor(8) as pool:
            created = list(pool.map(create, range(8)))
        assert [str(n) for n, first in enumerate(created) if first] == [path.read_text()]
        path.unlink()


@pytest.mark.parametrize(
    ("number", "of_folder", "fails"),
    [(errno.EINVAL, True, False), (errno.EINVAL, False, True), (errno.EIO, True, True)],
)
def test_a_file_system_may_refuse_to_sync_a_folder(
    number: int, of_folder: bool, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == of_folder:
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match=os.strerror(number)) if fails else contextlib.nullcontext():
        atomic.write_whole(tmp_path / "file", "content")
    assert fails or (tmp_path / "file").read_text() == "content"


@pytest.mark.parametrize("end", [b"", b"torn", b"x" * 200_000])
@pytest.mark.parametrize(
    "whole", [b"", b"one\n", b"y" * 70_000 + b"\n", (b"z" * 99 + b"\n") * 2000]
)
def test_a_torn_line_is_dropped(whole: bytes, end: bytes, tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(whole + end)
    atomic.drop_torn_line(path)
    assert path.read_bytes() == whole


KILLED = """
import os
import sys
from pathlib import Path
from jaxtrain.storage import atomic
os.fsync = lambda file: os._exit(9)  # the first one is of the temporary file
path = Path(sys.argv[1])
atomic.create_whole(path, "half") if sys.argv[2] == "create" else atomic.write_whole(path, "half")
"""


@pytest.mark.parametrize(("name", "how"), [("token", "create"), ("a.b.npy", "write")])
def test_what_a_killed_writer_left_is_found(
    name: str, how: str, tmp_path: Path, checkout: Path
) -> None:
    wanted, others = tmp_path / name, (".claims", ".note.txt", f".{name}", name, f".{name}.short")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, wanted, how], env=os.environ | {"PYTHONPATH": str(checkout)}
    )
    assert killed.returncode == 9
    for other in others:
        (tmp_path / other).touch()
    ((left, of),) = atomic.leftovers(tmp_path)
    assert of == name
    atomic.remove_leftovers(tmp_path, alone=False)  # its process may be alive elsewhere
    atomic.remove_leftovers(tmp_path, ("other",), alone=True)
    assert left.exists()
    os.utime(left, times=(time.time() - 25 * 3600,) * 2)
    atomic.remove_leftovers(tmp_path, alone=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({*others})
    left.touch()
    atomic.remove_leftovers(tmp_path, (name,), alone=True)
    assert not left.exists()
    assert not list(atomic.leftovers(tmp_path / "gone"))
