"""The clips of evaluate: the same ones every time, spread over the videos, or from the start."""

import errno
import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pytest
from data.video import sample_videos

from jaxtrain.data.video import prepare_clips
from jaxtrain.data.video.pieces import Settings
from jaxtrain.data.video.reader import Break, Frame, Item, Look
from jaxtrain.errors import BadExample, InputError
from jaxtrain.inference.evaluation import evaluation_clips
from jaxtrain.jobs import engines
from jaxtrain.storage import disks

pytestmark = pytest.mark.usefixtures("own_cache")


def clips_of(videos: Path, count: int | None) -> list[tuple[str, float]]:
    found = evaluation_clips.choose(
        str(videos),
        "--data",
        frames=8,
        height=16,
        width=24,
        clips=count,
        say=lambda line: None,
    )
    return [(clip.frame_range.name, clip.place) for clip in found]


def test_clips_are_spread_evenly(tmp_path: Path) -> None:
    videos = tmp_path / "videos"
    for number, frames in enumerate((8, 12, 20, 30)):
        sample_videos.write(videos / f"{number}.mp4", frames)
    everything = [(f"{number}.mp4", 0.5) for number in range(4)]
    assert clips_of(videos, None) == clips_of(videos, 4) == everything
    assert clips_of(videos, 2) == [("0.mp4", 0.5), ("2.mp4", 0.5)]
    six = clips_of(videos, 6)
    assert [name for name, _ in six] == ["0.mp4", "0.mp4", "1.mp4", "2.mp4", "2.mp4", "3.mp4"]
    assert [at for _, at in six] == [0.25, 0.75, 0.5, 0.25, 0.75, 0.5]


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sample_videos.films(tmp_path_factory.mktemp("films"))


def numbers_of(films: Path, **how: Any) -> list[tuple[str, list[int]]]:
    size = {"height": sample_videos.HEIGHT, "width": sample_videos.WIDTH}
    chosen = evaluation_clips.from_the_start(
        str(films), "--data", **size, **how, say=lambda line: None
    )
    return [
        (clip.frame_range.name, [sample_videos.number_of(image) for image in clip.read()])
        for clip in chosen
    ]


def test_clips_of_a_complete_video_follow_each_other(films: Path) -> None:
    """At 30 frames per second: every frame of 25, every second of 60; the last frame repeats."""
    found = numbers_of(films, frames=17, fps=30, complete=True)
    assert found == [
        ("a.mp4", list(range(17))),
        ("a.mp4", [17, 18, 19] + [19] * 14),
        ("b.mp4", list(range(0, 34, 2))),
        ("b.mp4", [34, 36, 38] + [38] * 14),
        ("c.mp4", [0, 1, 2, 3, 4] + [4] * 12),
    ]


def test_first_clips_begin_at_the_first_frame(films: Path) -> None:
    found = numbers_of(films, frames=18, fps=None, complete=False)
    assert found == [("a.mp4", list(range(18))), ("b.mp4", list(range(18)))]


def chosen(path: Path, **how: Any) -> list[evaluation_clips.Clip]:
    given: dict[str, Any] = {"frames": 6, "clips": None, "say": lambda line: None} | how
    size = {"height": sample_videos.HEIGHT, "width": sample_videos.WIDTH}
    return evaluation_clips.choose(str(path), "--data", **size, **given)


def frame_numbers(clip: evaluation_clips.Clip) -> list[int]:
    return [sample_videos.number_of(image) for image in clip.read()]


def test_clips_are_read_in_any_order(films: Path) -> None:
    clips = chosen(films, clips=12, frames=5)
    found = [frame_numbers(clip) for clip in clips]
    assert all(numbers == [*range(numbers[0], numbers[0] + 5)] for numbers in found)
    assert [numbers[0] for numbers in found] == [2, 6, 9, 13, 4, 13, 22, 31, 0, 0, 0, 0]
    assert [frame_numbers(clip) for clip in reversed(clips)] == found[::-1]


def test_chosen_videos_only(films: Path) -> None:
    assert [clip.frame_range.name for clip in chosen(films)] == ["a.mp4", "b.mp4"]
    said: list[str] = []
    (clip,) = chosen(films, only={"b.mp4", "c.mp4"}, say=said.append)
    assert clip.frame_range.name == "b.mp4"
    (line,) = said
    assert "c.mp4: is too short: it has 5 frames in a row, a clip needs 6" in line
    with pytest.raises(InputError, match=r"--data .*films.*: none of \d videos can be used"):
        chosen(films, only={"c.mp4"})


@pytest.fixture(scope="module")
def prepared(films: Path) -> Path:
    settings = Settings(height=64, width=96, frames=16, min_frames=4, split_at_cuts=False)
    out = films.parent / "prepared"
    prepare_clips.run(str(films), out, settings, engine=engines.Threads(1), say=lambda line: None)
    return out


def test_clips_of_a_set_are_inside_of_pieces(prepared: Path) -> None:
    clips = chosen(prepared, clips=80)  # of pieces of 16 and 4 frames, and of 16, 16, and 8
    assert [clip.frame_range.name for clip in clips] == ["a.mp4"] * 40 + ["b.mp4"] * 40
    starts = {"a.mp4": set[int](), "b.mp4": set[int]()}
    for clip in clips:
        numbers = frame_numbers(clip)
        assert numbers == [*range(numbers[0], numbers[0] + 6)]
        starts[clip.frame_range.name].add(numbers[0])
    assert starts["a.mp4"] == {*range(11)}
    assert starts["b.mp4"] == {*range(11), *range(16, 27), *range(32, 35)}


def test_clips_of_a_complete_set_have_places_in_the_video(prepared: Path) -> None:
    size = {"height": sample_videos.HEIGHT, "width": sample_videos.WIDTH}
    clips = evaluation_clips.from_the_start(
        str(prepared), "--data", **size, frames=8, fps=None, complete=True, say=lambda line: None
    )
    of_b = [clip for clip in clips if clip.frame_range.name == "b.mp4"]
    assert [frame_numbers(clip) for clip in of_b] == [[*range(n, n + 8)] for n in range(0, 40, 8)]
    assert [clip.place for clip in of_b] == [0, 0.2, 0.4, 0.6, 0.8]


class Gap:
    """A video whose frames 10 to 12 are missing; its disk is away for a moment, or it changes."""

    rate = Fraction(25)
    away = 0
    length = 30

    def __init__(self, path: str, span: Any) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Item]:
        for number in range(self.length):
            if number == 10:
                yield Break("is damaged", 3)
            if 10 <= number < 13:
                continue
            if number == 20 and Gap.away:
                Gap.away -= 1
                raise disks.unreadable(self.path, OSError(errno.EIO, os.strerror(errno.EIO)))
            picture = av.VideoFrame.from_ndarray(sample_videos.numbered(number), "rgb24")
            yield Frame(picture, Look(96, 64, Fraction(1)), number)


@pytest.fixture
def gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(evaluation_clips, "Reader", Gap)
    monkeypatch.setattr(disks, "_FIRST_PAUSE_S", 0.0)
    (tmp_path / "gap.mp4").write_bytes(b"video")
    return tmp_path / "gap.mp4"


def test_no_clip_has_frames_from_both_sides_of_a_gap(gap: Path) -> None:
    starts = set[int]()
    for clip in chosen(gap, clips=80):
        numbers = frame_numbers(clip)
        assert numbers == [*range(numbers[0], numbers[0] + 6)]
        starts.add(numbers[0])
    assert starts == {*range(5), *range(13, 25)}


def test_a_disk_that_is_away_for_a_moment_is_waited_for(
    gap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clips = chosen(gap, clips=4)
    found = [frame_numbers(clip) for clip in clips]
    assert found[-1][0] > 20
    for order in (clips, clips[::-1]):
        monkeypatch.setattr(Gap, "away", 2)
        assert sorted(frame_numbers(clip) for clip in order) == found
        assert Gap.away == 0


def test_a_video_that_changed_is_one_line(gap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clips = chosen(gap, clips=4)
    monkeypatch.setattr(Gap, "length", 20)
    with pytest.raises(BadExample, match=r"gap\.mp4: changed: its frame \d+ is missing"):
        clips[-1].read()
