"""The demo videos."""

from pathlib import Path

import numpy as np
import pytest
from data.video import sample_videos

from jaxtrain.data import video
from jaxtrain.data.video import demo_videos

MODEL = sample_videos.model(12, demo_videos.HEIGHT, demo_videos.WIDTH)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def folder(root: Path) -> Path:
    """One video of each kind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo_videos, "VIDEOS", 6)
        patch.setattr(demo_videos, "FRAMES", 16)
        return demo_videos.prepare(root, lambda text: None)


def test_they_are_rendered_once(folder: Path, root: Path) -> None:
    said: list[str] = []
    assert demo_videos.prepare(root, said.append) == folder
    assert said == []
    names = sorted(path.stem for path in folder.glob("*.mp4"))
    assert names == ["balls-0", "clouds-0", "flight-0", "hills-0", "mosaic-0", "water-0"]


def test_they_are_read_like_any_other_files(folder: Path, root: Path) -> None:
    config = video.Config(demo=True, batch_size=1, cache_dir=str(root))
    sources = config.open(MODEL, seed=0, say=lambda text: None)
    assert (sources.files, sources.bad) == (6, ())
    frames = 6 * 16
    assert sources.summary == f"6 videos (6 good), {frames} frames in pieces, 5 train / 1 val"
    for source in (sources.train, sources.val):
        for index in range(len(source)):
            clip = source.example(index, np.random.default_rng(index))["video"]
            assert clip.shape == (12, demo_videos.HEIGHT, demo_videos.WIDTH, 3)
            assert clip.std() > 15, "the clip is almost uniform"


@pytest.mark.parametrize("kind", sorted(demo_videos._KINDS))
def test_scenes_move_smoothly_and_look_natural(kind: str) -> None:
    scene = demo_videos._KINDS[kind](np.random.default_rng(3))
    one, two, far = scene(0.5), scene(0.5 + 1 / demo_videos.FPS), scene(1.8)
    assert one.shape == (demo_videos.HEIGHT, demo_videos.WIDTH, 3)
    step, way = np.abs(two - one).mean(), np.abs(far - one).mean()
    assert 0 < step < 0.05, "consecutive frames must differ, but only a little"
    assert way > 1.3 * step, "distant frames must differ more"
    # Neighboring pixels are similar, as in natural images.
    grey = one.mean(axis=-1)
    pairs = np.corrcoef(grey[:, :-1].ravel(), grey[:, 1:].ravel())[0, 1]
    assert pairs > 0.8
    assert np.mean((one < 0) | (one > 1)) < 0.1, "too many pixels are clipped"


def test_the_same_seed_gives_the_same_images() -> None:
    make = demo_videos._KINDS["balls"]
    first = [next(iter(demo_videos.render(make, seed))) for seed in (1, 1, 2)]
    np.testing.assert_array_equal(first[0], first[1])
    assert np.abs(first[0] - first[2]).mean() > 0.02
