"""Clips decoded together equal clips decoded alone, and are spread over their file like those."""

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sample_videos as sample

from jaxtrain.data import video
from jaxtrain.data.video import decode, packets
from jaxtrain.data.video.clips import Clips
from jaxtrain.errors import BadExample, InputError

FRAMES, GROUP = 4, 3
MODEL = types.SimpleNamespace(frames=FRAMES, height=sample.HEIGHT, width=sample.WIDTH)
PLAIN: dict[str, Any] = {  # no augmentation
    "flip": False,
    "min_crop_scale": 1.0,
    "jitter_probability": 0.0,
    "blur_sigma": None,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos of 75 frames with keyframes at 0, 30 and 60, and B frames in between."""
    folder = tmp_path_factory.mktemp("videos")
    for number in range(3):
        sample.write(folder / f"{number}.mp4", 75, g="30", sc_threshold="0", bf="2")
    return folder


def train_of(path: Path, **settings: Any) -> Clips:
    how = {"batch_size": 2, "cache_dir": str(path.parent / "cache"), "verify": "never"}
    config = video.Config(path=str(path), **{**how, "clips_per_video": GROUP, **settings})
    train = config.open(MODEL, seed=0, say=lambda line: None).train
    assert isinstance(train, Clips)
    return train


def _rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def together(train: Clips, indices: list[int], seed: int = 0) -> list[Any]:
    return train.together(indices, [_rng(seed, 1 + index) for index in indices], _rng(seed))


def numbers_of(example: dict[str, np.ndarray]) -> list[int]:
    return [sample.number_of(picture) for picture in example["video"]]


def test_a_clip_does_not_depend_on_the_other_clips_requested(data: Path) -> None:
    train = train_of(data)
    for seed in range(4):
        group = together(train, [3, 4, 5], seed)
        for members in ([3], [5], [4, 3]):
            for index, found in zip(members, together(train, members, seed), strict=True):
                assert found.keys() == {"video", "augment"}
                for name, value in found.items():
                    np.testing.assert_array_equal(value, group[index - 3][name])


def test_a_group_is_decoded_once(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = train_of(data, **PLAIN)
    seed = next(s for s in range(20) if max(map(max, _numbers(train, monkeypatch, s))) < 30)
    opened = []
    monkeypatch.setattr(decode, "open_input", lambda *a: opened.append(a) or packets.open_input(*a))
    assert len(together(train, [0, 1, 2], seed)) == GROUP
    assert len(opened) == 1


def _numbers(train: Clips, monkeypatch: pytest.MonkeyPatch, seed: int) -> list[list[int]]:
    """Returns the frame numbers of each clip of a group, without decoding."""
    asked: list[list[int]] = []

    def read_each(path: str, info: Any, clips: list[list[int]], *rest: Any) -> list[None]:
        asked.extend(clips)
        return [None] * len(clips)

    with monkeypatch.context() as patched:
        patched.setattr(decode, "read_each", read_each)
        together(train, [0, 1, 2], seed)
    return asked


def test_each_clip_begins_at_every_frame_equally_often(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every member of a group and every frame delta, as for single clips."""
    train = train_of(data, min_frame_delta=1, max_frame_delta=2)
    present = np.arange(75)
    draws = 3000
    starts: dict[tuple[int, int], list[int]] = {}
    for seed in range(draws):
        for member, numbers in enumerate(_numbers(train, monkeypatch, seed)):
            places = np.searchsorted(present, numbers)
            (delta,) = set(np.diff(places))
            starts.setdefault((member, int(delta)), []).append(int(places[0]))
    assert starts.keys() == {(member, delta) for member in range(GROUP) for delta in (1, 2)}
    for (_, delta), found in starts.items():
        room = len(present) - (FRAMES - 1) * delta
        counts = np.bincount(found, minlength=room)
        assert len(counts) == room, "a clip ends after the last frame"
        expected = len(found) / room
        assert abs(len(found) - draws / 2) < 5 * np.sqrt(draws / 4)
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        assert chi_squared < room + 5 * np.sqrt(2 * room)


def test_clips_of_a_group_are_close_but_different(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = train_of(data, min_frame_delta=1, max_frame_delta=1)
    for seed in range(50):
        starts = sorted(numbers[0] for numbers in _numbers(train, monkeypatch, seed))
        assert starts[-1] - starts[0] < 30, "stretches have 12 to 18 frames, the last one 30"
        assert len(set(starts)) == GROUP


def test_a_broken_clip_does_not_affect_the_others(tmp_path: Path) -> None:
    """One clip's frames exist, another's do not: only that one fails, as when read alone."""
    path = str(sample.write(tmp_path / "a.mp4", 30, g="30", bf="0"))
    info = packets.scan(path)
    frames: dict[int, list[int]] = {}

    def take(clip: int, place: int, frame: Any) -> None:
        frames.setdefault(clip, []).append(sample.number_of(frame.to_ndarray(format="rgb24")))

    good, bad = [3, 4, 5], [28, 29, 30]
    failures = decode.read_each(path, info, [good, bad, [4, 8]], take)
    assert [failures[0], failures[2]] == [None, None]
    assert isinstance(failures[1], BadExample)
    assert "frame 30 of 30" in failures[1].reason
    assert (frames[0], frames[2]) == ([3, 4, 5], [4, 8])


def test_a_broken_file_fails_every_clip_of_its_group(data: Path, tmp_path: Path) -> None:
    for one in data.iterdir():
        (tmp_path / one.name).write_bytes(one.read_bytes())
    train = train_of(tmp_path)
    Path(train.entries[0].path).write_bytes(b"no video")
    found = together(train, [0, 1, 2])
    assert len(found) == GROUP
    assert all(isinstance(one, BadExample) for one in found)


def test_clips_are_grouped_if_keyframes_are_far_apart(data: Path, tmp_path: Path) -> None:
    for number in range(3):
        sample.write(tmp_path / "short" / f"{number}.mp4", 75, g="8", sc_threshold="0")
    assert train_of(tmp_path / "short").group == 1
    assert train_of(data).group == GROUP
    assert train_of(data, clips_per_video=14).group == 2
    assert train_of(data, clips_per_video=12).group == 6
    assert train_of(data, clips_per_video=1).group == 1
    assert train_of(data, clips_per_video=4, clips_per_group=2).group == 2
    assert train_of(data, clips_per_group=1).group == 1


def test_the_fingerprint_includes_the_grouping(data: Path) -> None:
    def fingerprint(**settings: Any) -> str:
        return train_of(data, **settings).fingerprint

    assert fingerprint() != fingerprint(clips_per_group=1)
    assert fingerprint() != fingerprint(batch_size=4)
    assert fingerprint() == fingerprint(batch_size=4, group_spread=2)
    assert fingerprint(clips_per_video=1) == fingerprint(clips_per_video=1, batch_size=4)


@pytest.mark.parametrize("wrong", [{"clips_per_group": 2}, {"clips_per_group": 0}])
def test_groups_that_do_not_divide_the_clips_are_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match=r"data.clips_per_group=\d must divide"):
        video.Config(batch_size=2, clips_per_video=3, **wrong)
