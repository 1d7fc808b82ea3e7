"""``jaxtrain bench`` on a tiny config: real workers, cold and warm, and a sweep."""

import json
from pathlib import Path

import pytest
from program import TINY_MLM, write_corpus

from jaxtrain import main
from jaxtrain.bench.request import BenchRequest
from jaxtrain.planning import calibration

TINY = ["bench", *TINY_MLM, "--seconds", "0.2"]


@pytest.mark.long
def test_everything_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, rates = tmp_path / "found.json", tmp_path / "rates.json"
    data = ["--data.path", str(write_corpus(tmp_path)), "--data.cache_dir", str(tmp_path / "cache")]
    files = ["--json", str(output), "--calibration", str(rates)]
    assert main.main([*TINY, *data, *files, "--sweep", "remat"]) == 0
    found = json.loads(output.read_text())
    rows = found["rows"]
    for name in (
        *("start/imports", "start/compile", "start/total", "start/warm_total"),
        *("synthetic/step", "synthetic/tokens_per_second", "pipeline/step"),
        *("pipeline/data_wait_fraction", "memory/host_peak_gib", "save/blocks_loop"),
        *("ceilings/bf16_flops", "synthetic/share_of_measured_flops"),
    ):
        assert name in rows, name
    assert rows["start/compile"] > rows["start/warm_compile"]
    assert rows["start/total"] == pytest.approx(
        sum(rows[f"start/{lap}"] for lap in ("interpreter", "imports", "state"))
        + rows["start/config_and_devices"]
        + rows["start/compile"]
        + rows["start/first_step"]
    )
    assert 0 < rows["synthetic/share_of_measured_flops"] < 1
    assert rows["save/gib"] > 0
    assert found["notes"] == {}
    assert found["operations"][0]["ms_per_step"] > 0
    assert set(found["sweep"]) == {"none", "block"}
    assert all("synthetic/step" in one["rows"] for one in found["sweep"].values())
    calibrated = calibration.load(rates)
    assert calibrated.device == found["device"]["kind"]
    (step,) = calibrated.measured
    assert step.step_s == rows["synthetic/step"]["median_s"]
    assert sum(one.flops for one in step.samples) > 0
    assert sum(one.seconds for one in step.samples if one.kind == "matmul f32") > 0
    printed = capsys.readouterr().out
    assert f"measured rates added to {rates}" in printed
    assert "steps with the real input pipeline" in printed
    assert "speed (examples/s)" in printed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--config", "demp"], "did you mean demo"),
        (["--seconds", "3"], "--config is missing"),
        (["--config", "demo", "--sweep", "depth"], "depth"),
        (["--config", "demo", "--sweep", "shard"], "mesh.fsdp is 1"),
        (["--config", "demo", "--json", "/nowhere/at/all.json"], "/nowhere/at"),
        (["--config", "demo", "--calibration", "/nowhere/at/all.json"], "/nowhere/at"),
        (["--config", "demo", "--calibration", __file__], "as a calibration file"),
        (["--config", "h100_8", "--calibration", "/tmp/new.json"], "measures one device"),
        (["--config", "demo", "--seconds", "nan"], "--seconds nan"),
        (["ceilings", "--sweep", "batch"], "unknown argument --sweep batch"),
    ],
)
def test_wrong_use_is_one_line(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["bench", *arguments]) == 2
    printed = capsys.readouterr().err
    assert expected in printed
    assert printed.count("\n") == 1


@pytest.mark.long
def test_a_failing_part_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "found.json"
    nowhere = ["--data.path", str(tmp_path / "nowhere")]
    assert main.main([*TINY, *nowhere, "--json", str(output)]) == 0
    found = json.loads(output.read_text())
    assert list(found["notes"]) == ["pipeline"]
    assert "nowhere" in found["notes"]["pipeline"]
    assert "save/blocks_loop" in found["rows"]
    assert "pipeline: skipped: " in capsys.readouterr().out


def test_a_part_that_fails_sets_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {
        "rows": {"synthetic/examples_per_second": 3.0, "memory/compiled_gib": 1.0},
        "notes": {"save": "OSError: no space left on device"},
        "failed": ["save"],
        "operations": [],
    }
    monkeypatch.setattr(BenchRequest, "findings", lambda self: found)
    assert main.main(["bench", *TINY_MLM]) == 1
    assert "save: failed: OSError: no space left on device" in capsys.readouterr().out
