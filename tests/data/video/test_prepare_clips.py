"""Cutting videos into pieces: their content, what is reported, and the folder that results."""

import contextlib
import errno
import json
import os
import tarfile
import types
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from data.video import sample_videos as sample
from obstore.store import MemoryStore
from storage import file_server

from jaxtrain.data.video import frames as video_frames
from jaxtrain.data.video import pieces, prepare_clips, sets
from jaxtrain.data.video.pieces import Settings
from jaxtrain.data.video.reader import Frame, Reader, Span
from jaxtrain.errors import BadExample, InputError, RunAgain
from jaxtrain.jobs import engines, resumable
from jaxtrain.storage import bucket_folders, disks
from jaxtrain.storage.bucket import Bucket

SMALL = Settings(
    height=32,
    width=48,
    min_crop_scale=0.8,
    frames=16,
    min_frames=8,
    min_side=16,
    gop=4,
    quantizer=2,
    split_at_cuts=False,  # every numbered frame looks like a new shot
)


def _cut(path: Path, folder: Path, settings: Settings = SMALL) -> pieces.Cut:
    folder.mkdir(parents=True)
    return pieces.cut(str(path), None, folder, settings)


def _contents(folder: Path) -> dict[str, bytes]:
    """Returns the pieces in a folder, or in the tars of a set."""
    found = {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.mp4")
    }
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                found[member.name] = file.read()
    return found


def _numbers(path: Path) -> list[int]:
    with av.open(str(path)) as container:
        return [sample.number_of(f.to_ndarray(format="rgb24")) for f in container.decode(video=0)]


def _run(
    source: Path | str, out: Path | str, settings: Settings = SMALL, **more: Any
) -> tuple[resumable.Outcome, list[str]]:
    said: list[str] = []
    more = {"engine": engines.Threads(1)} | more
    return prepare_clips.run(str(source), out, settings, say=said.append, **more), said


def test_pieces_contain_all_frames_in_order(tmp_path: Path) -> None:
    pictures = [sample.numbered(number, 128, 192) for number in range(39)]
    source = sample.write(tmp_path / "a.mp4", pictures, g="250")
    half = Settings(**{**vars(SMALL), "min_crop_scale": 0.5})
    made = _cut(source, tmp_path / "out", half)
    assert (made.pieces, made.left_out, made.lost, made.damage) == ((16, 23), 0, 0, ())
    assert (made.sizes, made.rate) == (((64, 96), (64, 96)), 25)
    assert _cut(source, tmp_path / "again", half) == made
    assert _contents(tmp_path / "again") == _contents(tmp_path / "out")
    files = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in files] == ["00000.mp4", "00001.mp4"]
    for first, count, path in zip((0, 16), (16, 23), files, strict=True):
        assert _numbers(path) == list(range(first, first + count))
        with av.open(str(path)) as container:
            (stream,) = container.streams
            frames = list(container.decode(video=0))
        assert [number for number, one in enumerate(frames) if one.key_frame] == [
            *range(0, count, 4)
        ]
        assert (stream.height, stream.width, stream.average_rate) == (64, 96, 25)
        for numbers in ([0], [5], [11], [3, 4, 9], [count - 1]):
            pictures = _pictures(path, numbers)
            assert [sample.number_of(one) for one in pictures] == [first + n for n in numbers]


def _pictures(path: Path, numbers: list[int]) -> list[np.ndarray]:
    """Reads frames of a piece."""
    taken: dict[int, np.ndarray] = {}

    def take(position: int, frame: av.VideoFrame) -> None:
        taken[position] = frame.to_ndarray(format="rgb24")

    pieces.read(str(path), Span(str(path), 0, path.stat().st_size), numbers, take)
    return [taken[position] for position in range(len(numbers))]


def test_reading_a_piece_decodes_from_the_keyframe_before_the_first_frame_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sample.write(tmp_path / "a.mp4", [sample.numbered(n, 128, 192) for n in range(16)])
    _cut(source, tmp_path / "out", Settings(**{**vars(SMALL), "min_crop_scale": 0.5}))
    (path,) = (tmp_path / "out").iterdir()
    count = 0
    real = pieces.open_input

    @contextlib.contextmanager
    def opened(*given: Any) -> Iterator[Any]:
        def decode(stream: Any) -> Iterator[av.VideoFrame]:
            nonlocal count
            for frame in container.decode(stream):
                count += 1
                yield frame

        with real(*given) as container:
            yield types.SimpleNamespace(
                streams=container.streams, seek=container.seek, decode=decode
            )

    monkeypatch.setattr(pieces, "open_input", opened)
    for numbers, decoded in (([0], 1), ([3], 4), ([4], 1), ([10, 11], 4), ([6, 9], 6)):
        count = 0
        assert [sample.number_of(one) for one in _pictures(path, numbers)] == numbers
        assert count == decoded


def test_a_damaged_piece_is_one_line(tmp_path: Path) -> None:
    source = sample.write(tmp_path / "a.mp4", 16)
    _cut(source, tmp_path / "out")
    (path,) = (tmp_path / "out").iterdir()
    with pytest.raises(BadExample, match="frame 16 is missing"):
        _pictures(path, [14, 16])
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(BadExample, match="cannot be decoded: Invalid data found"):
        _pictures(path, [0])


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        ((720, 1280), (600, 1066)),  # limited by the height
        ((2560, 1440), (1600, 900)),  # upright: limited by the width
        ((480, 720), (480, 720)),  # not enlarged
        ((500, 4000), (500, 4000)),
    ],
)
def test_a_piece_covers_the_largest_crop(shown: tuple[int, int], wanted: tuple[int, int]) -> None:
    assert Settings().size(*shown) == wanted


def test_colors_are_preserved(tmp_path: Path) -> None:
    colors = np.array([[200, 40, 40], [40, 160, 60], [50, 60, 190]], np.uint8)
    picture = np.broadcast_to(np.repeat(colors, 32, 0), (64, 96, 3)).copy()
    formats: dict[str, dict[str, Any]] = {
        "full.mp4": {"full_range": True},
        "plain.mp4": {},
        "deep.mkv": {"codec": "libx265", "pix_fmt": "yuv420p10le"},
    }
    for name, more in formats.items():
        source = sample.write(tmp_path / name, [picture] * 8, crf="4", **more)
        _cut(source, tmp_path / f"out-{name}")
        piece = tmp_path / f"out-{name}" / "00000.mp4"
        seen = [_colors(path) for path in (source, piece)]
        np.testing.assert_allclose(seen[0], seen[1], atol=6)


def _colors(path: Path) -> np.ndarray:
    frame = [item for item in Reader(str(path)) if isinstance(item, Frame)][3]
    position = video_frames.CropPosition(across=0, down=0)
    crop = video_frames.Crop(frame.look, frames=1, height=32, width=48, position=position)
    crop.put(0, frame.picture)
    return crop.out_THWC[0, 16, [8, 24, 40]].astype(int)


def test_odd_sized_videos(tmp_path: Path) -> None:
    odd = sample.write(
        tmp_path / "odd.mkv",
        [np.full((45, 67, 3), 90, np.uint8)] * 8,
        codec="ffv1",
        pix_fmt="yuv444p",
    )
    assert _cut(odd, tmp_path / "odd").sizes == ((40, 60),)
    (picture,) = _pictures(tmp_path / "odd/00000.mp4", [7])
    assert picture.shape == (40, 60, 3)


def test_a_piece_ends_at_a_hard_cut(tmp_path: Path) -> None:
    values = [30 + 4 * (number % 2) for number in range(10)] + [220] * 10
    images = [np.full((64, 96, 3), value, np.uint8) for value in values]
    source = sample.write(tmp_path / "a.mp4", images, crf="4")
    assert _cut(source, tmp_path / "kept").pieces == (20,)
    split = Settings(**{**vars(SMALL), "split_at_cuts": True})
    assert _cut(source, tmp_path / "split", split).pieces == (10, 10)


def test_errors_about_videos_give_the_reason(tmp_path: Path) -> None:
    garbled = sample.garble(sample.write(tmp_path / "garbled.mp4", sample.busy(30), g="30"))
    short = sample.write(tmp_path / "short.mp4", 7)
    tiny = sample.write(tmp_path / "tiny.mp4", [np.zeros((8, 8, 3), np.uint8)] * 9)
    for path, words in (
        (garbled, r"none of its \d frames begins 8 .*; it (has damaged frames|cannot be decoded)"),
        (short, r"none of its 7 frames begins 8 frames \(--min-frames\) in a row without a"),
        (tiny, "8x8, smaller than --min-side 16"),
        (tmp_path / "gone.mp4", "No such file"),
    ):
        with pytest.raises(BadExample, match=words):
            _cut(path, tmp_path / f"out-{path.name}")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "videos"
    for number in range(3):
        pictures = [sample.numbered(number + frame) for frame in range(20)]
        sample.write(folder / "sub" / f"{number}.mp4", pictures)
    (folder / "broken.mp4").write_bytes(b"no video" * 100)
    return folder


def test_a_folder_becomes_a_set_and_a_report(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome, said = _run(source, out, engine=engines.Processes(1))
    assert (outcome.made, list(outcome.failed)) == (3, ["broken.mp4"])
    assert outcome.totals == {
        "pieces": 3,
        "frames": 60,
        "frames_left_out": 0,
        "frames_lost": 0,
    }
    report = json.loads((out / "report.json").read_text())
    assert (report["inputs"], report["made"], report["frames"]) == (4, 3, 60)
    assert [failed["name"] for failed in report["failed"]] == ["broken.mp4"]
    assert any("failed: broken.mp4" in line for line in said)
    assert sorted(path.name for path in out.iterdir()) == [
        ".jobs",
        "all.tar",
        "report.json",
        "table",
    ]
    assert sorted(_contents(out)) == [f"sub/{n}.mp4/00000.mp4" for n in range(3)]
    assert sets.is_set(str(out))
    assert not sets.is_set(str(source))
    model = sample.model(height=32, width=48)
    sources = sample.opened(out, tmp_path / "cache", model, convert_on="host")
    assert (sources.files, sources.bad) == (3, ())  # named by the command
    assert [source.groups for source in (sources.train, sources.val)] == [2, 1]
    assert all(video.rate == 25 for video in sources.train.videos)
    example = sources.train.example(0, np.random.default_rng(0))
    assert example["video"].shape == (6, 32, 48, 3)


def test_wrong_use_of_folders(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _run(source, out)
    with pytest.raises(InputError, match=r"outputs with other settings \(gop 4, not 2\)"):
        _run(source, out, Settings(**{**vars(SMALL), "gop": 2}))
    with pytest.raises(InputError, match=r"is inside SOURCE"):
        _run(source, source / "out")
    with pytest.raises(InputError, match=r"videos is SOURCE .*videos, so its clips would be cut"):
        _run(source, source)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write to .*, and start again"):
        _run(source, tmp_path / "file/out")
    with pytest.raises(InputError, match=r"--width 853: .* the nearest is 856"):
        Settings(width=853)
    for wrong in ({"gop": 0}, {"min_frames": 99, "frames": 9}, {"quantizer": 0}):
        with pytest.raises(InputError, match="--"):
            Settings(**wrong)


@pytest.mark.parametrize("rate", [Fraction(120_000, 1001), Fraction(10**6)])
def test_many_frames_per_second_can_be_written(tmp_path: Path, rate: Fraction) -> None:
    writer = pieces._Writer(tmp_path / "fast.mp4", (64, 96), rate, SMALL)
    for _ in range(9):
        writer.add(av.VideoFrame(96, 64, "yuv420p"))
    writer.finish()
    assert len([item for item in Reader(str(writer.path)) if isinstance(item, Frame)]) == 9


def test_a_listed_video_that_does_not_exist_is_named_and_cut_once_it_does(tmp_path: Path) -> None:
    listed = tmp_path / "listed.txt"
    sample.write(tmp_path / "0.mp4", 20)
    listed.write_text("0.mp4\n1.mp4\n")
    outcome, _ = _run(listed, tmp_path / "out")
    assert (outcome.made, outcome.failed) == (1, {"1.mp4": "No such file or directory"})
    sample.write(tmp_path / "1.mp4", 20)
    outcome, _ = _run(listed, tmp_path / "out")  # both are in one tar
    assert (outcome.made, outcome.failed) == (2, {})


def test_a_disk_that_is_gone_is_waited_for_and_then_ends_the_command(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would report all videos that are left as failed."""
    real, left = os.open, [3]

    def fail(path: Any, *rest: Any, **more: Any) -> int:
        if str(path).endswith(".mp4") and left[0]:
            left[0] -= 1
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), path)
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", fail)
    with monkeypatch.context() as patched:
        patched.setattr(disks, "OUTAGE_S", 0.0)
        message = r"\.mp4 cannot be read \(Transport endpoint is not connected\): bring the disk"
        with pytest.raises(RunAgain, match=message):
            _run(source, tmp_path / "out")
    outcome, _ = _run(source, tmp_path / "out")
    assert (outcome.made + outcome.skipped, len(outcome.failed)) == (3, 1)


def test_videos_and_clips_may_be_in_buckets(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Videos are fetched one by one, and the objects are the files of a local folder."""
    bucket = Bucket("s3://bucket/clips", MemoryStore())
    monkeypatch.setattr(bucket_folders, "opened", lambda url: bucket)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    _run(source, tmp_path / "out")
    real, present = pieces.cut, []

    def cut(path: str, *rest: Any) -> pieces.Cut:
        present.append(list((tmp_path / "cache").rglob("*.mp4")))
        return real(path, *rest)

    monkeypatch.setattr(pieces, "cut", cut)
    with file_server.bucket(monkeypatch, "films") as memory:
        for path in source.rglob("*.mp4"):
            memory.put(str(path.relative_to(source)), path)
        memory.put("page.mp4", b"<html>")
        outcome, _ = _run("s3://films", "s3://bucket/clips")
        assert (outcome.made, sorted(outcome.failed)) == (3, ["films/broken.mp4", "films/page.mp4"])
        assert "page.mp4 is an HTML page" in outcome.failed["films/page.mp4"]
        assert [len(fetched) for fetched in present] == [1, 1, 1, 1]
        assert not list((tmp_path / "cache/scratch").rglob("*.mp4"))
        _, said = _run("s3://films", "s3://bucket/clips")
        assert said == ["3 of 5 videos are already done; 2 failed before, without a change since"]
        with pytest.raises(InputError, match=r"OUT s3://films/a is inside SOURCE s3://films"):
            _run("s3://films", "s3://films/a")
    copy = tmp_path / "copy"
    for name in bucket.sizes():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        bucket.fetch(name, copy / name)
    assert _contents(copy) == {
        f"films/{name}": content for name, content in _contents(tmp_path / "out").items()
    }
    # The table says the same of their content, as it tells equal videos apart.
    tables = [sets.Table.of(folder) for folder in (copy, tmp_path / "out")]
    fetched, local = (table.rows[["size", "ends", "frames"]].tolist() for table in tables)
    assert fetched == local
    assert tables[0].names == [f"films/{name}" for name in tables[1].names]


def test_videos_at_https_are_told_apart_by_their_content(source: Path, tmp_path: Path) -> None:
    """Servers say no more than an address, by which equal videos would seem to differ."""
    listed = tmp_path / "list.txt"
    with file_server.serving() as server:
        for name, number in (("a", 0), ("b", 1), ("again", 1)):
            body = (source / f"sub/{number}.mp4").read_bytes()
            server.files[f"/{name}.mp4"] = file_server.Answer(body)
        listed.write_text("".join(f"{server.base}{name}\n" for name in server.files))
        outcome, _ = _run(listed, tmp_path / "out")
        assert (outcome.made, outcome.failed) == (3, {})
        assert _run(listed, tmp_path / "out")[0].skipped == 3
        assert len(server.asked) == 3
    rows, names = sets.Table.of(tmp_path / "out").rows, sets.Table.of(tmp_path / "out").names
    contents = {
        Path(name).name: (int(row["size"]), row["ends"])
        for name, row in zip(names, rows, strict=True)
    }
    assert contents["b.mp4"] == contents["again.mp4"] != contents["a.mp4"]
    size = {"model": sample.model(height=32, width=48)}
    sources = sample.opened(tmp_path / "out", tmp_path / "cache", **size)
    sides = [{Path(one.name).name for one in side.videos} for side in (sources.train, sources.val)]
    assert {frozenset(side) for side in sides} == {
        frozenset(["a.mp4"]),
        frozenset(["b.mp4", "again.mp4"]),
    }
