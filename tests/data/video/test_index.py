"""The index is built once, updated when files change, and identified by their content."""

import dataclasses
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.video import sample_videos as sample

from jaxtrain.data.video import decode, files, index, packets
from jaxtrain.data.video.file_table import FileTable
from jaxtrain.errors import BadExample


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    for number in range(3):
        sample.write(folder / f"{number}.mp4", 10 + number)
    (folder / "bad.mp4").touch()
    return folder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records the names of files that are scanned (s) or decoded completely (d), in order."""
    made: list[str] = []

    def record(kind: str, module: Any, name: str) -> None:
        real = getattr(module, name)

        def recorded(path: str, *args: Any) -> Any:
            made.append(f"{kind} {Path(path).name}")
            return real(path, *args)

        monkeypatch.setattr(module, name, recorded)

    record("s", packets, "scan")
    record("d", decode, "verify")
    return made


def _build(data: Path, *, decode_all: bool = False) -> dict[str, index.Entry]:
    folder = data.parent / "cache"
    found = files.find(str(data), "--data.path", folder, lambda line: None)
    entries = index.build(found, folder, decode_all=decode_all, say=lambda text: None)
    return {entry.name: entry for entry in entries}


def test_files_are_scanned_once(data: Path, calls: list[str]) -> None:
    first = _build(data)
    assert sorted(calls) == ["s 0.mp4", "s 1.mp4", "s 2.mp4", "s bad.mp4"]
    assert first["bad.mp4"].reason == "is empty"
    assert [first[f"{n}.mp4"].scanned.frames for n in range(3)] == [10, 11, 12]
    calls.clear()
    assert _build(data) == first
    assert calls == ["s bad.mp4"], "only an unreadable file is scanned again"


def test_a_killed_command_has_scanned_what_it_saved(
    data: Path, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (data / "bad.mp4").unlink()
    _build(data)
    os.utime(data / "2.mp4", ns=(1, 1))
    sample.write(data / "0.mp4", 15)
    calls.clear()
    real = index.cache.write_lines

    def save(file: Path, lines: Iterable[str]) -> None:
        saved = list(lines)
        real(file, saved)
        if any(index.from_line(line.encode()).scanned.frames == 15 for line in saved):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(index, "_KEEP_EVERY_S", -1.0)
        patched.setattr(index.cache, "write_lines", save)
        with pytest.raises(KeyboardInterrupt):
            _build(data)
    calls.clear()
    assert [_build(data)[f"{n}.mp4"].scanned.frames for n in range(3)] == [15, 11, 12]
    assert calls == ["s 2.mp4"]


@pytest.mark.parametrize("change", ["size", "mtime"])
def test_a_changed_file_is_scanned_again(data: Path, calls: list[str], change: str) -> None:
    _build(data)
    calls.clear()
    if change == "size":
        before = (data / "1.mp4").stat()
        sample.write(data / "1.mp4", 20)
        os.utime(data / "1.mp4", ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        os.utime(data / "1.mp4", ns=(1, 1))
    assert _build(data)["1.mp4"].scanned.frames == (20 if change == "size" else 11)
    assert sorted(calls) == ["s 1.mp4", "s bad.mp4"]


def test_a_video_that_replaces_another_of_its_size_and_time_is_scanned_again(
    data: Path, calls: list[str]
) -> None:
    before = _build(data)["1.mp4"]
    calls.clear()
    status = (data / "1.mp4").stat()
    with open(data / "1.mp4", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(data / "1.mp4", ns=(status.st_atime_ns, status.st_mtime_ns))
    after = _build(data)["1.mp4"]
    assert sorted(calls) == ["s 1.mp4", "s bad.mp4"]
    assert (after.size, after.mtime_ns) == (before.size, before.mtime_ns)
    assert after.ends != before.ends


def test_the_fingerprint_depends_on_the_content(data: Path) -> None:
    def fingerprint(folder: Path) -> str:
        entries = _build(folder).values()
        good = [entry for entry in entries if entry.info is not None]
        return FileTable.stored(good, data.parent / "cache", print).content

    before = fingerprint(data)
    moved = data.parent / "elsewhere" / "data"
    shutil.copytree(data, moved, copy_function=shutil.copyfile)  # another place, other times
    assert fingerprint(moved) == before
    (moved / "0.mp4").rename(moved / "3.mp4")
    assert fingerprint(moved) != before, "names matter"
    (moved / "3.mp4").rename(moved / "0.mp4")
    assert fingerprint(moved) == before
    sample.write(moved / "0.mp4", 25)
    assert fingerprint(moved) != before, "the fingerprint ignores sizes and frames"


def test_a_damaged_index_is_rebuilt(data: Path) -> None:
    first = _build(data)
    file = data.parent / "cache" / "index.jsonl"
    for text in ("{", '{"format": 0}\n', "[]\n"):
        file.write_text(text)
        assert _build(data) == first
        assert _build(data) == first


def test_a_file_that_changes_or_vanishes_during_a_run_is_refused(data: Path) -> None:
    entry = _build(data)["0.mp4"]
    index.check_unchanged(entry)
    sample.write(data / "0.mp4", 40)
    with pytest.raises(BadExample, match=r"changed during the run: has \d+ bytes now, \d+ when"):
        index.check_unchanged(entry)
    (data / "0.mp4").unlink()
    with pytest.raises(BadExample, match="No such file or directory, although it was indexed"):
        index.check_unchanged(entry)


def test_frames_that_an_intact_file_lacks_are_replaced_by_others(
    data: Path, calls: list[str]
) -> None:
    (data / "2.avi").write_bytes(sample.write(data / "long.avi", 30).read_bytes())
    entry = _build(data)["2.avi"]
    entry = dataclasses.replace(entry, info=entry.scanned._replace(frames=31, keyframes=()))
    calls.clear()

    def read(numbers: np.ndarray) -> list[int]:
        wanted: list[int] = numbers[-3:].tolist()
        sample.decoded(entry.path, entry.scanned, wanted)
        return wanted

    assert index.with_frames(entry, read) == [27, 28, 29]
    assert calls == ["d 2.avi"]
    assert index.with_frames(entry, lambda numbers: len(numbers)) == 31
    assert calls == ["d 2.avi"], "a file that can be read was decoded completely"


def test_decoding_all_while_indexing(data: Path, calls: list[str]) -> None:
    sample.garble(sample.write(data / "1.mp4", sample.busy(30)))
    _build(data)
    entries = _build(data, decode_all=True)
    verdicts = {name: entry.verdict for name, entry in entries.items()}
    assert verdicts["0.mp4"] == decode.FrameCheck((), None)
    assert verdicts["1.mp4"] is not None
    assert verdicts["1.mp4"].broken
    assert verdicts["bad.mp4"] is None
    calls.clear()
    assert _build(data, decode_all=True) == entries
    assert calls == ["s bad.mp4"]


@pytest.mark.parametrize(
    ("url", "is_checked"),
    [
        ("s3://b/clips", True),
        ("s3://b/clips.v2/", True),
        ("s3://b", False),
        ("s3://b/a.mp4", False),
        ("s3://b/a-{0..9}.tar", False),
    ],
)
def test_each_folder_of_a_bucket_must_be_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, is_checked: bool
) -> None:
    checked: list[str] = []
    monkeypatch.setattr(index.resumable, "check_complete", checked.append)
    monkeypatch.setattr(index.video_files, "find", lambda *rest: [])
    index.of_path(url, "--data.path", tmp_path, decode_all=False, say=print)
    assert checked == [url] * is_checked
