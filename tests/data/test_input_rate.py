"""Tests the prediction of what a host can load, and the advice when that is too little."""

import dataclasses
import json
from pathlib import Path

import pytest

from jaxtrain import config
from jaxtrain.data import input_rate
from jaxtrain.data.input_rate import Host
from jaxtrain.data.video import sets
from jaxtrain.data.video.pieces import Settings

TWELVE = ["--model.frames", "12"]  # the rates are of clips of 12x480x720
RUN = config.load("h100_8", TWELVE)  # 128 clips
STEP = (0.17, 0.42)
ON_DEVICE = [*TWELVE, "--data.convert_on", "device"]
DEVICE = config.load("h100_8", ON_DEVICE)


def predicted(run: config.Run = RUN, **host: object) -> input_rate.Input:
    return input_rate.predict(run, 8, 1, Host(**host), STEP)  # type: ignore[arg-type]


def advised(found: input_rate.Input) -> str:
    return "\n".join(found.advice)


@pytest.mark.parametrize(
    ("typed", "rate"),
    [
        (TWELVE, (24 * 13.9, 24 * 28.7)),
        ([*TWELVE, "--data.clips_per_video", "6"], (24 * 13.9, 24 * 28.7)),
        (ON_DEVICE, (24 * 22.9, 24 * 47.3)),
        ([*ON_DEVICE, "--data.workers", "8"], (8 * 22.9, 8 * 47.3)),
        ([*ON_DEVICE, "--data.workers", "99"], (26 * 22.9, 26 * 47.3)),  # on 26 cores
        ([*ON_DEVICE, "--data.workers", "0"], (22.9, 47.3)),
    ],
)
def test_the_rate_of_a_host(typed: list[str], rate: tuple[float, float]) -> None:
    found = predicted(config.load("h100_8", typed), cores=26)
    assert found.rate == pytest.approx(rate)
    assert found.seconds == pytest.approx((128 / rate[1], 128 / rate[0]))
    assert not found.assumed


def test_cores_are_assumed_per_gpu() -> None:
    found = input_rate.predict(RUN, 4, 2, Host(), STEP)
    assert (found.cores, found.assumed) == (48, True)
    assert found.seconds[0] == pytest.approx(64 / (44 * 28.7))


def test_the_kind_of_data_that_is_here(tmp_path: Path) -> None:
    """Clips are resized on the device, but of a set that was made for larger ones."""
    run = config.load("h100_8", ["--data.path", str(tmp_path)])
    assert predicted(run).kind == "clips"  # a run cuts these videos into such pieces
    (tmp_path / ".jobs").mkdir()
    for scale, kind in ((0.5, "clips, resized on the host"), (0.8, "clips")):
        settings = dataclasses.asdict(Settings(height=480, width=720, min_crop_scale=scale))
        settings["version"] = sets.VERSION
        (tmp_path / ".jobs/set.json").write_text(json.dumps({"settings": settings}))
        assert predicted(run).kind == kind
    elsewhere = config.load("h100_8", ["--data.path", "/not/here"])
    assert predicted(elsewhere).kind == "clips"
    assert predicted(config.load("mlm_h200_8")).kind == "masked text"


def test_measured_rates_replace_the_table() -> None:
    found = predicted(cores=26, per_core=4.5)
    assert found.per_core == (4.5, 4.5)
    assert found.rate == (24 * 4.5, 24 * 4.5)
    assert found.measured
    assert "times the clips/s" not in advised(found)  # of prepared clips nothing was measured


def test_fast_input_needs_no_advice() -> None:
    found = predicted(DEVICE, cores=96)
    assert (found.waits, found.advice) == ("no", ())


def test_advice_is_in_numbers() -> None:
    found = predicted(cores=12)
    assert found.waits == "yes"
    assert "--data.convert_on device: 1.6 times the clips/s" in advised(found)
    assert "cores for 11 to 55 workers, instead of 8" in advised(found)
    assert "convert_on" not in advised(predicted(DEVICE, cores=4))


def test_few_workers_on_many_cores() -> None:
    run = config.load("h100_8", [*ON_DEVICE, "--data.workers", "8"])
    text = advised(predicted(run, cores=96))
    assert "--data.workers None: uses 96 cores instead of 8" in text


def test_crops_share_the_decoding_of_a_clip() -> None:
    """The rates of one machine, in ms per crop of 64x64 (benchmarks/LOG.md), relative to a clip."""
    for kind, clip, one, four, sixteen in (
        ("clips", 25.1, 22.6, 5.36, 1.53),
        ("clips, resized on the host", 42.3, 24.2, 6.43, 2.15),
    ):
        for several, measured in ((1, one), (4, four), (16, sixteen)):
            crops = {"data.crop": (64, 64), "data.crops_per_clip": several}
            rate = input_rate.KINDS[kind].per_core(RUN.override(crops), 1 / several)[0]
            factor = rate / input_rate.KINDS[kind].per_core(RUN, 1)[0]
            assert factor == pytest.approx(clip / measured, rel=0.1)


@pytest.mark.parametrize(
    ("several", "batch", "workers", "decoded", "factor"),
    [
        (4, 16, 8, 1 / 4, 1.9),
        (4, 16, 16, 1 / 4, 1.9),
        (4, 16, None, 1 / 4, 2.4),  # 8 workers, and then 10
        (16, 16, None, 1 / 16, None),  # two batches would decode the same clip
        (32, 16, None, 2 / 32, None),
        (16, 24, 8, (4 / 3) / 16, 1.3),  # batches share every third clip
        (16, 24, 1, 1 / 16, 1.8),  # but one worker has decoded it
    ],
)
def test_clips_that_workers_share_are_decoded_again(
    several: int, batch: int, workers: int | None, decoded: float, factor: float | None
) -> None:
    crops = {"data.crop": (64, 64), "data.crops_per_clip": several, "data.batch_size": batch}
    one_gpu = {"mesh.fsdp": 1, "optim.accumulate": 1, "data.workers": workers}
    run = DEVICE.override(crops | one_gpu)
    found = input_rate.predict(run, 1, 1, Host(cores=12), (1e-4, 1e-3))
    expected = input_rate.KINDS["clips"].per_core(run, decoded)
    assert found.per_core == pytest.approx(expected)
    shown = [line for line in found.advice if "crops_per_clip" in line]
    advice = f"--data.crops_per_clip {2 * several}: {factor} times the examples/s"
    assert shown == ([] if factor is None else [advice])


def test_slow_input_of_crops_gets_advice() -> None:
    run = DEVICE.override({"data.crop": (64, 64), "data.batch_size": 4096})
    assert "--data.crops_per_clip 2: 2.0 times the examples/s" in advised(predicted(run, cores=26))
