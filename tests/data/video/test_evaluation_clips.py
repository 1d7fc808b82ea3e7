"""The clips of evaluate: the same ones every time, spread over the videos, or from the start."""

from pathlib import Path
from typing import Any

import pytest
from data.video import sample_videos

from jaxtrain.data.video import evaluation_clips


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))


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
    return [(clip.entry.name, clip.place) for clip in found]


def test_clips_are_spread_evenly(tmp_path: Path) -> None:
    videos = tmp_path / "videos"
    for number, frames in enumerate((8, 12, 20, 30)):
        sample_videos.write(videos / f"{number}.mp4", frames)
    everything = [(f"{number}.mp4", 0.5) for number in range(4)]
    assert clips_of(videos, None) == clips_of(videos, 4) == everything
    assert clips_of(videos, 2) == [("0.mp4", 0.5), ("2.mp4", 0.5)]
    six = clips_of(videos, 6)
    assert [name for name, _ in six] == ["0.mp4", "1.mp4", "1.mp4", "2.mp4", "3.mp4", "3.mp4"]
    assert [at for _, at in six] == [0.5, 0.25, 0.75, 0.5, 0.25, 0.75]


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos of 20 and 40 numbered frames at 25 and 60 frames per second, and a short one."""
    folder = tmp_path_factory.mktemp("films")
    sample_videos.write(folder / "a.mp4", 20, fps=25)
    sample_videos.write(folder / "b.mp4", 40, fps=60)
    sample_videos.write(folder / "c.mp4", 5, fps=25)
    return folder


def numbers_of(films: Path, **how: Any) -> list[tuple[str, list[int]]]:
    size = {"height": sample_videos.HEIGHT, "width": sample_videos.WIDTH}
    chosen = evaluation_clips.from_the_start(
        str(films), "--data", **size, **how, say=lambda line: None
    )
    return [
        (clip.entry.name, [sample_videos.number_of(image) for image in clip.read()])
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
