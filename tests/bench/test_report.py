"""Tests the table of bench findings."""

import json
from pathlib import Path

from jaxtrain.bench import report

FINDINGS = {
    "rows": {
        "start/compile": 12.5,
        "synthetic/step": {"median_s": 0.5, "p95_s": 0.75, "spread": 0.02, "count": 17},
        "synthetic/mfu": 0.25,
        "synthetic/flops_per_second_per_device": 3e12,
        "memory/device_peak_gib": 39.25,
        "ceilings/copy_bytes": 4.3e12,
    },
    "notes": {"pipeline": "no data given", "save": "OSError: no space"},
    "failed": ["save"],
    "operations": [
        {
            "kind": "fusion",
            "made_by": "jit(f)/add",
            "name": "a.py:3 add",
            "count": 3,
            "ms_per_step": 4.5,
            "share": 0.5,
        }
    ],
    "device": {
        "kind": "NVIDIA H200",
        "count": 2,
        "platform_version": "PJRT cuda 13",
        "driver": "580.1",
    },
}


def test_each_number_has_its_unit() -> None:
    lines = report.table(FINDINGS).splitlines()
    by_name = {line.strip()[:28].strip(): line for line in lines}
    assert by_name["compile"].split()[-2:] == ["12.5", "s"]
    assert "500.00 ms" in by_name["step"]
    assert "p95 750.00 ms, spread 2.0% of 17" in by_name["step"]
    assert by_name["mfu"].split()[1:3] == ["25", "%"]
    assert by_name["flops per second per device"].split()[-2:] == ["3", "TFLOP/s"]
    assert by_name["device peak gib"].split()[3:5] == ["39.25", "GiB"]
    assert by_name["copy bytes"].split()[-2:] == ["4300", "GB/s"]
    assert "pipeline: skipped: no data given" in lines
    assert "save: failed: OSError: no space" in lines
    assert any("4.50  50.0%" in line and "a.py:3 add" in line for line in lines)


def test_a_failure_replaces_the_table() -> None:
    assert report.table({"failure": "out of memory", "detail": "x"}) == "failed: out of memory (x)"


def test_the_report_includes_command_versions_and_device(tmp_path: Path) -> None:
    found = report.complete(FINDINGS, ["--config", "demo"])
    assert found["command"] == "jaxtrain bench --config demo"
    assert "jax" in found["versions"]
    assert report.heading(found).startswith("2 x NVIDIA H200 (PJRT cuda 13, driver 580.1), python ")
    report.write(found, tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text())["rows"] == FINDINGS["rows"]
