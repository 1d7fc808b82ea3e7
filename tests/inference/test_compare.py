"""The meter and its statistics; the command is tested in tests/cli/test_evaluate.py."""

from pathlib import Path
from typing import Any

import pytest
from data.video import sample_videos
from models import small_autoencoder

from jaxtrain.data.video import evaluation_clips
from jaxtrain.inference import compare
from jaxtrain.inference import video as autoencoding


def measured(video: str, *values: float) -> compare.ClipMetrics:
    return compare.ClipMetrics(
        video=video, place=0.5, values=tuple({"psnr": value} for value in values)
    )


def test_clips_of_one_video_count_as_one() -> None:
    clips = [measured("a", 1, 2), measured("a", 3, 6), measured("b", 8, 8)]
    found = compare.compare(clips, ["psnr", "ssim"])
    assert (found.videos, found.clips) == (2, 3)
    assert list(found.estimates) == ["psnr"]  # no clip has an SSIM
    first, second = found.estimates["psnr"]
    assert (first.mean, first.count) == (5.0, 2)  # the mean of 2 and 8
    assert second.mean == 6.0  # the mean of 4 and 8
    assert found.differences["psnr"][0, 1].estimate.mean == 1.0


def test_another_metric_can_be_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A metric is a function of two videos that returns one number per frame."""

    def darkness(video: Any, other: Any) -> Any:
        del other
        return 1 - video.mean((2, 3, 4))

    monkeypatch.setenv("JAXTRAIN_CACHE", str(tmp_path / "cache"))
    weights = small_autoencoder.save(tmp_path / "0.safetensors", seed=0)
    film = sample_videos.write(tmp_path / "0.mp4", sample_videos.busy(8, height=20, width=30))
    models = [autoencoding.Autoencoder(weights)]
    measures = compare.MEASURES | {"darkness": darkness}
    meter = compare.Meter(models, measures, frames=8, height=16, width=24)
    clips = evaluation_clips.choose(
        str(film),
        "--data",
        frames=8,
        height=16,
        width=24,
        clips=None,
        say=lambda line: None,
    )
    (one,) = meter.measure(clips, lambda line: None)
    expected = 1 - clips[0].read()[:5].mean() / 255
    assert one.values[0]["darkness"] == pytest.approx(expected, rel=1e-4)
