"""The data of the charts."""

import math
from pathlib import Path
from typing import Any

from reporting import written_run

from jaxtrain.reporting import curves, facts, run_files


def read(directory: Path, **how: Any) -> run_files.RecordedRun:
    return run_files.read(written_run.write(directory, **how), directory.name)


def test_training_and_validation_of_all_runs_share_a_chart(tmp_path: Path) -> None:
    runs = [read(tmp_path / "a"), read(tmp_path / "b")]
    charts, notes = curves.charts(runs)
    loss = charts[0]
    assert loss["name"] == "loss"
    assert [(one["run"], one["kind"]) for one in loss["curves"]] == [
        *((0, "train"), (0, "val"), (1, "train"), (1, "val"))
    ]
    assert loss["curves"][1]["step"] == (50, 100)
    names = [chart["name"] for chart in charts]
    assert "loss_std" not in names  # the spread over examples gets no chart
    # The records have tokens, examples and steps per second; tokens alone would have a chart.
    assert names == ["loss", "grad_norm"]
    assert notes == [
        "Constant, without a chart: train/learning_rate 0.01, train/tokens_per_second 512, "
        "train/mfu 40.0%, train/data_wait_fraction 5.0%, train/gpu_memory_usage 11.0 GiB."
    ]


def test_a_metric_has_a_chart_unless_it_is_constant_in_every_run(tmp_path: Path) -> None:
    slow = written_run.records([1, 2, 3])
    fast = written_run.records([1, 2, 3])
    fast[2]["train/mfu"] = 0.5
    runs = [read(tmp_path / "slow", metrics=slow), read(tmp_path / "fast", metrics=fast)]
    charts, (note,) = curves.charts(runs)
    assert "mfu" in [chart["name"] for chart in charts]
    assert "train/mfu" not in note
    single = read(tmp_path / "single", metrics=written_run.records([1]))
    charts, notes = curves.charts([single])  # nothing is known to be constant
    assert "mfu" in [chart["name"] for chart in charts]
    assert not notes


def test_nan_and_inf_are_gaps_and_are_counted(tmp_path: Path) -> None:
    records = written_run.records([1, 2, 3, 4])
    records[1] |= {"train/loss": None, "nonfinite": {"train/loss": "nan"}}
    records[2] |= {"train/loss": None, "nonfinite": {"train/loss": "inf"}}
    run = read(tmp_path, metrics=records)
    charts, _ = curves.charts([run])
    values = charts[0]["curves"][0]["value"]
    assert [value is None for value in values] == [False, True, True, False]
    found = facts.results(run)
    (line,) = curves.nonfinite(run, found)
    assert "train/loss is NaN/Inf in 2 records, first at step 2" in line
    assert (found["train/loss"].best, found["train/loss"].best_step) == (4 / 5, 4)


def test_thinning_keeps_ends_and_peaks() -> None:
    points: list[tuple[int, float, float | None]] = [
        (step, float(step), math.sin(step)) for step in range(50_000)
    ]
    points[31_234] = (31_234, 31_234.0, 9.0)
    points[777] = (777, 777.0, -9.0)
    for step in range(40_000, 41_000):
        points[step] = (step, float(step), None)
    kept = curves.thin(points, 2000)
    assert len(kept) <= 2000
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]
    assert {points[31_234], points[777]} <= set(kept)
    assert any(value is None for _, _, value in kept)  # the gap remains
    assert kept == sorted(kept, key=lambda point: point[0])
    assert curves.thin(points[:2000], 2000) == points[:2000]
