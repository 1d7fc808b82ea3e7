"""The files of a split on disk: the same entries, in little memory."""

import dataclasses
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.video import sample_videos

from jaxtrain.data import sampler, video
from jaxtrain.data.video.clips import Clips
from jaxtrain.data.video.decode import FrameCheck
from jaxtrain.data.video.file_table import FileTable
from jaxtrain.data.video.index import Entry
from jaxtrain.data.video.packets import Keyframe, Scan, Span

KEYS = (Keyframe(-512, 0), Keyframe(2**40, 12))
SCAN = Scan(1, 24, 640, 360, 90, True, 2, ("interlaced",), 4 / 3, 30000 / 1001, KEYS)
ENTRIES = [
    Entry(name="b/ü.mp4", path="/data/b/ü.mp4", size=2**33, mtime_ns=2**60, info=SCAN),
    Entry(
        name="a\udcff.mp4",  # a byte that is not UTF-8
        path="/data/a\udcff.mp4",
        size=5,
        mtime_ns=1,
        info=SCAN._replace(keyframes=(), frames=7),
        verdict=FrameCheck((3, 5), None),
    ),
    Entry(
        name="t.tar/1.mp4",
        path="t.tar/1.mp4",
        size=9,
        mtime_ns=3,
        info=SCAN,
        span=Span("/data/t.tar", 512, 9),
        verdict=FrameCheck((), "decoding fails"),
    ),
]


def stored(folder: Path, entries: list[Entry]) -> FileTable:
    return FileTable.stored(entries, folder, print)


def test_entries_come_back_as_they_were(tmp_path: Path) -> None:
    table = stored(tmp_path, ENTRIES)
    for one in (table, pickle.loads(pickle.dumps(table))):
        assert list(one) == one[:] == ENTRIES
        assert (one[-1], len(one)) == (ENTRIES[-1], 3)
        assert repr(one[0]) == repr(ENTRIES[0])  # of Python's own types, not NumPy's
        assert one.frames.tolist() == [24, 7, 24]
        assert one.keyframes.tolist() == [2, 0, 2]
    assert list(stored(tmp_path, [])) == []


def test_equal_files_have_one_folder(tmp_path: Path) -> None:
    assert stored(tmp_path, ENTRIES) == stored(tmp_path, ENTRIES)
    assert stored(tmp_path, ENTRIES[:2]) != stored(tmp_path, ENTRIES)
    changed = [*ENTRIES[:2], ENTRIES[0]]
    assert stored(tmp_path, changed) != stored(tmp_path, ENTRIES)


def test_the_content_is_that_of_the_files_in_any_order_and_place(tmp_path: Path) -> None:
    content = stored(tmp_path, ENTRIES).content
    moved = [dataclasses.replace(one, path=f"/new{one.path}", mtime_ns=0) for one in ENTRIES]
    assert stored(tmp_path, moved[::-1]).content == content
    for change in ({"size": 1}, {"ends": "other"}):
        changed = [dataclasses.replace(ENTRIES[0], **change), *ENTRIES[1:]]  # type: ignore[arg-type]
        assert stored(tmp_path, changed).content != content


def clips(folder: Path, number: int, **settings: Any) -> Clips:
    config = video.Config(path="/data", batch_size=4, **settings)
    entry = ENTRIES[0]
    entries = [
        Entry(name=f"{n}.mp4", path=f"/{n}.mp4", size=n, mtime_ns=n, info=entry.info)
        for n in range(number)
    ]
    return config.clips(sample_videos.MODEL, stored(folder, entries), train=True)


@pytest.mark.parametrize("windows", ["random", "fixed"])
def test_what_a_worker_receives_does_not_grow_with_the_files(tmp_path: Path, windows: str) -> None:
    sizes = []
    for number in (3, 3000):
        source = clips(tmp_path, number, windows=windows, clips_per_video=1)
        assert len(source) == number * (4 if windows == "fixed" else 1)
        assert source.fingerprint
        assert not source.keyframes_are_far
        sizes.append(len(pickle.dumps(source)))
    assert sizes[0] == pytest.approx(sizes[1], abs=2)  # of a number


def test_the_order_is_found_without_reading_the_files(tmp_path: Path) -> None:
    source = clips(tmp_path, 5)
    shutil.rmtree(source.entries.folder)
    assert sampler.order_of(source, 3) == sampler.Order(len(source), 3)
    positions = [sampler.order_of(source, 3)(position) for position in range(len(source))]
    assert np.array_equal(np.sort(positions), np.arange(len(source)))
