"""A teacher's latents are computed for the windows of training, and found or reported missing."""

import errno
import math
import os
import tracemalloc
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.video import sample_videos as sample
from data.video.sample_videos import Means
from obstore.store import LocalStore

from jaxtrain.data.video import encode_latents, latents, sets
from jaxtrain.errors import BadExample, InputError
from jaxtrain.jobs import engines, resumable
from jaxtrain.storage import bucket_folders, cache, disks
from jaxtrain.storage.bucket import Bucket

SHAPE = (2, 8, 12, 3)
MODEL = sample.model(latent_shape=SHAPE)
TAUGHT = types.SimpleNamespace(**{**vars(MODEL), "batch_spec": lambda rows: {"latents": None}})


pytestmark = pytest.mark.usefixtures("one_shot")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("latents") / "videos"
    for number in range(4):
        sample.write(folder / f"{number}.mp4", 15 + number, g="8")
    return folder


def _open(path: Path, root: Path | str, model: Any = MODEL, **settings: Any) -> Any:
    return sample.opened(path, root, model, **{"windows": "fixed", **settings})


def _prepare(
    sources: Any, root: Path | str, teacher: Any = Means, *, threads: int = 2, **more: Any
) -> resumable.Outcome:
    settings: dict[str, Any] = {"batch_size": 4, "say": lambda line: None, **more}
    settings.setdefault("engine", engines.Threads(threads + settings["batch_size"]))
    load = teacher if teacher is Means else lambda: teacher
    where = str(root)
    size = sources.train.size
    target = latents.store(cache.root(where), size, SHAPE, teacher.name, cache.url(where))
    splits = (sources.train, sources.val)
    return encode_latents.prepare(splits, load, teacher.about, target, **settings)


def _file(split: Any, number: int = 0) -> Path:
    file: Path = split.latents.folder / split.latents.name(split.videos[number])
    return file


def test_each_fixed_window_comes_once_and_is_not_augmented(data: Path, tmp_path: Path) -> None:
    sources = _open(data, tmp_path)
    seen = []
    for split in (sources.train, sources.val):
        for index in range(len(split)):
            one, other = (split.example(index, np.random.default_rng(n)) for n in (1, 2))
            np.testing.assert_array_equal(one["video"], other["video"])
            seen.append([sample.number_of(picture) for picture in one["video"]])
    lengths = [15, 16, 17, 18]
    first = [6 * n for frames in lengths for n in range(frames // 6)]
    assert sorted(seen) == sorted([list(range(n, n + 6)) for n in first])
    assert sources.train.fingerprint != _open(data, tmp_path, windows="random").train.fingerprint


def test_latents_come_with_their_clips(data: Path, tmp_path: Path) -> None:
    plain = _open(data, tmp_path)
    teacher = Means()
    outcome = _prepare(plain, tmp_path, teacher)
    assert (outcome.made, outcome.totals) == (4, {"windows": 9, "lacking": 0})
    assert set(teacher.batches) == {4}
    sources = _open(data, tmp_path, TAUGHT)
    for split in (sources.train, sources.val):
        for index in range(len(split)):
            example = split.example(index, np.random.default_rng(0))
            wanted = Means().encode(example["video"][None].astype(np.float32) / 255)[0]
            assert (example["latents"].dtype, example["latents"].shape) == (np.float32, SHAPE)
            np.testing.assert_allclose(example["latents"], wanted, atol=1e-3)
    assert sources.train.fingerprint != plain.train.fingerprint
    named = _open(data, tmp_path, TAUGHT, teacher="means-0123")
    assert named.train.fingerprint == sources.train.fingerprint


def _set(folder: Path, about: list[Any], **settings: Any) -> sets.Video:
    """Returns the video of a set's table, which has no tar."""
    folder.mkdir()
    record = {"output": "all.tar", "details": {"videos": [about]}}
    sets._write_table(settings, folder / resumable.FINISHED, [record])
    return sets.Table.of(folder).video(0)


def test_videos_of_equal_names_sizes_and_lengths_have_latents_of_their_own(tmp_path: Path) -> None:
    target = latents.store(tmp_path, "6x64x96", SHAPE, "teacher")
    piece = [512, 99, 24, 64, 96]  # offset, size, frames, height, width
    about = ["a.mp4", [9, "1"], [25, 1], [piece]]

    def name(folder: str, settings: dict[str, Any], *given: Any) -> str:
        return target.name(_set(tmp_path / folder, list(given), **settings))

    usual = {"quantizer": 2, "version": 1}
    first = name("first", usual, *about)
    elsewhere = [[piece[0] + 512, 98, *piece[2:]]]  # in another tar, and encoded elsewhere
    assert name("moved", usual, *about[:3], elsewhere) == first
    others = [
        name("content", usual, "a.mp4", [9, "2"], *about[2:]),
        name("size", usual, "a.mp4", [8, "1"], *about[2:]),
        name("name", usual, "b.mp4", *about[1:]),
        name("pieces", usual, *about[:3], [[512, 99, 12, 64, 96], [1024, 99, 12, 64, 96]]),
        name("settings", usual | {"quantizer": 3}, *about),
        name("version", usual | {"version": 2}, *about),
    ]
    assert len({first, *others}) == 7


@pytest.mark.parametrize(("videos", "threads"), [(1, 1), (12, 5)])
def test_windows_of_several_videos_share_batches(videos: int, threads: int) -> None:
    """Every window has its own latents, and no thread waits forever."""
    teacher = Means()
    batches = encode_latents.Batches(teacher, SHAPE, 4, waiting=2)

    def encode(number: int) -> None:
        clips = [np.full((6, 64, 96, 3), 10 * number + n, np.uint8) for n in range(1 + number % 5)]
        with batches.video():
            added = [batches.add(clip) for clip in clips]
        for clip, window in zip(clips, added, strict=True):
            assert (
                window.result(timeout=20) == np.float16(clip[0, 0, 0, 0] / np.float32(255))
            ).all()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(encode, range(videos)))
    assert set(teacher.batches) == {4}
    windows = sum(1 + number % 5 for number in range(videos))
    assert len(teacher.batches) >= windows / 4


def test_memory_does_not_grow_with_the_length_of_a_video(tmp_path: Path) -> None:
    shape, windows = (1, 64, 64, 16), 200

    class Split:
        videos = ()
        block = 1

        def windows(self, video: Any) -> int:
            return windows

        def pixels(self, video: Any, window: int) -> list[np.ndarray]:
            return [np.zeros((1, 8, 8, 3), np.uint8)]

    class Zeros(Means):
        def encode(self, video_BTHW3: np.ndarray) -> np.ndarray:
            return np.zeros((len(video_BTHW3), *shape), np.float32)

    batches = encode_latents.Batches(Zeros(), shape, 4, waiting=2)
    target = latents.LatentStore(tmp_path, shape)
    item = resumable.Item("long.mp4", (), "long.npy", (0, None))
    tracemalloc.start()
    encode_latents._encode([Split()], batches, target, engines.Worker(0), item, tmp_path / "out")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    size = (tmp_path / "out").stat().st_size
    assert size == windows * 2 * math.prod(shape) > 4 * peak


def test_a_start_opens_no_file_with_latents(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To open a million files on a network disk takes minutes."""
    _prepare(_open(data, tmp_path), tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(latents, "NumberFile", None)
        sources = _open(data, tmp_path, TAUGHT)
    assert _prepare(sources, tmp_path).made == 0
    file = _file(sources.train)
    file.write_bytes(file.read_bytes()[:-1])  # truncated
    last = sources.train.windows(sources.train.videos[0]) - 1
    with pytest.raises(BadExample, match=r"its latents cannot be read"):
        sources.train.example(last, np.random.default_rng(0))
    with pytest.raises(InputError, match=r"means-0123 are missing for 1 of 4 videos"):
        _open(data, tmp_path, TAUGHT)
    assert _prepare(sources, tmp_path).made == 1


def test_parts_batch_sizes_and_engines_do_not_change_latents(data: Path, tmp_path: Path) -> None:
    _prepare(_open(data, tmp_path / "alone"), tmp_path / "alone")
    sources = _open(data, tmp_path / "parts")
    for index in range(3):
        _prepare(sources, tmp_path / "parts", batch_size=1 + index, part=resumable.Part(index, 3))
    assert _files(tmp_path / "parts") == _files(tmp_path / "alone")
    # A process with a teacher of its own, as an actor of Ray.
    sources = _open(data, tmp_path / "process")
    _prepare(sources, tmp_path / "process", engine=engines.Processes(1))
    assert _files(tmp_path / "process") == _files(tmp_path / "alone")


def _files(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.glob("latents/**/*")
        if path.is_file() and resumable.WORK not in path.parts
    }


def test_windows_that_cannot_be_decoded_have_no_latents(data: Path, tmp_path: Path) -> None:
    sources = _open(data, tmp_path / "cache")
    broken = next(one for one in sources.train.videos if one.name == "3.mp4")  # of 18 frames
    span = broken.pieces[0].span
    with open(span.file, "r+b") as tar:  # its second group of pictures of 8 frames
        content = tar.read()[span.offset : span.offset + span.size]
        at = content.index(b"mdat") + (len(content) - content.index(b"mdat")) * 6 // 10
        tar.seek(span.offset + at)
        tar.write(bytes(len(content) - at))
    said: list[str] = []
    outcome = _prepare(sources, tmp_path / "cache", say=said.append)
    lacking = outcome.totals["lacking"]
    assert [line for line in said if line.startswith(f"no latents for {lacking} of 3 clips of ")]
    assert 1 <= lacking <= 2
    assert (outcome.made, outcome.failed, outcome.totals["windows"]) == (4, {}, 9 - lacking)
    taught = _open(data, tmp_path / "cache", TAUGHT)
    refused = []
    for split in (taught.train, taught.val):
        for index in range(len(split)):
            try:
                split.example(index, np.random.default_rng(0))
            except BadExample as error:
                refused.append(error.path)
    assert refused == [broken.pieces[0].path] * lacking
    with pytest.raises(BadExample, match="has no latents") as failure:
        taught.train.latents.load(broken, 2)
    assert failure.value.path == broken.path


def test_a_disk_that_fails_is_waited_for(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = _open(data, tmp_path)
    real, failures = type(sources.train).pixels, ["fails", "fails"]

    def pixels(clips: Any, video: Any, window: int) -> list[np.ndarray]:
        if video == sources.train.videos[0] and failures:
            failures.pop()
            raise disks.unreadable(video.path, OSError(errno.EIO, os.strerror(errno.EIO)))
        return real(clips, video, window)

    monkeypatch.setattr(type(sources.train), "pixels", pixels)
    monkeypatch.setattr(disks, "_FIRST_PAUSE_S", 0.0)
    outcome = _prepare(sources, tmp_path)
    assert (failures, outcome.made, outcome.totals["lacking"]) == ([], 4, 0)


def test_missing_latents_give_an_error_with_the_command(data: Path, tmp_path: Path) -> None:
    command = r"compute them with `.* prepare latents`, .* --teacher SPEC"
    with pytest.raises(InputError, match=rf"no teacher's latents for clips of 6x64x96.*{command}"):
        _open(data, tmp_path, TAUGHT)
    sources = _open(data, tmp_path)
    _prepare(sources, tmp_path)
    with pytest.raises(InputError, match=rf"no latents of teacher other.*means-0123 at.*{command}"):
        _open(data, tmp_path, TAUGHT, teacher="other")
    larger = types.SimpleNamespace(**{**vars(TAUGHT), "height": 128})
    with pytest.raises(InputError, match=rf"128x96 in.*means-0123 at 6x64x96\): {command}"):
        _open(data, tmp_path, larger)
    other = types.SimpleNamespace(**{**vars(TAUGHT), "latent_shape": (2, 8, 12, 4)})
    with pytest.raises(InputError, match=r"\(2, 8, 12, 3\).*but the model's have \(2, 8, 12, 4\)"):
        _open(data, tmp_path, other)
    second = Means()
    second.name = "second-1"
    _prepare(sources, tmp_path, second)
    with pytest.raises(InputError, match=r"2 teachers.*--data.teacher \(means-0123, second-1\)"):
        _open(data, tmp_path, TAUGHT)
    _open(data, tmp_path, TAUGHT, teacher="second-1")
    with pytest.raises(InputError, match=r"--data.windows fixed, or --model.teacher None"):
        _open(data, tmp_path, TAUGHT, windows="random")
    with pytest.raises(InputError, match=r"data.teacher=x has no effect"):
        _open(data, tmp_path, teacher="x")
    with pytest.raises(InputError, match=r"data.clips_per_video=2"):
        _open(data, tmp_path, clips_per_video=2)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda x: x[..., :2], r"shape \(2, 8, 12, 2\).*model's have \(2, 8, 12, 3\)"),
        (lambda x: x * np.nan, "NaN/Inf"),
        (lambda x: x + 1e6, "above 65504"),
    ],
)
def test_a_teacher_with_wrong_latents_is_rejected(
    data: Path, tmp_path: Path, wrong: Any, words: str
) -> None:
    class Wrong(Means):
        def encode(self, video_BTHW3: np.ndarray) -> np.ndarray:
            return wrong(super().encode(video_BTHW3))

    sources = _open(data, tmp_path)
    with pytest.raises(InputError, match=words):
        _prepare(sources, tmp_path, Wrong())
    with pytest.raises(InputError, match=r"no teacher's latents"):
        _open(data, tmp_path, TAUGHT)


def test_a_damaged_description_is_an_error(data: Path, tmp_path: Path) -> None:
    _prepare(_open(data, tmp_path), tmp_path)
    (about,) = (tmp_path / "latents").rglob(latents.ABOUT)
    for text in ("{", '{"shape": 5}'):
        about.write_text(text)
        with pytest.raises(InputError, match=r"about.json is damaged \(.*\): delete it"):
            _open(data, tmp_path, TAUGHT)


def test_latents_belong_to_the_video_not_to_its_path(data: Path, tmp_path: Path) -> None:
    _prepare(_open(data, tmp_path), tmp_path)
    moved = tmp_path / "moved"
    moved.mkdir()
    for path in data.iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    assert _prepare(_open(moved, tmp_path), tmp_path).made == 0
    sample.write(moved / "0.mp4", 14)  # another video under the old name
    assert _prepare(_open(moved, tmp_path), tmp_path).made == 1


URL = "s3://bucket/cache"


def test_latents_in_a_bucket_are_fetched_by_training_on_another_machine(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(url: str) -> Bucket:
        folder = tmp_path / url.removeprefix("s3://")
        return Bucket(url, LocalStore(folder, mkdir=True))

    monkeypatch.setattr(bucket_folders, "opened", opened)
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "first"))
    assert _prepare(_open(data, URL), URL).made == 4
    assert not list((tmp_path / "first").rglob("*.f16"))
    _prepare(_open(data, tmp_path / "alone"), tmp_path / "alone")
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "second"))
    taught = _open(data, URL, TAUGHT)
    (copy,) = (tmp_path / "second/copies").iterdir()
    assert _files(copy) == _files(tmp_path / "alone")
    file = _file(taught.train)
    file.unlink()
    _open(data, URL, TAUGHT)
    assert file.exists()
    # If this disk has them all, the bucket is not asked.
    monkeypatch.setattr(bucket_folders, "opened", None)
    _open(data, URL, TAUGHT)
