"""``jaxtrain bench`` on a tiny config: real workers, cold and warm."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from program import TINY_MLM, write_corpus

from jaxtrain import main
from jaxtrain.bench import request
from jaxtrain.cost import cards, efficiency

TINY = ["bench", *TINY_MLM, "--seconds", "0.2"]


@pytest.mark.long
def test_everything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured, compiled = request.findings, []

    def with_cache(*arguments: Any, **more: Any) -> dict[str, Any]:
        findings = measured(*arguments, **more)
        compiled.append({path.name for path in Path(more["compiled"]).rglob("*-cache")})
        return findings

    monkeypatch.setattr(request, "findings", with_cache)
    output = tmp_path / "found.json"
    layers = ["--model.layers", "4"]  # so that compiling takes as long as programs that are kept
    data = ["--data.path", str(write_corpus(tmp_path)), "--data.cache_dir", str(tmp_path / "cache")]
    assert main.main([*TINY, *layers, *data, "--json", str(output)]) == 0
    found = json.loads(output.read_text())
    rows = found["rows"]
    for name in (
        *("start/imports", "start/compile", "start/total", "start/warm_total"),
        *("synthetic/step", "synthetic/tokens_per_second", "pipeline/step"),
        *("pipeline/data_wait_fraction", "memory/host_peak_gib", "save/blocks_loop"),
        *("ceilings/bf16_flops", "synthetic/share_of_measured_flops"),
    ):
        assert name in rows, name
    cold, warm = compiled
    assert any(name.startswith("jit_train_step") for name in cold)
    assert warm == cold
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
    printed = capsys.readouterr().out
    assert "steps with the real input pipeline" in printed


def test_a_part_that_fails_sets_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {
        "rows": {"synthetic/examples_per_second": 3.0, "memory/compiled_gib": 1.0},
        "notes": {"save": "OSError: no space left on device"},
        "failed": ["save"],
        "operations": [],
    }
    monkeypatch.setattr(request, "findings", lambda *_, **__: found)
    assert main.main(["bench", *TINY_MLM]) == 1
    assert "save: failed: OSError: no space left on device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, None),
        ({"rows": {}, "notes": {"steps": "no memory"}}, "no memory"),
        ({"rows": {}}, "plan does not know the peaks of cpu"),
        ({"failure": "out of memory", "detail": "x", "rows": {}}, "out of memory"),
    ],
)
def test_the_efficiency_is_written_for_plan(
    changes: dict[str, Any],
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, kind = tmp_path / "h100.json", cards.CARDS["h100"].name
    device = {
        "kind": kind if expected is None else "cpu",
        "count": 1,
        "platform_version": "cuda 13",
        "driver": None,
    }
    rows = {"synthetic/serial_bound": 0.07, "synthetic/of_serial_bound": 0.49}
    found = {"rows": rows, "notes": {}, "failed": [], "operations": [], "device": device} | changes
    monkeypatch.setattr(request, "findings", lambda *_, **__: found)
    code = main.main(["bench", *TINY_MLM, "--efficiency", str(path)])
    printed = capsys.readouterr()
    if expected is None:
        assert code == 0
        measured = efficiency.load(path)
        assert (measured.device, measured.of_serial_bound) == (kind, 0.49)
        assert measured.config == shlex.join(TINY_MLM[1:])
        assert f"efficiency written to {path}" in printed.out
        assert " 49 %" in printed.out
    else:
        assert code == 2
        assert printed.err.strip().endswith(f"{path} not written: {expected}")
        assert not path.exists()
