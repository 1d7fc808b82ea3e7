"""Clips that the device resizes and converts: the same examples, as planes."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from data.video import sample_videos as sample

from jaxtrain.data import video
from jaxtrain.data.video import frames as video_frames
from jaxtrain.data.video import prepare_clips
from jaxtrain.data.video.pieces import Settings
from jaxtrain.jobs import engines

HEIGHT, WIDTH, FRAMES = 32, 48, 4
MODEL = sample.model(FRAMES, HEIGHT, WIDTH)
SMALL = Settings(height=HEIGHT, width=WIDTH, frames=16, min_frames=8, min_side=16, gop=4)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planes")
    for number in range(3):
        images = [sample.smooth(40 * number + i) for i in range(32)]
        sample.write(folder / f"raw/{number}.mp4", images, g="250")
    prepare_clips.run(
        str(folder / "raw"), folder / "cut", SMALL, engine=engines.Threads(1), say=lambda line: None
    )
    return folder / "cut"


def opened(path: Path, **settings: Any) -> Any:
    return sample.opened(path, path.parent / "cache", MODEL, **settings)


CONFIG = video.Config(batch_size=2)
RECEIVED = jax.jit(lambda batch: CONFIG.received(batch, MODEL))


def received(examples: list[dict[str, np.ndarray]]) -> dict[str, Any]:
    """Returns a batch as the model sees it."""
    return RECEIVED({name: np.stack([one[name] for one in examples]) for name in examples[0]})


def loaded(source: Any, count: int) -> list[dict[str, np.ndarray]]:
    return [source.example(i % len(source), np.random.default_rng(i)) for i in range(count)]


@pytest.mark.parametrize(("split", "windows"), [("train", "random"), ("val", "fixed")])
def test_the_examples_are_those_of_the_host(prepared: Path, split: str, windows: str) -> None:
    host, device = (
        getattr(opened(prepared, convert_on=where, windows=windows), split)
        for where in ("host", "device")
    )
    assert (host.fingerprint, len(host)) == (device.fingerprint, len(device))
    expected, found = loaded(host, 6), loaded(device, 6)
    batch = received(found)
    assert batch.keys() == expected[0].keys()
    for i, one in enumerate(expected):
        difference = np.abs(one["video"].astype(int) - np.asarray(batch["video"][i]))
        assert difference.max() <= 2
        assert (difference > 0).mean() < 0.05
    if (split, windows) == ("train", "random"):  # both ways, at several sizes
        assert {int(one["crop"][2]) for one in found} == {0, 1}
        assert len({int(one["crop"][0]) for one in found}) > 2


def test_the_batch_that_workers_send(prepared: Path) -> None:
    config = dataclasses.replace(CONFIG, path=str(prepared))
    train = opened(prepared, convert_on=None).train
    example = train.example(0, np.random.default_rng(0))
    spec = {"video": jax.ShapeDtypeStruct((5, FRAMES, HEIGHT, WIDTH, 3), np.uint8)}
    sent = config.sent(spec, MODEL)
    assert {name: (part.shape[1:], part.dtype) for name, part in sent.items()} == {
        name: (part.shape, part.dtype) for name, part in example.items()
    }
    received = jax.eval_shape(lambda batch: config.received(batch, MODEL), sent)
    assert received == spec


def test_the_device_converts_clips_that_were_prepared_for_it(prepared: Path) -> None:
    def converts(path: Path | str, model: Any = MODEL, **settings: Any) -> bool:
        return video.Config(path=str(path), batch_size=2, **settings).converts_on_device(model)

    assert converts(prepared)
    assert not converts(prepared, convert_on="host")
    assert converts(prepared.parent / "raw")  # which a run cuts into such pieces
    assert not converts(prepared.parent / "raw", convert_on="host")
    # Smaller crops, from which pieces of this size would first be shrunk.
    assert not converts(prepared, min_crop_scale=1.0)
    assert not converts(prepared, sample.model(FRAMES, 16, 24))
    assert not converts("https://videos.example/cut")


@pytest.mark.parametrize("scale", [1.0, 0.8, 0.7, 0.3])
def test_planes_have_room_for_every_crop(scale: float) -> None:
    high, wide = video_frames.plane_size(480, 720, scale)
    settings = Settings(min_crop_scale=scale)
    assert high % 2 == wide % 2 == 0
    for shape in [(1080, 1920), (2000, 2000), (4000, 1000), (1440, 2560), (600, 900), (2161, 3841)]:
        piece = settings.size(*shape)
        crop = video_frames.crop_of((piece[1], piece[0]), 1.0, 1.5, video_frames.CropPosition())
        assert crop[0] <= wide
        assert crop[1] <= high
