"""A teacher's latents of random crops: one for each crop, and the same in every run."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from data.video import sample_videos as sample
from data.video.sample_videos import Means

from jaxtrain.data import video
from jaxtrain.data.video import encode_latents, latents
from jaxtrain.data.video import frames as video_frames
from jaxtrain.errors import InputError
from jaxtrain.jobs import engines
from jaxtrain.models import video_ae

CROPPED: dict[str, Any] = {"crop": (16, 32), "crops_per_clip": 3}
STUDENT = video_ae.Config(frames=6, height=64, width=96, latent_channels=3)


pytestmark = pytest.mark.usefixtures("one_shot")


def _open(path: Path, root: Path, model: Any, **settings: Any) -> Any:
    return sample.opened(path, root, model, windows="fixed", **settings)


@pytest.fixture(scope="module")
def smooth(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos whose crops all differ."""
    folder = tmp_path_factory.mktemp("latents") / "smooth"
    for number in range(3):
        images = [sample.smooth(40 * number + i, 64, 96) for i in range(12 + number)]
        sample.write(folder / f"{number}.mp4", images, title=str(number), g="8")
    return folder


def _of_crops(root: Path, sources: Any, model: Any = STUDENT, **crops: Any) -> list[Means]:
    """Prepares the latents of both splits; returns the teachers, as they were asked."""
    config = video.Config(batch_size=2, windows="fixed", **(CROPPED | crops))
    asked = []
    for shape, group in config.latent_groups(model, sources.train, sources.val):
        asked.append(Means())
        target = latents.store(root, group[0].size, shape, Means.name)
        encode_latents.prepare(
            group,
            lambda: asked[-1],
            Means.about,
            target,
            engine=engines.Threads(4),
            batch_size=4,
            say=lambda line: None,
        )
    return asked


@pytest.mark.parametrize("convert_on", ["host", "device"])
def test_random_crops_have_latents_of_their_own(
    smooth: Path, tmp_path: Path, convert_on: str
) -> None:
    """Each crop is encoded by itself, and training reads it with its latents."""
    settings = {**CROPPED, "min_crop_scale": 0.5, "convert_on": convert_on}
    plain = _open(smooth, tmp_path, STUDENT, **settings)
    _of_crops(tmp_path, plain)
    taught = dataclasses.replace(STUDENT, teacher=video_ae.Teacher())
    sources = _open(smooth, tmp_path, taught, **settings)
    assert len(sources.train) == 3 * sum(map(sources.train.windows, sources.train.videos))
    assert len(sources.val) == sum(map(sources.val.windows, sources.val.videos))
    assert {v.name for v in sources.train.videos}.isdisjoint(v.name for v in sources.val.videos)
    received, seen = jax.jit(lambda batch: sources.train.config.received(batch, taught)), set()
    for index in range(len(sources.train)):
        one, other = (sources.train.example(index, np.random.default_rng(n)) for n in (1, 2))
        for name, array in one.items():
            np.testing.assert_array_equal(array, other[name])
        clip, number = divmod(index, 3)
        crop = sources.train.pixels(*sources.train._video_of(clip))[number]
        seen_by_model = received({name: array[None] for name, array in one.items()})["video"][0]
        np.testing.assert_allclose(seen_by_model, crop, atol=2 * (convert_on == "device"))
        wanted = Means().encode(crop[None].astype(np.float32) / 255)[0]
        assert one["latents"].shape == wanted.shape == (2, 2, 4, 3)
        np.testing.assert_allclose(one["latents"], wanted, atol=1e-3)
        seen.add(crop.tobytes())
    assert len(seen) == len(sources.train)
    for index in range(len(sources.val)):
        complete = sources.val.example(index, np.random.default_rng(0))
        wanted = Means().encode(complete["video"][None].astype(np.float32) / 255)[0]
        np.testing.assert_allclose(complete["latents"], wanted, atol=1e-3)


def test_crops_follow_from_the_video_alone(smooth: Path, tmp_path: Path) -> None:
    """Not from the run's seed, nor from the number of crops; so runs share the latents."""
    settings = {**CROPPED, "min_crop_scale": 0.5}
    train = _open(smooth, tmp_path, STUDENT, **settings).train
    moved = shutil.copytree(smooth, tmp_path / "moved")
    given: dict[str, Any] = {"batch_size": 2, "cache_dir": str(tmp_path), "windows": "fixed"}
    config = video.Config(path=str(moved), convert_on="host", **given, **settings)
    again = config.open(STUDENT, seed=7, say=lambda line: None).train
    more = _open(smooth, tmp_path, STUDENT, **{**settings, "crops_per_clip": 5}).train
    other = _open(smooth, tmp_path, STUDENT, **{**settings, "min_crop_scale": 0.6}).train
    assert train.fingerprint == again.fingerprint
    assert len({one.fingerprint for one in (train, more, other)}) == 3
    assert len({one.size for one in (train, more, other)}) == 3
    for one in train.videos:
        for place in range(train.windows(one)):
            crops = train.pixels(one, place)
            for crop, same, first in zip(
                crops, again.pixels(one, place), more.pixels(one, place)[:3], strict=True
            ):
                np.testing.assert_array_equal(crop, same)
                np.testing.assert_array_equal(crop, first)


def test_crops_are_inside_of_the_frame_and_have_no_other_aspect(
    smooth: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = _open(
        smooth, tmp_path, STUDENT, **CROPPED, min_crop_scale=0.5, max_crop_scale=2.0
    ).train
    cuts = []
    real = video_frames.crop_of

    def crop_of(stored: Any, *rest: Any) -> tuple[int, int, int, int]:
        cuts.append(real(stored, *rest))
        return cuts[-1]

    monkeypatch.setattr(video_frames, "crop_of", crop_of)
    for one in train.videos:
        for place in range(train.windows(one)):
            train.pixels(one, place)
    assert len(set(cuts)) == len(train)
    for wide, high, left, top in cuts:
        assert left >= 0 <= top
        assert left + wide <= 96
        assert top + high <= 64
        assert wide == pytest.approx(2 * high, abs=2)
        assert 16 <= wide <= 64


def test_latents_of_crops_and_of_clips_are_of_one_teacher(smooth: Path, tmp_path: Path) -> None:
    plain = _open(smooth, tmp_path, STUDENT, **CROPPED)
    (crops, complete) = _of_crops(tmp_path, plain)
    assert set(crops.batches) == set(complete.batches) == {4}
    taught = dataclasses.replace(STUDENT, teacher=video_ae.Teacher())
    with pytest.raises(InputError, match=r"no teacher's latents for clips of 6x16x32-2-crops-"):
        _open(smooth, tmp_path, taught, **CROPPED | {"crops_per_clip": 2})
    # A second teacher that only has latents of complete clips.
    second = tmp_path / "latents/6x64x96/second"
    shutil.copytree(tmp_path / f"latents/6x64x96/{Means.name}", second)
    assert _open(smooth, tmp_path, taught, **CROPPED).val.latents.teacher == Means.name
    shutil.rmtree(tmp_path / f"latents/6x64x96/{Means.name}")
    with pytest.raises(InputError, match=rf"no latents of teacher {Means.name} for clips of 6x64x"):
        _open(smooth, tmp_path, taught, **CROPPED)
