"""Sets of pieces: made once, identified by content, complete or refused, small for workers."""

import dataclasses
import errno
import itertools
import json
import os
import pickle
import shlex
import shutil
import tarfile
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from data.video import sample_videos as sample
from obstore.store import LocalStore

from jaxtrain.cli import command_line
from jaxtrain.data import sampler, video
from jaxtrain.data.source import Sources
from jaxtrain.data.video import clips as clips_module
from jaxtrain.data.video import files, pieces, sets
from jaxtrain.data.video.clips import Clips
from jaxtrain.data.video.pieces import Settings
from jaxtrain.data.video.reader import Look, Span
from jaxtrain.errors import BadExample, InputError
from jaxtrain.jobs import engines, resumable
from jaxtrain.storage import bucket_folders
from jaxtrain.storage.bucket import Bucket

ONE = engines.Threads(1)
SMALL = Settings(height=32, width=48, frames=16, min_frames=8, min_side=16, split_at_cuts=False)


pytestmark = pytest.mark.usefixtures("one_shot")


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals") / "videos"
    for number in range(8):
        sample.write(folder / f"{number}.mp4", 18 + number)
    return folder


@pytest.fixture
def data(originals: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "videos"
    shutil.copytree(originals, folder)
    return folder


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Receives the names of videos when they are cut; those of which have "broken" fail."""
    made: list[str] = []
    real = pieces.cut

    def cut(path: str, *rest: Any) -> pieces.Cut:
        made.append(Path(path).name)
        return real(path, *rest)

    monkeypatch.setattr(pieces, "cut", cut)
    return made


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each video a tar."""
    monkeypatch.setattr(sets, "LEAST_GROUP_BYTES", 1)


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives two or three videos a tar."""
    monkeypatch.setattr(sets, "LEAST_GROUP_BYTES", 10_000)


def opened(path: Path | str, cache: Path, **settings: Any) -> Sources:
    return sample.opened(path, cache, **settings)


def prepared(
    path: Path, out: Path, settings: Settings = SMALL, **more: Any
) -> tuple[resumable.Outcome, list[str]]:
    said: list[str] = []
    found = files.find(str(path), "SOURCE", out.parent / "lists", lambda line: None)
    given = {"engine": ONE} | more
    return sets.prepare(found, out, settings, say=said.append, **given), said


def tars(folder: Path) -> dict[str, tuple[int, int]]:
    """Returns what changes when a tar is made again."""
    return {
        path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.glob("*.tar")
    }


def members(folder: Path) -> dict[str, list[str]]:
    """Returns the names of videos in each tar."""
    found = {}
    for path in folder.glob("*.tar"):
        with tarfile.open(path) as tar:
            found[path.name] = sorted({os.path.dirname(name) for name in tar.getnames()})
    return found


def table_of(folder: Path) -> sets.Table:
    return sets.Table.of(folder)


def read(piece: sets.Piece) -> list[int]:
    """Returns the numbers that all frames of a piece show."""
    taken: dict[int, int] = {}

    def take(position: int, frame: Any) -> None:
        taken[position] = sample.number_of(frame.to_ndarray(format="rgb24"))

    pieces.read(piece.path, piece.span, range(piece.frames), take)
    return [taken[number] for number in range(piece.frames)]


def test_a_set_is_made_once_and_used_without_its_videos_being_read(
    data: Path, tmp_path: Path, cuts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    config = video.Config(path=str(data), batch_size=2, cache_dir=str(tmp_path / "cache"))
    first = config.open(sample.MODEL, seed=0, say=said.append)
    assert sorted(cuts) == [f"{n}.mp4" for n in range(8)]
    assert sum("cutting 8 videos" in line and line.endswith("(once)") for line in said) == 1
    folder = Path(first.train.videos.table.folder)
    before = tars(folder)
    said.clear()
    monkeypatch.setattr(sets, "Reader", None)
    second = config.open(sample.MODEL, seed=0, say=said.append)
    assert len(cuts) == 8
    assert not any("cutting" in line for line in said)
    assert tars(folder) == before
    for ours, theirs in ((first.train, second.train), (first.val, second.val)):
        assert ours.videos.content == theirs.videos.content
        assert ours.fingerprint == theirs.fingerprint
        assert [*ours.videos] == [*theirs.videos]


def test_the_table_says_where_each_frame_is(data: Path, tmp_path: Path, together: None) -> None:
    del together
    (data / "sub").mkdir()
    (data / "7.mp4").rename(data / "sub/ü.mp4")
    (data / "6.mp4").rename(data / "sub" / os.fsdecode(b"\xff.mp4"))  # not UTF-8
    sample.write(data / "5.mp4", [sample.numbered(n, 64, 96) for n in range(50)], fps=60)
    half = dataclasses.replace(SMALL, min_crop_scale=0.5)
    outcome, _ = prepared(data, tmp_path / "out", half)
    assert (outcome.made, outcome.failed) == (8, {})
    table = table_of(tmp_path / "out")
    names = [*(f"{n}.mp4" for n in range(6)), "sub/ü.mp4", os.fsdecode(b"sub/\xff.mp4")]
    assert table.names == sorted(names)
    counts = dict(zip(names, [18, 19, 20, 21, 22, 50, 25, 24], strict=True))
    for number, name in enumerate(table.names):
        one = pickle.loads(pickle.dumps(table)).video(number)
        assert (one.name, one.rate) == (name, 60 if name == "5.mp4" else 25)
        assert [n for piece in one.pieces for n in read(piece)] == list(range(counts[name]))
        for place, piece in enumerate(one.pieces):
            assert piece.look == Look(96, 64, Fraction(1))
            assert piece.path == f"{piece.span.file}/{name}/{place:05}.mp4"
            with tarfile.open(piece.span.file) as tar:
                member = tar.getmember(f"{name}/{place:05}.mp4")
                assert (member.offset_data, member.size) == piece.span[1:]
    assert [piece.frames for piece in table.video(5).pieces] == [16, 16, 18]
    assert table.clips(18, 1)[5] == 1
    assert table.clips(19, 1)[5] == 0
    assert table.clips(8, 8)[5] == 2 + 2 + 2
    assert table.clips(17, 17)[5] == 1
    assert table.rows["frames"].tolist() == [counts[name] for name in table.names]


@pytest.mark.parametrize("how", ["longer", "replaced"])
def test_a_changed_video_makes_only_its_tar_again(
    data: Path, tmp_path: Path, alone: None, cuts: list[str], how: str
) -> None:
    del alone
    out = tmp_path / "out"
    prepared(data, out)
    before, content = tars(out), table_of(out).video(3)
    assert len(before) == 8
    cuts.clear()
    assert prepared(data, out)[0].skipped == 8
    assert cuts == []
    status = (data / "3.mp4").stat()
    if how == "longer":
        sample.write(data / "3.mp4", 30)
    else:
        with open(data / "3.mp4", "r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
    os.utime(data / "3.mp4", ns=(status.st_atime_ns, status.st_mtime_ns))
    outcome, _ = prepared(data, out)
    assert (outcome.made, outcome.skipped, cuts) == (1, 7, ["3.mp4"])
    changed = [name for name, about in tars(out).items() if before[name] != about]
    assert tars(out).keys() == before.keys()
    assert [members(out)[name] for name in changed] == [["3.mp4"]]
    after = table_of(out).video(3)
    assert after.digest != content.digest
    assert sum(piece.frames for piece in after.pieces) == (30 if how == "longer" else 21)


def test_a_video_that_is_added_or_removed_changes_one_tar(
    data: Path, tmp_path: Path, together: None
) -> None:
    del together
    out = tmp_path / "out"
    prepared(data, out)
    before, had = tars(out), members(out)
    assert 2 <= len(before) <= 6
    for change in ("added", "removed"):
        if change == "added":
            sample.write(data / "new.mp4", 20)
        else:
            (data / "new.mp4").unlink()
        outcome, said = prepared(data, out)
        assert not any("no longer in the list" in line for line in said)
        assert json.loads((out / "report.json").read_text())["not_in_list"] == []
        kept = [name for name in tars(out) if tars(out)[name] == before.get(name)]
        assert len(before) - 1 <= len(kept) < len(tars(out)) + 1
        table = table_of(out)
        assert table.length == outcome.made + outcome.skipped == 8 + (change == "added")
        for number in range(table.length):
            assert all(read(piece) for piece in table.video(number).pieces)
        # Each tar has the videos of the table, and no other one.
        names = sorted(name for listed in members(out).values() for name in listed)
        assert names == table.names
    assert members(out) == had


def test_tars_of_videos_that_are_in_other_groups_now_are_removed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    shapes = []
    for least in (10**6, 1, 10_000, 10**6):
        monkeypatch.setattr(sets, "LEAST_GROUP_BYTES", least)
        outcome, said = prepared(data, out)
        assert outcome.made + outcome.skipped == 8
        assert not any("no longer in the list" in line for line in said)
        shapes.append(len(tars(out)))
        names = sorted(name for listed in members(out).values() for name in listed)
        assert names == [f"{n}.mp4" for n in range(8)]
        records = list((out / resumable.WORK / "records").glob("*/*.json"))
        assert len(records) == len(tars(out))
    assert shapes[0] == shapes[3] == 1
    assert shapes[1] == 8
    assert 1 < shapes[2] < 8
    resumable.check_complete(out)


def test_a_removed_video_that_had_a_tar_is_named(data: Path, tmp_path: Path, alone: None) -> None:
    del alone
    out = tmp_path / "out"
    prepared(data, out)
    (had,) = (name for name, listed in members(out).items() if listed == ["3.mp4"])
    (data / "3.mp4").unlink()
    _, said = prepared(data, out)
    assert any(f"such as {had}" in line for line in said)
    assert "3.mp4" not in table_of(out).names


def test_a_killed_preparation_continues(
    data: Path, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch, cuts: list[str]
) -> None:
    del alone
    recorded = pieces.cut

    def cut(path: str, *rest: Any) -> pieces.Cut:
        if len(cuts) == 5:
            raise KeyboardInterrupt
        return recorded(path, *rest)

    monkeypatch.setattr(sets.machine, "cores", lambda: 1)
    with monkeypatch.context() as patched:
        patched.setattr(pieces, "cut", cut)
        with pytest.raises(KeyboardInterrupt):
            opened(data, tmp_path / "cache")
    (folder,) = (tmp_path / "cache/sets").iterdir()
    before = tars(folder)
    assert len(before) == 5
    with pytest.raises(InputError, match=r"is incomplete: .* repeat it"):
        opened(folder, tmp_path / "other")
    assert opened(data, tmp_path / "cache").files == 8
    assert sorted(cuts) == [f"{n}.mp4" for n in range(8)]
    assert {name: tars(folder)[name] for name in before} == before
    assert list((folder / resumable.WORK / "half").iterdir()) == []


def test_the_fingerprint_depends_on_the_content_and_the_settings(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4, 8):
        (data / f"{number}.mp4").unlink()

    def fingerprint(folder: Path, cache: str = "cache", **more: Any) -> tuple[str, str]:
        sources = sample.opened(folder, tmp_path / cache, **more)
        return sources.train.fingerprint, sources.val.fingerprint

    before = fingerprint(data)
    assert before[0] != before[1]
    moved = tmp_path / "elsewhere/data"
    shutil.copytree(data, moved, copy_function=shutil.copyfile)  # another place, other times
    assert fingerprint(moved) == fingerprint(moved, "another") == before
    with monkeypatch.context() as patched:
        patched.setattr(sets, "LEAST_GROUP_BYTES", 1)  # the same pieces, in other tars
        assert fingerprint(data, "groups") == before
    assert fingerprint(data, "larger", min_crop_scale=0.5) != before
    (moved / "0.mp4").rename(moved / "a.mp4")
    assert fingerprint(moved) != before, "names matter"
    (moved / "a.mp4").rename(moved / "0.mp4")
    assert fingerprint(moved) == before
    sample.write(moved / "0.mp4", 25)
    assert fingerprint(moved) != before
    monkeypatch.setattr(sets, "VERSION", sets.VERSION + 1)
    assert fingerprint(data, "version") != before


def test_a_larger_complete_set_is_used_and_a_smaller_one_is_not(
    data: Path, tmp_path: Path, cuts: list[str]
) -> None:
    def folder(height: int, width: int, frames: int = 6) -> Path:
        sources = opened(data, tmp_path / "cache", model=sample.model(frames, height, width))
        return Path(sources.train.videos.table.folder)

    middle = folder(96, 144)
    assert len(cuts) == 8
    assert folder(64, 96) == folder(96, 144) == folder(96, 96, 12) == middle
    assert len(cuts) == 8
    large = folder(128, 144)
    assert large != middle
    assert len(cuts) == 16
    # What a run uses does not change, whatever was made since.
    assert (folder(64, 96), folder(96, 144), folder(128, 144)) == (middle, middle, large)
    os.utime(large / "table/manifest.json", ns=(1, 1))
    assert (folder(64, 96), folder(96, 144), folder(128, 144)) == (large, middle, large)
    assert len(cuts) == 16
    assert folder(96, 144, 5) not in (middle, large), "they lack pieces of 5 frames"
    assert len(cuts) == 24
    for other in large.parent.iterdir():
        if other != large:
            shutil.rmtree(other)
    (large / resumable.WORK / "complete.json").rename(large / "kept")
    assert folder(64, 96) != large, "it is incomplete"
    assert len(cuts) == 32
    (large / "kept").rename(large / resumable.WORK / "complete.json")
    shutil.rmtree(large / "table")
    assert folder(128, 144) == large
    assert len(cuts) == 32, "only its table is made again"


def test_settings_cover_those_of_smaller_runs() -> None:
    base = Settings()
    for larger in (
        {"height": 720, "width": 1080},
        {"min_crop_scale": 0.5},
        {"frames": 200},
        {"min_frames": 12},
        {"min_side": 32},
        {"quantizer": 1},
    ):
        other = dataclasses.replace(base, **larger)  # type: ignore[arg-type]
        assert other.covers(base)
        assert not base.covers(other)
    assert base.covers(base)
    assert not base.covers(dataclasses.replace(base, split_at_cuts=False))


def test_a_set_of_another_version_or_a_damaged_one_is_refused(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepared(data, out)
    cache = tmp_path / "cache"
    opened(out, cache)
    file = out / resumable.WORK / "set.json"
    intact = file.read_text()

    def refused(match: str) -> None:
        with pytest.raises(InputError, match=match) as error:
            opened(out, cache)
        assert len(error.value.messages) == 1
        assert "\n" not in str(error.value)

    def with_settings(change: Any) -> None:
        about = json.loads(intact)
        change(about["settings"])
        for name in ("set.json", "complete.json"):
            (file.parent / name).write_text(json.dumps(about))

    another = r"--data\.path .*/out was made by another version of jaxtrain: prepare its videos ag"
    with_settings(lambda settings: settings.update(version=0))
    refused(another)
    with_settings(lambda settings: settings.pop("version"))  # before there were sets
    refused(another)
    with_settings(lambda settings: settings.pop("min_side"))
    refused(another)
    with_settings(lambda settings: None)
    opened(out, cache)
    (file.parent / "complete.json").unlink()
    refused("is incomplete: the command that prepares it was stopped")
    with_settings(lambda settings: None)
    for content in ("{", "[]", '{"inputs": 1}', '{"inputs": "x", "failed": []}'):
        report = (out / "report.json").read_text()
        (out / "report.json").write_text(content)
        refused(r"its report.json is damaged: prepare its videos again")
        (out / "report.json").write_text(report)
    opened(out, cache)
    videos = out / "table/videos"
    videos.write_bytes(videos.read_bytes()[:-1])
    refused(another)
    shutil.rmtree(out / "table")
    refused(another)


def test_a_long_preparation_is_refused_with_the_command_and_can_be_wanted(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (data.parent / "my videos").symlink_to(data)
    path = str(data.parent / "my videos")
    with monkeypatch.context() as patched:
        patched.setattr(sets, "_SOURCE_S", 1.0)
        with pytest.raises(InputError) as error:
            opened(path, tmp_path / "cache", min_crop_scale=0.5)
        text = str(error.value)
        assert "cutting 8 videos (172 frames, about " in text
        assert "takes more than 30 minutes: prepare the clips first with `" in text
        assert text.endswith("and pass --data.path OUT; or set --data.prepare True")
        assert not (tmp_path / "cache/sets").exists()
        sources = opened(path, tmp_path / "wanted", min_crop_scale=0.5, prepare=True)
        assert sources.files == 8
        opened(path, tmp_path / "wanted", min_crop_scale=0.5)  # what is made is used
    # The command makes a set that the run accepts, of the same pieces.
    words = shlex.split(text.split("`")[1])
    flags = command_line.parse("prepare clips", words[words.index("clips") + 1 :])
    assert flags.source == path
    made = Settings(
        **{
            field.name: getattr(flags, field.name)
            for field in dataclasses.fields(Settings)
            if hasattr(flags, field.name)
        }
    )
    config = video.Config(path=path, batch_size=2, min_crop_scale=0.5)
    assert made.covers(config.needed(sample.MODEL))
    with monkeypatch.context() as patched:
        free = shutil.disk_usage(tmp_path)._replace(free=100)
        patched.setattr(shutil, "disk_usage", lambda folder: free)
        with pytest.raises(InputError, match=r"takes more than the 100 bytes that are free at /"):
            opened(data, tmp_path / "cache")
        assert opened(data, tmp_path / "cache", prepare=True).files == 8


def test_an_estimate_counts_frames_and_pixels(data: Path) -> None:
    found = files.find(str(data), "SOURCE", data.parent / "lists", lambda line: None)
    plan = sets.Plan.of(found, SMALL)
    assert (plan.videos, plan.frames) == (8, pytest.approx(172))
    assert plan.source_bytes == sum(path.stat().st_size for path in data.iterdir())
    pixels = 172 * 40 * 60  # of the pieces
    assert plan.out_bytes == pytest.approx(pixels * sets._OUT_BYTES)
    assert plan.core_s == pytest.approx(pixels * sets._OUT_S + 172 * 64 * 96 * sets._SOURCE_S)
    # Of many videos, some are read, and stand for all.
    many = sets.Plan.of(found * 50, SMALL)
    assert many.frames == pytest.approx(172 * 50, rel=0.1)


def test_what_is_not_a_set_is_not_taken_for_one(data: Path) -> None:
    for path in (str(data), str(data / "0.mp4"), "/nowhere", "https://videos.example/a.mp4"):
        assert not sets.is_set(path)
    with pytest.raises(InputError, match="prepare these first"):
        opened("https://videos.example/a.mp4", data.parent / "cache")


def of_names(folder: Path, count: int) -> sets.Table:
    """Writes the table of a set with some videos, and no tar."""
    made = [
        [f"{n:06}.mp4", [n, f"{n:016}"], [25, 1], [[512 * n, 99, 24 + n % 3, 64, 96]]]
        for n in range(count)
    ]
    settings = {**dataclasses.asdict(SMALL), "version": sets.VERSION}
    record: Any = {"output": "all.tar", "details": {"videos": made}}
    folder.mkdir()
    sets._write_table(settings, folder / resumable.FINISHED, [record])
    return sets.Table.of(folder)


def clips_of(folder: Path, count: int, **settings: Any) -> Clips:
    table = of_names(folder / f"set{count}", count)
    videos = sets.Videos.of(table, np.arange(count))
    config = video.Config(path="/data", batch_size=4, **settings)
    return config.clips(sample.MODEL, videos, train=True)


@pytest.mark.parametrize("windows", ["random", "fixed"])
def test_what_a_worker_receives_grows_by_a_number_per_video(tmp_path: Path, windows: Any) -> None:
    sizes = []
    for number in (3, 3000):
        source = clips_of(tmp_path, number, windows=windows)
        assert len(source) == number * (4 if windows == "fixed" else 1)
        assert source.fingerprint
        assert source.videos[number - 1].name == f"{number - 1:06}.mp4"
        sizes.append(len(pickle.dumps(source)))
    assert sizes[1] - sizes[0] == pytest.approx(8 * (3000 - 3), abs=50)
    source = clips_of(tmp_path, 5, windows=windows)
    copy = pickle.loads(pickle.dumps(source))
    assert [*copy.videos] == [*source.videos]


def test_the_order_is_known_without_reading_the_table(tmp_path: Path) -> None:
    source = clips_of(tmp_path, 5)
    shutil.rmtree(source.videos.table.folder)
    positions = [sampler.order_of(source, 3)(position) for position in range(len(source))]
    assert np.array_equal(np.sort(positions), np.arange(len(source)))


def test_a_split_is_identified_by_its_videos(tmp_path: Path) -> None:
    table = of_names(tmp_path / "set", 9)

    def of(*numbers: int) -> sets.Videos:
        return sets.Videos.of(table, np.array(numbers, np.int64))

    first = of(1, 4, 7)
    assert [one.name for one in first] == ["000001.mp4", "000004.mp4", "000007.mp4"]
    assert of(1, 4).content != first.content
    assert of(7, 4, 1).content == first.content, "in any order"
    assert first.clips(5, 5).tolist() == [5, 5, 5]
    assert len(of()) == 0
    assert [*of()] == []


class Killing:
    """Its workers die of one of the videos."""

    def __init__(self, name: str) -> None:
        self.name = name

    def map(self, begin: Any, items: Any) -> Iterator[tuple[resumable.Item, Any]]:
        make = begin(engines.Worker(0))
        for item in items:
            dies = any(one.name == self.name for one in item.value)
            yield item, None if dies else make(item)


def test_a_video_that_kills_its_worker_fails_alone(
    data: Path, tmp_path: Path, together: None, cuts: list[str]
) -> None:
    del together
    out = tmp_path / "out"
    prepared(data, out)
    (group,) = (listed for listed in members(out).values() if "3.mp4" in listed)
    assert len(group) > 1
    shutil.rmtree(out)
    outcome, said = prepared(data, out, engine=Killing("3.mp4"))
    assert (outcome.made, outcome.failed) == (7, {"3.mp4": resumable.KILLS})
    assert f"failed: 3.mp4: {resumable.KILLS}" in said
    table = table_of(out)
    assert table.names == [f"{n}.mp4" for n in range(8) if n != 3]
    assert all(read(piece) for n in range(7) for piece in table.video(n).pieces)
    assert sum(name.startswith("one-") for name in tars(out)) == len(group) - 1
    sources = opened(out, tmp_path / "cache")
    assert (sources.files, sources.bad) == (7, ())  # `prepare clips` has named it
    cuts.clear()
    before = tars(out)
    outcome, _ = prepared(data, out, engine=Killing("3.mp4"))
    assert (outcome.skipped, outcome.failed, cuts) == (7, {"3.mp4": resumable.KILLS}, [])
    outcome, _ = prepared(data, out)  # with more memory
    assert (outcome.skipped, outcome.failed, cuts) == (7, {}, ["3.mp4"])
    assert {name: tars(out)[name] for name in before} == before
    assert table_of(out).length == 8
    cuts.clear()
    sample.write(data / "3.mp4", 19)  # another one
    outcome, _ = prepared(data, out)
    assert (outcome.made, outcome.failed) == (len(group), {})
    assert sorted(cuts) == group
    assert not any(name.startswith("one-") for name in tars(out))
    assert table_of(out).length == 8


def test_a_video_that_the_encoder_refuses_fails_alone(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FFmpeg's encoder refuses sides of more than 8,191 pixels, when the first frame arrives."""
    real = pieces.cut

    def cut(path: str, *rest: Any) -> pieces.Cut:
        if path.endswith("3.mp4"):
            raise av.ArgumentError(errno.EINVAL, "Invalid argument")
        return real(path, *rest)

    monkeypatch.setattr(pieces, "cut", cut)
    outcome, _ = prepared(data, tmp_path / "out")
    assert outcome.made == 7
    assert list(outcome.failed) == ["3.mp4"]
    assert "ArgumentError: " in outcome.failed["3.mp4"]
    assert list(members(tmp_path / "out")) == ["all.tar"]


def test_a_video_that_the_system_refuses_fails_alone_and_is_tried_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    real = pieces.cut

    def cut(path: str, *rest: Any) -> pieces.Cut:
        if path.endswith("3.mp4"):
            cause = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            raise BadExample(path, "Permission denied") from cause
        return real(path, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(pieces, "cut", cut)
        outcome, _ = prepared(data, out)
    assert (outcome.made, outcome.failed) == (7, {"3.mp4": "Permission denied"})
    assert table_of(out).length == 7
    assert list(members(out)) == ["all.tar"]
    outcome, _ = prepared(data, out)
    assert (outcome.made, outcome.failed) == (8, {})
    assert prepared(data, out)[0].skipped == 8


def test_a_worker_that_sees_another_folder_ends_the_command(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on nodes that do not share the folder of the videos."""

    def cut(path: str, *rest: Any) -> pieces.Cut:
        raise BadExample(path, "No such file or directory") from FileNotFoundError()

    hosts = itertools.cycle(["a node", "here"])
    monkeypatch.setattr(resumable.socket, "gethostname", lambda: next(hosts))
    monkeypatch.setattr(pieces, "cut", cut)
    with pytest.raises(
        InputError, match=r"\d\.mp4 does not exist on a node: use a folder that all"
    ):
        prepared(data, tmp_path / "out")


def test_a_video_that_changes_while_it_is_cut_is_refused(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = pieces.cut

    def cut(path: str, *rest: Any) -> pieces.Cut:
        made = real(path, *rest)
        if path.endswith("3.mp4"):
            sample.write(Path(path), 40)
        return made

    with monkeypatch.context() as patched:
        patched.setattr(pieces, "cut", cut)
        outcome, _ = prepared(data, tmp_path / "out")
    assert outcome.failed == {"3.mp4": "changed while it was processed"}
    outcome, _ = prepared(data, tmp_path / "out")
    assert outcome.failed == {}
    table = table_of(tmp_path / "out")
    assert [piece.frames for piece in table.video(3).pieces] == [16, 16, 8]


@pytest.mark.parametrize("shots", [[60], [3, 40, 7, 8, 31], [5, 5, 5, 20, 5], [9] * 7, [16, 17, 7]])
@pytest.mark.parametrize("limits", [(16, 8), (16, 16), (8, 1), (10, 3)])
def test_every_frame_of_a_video_is_in_a_piece_or_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shots: list[int], limits: tuple[int, int]
) -> None:
    """In order, and no piece has frames of two shots, or fewer or more than it may."""
    ends = [0, *itertools.accumulate(shots)]
    monkeypatch.setattr(
        pieces._CutDetector, "is_cut", lambda self, frame: next(numbers) in ends[1:]
    )
    numbers = iter(range(ends[-1]))
    frames, least = limits
    path = sample.write(tmp_path / "a.mp4", ends[-1], preset="ultrafast")
    settings = Settings(
        height=64, width=96, min_crop_scale=1, frames=frames, min_frames=least, min_side=16
    )
    (tmp_path / "out").mkdir()
    if max(shots) < least:
        with pytest.raises(
            BadExample, match=f"none of its {ends[-1]} frames begins {least} frames"
        ):
            pieces.cut(str(path), None, tmp_path / "out", settings)
        return
    cut = pieces.cut(str(path), None, tmp_path / "out", settings)
    assert cut.lost == 0
    assert sum(cut.pieces) + cut.left_out == ends[-1]
    assert cut.left_out == sum(length for length in shots if length < least)
    expected = iter(
        range(start, stop) for start, stop in itertools.pairwise(ends) if stop - start >= least
    )
    shot: list[int] = []
    for number, count in enumerate(cut.pieces):
        file = tmp_path / f"out/{number:05}.mp4"
        look = Look(96, 64, Fraction(1))
        shown = read(sets.Piece(str(file), Span(str(file), 0, file.stat().st_size), count, look))
        shot = shot or list(next(expected))
        assert shown == shot[:count]
        shot = shot[count:]
        assert least <= count < frames + least
    assert shot == []
    assert next(expected, None) is None


def lengths_of(*lengths: int) -> sets.Video:
    made = tuple(
        sets.Piece(f"a.tar/v/{n}", Span("a.tar", 0, 1), length, Look(96, 64, Fraction(1)))
        for n, length in enumerate(lengths)
    )
    return sets.Video("v", Fraction(25), made, "0")


@pytest.mark.parametrize(
    "lengths", [(6,), (30,), (6, 6), (96, 100), (5, 40, 5, 7, 11), (16, 16, 17, 119), (1, 2, 6)]
)
def test_all_clips_of_a_video_are_equally_likely(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    """Whichever pieces they are in; none crosses the end of one."""
    clips = clips_of(tmp_path, 3, max_frame_delta=3)
    one = lengths_of(*lengths)
    for draw, wanted in ((0.1, 1), (0.5, 2), (0.9, 3)):
        delta = min(wanted, (max(lengths) - 1) // 5)
        every = {
            (number, first)
            for number, length in enumerate(lengths)
            for first in range(length - 5 * delta)
        }
        chosen = []
        for place in range(3 * len(every)):
            piece, frames = clips._choose(one, np.array([draw, (place + 0.5) / (3 * len(every))]))
            assert np.diff(frames).tolist() == [delta] * 5
            assert frames[0] >= 0
            assert frames[-1] < piece.frames
            chosen.append((one.pieces.index(piece), frames[0]))
        assert {each: chosen.count(each) for each in chosen} == dict.fromkeys(every, 3)


@pytest.mark.parametrize(
    ("most", "count", "shares"),
    [
        ([1, 1, 9, 3], 4, [1, 1, 1, 1]),
        ([1, 1, 9, 3], 6, [1, 1, 2, 2]),
        ([1, 1, 9, 3], 9, [1, 1, 4, 3]),
        ([1, 1, 9, 3], 99, [1, 1, 9, 3]),
        ([5, 5, 5, 5, 5, 5], 3, [1, 0, 1, 0, 1, 0]),
    ],
)
def test_clips_of_a_validation_are_evenly_over_the_videos(
    most: list[int], count: int, shares: list[int]
) -> None:
    assert clips_module._shares(np.array(most), count).tolist() == shares


@pytest.mark.parametrize("windows", ["random", "fixed"])
def test_the_clips_of_a_video_count_as_one(tmp_path: Path, windows: Any) -> None:
    source = dataclasses.replace(clips_of(tmp_path, 3, windows=windows), train=False)
    chosen = source.validated(7)
    assert chosen.groups.tolist() == [0, 0, 0, 1, 1, 2, 2]
    np.testing.assert_allclose(np.bincount(chosen.groups, chosen.weights), 1)
    assert chosen.indices.max() < len(source)
    assert len(np.unique(chosen.indices)) == 7


def test_a_clip_of_a_validation_is_inside_of_a_piece(tmp_path: Path) -> None:
    clips = dataclasses.replace(clips_of(tmp_path, 3), train=False)
    one = lengths_of(10, 20, 5, 10)  # 5, 15, 0, and 5 places
    assert clips._at(one, 4) == (one.pieces[0], [4, 5, 6, 7, 8, 9])
    assert clips._at(one, 5) == (one.pieces[1], [0, 1, 2, 3, 4, 5])
    assert clips._at(one, 20) == (one.pieces[3], [0, 1, 2, 3, 4, 5])
    with pytest.raises(IndexError):
        clips._at(one, 25)


def test_a_set_in_a_bucket_is_fetched_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_buckets(tmp_path / "buckets", monkeypatch)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "scratch"))
    prepared(data, tmp_path / "out")
    local = opened(tmp_path / "out", tmp_path / "cache", convert_on="host")
    found = files.find(str(data), "SOURCE", tmp_path / "lists", lambda line: None)
    url = "s3://bucket/sets/one"
    with pytest.raises(InputError, match="no video files found"):
        opened(url, tmp_path / "cache")
    sets.prepare(found, url, SMALL, engine=ONE, say=lambda line: None)
    remote = opened(url, tmp_path / "cache")
    for ours, theirs in ((remote.train, local.train), (remote.val, local.val)):
        assert ours.fingerprint == theirs.fingerprint
        for index in range(len(ours)):
            example, same = (one.example(index, np.random.default_rng(0)) for one in (ours, theirs))
            np.testing.assert_array_equal(example["video"], same["video"])
    said: list[str] = []
    config = video.Config(path=url, batch_size=2, cache_dir=str(tmp_path / "cache"))
    config.open(sample.MODEL, seed=0, say=said.append)
    assert not any("fetch" in line for line in said)
    sample.write(data / "3.mp4", 30)
    found = files.find(str(data), "SOURCE", tmp_path / "lists", lambda line: None)
    sets.prepare(found, url, SMALL, engine=ONE, say=lambda line: None)
    changed = opened(f"{url}/", tmp_path / "cache")
    assert changed.train.fingerprint != remote.train.fingerprint
    bucket_folders.opened(url).delete([".jobs/complete.json"])
    with pytest.raises(InputError, match=f"{url} is incomplete"):
        opened(url, tmp_path / "cache")


def fake_buckets(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps buckets in folders of a folder."""

    def bucket(url: str) -> Bucket:
        return Bucket(url, LocalStore(folder / url.removeprefix("s3://"), mkdir=True))

    monkeypatch.setattr(bucket_folders, "opened", bucket)


@pytest.mark.parametrize("in_bucket", [False, True])
def test_processes_each_make_a_part_of_a_set(
    data: Path,
    tmp_path: Path,
    cuts: list[str],
    alone: None,
    monkeypatch: pytest.MonkeyPatch,
    in_bucket: bool,
) -> None:
    """Before they open it: then nothing is left to cut, and all open the same."""
    fake_buckets(tmp_path / "buckets", monkeypatch)
    whole = opened(data, tmp_path / "whole")
    cuts.clear()
    config = video.Config(
        path=str(data),
        batch_size=2,
        convert_on="host",
        cache_dir="s3://bucket/cache" if in_bucket else str(tmp_path / "cache"),
    )

    def say(line: str) -> None:
        pass

    parts = []
    for index in range(2):
        monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / f"disk-{index}"))  # with a bucket
        (missing,) = config.to_prepare(sample.MODEL, say)
        if index == 0:
            missing.begin(2)
        missing.make(say, resumable.Part(index, 2), 2)
        parts.append(sorted(cuts))
        cuts.clear()
    assert all(len(part) == 4 for part in parts)
    assert sorted(parts[0] + parts[1]) == [f"{n}.mp4" for n in range(8)]
    for index in range(2):
        monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / f"disk-{index}"))
        assert config.to_prepare(sample.MODEL, say) == []
        sources = config.open(sample.MODEL, seed=0, say=say)
        assert sources.train.fingerprint == whole.train.fingerprint
        sources.train.example(0, np.random.default_rng(0))
    assert not cuts


def test_a_run_alone_keeps_its_set_in_the_bucket_of_its_cache(
    data: Path, tmp_path: Path, cuts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rented machine does not cut again."""
    fake_buckets(tmp_path / "buckets", monkeypatch)
    for machine in range(2):
        monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / f"disk-{machine}"))
        opened(data, "s3://bucket/cache")
        assert len(cuts) == 8
    (tar, *_) = (tmp_path / "disk-1").rglob("fetched-sets/*/*.tar")
    tar.resolve().unlink()
    opened(data, "s3://bucket/cache")
    assert tar.exists()
    assert len(cuts) == 8
    with monkeypatch.context() as patched:
        patched.setattr(bucket_folders, "opened", None)  # not asked if this disk has all
        opened(data, "s3://bucket/cache")
    # If the bucket has lost it, processes agree to make it again, whatever their disks have.
    shutil.rmtree(tmp_path / "buckets")
    config = video.Config(path=str(data), batch_size=2, cache_dir="s3://bucket/cache")
    missing = []
    for machine in (1, 2):
        monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / f"disk-{machine}"))
        missing += config.to_prepare(sample.MODEL, print)
    assert [one.folder for one in missing] == [missing[0].folder] * 2
    for index, one in enumerate(missing):
        one.make(print, resumable.Part(index, 2), 2)
    assert len(cuts) == 16
    opened(data, "s3://bucket/cache")
    assert len(cuts) == 16


def test_a_run_cuts_only_videos_that_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tars of the others are linked from the set of before, which stays as it was."""
    monkeypatch.setattr(sets, "LEAST_GROUP_BYTES", 1)
    for number in range(6):
        sample.write(tmp_path / "v" / f"{number}.mp4", 12, title=str(number))
    model = sample.model(frames=4, height=32, width=48)
    first = sample.opened(tmp_path / "v", tmp_path / "cache", model)
    table = first.train.videos.table
    before = {path: path.read_bytes() for path in Path(table.folder).glob("*.tar")}
    cut = pieces.cut
    names = []
    monkeypatch.setattr(
        pieces, "cut", lambda path, *more: names.append(Path(path).name) or cut(path, *more)
    )
    sample.write(tmp_path / "v" / "3.mp4", 16, title="another")
    sample.write(tmp_path / "v" / "new.mp4", 12, title="new")
    second = sample.opened(tmp_path / "v", tmp_path / "cache", model)
    assert second.files == 7
    assert {"3.mp4", "new.mp4"} <= set(names)
    assert len(names) < 7
    assert second.train.fingerprint != first.train.fingerprint
    assert {path: path.read_bytes() for path in before} == before
    assert sum(len(source.videos) for source in (second.train, second.val)) == 7
    for source in (first.train, first.val, second.train, second.val):
        for number in range(len(source)):
            source.example(number, np.random.default_rng(0))
