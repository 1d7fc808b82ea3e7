"""Tests the points of a sweep, and curves with points that ran out of memory."""

import dataclasses

import pytest

from jaxtrain import config
from jaxtrain.bench import report, sweep
from jaxtrain.errors import InputError

RUN = config.named("h100_16")  # 128 = 8 x 16


def test_batches_double_from_a_quarter() -> None:
    found = sweep.points(RUN, "batch")
    assert list(found) == ["2", "4", "8", "16", "32", "64"]
    assert found["4"] == ("--data.batch_size", "64")
    small = dataclasses.replace(RUN, data=dataclasses.replace(RUN.data, batch_size=16))
    assert list(sweep.points(small, "batch")) == ["1", "2", "4", "8"]


def test_every_point_is_a_valid_config() -> None:
    for kind in sweep.KINDS:
        points = sweep.points(RUN, kind)
        assert len(points) > 1
        for overrides in points.values():
            config.load("h100_16", overrides)


def test_remat_and_shard_use_all_values_of_the_field() -> None:
    assert sweep.points(RUN, "remat")["block"] == ("--model.remat", "block")
    assert set(sweep.points(RUN, "shard")) == {"params", "optimizer", "none"}


def test_one_device_has_nothing_to_shard_over() -> None:
    with pytest.raises(InputError, match=r"mesh.fsdp is 1.*--mesh.fsdp"):
        sweep.points(config.named("demo"), "shard")


def test_a_point_that_runs_out_of_memory_appears_in_the_curve() -> None:
    rows = {"synthetic/examples_per_second": 20.0, "memory/compiled_gib": 3.0}
    assert sweep.summary({"rows": rows}) == (20.0, 3.0)
    assert sweep.summary({"rows": rows | {"memory/device_peak_gib": 4.0}}) == (20.0, 4.0)
    out = sweep.summary({"failure": "out of memory", "detail": ""})
    curve = report.curve("speed", {"8": 20.0, "16": 40.0, "32": out[0]}, "examples/s")
    title, eight, sixteen, last = curve.splitlines()
    assert title == "speed (examples/s)"
    assert eight.count("#") * 2 == sixteen.count("#") == 40
    assert last.split("  ")[-1] == "out of memory"
