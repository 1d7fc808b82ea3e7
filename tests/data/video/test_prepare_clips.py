"""Cutting videos into pieces: their content, skipped videos, and resuming after a kill."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
import types
import typing
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any
from unittest import mock

import av
import engine_threads
import numpy as np
import pytest
import sample_videos as sample

from jaxtrain.data import engine, video
from jaxtrain.data.video import decode, demo_videos, packets, pieces, prepare_clips
from jaxtrain.data.video import files as video_files
from jaxtrain.data.video.pieces import Settings
from jaxtrain.errors import BadExample, InputError, RunAgain
from jaxtrain.storage import atomic, disks

SMALL = Settings(
    height=32,
    width=48,
    min_crop_scale=0.8,
    frames=16,
    min_frames=8,
    min_side=16,
    gop=4,
    quantizer=2,
    crf=10,
    split_at_cuts=False,  # every numbered frame looks like a new shot
)


def _cut(path: Path, folder: Path, settings: Settings = SMALL) -> pieces.Cut:
    folder.mkdir(parents=True)
    return pieces.cut(str(path), None, folder, settings)


def _numbers(path: Path) -> list[int]:
    with av.open(str(path)) as container:
        return [sample.number_of(f.to_ndarray(format="rgb24")) for f in container.decode(video=0)]


def _run(
    source: Path, out: Path, settings: Settings = SMALL, share: str | None = None
) -> tuple[Any, list[str]]:
    said: list[str] = []
    report = prepare_clips.run(
        str(source), out, settings, engine=engine.Local(1), say=said.append, share=share
    )
    return report, said


CODECS = pytest.mark.parametrize("codec", typing.get_args(pieces.Codec))


@CODECS
def test_pieces_contain_all_frames_in_order(tmp_path: Path, codec: pieces.Codec) -> None:
    pictures = [sample.numbered(number, 128, 192) for number in range(39)]
    source = sample.write(tmp_path / "a.mp4", pictures, g="250")
    half = Settings(**{**vars(SMALL), "min_crop_scale": 0.5, "codec": codec})
    assert _cut(source, tmp_path / "out", half) == pieces.Cut((16, 16), 7)
    files = sorted((tmp_path / "out").iterdir())
    assert [path.name for path in files] == ["00000.mp4", "00001.mp4"]
    for first, path in zip((0, 16), files, strict=True):
        assert _numbers(path) == list(range(first, first + 16))
        info = packets.scan(str(path))
        assert [key.frame for key in info.keyframes] == [0, 4, 8, 12]
        assert (info.height, info.width, info.fps) == (64, 96, 25.0)
        assert decode.verify(str(path), info).broken is None
        for number in (0, 5, 11):
            frames = sample.decoded(str(path), info, [number])
            picture = frames[0].to_ndarray(format="rgb24")
            assert sample.number_of(picture) == first + number


@CODECS
def test_the_same_video_gives_the_same_bytes(tmp_path: Path, codec: pieces.Codec) -> None:
    """x264 may depend on the memory addresses of frames, which differ between threads."""
    frames = [demo_videos.to_uint8(f) for f in demo_videos.render(demo_videos._KINDS["hills"], 0)]
    demo_videos.encode(tmp_path / "a.mp4", iter(frames), demo_videos.FPS)
    large = Settings(height=80, width=128, frames=48, gop=24, codec=codec)

    def pieces_of(number: int) -> bytes:
        folder = tmp_path / str(number)
        _cut(tmp_path / "a.mp4", folder, large)
        (piece,) = folder.iterdir()
        return piece.read_bytes()

    with ThreadPoolExecutor(2) as pool:
        assert len(set(pool.map(pieces_of, range(24)))) == 1


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
    colours = np.array([[200, 40, 40], [40, 160, 60], [50, 60, 190]], np.uint8)
    picture = np.broadcast_to(np.repeat(colours, 32, 0), (64, 96, 3)).copy()
    for name, more in (("full.mp4", {"full_range": True}), ("plain.mp4", {}), ("deep.mkv", {})):
        deep = {"codec": "libx265", "pix_fmt": "yuv420p10le"} if name == "deep.mkv" else {}
        source = sample.write(tmp_path / name, [picture] * 8, crf="4", **more, **deep)
        _cut(source, tmp_path / f"out-{name}")
        piece = str(tmp_path / f"out-{name}" / "00000.mp4")
        seen = [_read(str(path)) for path in (source, piece)]
        np.testing.assert_allclose(seen[0], seen[1], atol=6)


def _read(path: str) -> np.ndarray:

    info = packets.scan(path)
    frames = sample.decoded(path, info, [3])
    picture = sample.cropped(
        frames, info, height=32, width=48, scale=1, across=0, down=0, mirror=False
    )
    return picture[0, 16, [8, 24, 40]].astype(int)


def test_turned_and_odd_sized_videos(tmp_path: Path) -> None:
    turned = sample.rotate_quarter(sample.write(tmp_path / "t.mp4", 8))
    _cut(turned, tmp_path / "t")
    info = packets.scan(str(tmp_path / "t/00000.mp4"))
    assert (info.height, info.width, info.rotation) == (90, 60, 0)
    upright = _read_whole(str(tmp_path / "t/00000.mp4"))
    np.testing.assert_allclose(upright, _read_whole(str(turned)), atol=40)
    odd = sample.write(
        tmp_path / "odd.mkv",
        [np.full((45, 67, 3), 90, np.uint8)] * 8,
        codec="ffv1",
        pix_fmt="yuv444p",
    )
    _cut(odd, tmp_path / "odd")
    info = packets.scan(str(tmp_path / "odd/00000.mp4"))
    assert (info.height, info.width) == (40, 60)


def _read_whole(path: str) -> np.ndarray:

    info = packets.scan(path)
    return sample.cropped(
        sample.decoded(path, info, [5]),
        info,
        height=48,
        width=32,
        scale=1,
        across=0,
        down=0,
        mirror=False,
    ).astype(int)


def test_a_piece_ends_at_a_hard_cut(tmp_path: Path) -> None:
    dark, bright = (np.full((64, 96, 3), value, np.uint8) for value in (30, 220))
    source = sample.write(tmp_path / "a.mp4", [dark] * 10 + [bright] * 10)
    assert _cut(source, tmp_path / "kept") == pieces.Cut((16,), 4)
    split = Settings(**{**vars(SMALL), "split_at_cuts": True})
    assert _cut(source, tmp_path / "split", split).pieces == (10, 10)


def test_errors_about_videos_give_the_reason(tmp_path: Path) -> None:
    garbled = sample.garble(sample.write(tmp_path / "garbled.mp4", sample.busy(30), g="30"))
    short = sample.write(tmp_path / "short.mp4", 7)
    tiny = sample.write(tmp_path / "tiny.mp4", [np.zeros((8, 8, 3), np.uint8)] * 9)
    for path, words in (
        (garbled, "corrupt|fails"),
        (short, r"too short: it does not have 8 frames \(--min-frames\) without a cut among its 7"),
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


def test_a_folder_becomes_pieces_a_report_and_data(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report, said = _run(source, out)
    assert (report["videos"], report["cut"], report["pieces"]) == (4, 3, 3)
    assert (report["frames"], report["frames_left_out"]) == (48, 12)
    assert [one["source"] for one in report["dropped"]] == ["broken.mp4"]
    assert json.loads((out / "report.json").read_text()) == report
    assert any("skipped" in line and "broken.mp4" in line for line in said)
    names = [one.name for one in video_files.find(str(out), "--data.path", tmp_path, said.append)]
    assert names == [f"sub/{n}.mp4.pieces/00000.mp4" for n in range(3)]
    model = types.SimpleNamespace(frames=6, height=32, width=48)
    config = video.Config(
        path=str(out), batch_size=1, cache_dir=str(tmp_path / "cache"), convert_on="host"
    )
    sources = config.open(model, seed=0, say=lambda line: None)
    example = sources.train.example(0, np.random.default_rng(0))
    assert example["video"].shape == (6, 32, 48, 3)


def test_a_killed_worker_leaves_files_only_where_they_are_removed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records are written in folders that the next command removes without a list of records."""
    written: list[Path] = []
    real = atomic._beside

    def beside(path: Path) -> Any:
        written.append(path)
        return real(path)

    monkeypatch.setattr(engine, "_pool", engine_threads.pool)
    monkeypatch.setattr(atomic, "_beside", beside)
    _run(source, tmp_path / "out")
    out = tmp_path / "out"
    names = {path.parent.relative_to(out).as_posix() for path in written if out in path.parents}
    assert len([name for name in names if name.startswith(".prepare/half-")]) == 4
    assert {name for name in names if "half-" not in name} == {".", ".prepare"}


def test_a_second_run_resumes_the_first(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _run(source, out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.mp4") if path.is_file()}
    # As if killed while it cut 1.mp4, after it had removed the old pieces.
    records = {json.loads(p.read_text())["source"]: p for p in out.rglob(".prepare/records/*/*")}
    records["sub/1.mp4"].unlink()
    (out / ".prepare/half-0123").mkdir()
    (out / ".prepare/half-0123/00000.mp4").write_bytes(b"half")
    lefts = (out / ".report.json.abcd1234.json", out / ".prepare/.token.abcd1234")
    for left in lefts:
        left.write_text("half")
    sample.write(source / "sub/2.mp4", 36)  # another video under the same name
    report, said = _run(source, out)
    assert said[0] == "2 of 4 videos are already done"
    assert (report["pieces"], report["cut"]) == (4, 3)
    after = {path: path.stat().st_mtime_ns for path in out.rglob("*.mp4") if path.is_file()}
    same = {path.relative_to(out).parts[1] for path in before if before[path] == after.get(path)}
    assert same == {"0.mp4.pieces"}
    assert not list((out / ".prepare").glob("half-*"))
    assert not any(left.exists() for left in lefts)
    # A video that is broken now loses its pieces.
    (source / "sub/2.mp4").write_bytes(b"gone bad" * 50)
    report, _ = _run(source, out)
    assert report["pieces"] == 2
    assert not (out / "sub/2.mp4.pieces").exists()


def test_damaged_pieces_are_cut_again(source: Path, tmp_path: Path) -> None:
    """Also after an interrupted copy of the folder; records without sizes are those of before."""
    out = tmp_path / "out"
    _run(source, out)
    before = {path: path.read_bytes() for path in out.glob("sub/*/*.mp4")}
    short, gone, _ = sorted(before)
    os.truncate(short, len(before[short]) - 1)
    gone.unlink()
    _, said = _run(source, out)
    assert said[0] == "2 of 4 videos are already done"
    assert {path: path.read_bytes() for path in out.glob("sub/*/*.mp4")} == before
    for path in out.glob(".prepare/records/*/*"):
        record = json.loads(path.read_text())
        path.write_text(json.dumps({k: v for k, v in record.items() if k != "bytes"}))
    _, said = _run(source, out)
    assert said[0] == "4 of 4 videos are already done"


SETTINGS_BEFORE = (  # of pieces when all were H.264
    *("height", "width", "min_crop_scale", "frames", "min_frames", "min_side", "gop", "crf"),
    "split_at_cuts",
)


def test_wrong_use_of_folders(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _run(source, out)
    with pytest.raises(InputError, match=r"clips with other settings \(gop 4, not 2\)"):
        _run(source, out, Settings(**{**vars(SMALL), "gop": 2}))
    with pytest.raises(InputError, match=r"is inside SOURCE"):
        _run(source, source / "out")
    with pytest.raises(InputError, match=r"videos is SOURCE .*videos, so its clips would be cut"):
        _run(source, source)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write to .*, and start again$"):
        _run(source, tmp_path / "file/out")
    stored = out / ".prepare/settings.json"
    before = json.loads(stored.read_text())
    stored.write_text(json.dumps({k: v for k, v in before.items() if k in SETTINGS_BEFORE}))
    with pytest.raises(InputError, match=r"clips with other settings \(codec h264, not mpeg4\)"):
        _run(source, out)
    _, said = _run(source, out, Settings(**{**vars(SMALL), "codec": "h264"}))
    assert said[0] == "4 of 4 videos are already done"
    with pytest.raises(InputError, match=r"--width 853: .* the nearest is 856"):
        Settings(width=853)
    for wrong in (
        *({"gop": 0}, {"min_frames": 99, "frames": 9}, {"crf": 60}, {"quantizer": 0}),
        {"min_crop_scale": 0},
    ):
        with pytest.raises(InputError, match="--"):
            Settings(**wrong)


@CODECS
@pytest.mark.parametrize("fps", [120_000 / 1001, 1e6])
def test_many_frames_per_second_can_be_written(
    tmp_path: Path, codec: pieces.Codec, fps: float
) -> None:
    writer = pieces._Writer(
        tmp_path / "fast.mp4", (64, 96), fps, Settings(**{**vars(SMALL), "codec": codec})
    )
    for _ in range(9):
        writer.add(av.VideoFrame(96, 64, "yuv420p"))
    writer.close()
    assert packets.scan(str(writer.path)).frames == 9


def test_a_video_with_hours_between_frames_is_cut(tmp_path: Path) -> None:
    pictures = [sample.numbered(number) for number in range(9)]
    slow = sample.write_at(tmp_path / "slow.mp4", pictures, [n * 5_000_000 for n in range(9)])
    assert 0 < packets.scan(str(slow)).fps < 1 / 2002
    report, _ = _run(slow, tmp_path / "out")
    assert (report["cut"], report["frames"], report["dropped"]) == (1, 9, [])


def test_a_video_that_causes_any_error_is_skipped_and_reported(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_clips, "_cut_here", _cut_and_fail)
    shutil.copy(
        source / "sub/0.mp4", source / f"{'n' * 250}.mp4"
    )  # with .pieces, the name is too long
    report, said = _run(source, tmp_path / "out")
    assert report["cut"] == 2
    reasons = {one["source"]: one["reason"] for one in report["dropped"]}
    assert reasons.pop("broken.mp4")
    assert reasons.pop("sub/1.mp4") == "cannot be cut: ZeroDivisionError: unexpected"
    assert "File name too long" in reasons.popitem()[1]
    assert not reasons
    assert any(f"skipped: {source}/sub/1.mp4: cannot be cut" in line for line in said)
    report, said = _run(source, tmp_path / "out")  # the records are still valid
    assert said[0] == "5 of 5 videos are already done"
    for record in (tmp_path / "out/.prepare/records").glob("*/*"):
        record.write_text("[" * 100_000)
    assert _run(source, tmp_path / "out")[0]["cut"] == 2
    for content in ("[]", '{"source": 1}', "9" * 5000):
        for record in (tmp_path / "out/.prepare/records").glob("*/*"):
            record.write_text(content)
    assert _run(source, tmp_path / "out")[0]["cut"] == 2


def test_a_full_disk_ends_the_command(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_clips, "_cut_here", _cut_on_a_full_disk)
    out = tmp_path / "out"
    full = r"cannot write to .*out \(No space left on device\): free space on that disk, or choose "
    with pytest.raises(
        RunAgain, match=full + "another folder, and start again; finished videos are kept$"
    ):
        _run(source, out)


def test_a_text_is_not_taken_as_a_list_of_thousands_of_videos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prose = tmp_path / "prose.txt"
    prose.write_text("".join(f"Sentence {number}.\n" for number in range(1458)))
    message = r"prose.txt is not a list of videos: none of its 1,458 lines ends like"
    with pytest.raises(InputError, match=message):
        _run(prose, tmp_path / "out")
    prose.write_text("".join(f"{number}.mp4\n" for number in range(1458)))
    message = (
        r"prose.txt: none of its 1,458 entries exists on this machine, such as .*0\.mp4: "
        r"is it a list of videos\? With --engine ray, this machine must see them, too"
    )
    with pytest.raises(InputError, match=message):
        _run(prose, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(engine, "_pool", engine_threads.pool)
    sample.write(tmp_path / "0.mp4", 20)
    prose.write_text("0.mp4\n" + "".join(f"{number}.mp4\n" for number in range(1, 25)))
    report, said = _run(prose, tmp_path / "out")
    assert (report["cut"], len(report["dropped"])) == (1, 24)
    lines = [line for line in said if line.startswith("skipped: ")]
    assert len(lines) == 21
    assert lines[-1] == "skipped: 4 more, all in report.json"


def _fail(monkeypatch: pytest.MonkeyPatch, name: str, number: int, times: int) -> None:
    """Makes the system fail to open a file so many times."""
    real, left = os.open, [times]

    def fail(path: Any, *rest: Any, **more: Any) -> int:
        if str(path).endswith(name) and left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number), path)
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", fail)


def test_a_video_that_may_not_be_read_is_tried_again_by_the_next_command(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_pool", engine_threads.pool)
    _fail(monkeypatch, "1.mp4", errno.EACCES, 1)
    report, said = _run(source, tmp_path / "out")
    assert (report["cut"], len(report["dropped"])) == (2, 2)
    assert any("1.mp4: Permission denied" in line for line in said)
    monkeypatch.undo()
    monkeypatch.setattr(engine, "_pool", engine_threads.pool)
    report, said = _run(source, tmp_path / "out")
    assert said[0] == "3 of 4 videos are already done"
    assert (report["cut"], len(report["dropped"])) == (3, 1)


def test_a_node_that_is_lost_late_does_not_remove_the_clips_of_another(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray moves its video to another node, which finishes it before the first one is dead."""
    out = tmp_path / "out"
    (out / ".prepare").mkdir(parents=True)
    job = prepare_clips._Job(video_files.Found("0.mp4", str(source / "sub/0.mp4")), out)
    published: list[Path] = []
    publish = prepare_clips._publish

    def counted(work: Path, folder: Path, top: Path) -> None:
        published.append(folder)
        publish(work, folder, top)

    def cut(*arguments: Any) -> pieces.Cut:
        monkeypatch.setattr(pieces, "cut", _real_pieces)
        records.append(prepare_clips._cut(job, SMALL))
        return _real_pieces(*arguments)

    records: list[Any] = []
    monkeypatch.setattr(prepare_clips, "_publish", counted)
    monkeypatch.setattr(pieces, "cut", cut)
    records.append(prepare_clips._cut(job, SMALL))
    assert records[0] == records[1] == job.done()
    assert published == [out / "0.mp4.pieces"]


def test_a_disk_that_is_gone_is_waited_for_and_then_ends_the_command(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would drop all videos that are left, and end with exit code 0."""
    monkeypatch.setattr(engine, "_pool", engine_threads.pool)
    _fail(monkeypatch, ".mp4", errno.ENOTCONN, 3)
    with monkeypatch.context() as patched:
        patched.setattr(disks, "OUTAGE_S", 0.0)
        message = r"\.mp4 cannot be read \(Transport endpoint is not connected\): bring the disk"
        with pytest.raises(RunAgain, match=message):
            _run(source, tmp_path / "out")
    report, _ = _run(source, tmp_path / "out")
    assert (report["videos"], report["cut"]) == (4, 3)


@pytest.mark.parametrize("fraction", [0.25, 0.9])
def test_a_video_that_is_copied_while_it_is_cut_is_cut_again_by_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fraction: float
) -> None:
    monkeypatch.setattr(engine, "_pool", engine_threads.pool)
    path = sample.write(tmp_path / "in/a.mkv", 40)
    _run(path.parent, tmp_path / "expected")
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * fraction)])

    def cut(*arguments: Any) -> pieces.Cut:
        try:
            return _real_pieces(*arguments)
        finally:
            path.write_bytes(content)

    monkeypatch.setattr(pieces, "cut", cut)
    report, _ = _run(path.parent, tmp_path / "out")
    assert report["dropped"] == [{"source": "a.mkv", "reason": "changed while it was cut"}]
    assert not list((tmp_path / "out").glob("*.pieces"))
    monkeypatch.setattr(pieces, "cut", _real_pieces)
    _, said = _run(path.parent, tmp_path / "out")
    assert not any("already done" in line for line in said)
    found, expected = (_pieces_in(tmp_path / name) for name in ("out", "expected"))
    assert found == expected


def _pieces_in(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in out.glob("*.pieces/*")}


def test_a_video_that_kills_its_worker_is_skipped(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_clips, "_cut_here", _cut_or_die)
    earlier = tmp_path / "out/sub/1.mp4.pieces/00000.mp4"  # of another version of the video
    earlier.parent.mkdir(parents=True)
    earlier.touch()
    report, _ = _run(source, tmp_path / "out")
    assert not earlier.exists()
    assert (report["cut"], len(report["dropped"])) == (2, 2)
    reasons = {one["source"]: one["reason"] for one in report["dropped"]}
    assert reasons["sub/1.mp4"] == engine.KILLS
    # Perhaps for lack of memory, so the next command tries it again, unless many commands would.
    report, said = _run(source, tmp_path / "out", share="a")
    assert (report["cut"], said[0]) == (2, "4 of 4 videos are already done")
    monkeypatch.setattr(prepare_clips, "_cut_here", _real_cut)
    monkeypatch.setattr(engine, "_pool", engine_threads.pool)
    report, said = _run(source, tmp_path / "out")
    assert (report["cut"], said[0]) == (3, "3 of 4 videos are already done")
    assert said[1] == "trying 1 video again after all others: each killed its worker before"


def test_a_worker_that_dies_while_another_record_is_processed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two workers waits to die until the record of the first one has arrived."""
    pools: list[Any] = []
    real = engine._pool

    def kept(*arguments: Any) -> Any:
        pools.append(real(*arguments))
        return pools[-1]

    monkeypatch.setattr(engine, "_pool", kept)
    monkeypatch.setattr(prepare_clips, "_cut_here", _cut_or_die_late)
    out = tmp_path / "out"

    def say(line: str) -> None:
        if "skipped" in line and "broken.mp4" in line:
            (out / "die").touch()
            for _ in range(3000):
                try:
                    pools[1].submit(int)
                except BrokenProcessPool:
                    return
                time.sleep(0.02)
            pytest.fail("no worker died")

    report = prepare_clips.run(str(source), out, SMALL, engine=engine.Local(2), say=say)
    assert (report["videos"], report["cut"]) == (4, 2)  # each has a record
    dropped = {one["source"]: one["reason"] for one in report["dropped"]}
    assert dropped.pop("sub/0.mp4") == engine.KILLS
    assert list(dropped) == ["broken.mp4"]


def _cut_and_fail(job: Any, *rest: Any) -> Any:
    return _cut_beside(job, rest, ZeroDivisionError("unexpected"))


def _cut_on_a_full_disk(job: Any, *rest: Any) -> Any:
    return _cut_beside(job, rest, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


def _cut_beside(job: Any, rest: tuple[Any, ...], error: Exception) -> Any:
    """Cuts a video in a worker, but raises the error for 1.mp4."""

    def cut(path: str, *arguments: Any) -> pieces.Cut:
        if path.endswith("1.mp4"):
            raise error
        return _real_pieces(path, *arguments)

    with mock.patch.object(pieces, "cut", cut):
        return _real_cut(job, *rest)


def _cut_or_die_late(job: Any, *rest: Any) -> Any:
    while job.found.name == "sub/0.mp4":
        if (job.out / "die").exists():
            os._exit(139)
        time.sleep(0.01)
    return _real_cut(job, *rest)


def test_pieces_of_videos_no_longer_in_source_are_listed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_pool", engine_threads.pool)
    out = tmp_path / "out"
    _run(source, out)
    (source / "sub/1.mp4").unlink()
    report, said = _run(source, out)
    gone = {"source": "sub/1.mp4", "folder": "sub/1.mp4.pieces", "pieces": 1}
    assert report["not_in_source"] == [gone]
    assert report["pieces"] == 2
    assert "clips of 1 video not in SOURCE (sub/1.mp4), and training uses them" in said[-1]
    assert (out / "sub/1.mp4.pieces/00000.mp4").is_file()
    shutil.rmtree(out / "sub/1.mp4.pieces")
    report, said = _run(source, out)
    assert report["not_in_source"] == []
    assert not any("SOURCE" in line for line in said)


_real_cut = prepare_clips._cut_here
_real_pieces = pieces.cut


def _cut_or_die(job: Any, *rest: Any) -> Any:
    if job.found.name == "sub/1.mp4":
        os._exit(139)
    return _real_cut(job, *rest)


def test_names_from_lists_stay_inside_the_output_folder(tmp_path: Path) -> None:
    assert prepare_clips.folder_of("/data/.hidden/a.mp4") == "data/_hidden/a.mp4.pieces"
    assert prepare_clips.folder_of("../up.mp4") == "up.mp4.pieces"


SHARER = """
import sys
from pathlib import Path
import engine_threads
from jaxtrain.data import engine
from jaxtrain.data.video import pieces, prepare_clips
from jaxtrain.data.video.pieces import Settings
from jaxtrain.storage import lock

real = pieces.cut
def slow(*arguments):
    print("cut", arguments[0], flush=True)
    if sys.argv[3] == "0" and arguments[0].endswith("2.mp4"):
        sys.stdin.read(1)
    return real(*arguments)

def pool(*arguments):
    print("pool", flush=True)
    return engine_threads.pool(*arguments)

pieces.cut = slow
engine._pool = pool
lock.POLL_S = 0.05
prepare_clips._LATE_S = 0.5
report = prepare_clips.run(
    sys.argv[1], Path(sys.argv[2]), Settings(**eval(sys.argv[4])), engine=engine.Local(1),
    say=print, share=sys.argv[3],
)
print("done", report["cut"], flush=True)
"""


def _files(out: Path) -> dict[str, bytes]:
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file() and path.name not in ("claims", ".lock", "token")
    }


def test_commands_share_a_folder(source: Path, tmp_path: Path, checkout: Path) -> None:
    """One is killed while it cuts a video; the other waits for that video, and then cuts it."""
    for number in range(3, 6):
        shutil.copy(source / "sub/0.mp4", source / f"sub/{number}.mp4")
    _run(source, tmp_path / "alone")
    out = tmp_path / "out"

    def start(number: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", SHARER, source, out, str(number), repr(vars(SMALL))],
            env=os.environ | {"PYTHONPATH": f"{checkout}:{checkout / 'tests'}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    first = start(0)
    assert first.stdout is not None
    while "sub/2.mp4" not in (line := first.stdout.readline()):
        assert line
    with pytest.raises(RunAgain, match=rf"another command is using {out} \(process"):
        _run(source, out)
    second = start(1)
    records = out / ".prepare/records"
    while len(list(records.glob("*/*"))) < 6:  # all but the one that is being cut
        time.sleep(0.05)
    time.sleep(0.3)
    assert second.poll() is None
    first.kill()
    first.communicate()
    said, _ = second.communicate(timeout=60)
    assert said.splitlines()[-1] == "done 6"
    assert f"cut {source}/sub/2.mp4" in said
    assert said.splitlines().count("pool") == 2  # not again and again while it waits
    waits = f"waiting for 1 video that other commands are cutting, such as {source}/sub/2.mp4"
    assert said.splitlines().count(waits) == 1
    assert _files(out) == _files(tmp_path / "alone")


class _LateRecords(prepare_clips._FolderDestination):
    """A folder on NFS: another command has just cut the video, and its record appears later."""

    asked = 0

    def done(self, jobs: Any) -> Any:
        _LateRecords.asked += 1
        record = prepare_clips._record(jobs[0], None, pieces=[16])
        return iter([record if _LateRecords.asked > 4 else None])

    def cut_all(self, jobs: Any, *_: Any) -> Any:
        return iter([(job, None) for job in jobs])


def test_a_record_that_this_host_sees_late_is_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_clips.lock, "POLL_S", 0.0)
    monkeypatch.setattr(_LateRecords, "asked", 0)
    job = prepare_clips._Job(video_files.Found("a.mp4", "/a.mp4"), tmp_path)
    (tmp_path / ".prepare").mkdir()
    said: list[str] = []
    report = prepare_clips._run(
        [job], _LateRecords(tmp_path), SMALL, engine.Local(1), said.append, "1"
    )
    assert report["cut"] == 1
    assert said == ["waiting for 1 video that other commands are cutting, such as /a.mp4"]


@pytest.mark.parametrize("name", [".prepare", ".prepare/records", "sub"])
def test_links_do_not_lead_out_of_the_folder(source: Path, tmp_path: Path, name: str) -> None:
    outside, link = tmp_path / "outside", tmp_path / "out" / name
    outside.mkdir()
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    with pytest.raises(InputError, match=f"{re.escape(str(link))} is a symbolic link, and prepare"):
        _run(source, tmp_path / "out")
    assert not list(outside.iterdir())
