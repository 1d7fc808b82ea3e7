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
from jaxtrain.data.video.reader import Frame, Reader
from jaxtrain.jobs import engines

HEIGHT, WIDTH, FRAMES = 32, 48, 4
ROOM = (40, 60)
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


def shown(examples: list[dict[str, np.ndarray]]) -> dict[str, Any]:
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
    batch = shown(found)
    assert batch.keys() == expected[0].keys()
    for i, one in enumerate(expected):
        np.testing.assert_array_equal(one["augment"], batch["augment"][i])
        difference = np.abs(one["video"].astype(int) - np.asarray(batch["video"][i]))
        assert difference.max() <= 2
        assert (difference > 0).mean() < 0.05
    if (split, windows) == ("train", "random"):  # both ways, at several sizes
        assert {int(one["crop"][2]) for one in found} == {0, 1}
        assert len({int(one["crop"][0]) for one in found}) > 2


def test_the_batch_that_workers_send(prepared: Path) -> None:
    config = dataclasses.replace(CONFIG, path=str(prepared))
    example = opened(prepared, convert_on=None).train.example(0, np.random.default_rng(0))
    spec = {"video": jax.ShapeDtypeStruct((5, FRAMES, HEIGHT, WIDTH, 3), np.uint8)}
    rest = {"augment": jax.ShapeDtypeStruct((5, 5), np.float32)}
    sent = config.sent(spec | rest, MODEL)
    assert {name: (part.shape[1:], part.dtype) for name, part in sent.items()} == {
        name: (part.shape, part.dtype) for name, part in example.items()
    }
    received = jax.eval_shape(lambda batch: config.received(batch, MODEL), sent)
    assert received == spec | rest


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


SMALLEST, FITTING, USUAL, TALL = (31, 47), (36, 54), (90, 160), (200, 120)


@pytest.mark.parametrize(
    ("ending", "size", "how"),
    [
        ("mp4", USUAL, {}),
        ("mp4", TALL, {}),
        ("mp4", USUAL, {"full_range": True}),
        ("mp4", FITTING, {}),
        ("mp4", FITTING, {"full_range": True}),
        ("mp4", FITTING, {"pix_fmt": "yuv420p10le"}),
        ("mp4", TALL, {"pix_fmt": "yuv420p10le"}),
        ("mkv", SMALLEST, {"codec": "ffv1", "pix_fmt": "yuv444p"}),
        ("mkv", SMALLEST, {"codec": "ffv1", "pix_fmt": "bgr0"}),
        ("mkv", TALL, {"codec": "ffv1", "pix_fmt": "bgr0"}),
    ],
)
def test_other_videos_are_converted_first(
    tmp_path: Path, ending: str, size: tuple[int, int], how: dict[str, Any]
) -> None:
    """Such as frames of a video that is not cut into pieces."""
    path = sample.write(
        tmp_path / f"a.{ending}", [sample.smooth(i, *size) for i in range(2)], **how
    )
    _same(frames_of(path))


def test_a_video_whose_size_changes(tmp_path: Path) -> None:
    frames = frames_of(sample.growing(tmp_path / "a.ts", (48, 64), (72, 96)))
    assert len({frame.look.height for frame in frames}) == 2
    _same([frames[0], frames[-1]])


def frames_of(path: Path) -> list[Frame]:
    return [item for item in Reader(str(path)) if isinstance(item, Frame)]


def _same(frames: list[Frame]) -> None:
    look = frames[0].look
    for position in (
        video_frames.CropPosition(),
        video_frames.CropPosition(scale=0.8, across=1.0, down=0.3, mirror=True),
    ):
        size = {"frames": 2, "height": HEIGHT, "width": WIDTH, "position": position}
        host = video_frames.Crop(look, **size)
        device = video_frames.Planes(look, **size, plane_size=ROOM)
        for one in (host, device):
            for number, frame in enumerate(frames):
                one.put(number, frame.picture)
        found = np.asarray(shown([device.arrays()])["video"][0])
        difference = np.abs(host.out_THWC.astype(int) - found)
        # A crop without room has color at half the resolution. A wrong range is off by 9.
        fits = device.arrays()["crop"][0] <= ROOM[0] and look.height * look.width < 40 * 60
        assert difference.mean() < (2 if fits else 4)


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
