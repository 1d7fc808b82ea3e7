"""The video data set: the frames of an example, its augmentation, and skipped files."""

import itertools
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.video import sample_videos as sample

from jaxtrain.data import sampler, validation, video
from jaxtrain.data.video import pieces
from jaxtrain.errors import BadExample, InputError
from jaxtrain.inference.evaluation import evaluation_clips

PLAIN: dict[str, Any] = {"flip": False, "min_crop_scale": 1.0}  # no augmentation


pytestmark = pytest.mark.usefixtures("one_shot")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("videos")
    for number in range(6):
        sample.write(folder / f"{number}.mp4", 30, g="8")
    return folder


def _open(path: Path, **settings: Any) -> Any:
    return sample.opened(path, path.parent / "cache", **settings)


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _numbers(example: dict[str, np.ndarray]) -> list[int]:
    return [sample.number_of(picture) for picture in example["video"]]


def test_the_content_of_an_example(data: Path) -> None:
    sources = _open(data)
    assert (len(sources.train), sources.val.groups, sources.files, sources.bad) == (5, 1, 6, ())
    assert len(sources.val) == 25  # a clip of 6 of 30 frames begins at one of these
    assert validation.described(sources, 9) == (
        "5 examples validate, of 1 videos; metrics are means over videos"
    )
    assert sources.summary == "6 videos (6 good), 180 frames in pieces, 5 train / 1 val"
    for source in (sources.train, sources.val):
        example = source.example(0, _rng(0))
        assert sorted(example) == ["video"]
        assert example["video"].shape == (6, sample.HEIGHT, sample.WIDTH, 3)
        assert example["video"].dtype == np.uint8


def test_frames_are_consecutive_at_the_drawn_distance(data: Path) -> None:
    train = _open(data, max_frame_delta=3, **PLAIN).train
    starts: dict[int, set[int]] = {1: set(), 2: set(), 3: set()}
    for seed in range(250):
        numbers = _numbers(train.example(seed % 5, _rng(seed)))
        (delta,) = {later - earlier for earlier, later in itertools.pairwise(numbers)}
        starts[delta].add(numbers[0])
    # Every possible first frame, for each frame delta.
    assert {delta: (min(s), max(s)) for delta, s in starts.items()} == {
        1: (0, 24),
        2: (0, 19),
        3: (0, 14),
    }
    assert all(len(s) > 12 for s in starts.values())


def test_validation_clips_are_centered_and_not_augmented(data: Path) -> None:
    val = _open(data, max_frame_delta=4).val
    one, two = val.example(0, _rng(1)), val.example(0, _rng(2))
    np.testing.assert_array_equal(one["video"], two["video"])
    chosen = val.validated(1)
    assert _numbers(val.example(int(chosen.indices[0]), _rng(0))) == [12, 13, 14, 15, 16, 17]


@pytest.mark.parametrize("count", [2, 4, 6, 9])
def test_a_validation_has_the_clips_of_evaluate(count: int, tmp_path: Path) -> None:
    """On the pieces of a run, `evaluate` measures what the run validates on."""
    sample.write(tmp_path / "train" / "a.mp4", 12)
    for number, frames in enumerate((26, 31, 40, 60)):
        sample.write(tmp_path / "val" / f"{number}.mp4", frames)
    val = _open(tmp_path, **PLAIN).val
    chosen = val.validated(count)
    evaluated = evaluation_clips.choose(
        val.videos.table.folder,
        "--data",
        frames=6,
        height=sample.HEIGHT,
        width=sample.WIDTH,
        clips=count,
        say=lambda line: None,
        only={video.name for video in val.videos},
    )
    examples = [val.example(int(index), _rng(0)) for index in chosen.indices]
    assert [_numbers(example) for example in examples] == [
        [sample.number_of(image) for image in clip.read()] for clip in evaluated
    ]
    of_videos = np.unique(chosen.groups, return_counts=True)[1]
    np.testing.assert_allclose(chosen.weights, np.repeat(1 / of_videos, of_videos), rtol=1e-6)


def test_clips_per_video_multiply_training_only(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = _open(data, clips_per_video=3, **PLAIN)
    assert (len(sources.train), sources.val.groups) == (15, 1)
    paths = [video.pieces[0].path for video in sources.train.videos]
    asked: list[str] = []

    def read(path: str, *rest: Any) -> None:
        asked.append(path)
        raise InterruptedError

    monkeypatch.setattr(pieces, "read", read)
    for index in range(15):
        with pytest.raises(InterruptedError):
            sources.train.example(index, _rng(index))
    assert asked == [path for path in paths for _ in range(3)]
    assert sources.train.fingerprint != _open(data).train.fingerprint


def test_a_film_counts_as_a_clip_or_by_its_length(tmp_path: Path) -> None:
    """In an epoch, a video has one clip, or as many as fit into it one after another."""
    for name, frames in (("a", 13), ("film", 60), ("v", 24)):
        sample.write(tmp_path / "train" / f"{name}.mp4", frames)
    sample.write(tmp_path / "val" / "b.mp4", 12)

    def drawn(clips: int | None, seed: int) -> tuple[Any, list[str]]:
        source = _open(tmp_path, clips_per_video=clips, **PLAIN).train
        order = sampler.order_of(source, seed)
        indices = [order(position) for position in range(len(source))]
        assert sorted(indices) == list(range(len(source)))
        return source, [source._video_of(index)[0].name for index in indices]

    once, names = drawn(1, 0)
    assert sorted(names) == ["train/a.mp4", "train/film.mp4", "train/v.mp4"]
    train, names = drawn(None, 0)
    counts = {name: names.count(name) for name in names}
    assert counts == {"train/a.mp4": 2, "train/film.mp4": 10, "train/v.mp4": 4}
    assert drawn(None, 1)[1] != names  # they are shuffled together
    starts = [_numbers(train.example(2 + seed % 10, _rng(seed)))[0] for seed in range(60)]
    assert (min(starts) < 6, max(starts) > 44) == (True, True)  # anywhere in the film
    assert train.fingerprint != once.fingerprint
    worker = pickle.loads(pickle.dumps(train))
    one, two = train.example(15, _rng(5)), worker.example(15, _rng(5))
    np.testing.assert_array_equal(one["video"], two["video"])


def test_flip_and_crop_are_the_same_for_all_frames_of_a_clip(tmp_path: Path) -> None:
    ramp = np.broadcast_to(np.linspace(0, 250, 96)[None, :, None], (64, 96, 3)).astype(np.uint8)
    for name in ("a", "b"):
        sample.write(tmp_path / "v" / f"{name}.mp4", [ramp] * 12, title=name, crf="4")
    train = _open(tmp_path / "v", min_crop_scale=0.5).train
    rising, spans = [], []
    for seed in range(60):
        clip = train.example(0, _rng(seed))["video"].astype(float)
        assert np.abs(clip - clip[:1]).max() < 6, "frames are cropped differently"
        ends = clip[0, 30, 0, 1], clip[0, 30, -1, 1]
        rising.append(ends[0] < ends[1])
        spans.append(abs(ends[1] - ends[0]) / 250)
    assert 15 < sum(rising) < 45
    assert 0.45 < min(spans) < 0.6
    assert 0.9 < max(spans) <= 1.02
    fixed = _open(tmp_path / "v", flip=False).train
    for seed in range(20):
        clip = fixed.example(0, _rng(seed))["video"].astype(float)
        assert clip[0, 30, 0, 1] < clip[0, 30, -1, 1]


def test_short_videos_use_a_smaller_frame_delta_or_are_reported(tmp_path: Path) -> None:
    for name, frames in [("long", 30), ("short", 12), ("least", 6), ("less", 5)]:
        sample.write(tmp_path / "v" / f"{name}.mp4", frames)
    (tmp_path / "val").mkdir()
    (tmp_path / "v" / "long.mp4").rename(tmp_path / "val" / "long.mp4")
    sources = _open(
        tmp_path / "v",
        val_path=str(tmp_path / "val"),
        max_frame_delta=4,
        **PLAIN,
    )
    assert [(bad.path, bad.reason) for bad in sources.bad] == [
        (
            "less.mp4",
            "is too short: none of its 5 frames begins 6 frames (--min-frames) in a row without a "
            "cut",
        )
    ]
    assert [video.name for video in sources.train.videos] == ["least.mp4", "short.mp4"]
    starts = set()
    for seed in range(32):
        assert _numbers(sources.train.example(0, _rng(seed))) == [0, 1, 2, 3, 4, 5]
        numbers = _numbers(sources.train.example(1, _rng(seed)))
        (delta,) = {later - earlier for earlier, later in itertools.pairwise(numbers)}
        starts.add((delta, numbers[0]))
    assert {delta for delta, _ in starts} == {1, 2}
    assert {first for delta, first in starts if delta == 2} == {0, 1}
    assert sources.files == 4


def test_prepared_videos_that_are_too_short_for_a_run_are_reported(tmp_path: Path) -> None:
    for name, frames in [("a", 30), ("b", 30), ("short", 10)]:
        sample.write(tmp_path / "v" / f"{name}.mp4", frames)
    made = _open(tmp_path / "v").train.videos.table.folder
    said: list[str] = []
    settings = {"path": made, "batch_size": 2, "cache_dir": str(tmp_path / "cache")}
    more = sample.model(frames=11)
    sources = video.Config(**settings).open(more, seed=0, say=said.append)
    (bad,) = sources.bad
    assert (bad.path, bad.reason) == (
        "short.mp4",
        "is too short: a clip needs 11 frames in a row",
    )
    assert any("short.mp4: is too short" in line for line in said)
    assert {v.name for split in (sources.train, sources.val) for v in split.videos} == {
        "a.mp4",
        "b.mp4",
    }
    with pytest.raises(
        InputError,
        match=r"none of 3 videos can be used \(a.mp4: .*31 frames.*\): pass longer videos",
    ):
        video.Config(**settings).open(sample.model(frames=31), seed=0, say=said.append)


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Three intact files and a broken file of each kind."""
    folder = tmp_path / "v"
    for name in ("a", "b", "c"):
        sample.write(folder / f"{name}.mp4", 20)
    sample.garble(sample.write(folder / "garbled.mp4", sample.busy(40)))
    sample.truncate(sample.write(folder / "short.mkv", sample.busy(40)), 0.6)
    (folder / "empty.mp4").touch()
    (folder / "text.mp4").write_text("no video")
    return folder


def test_what_is_intact_of_damaged_videos_is_used(mixed: Path) -> None:
    sources = _open(mixed)
    assert sorted(bad.path for bad in sources.bad) == ["empty.mp4", "text.mp4"]
    assert sources.summary.startswith("7 videos (5 good), ")
    used = {}
    for source in (sources.train, sources.val):
        for index, one in enumerate(source.videos):
            used[one.name] = sum(piece.frames for piece in one.pieces)
            source.example(index, _rng(index))
    assert used.keys() == {"a.mp4", "b.mp4", "c.mp4", "garbled.mp4", "short.mkv"}
    assert [used[f"{name}.mp4"] for name in "abc"] == [20, 20, 20]
    assert 6 <= used["garbled.mp4"] < 40
    assert 6 <= used["short.mkv"] < 40


def test_a_run_reads_only_pieces(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "v")
    train = _open(tmp_path / "v", clips_per_video=2).train
    before = [train.example(index, _rng(index)) for index in range(len(train))]
    shutil.rmtree(tmp_path / "v")
    for index, example in enumerate(before):
        np.testing.assert_array_equal(train.example(index, _rng(index))["video"], example["video"])


def test_a_piece_that_is_damaged_is_a_bad_example(data: Path, tmp_path: Path) -> None:
    train = sample.opened(data, tmp_path).train
    piece = train.videos[1].pieces[0]
    with open(piece.span.file, "r+b") as tar:
        tar.seek(piece.span.offset)
        tar.write(bytes(piece.span.size))
    with pytest.raises(BadExample, match="cannot be decoded") as error:
        train.example(1, _rng(0))
    assert error.value.path == piece.path
    train.example(0, _rng(0))


def test_wrong_inputs_give_one_clear_line(tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    with pytest.raises(InputError, match=r"--data\.path"):
        video.Config(batch_size=1, cache_dir=cache).open(sample.MODEL, seed=0, say=print)
    sample.write(tmp_path / "one" / "a.mp4", 20)
    with pytest.raises(InputError, match=r"a\.mp4.*--data\.val_path"):
        _open(tmp_path / "one")
    sample.write(tmp_path / "b.mp4", 20)
    assert len(_open(tmp_path / "one", val_path=str(tmp_path / "b.mp4")).train) == 1
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "a.mp4").touch()
    with pytest.raises(
        InputError,
        match=r"none of 1 videos can be used \(.*is empty\): fix or replace them, or pass",
    ):
        _open(tmp_path / "none")
    sample.write(tmp_path / "short" / "a.mp4", 3)
    with pytest.raises(
        InputError, match=r"a\.mp4: is too short: none of its 3 frames.*, or pass other videos with"
    ):
        _open(tmp_path / "short")


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_crop_scale": 0.9, "max_crop_scale": 0.5},
        {"min_crop_scale": 0.0},
        {"train_split": 95.0},
        {"windows": "fixed", "clips_per_video": 2},
    ],
)
def test_errors_about_settings_contain_the_value(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError) as error:
        video.Config(batch_size=1, **wrong)
    for name, value in wrong.items():
        assert f"data.{name}" in str(error.value)
        assert str(value) in str(error.value)
