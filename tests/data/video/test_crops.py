"""Training on random crops of clips: place, scale, several from one clip, and the same clips."""

import dataclasses
import itertools
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data.video import sample_videos as sample

from jaxtrain import config
from jaxtrain.data import sampler, video
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.data.video import pieces
from jaxtrain.data.video.reader import Span
from jaxtrain.errors import BadExample, InputError
from jaxtrain.models import video_ae
from jaxtrain.training import step_setup
from jaxtrain.training.model_flops import model_flops

MODEL = video_ae.Config(frames=2, height=64, width=96)
PLAIN: dict[str, Any] = {"flip": False}


def _ramp(height: int, width: int, *, down: bool = False) -> np.ndarray:
    """Returns an image whose gray is proportional to the distance from the left or the top."""
    along = np.linspace(0, 250, height if down else width)
    image_HW = along[:, None] if down else along[None]
    return np.broadcast_to(image_HW[..., None], (height, width, 3)).astype(np.uint8)


def _folder(folder: Path, image_HW3: np.ndarray, files: int = 2) -> Path:
    for number in range(files):
        sample.write(folder / f"{number}.mp4", [image_HW3] * 4, title=str(number), crf="2")
    return folder


def _open(path: Path, **settings: Any) -> Any:
    return sample.opened(path, path.parent / "cache", MODEL, **settings)


def _ends(image_HW3: np.ndarray, *, down: bool = False) -> tuple[float, float]:
    """Returns the gray at both ends, along the ramp, as a fraction of the ramp."""
    gray = image_HW3[:, :, 1].mean(1 if down else 0) / 250
    inside = (gray[-2] - gray[1]) / (len(gray) - 3)  # the ends repeat pixels of the border
    return float(gray[1] - 1.5 * inside), float(gray[-2] + 1.5 * inside)


@pytest.mark.parametrize("down", [False, True])
def test_place_and_scale_are_uniform(tmp_path: Path, down: bool) -> None:
    side = 64 if down else 96
    ramp = _folder(tmp_path / "v", _ramp(64, 96, down=down))
    train = _open(ramp, crop=(16, 16), min_crop_scale=0.5, max_crop_scale=2.5, **PLAIN).train
    first, last = np.array(
        [
            _ends(train.example(0, np.random.default_rng(seed))["video"][0], down=down)
            for seed in range(400)
        ]
    ).T
    scales = (last - first) * side / 16
    np.testing.assert_allclose(
        np.quantile(scales, (0, 0.25, 0.5, 0.75, 1)), (0.5, 1, 1.5, 2, 2.5), atol=0.2
    )
    places = first / (1 - (last - first))
    np.testing.assert_allclose(
        np.quantile(places, (0, 0.25, 0.5, 0.75, 1)), (0, 0.25, 0.5, 0.75, 1), atol=0.1
    )
    assert abs(np.corrcoef(scales, places)[0, 1]) < 0.15


@pytest.mark.parametrize("shown", [(64, 96), (128, 192), (64, 80), (96, 64), (64, 160), (100, 100)])
@pytest.mark.parametrize("crop", [(16, 16), (16, 48), (48, 16), (64, 96)])
def test_things_are_as_large_in_a_crop_as_in_a_validation(
    tmp_path: Path, shown: tuple[int, int], crop: tuple[int, int]
) -> None:
    sources = _open(_folder(tmp_path / "v", _ramp(*shown)), crop=crop, min_crop_scale=1.0, **PLAIN)
    example = sources.train.example(0, np.random.default_rng(3))["video"][0]
    complete = sources.val.example(0, np.random.default_rng(0))["video"][0]
    assert example.shape[:2] == crop
    expected, pixels = (
        (last - first) * shown[1] for first, last in (_ends(complete), _ends(example))
    )
    # The crop has an even number of the video's pixels.
    assert pixels == pytest.approx(expected * crop[1] / MODEL.width, abs=1.3)


@pytest.fixture(scope="module")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("crops") / "videos"
    for number in range(6):
        images = [sample.smooth(40 * number + i, 64, 96) for i in range(12)]
        sample.write(folder / f"{number}.mp4", images, title=str(number))
    return folder


def test_validation_does_not_depend_on_crops(numbered: Path) -> None:
    crops, clips = _open(numbered, crop=(16, 24), crops_per_clip=3).val, _open(numbered).val
    assert (crops.fingerprint, len(crops)) == (clips.fingerprint, len(clips))
    for name, array in clips.example(0, np.random.default_rng(0)).items():
        np.testing.assert_array_equal(
            crops.example(0, np.random.default_rng(0))[name], array, strict=True
        )


def _rows(source: Any, folder: Path, **part: int) -> sampler.TrainingRows:
    every = {"start": 0, "batch_size": 8, "first_row": 0, "rows_per_batch": 8, "batches": 9} | part
    quarantine = Quarantine(folder / "quarantine.jsonl")
    return sampler.TrainingRows(source, sampler.order_of(source, 3), **every, quarantine=quarantine)


@pytest.mark.parametrize("crops", [1, 3])
def test_examples_depend_only_on_their_position(numbered: Path, tmp_path: Path, crops: int) -> None:
    """Loaded alone, by several processes, or after a resume inside a clip's crops."""
    source = _open(numbered, crop=(16, 24), crops_per_clip=crops).train
    straight = [_rows(source, tmp_path)[row] for row in range(72)]
    every = len(source)
    assert every == 5 * crops
    for epoch in range(72 // every):
        seen = [int(one["_id"]) for one in straight[epoch * every : (epoch + 1) * every]]
        assert sorted(seen) == list(range(every))
    pictures = {one["video"].tobytes() for one in straight}
    assert len(pictures) == len(straight)
    rng = np.random.default_rng(0)
    for position in rng.permutation(72)[:20].tolist():
        alone = _rows(pickle.loads(pickle.dumps(source)), tmp_path, start=position)[0]
        parts = _rows(source, tmp_path, first_row=position % 8, rows_per_batch=1)[position // 8]
        for name, array in straight[position].items():
            np.testing.assert_array_equal(alone[name], array)
            np.testing.assert_array_equal(parts[name], array)


def test_the_crops_of_a_clip_are_decoded_once(
    numbered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _open(numbered, crop=(16, 24), crops_per_clip=4).train
    asked: list[tuple[str, tuple[int, ...]]] = []
    real = pieces.read

    def read(path: str, span: Span, numbers: list[int], *rest: Any) -> None:
        asked.append((path, tuple(numbers)))
        real(path, span, numbers, *rest)

    monkeypatch.setattr(pieces, "read", read)
    rows = _rows(source, tmp_path)
    examples = [rows[row] for row in range(40)]  # two epochs of five files
    assert len(asked) == 10
    assert sorted(path for path, _ in asked[:5]) == sorted(path for path, _ in asked[5:])
    for one, other in itertools.pairwise(examples):
        assert not np.array_equal(one["video"], other["video"])


def test_a_broken_clip_is_replaced_by_the_crops_of_one_clip(
    numbered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _open(numbered, crop=(16, 24), crops_per_clip=4).train
    (bad,) = source.videos[2].pieces
    real = pieces.read

    def read(path: str, *rest: Any) -> None:
        if path == bad.path:
            raise BadExample(path, "broken on purpose")
        real(path, *rest)

    monkeypatch.setattr(pieces, "read", read)
    rows = _rows(source, tmp_path)
    for block in range(10):
        ids = [int(rows[4 * block + place]["_id"]) for place in range(4)]
        assert ids == list(range(ids[0], ids[0] + 4))
        assert ids[0] % 4 == 0
        assert ids[0] // 4 != 2


def test_what_depends_on_the_size_of_training() -> None:
    # Large, since frames are enlarged with a border of one pixel around them.
    size = ("--model.height", "128", "--model.width", "192")
    complete = config.load("demo", [*size, "--loop.eval_examples", "64"])
    crops = complete.override({"data.crop": (64, 96), "data.batch_size": 32})
    spec = crops.sent_spec(3)
    assert spec["video"].shape == (3, crops.model.frames, 64, 96, 3)
    # Validations see complete clips, in batches that need no more memory than a microbatch.
    assert crops.model.batch_spec(3) == complete.model.batch_spec(3)
    assert step_setup.validation_batch_size(crops, 100) == 8
    one = crops.override({"data.batch_size": 2, "optim.accumulate": 2})
    assert step_setup.validation_batch_size(one, 100) == 1
    whole = complete.override({"data.batch_size": 32})
    assert step_setup.validation_batch_size(whole, 100) == 32
    ratio = model_flops(complete.model) / model_flops(crops.training_model)
    assert ratio == pytest.approx(4, rel=0.02)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"crop": (16, 16), "min_crop_scale": 0.9, "max_crop_scale": 0.5}, "data.max_crop_scale"),
        ({"crops_per_clip": 2}, "data.crops_per_clip=2 requires data.crop"),
    ],
)
def test_settings_that_do_not_fit_each_other(settings: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError) as error:
        video.Config(batch_size=1, **settings)
    assert part in str(error.value)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"crop": (20, 16)}, "data.crop=20 16, which is the clip size in training: .*multiples of"),
        ({"crop": (8, 8)}, "use at least 16"),
        (
            {"crop": (128, 96)},
            "64 x 96 .* or at most 0.5 for --data.min_crop_scale and --data.max_crop_scale",
        ),
        (
            {"crop": (32, 32), "max_crop_scale": 2.5},
            "shows 80 x 80 pixels.* at most 2 for --data.max_crop_scale",
        ),
        ({"max_crop_scale": 1.5}, "set --data.max_crop_scale 1, or --data.crop"),
    ],
)
def test_settings_that_do_not_fit_the_model(settings: dict[str, Any], part: str) -> None:
    (problem,) = video.Config(batch_size=1, demo=True, **settings).problems(MODEL)
    assert re.search(part, problem), problem


def test_settings_that_fit_the_model() -> None:
    """A crop that is larger than the clip may show a part of it."""
    large = {"crop": (128, 192), "min_crop_scale": 0.25, "max_crop_scale": 0.5}
    for settings in ({"crop": (32, 48)}, large):
        assert not video.Config(batch_size=1, demo=True, **settings).problems(MODEL)


def test_a_discriminator_must_fit_the_crop() -> None:
    model = dataclasses.replace(MODEL, frames=12, adversary=video_ae.Adversary(weight=1, crop=32))
    assert not video.Config(batch_size=1, demo=True, crop=(32, 48)).problems(model)
    (problem,) = video.Config(batch_size=1, demo=True, crop=(16, 48)).problems(model)
    assert "model.adversary.crop=32: use a multiple of 8 up to 16" in problem
