"""Tests the search after running out of memory: it returns only compiled overrides that fit."""

from typing import Any

import pytest
from step_findings import findings

from jaxtrain.planning import cards, planner, relief

H100 = cards.CARDS["h100"]
TYPED = ["--data.path", "clips", "--model.remat", "ends"]


def compile_step(one: planner.PlanRequest, _: float, *, estimate: bool = False) -> dict[str, Any]:
    """Returns findings with 160 GiB of temporaries, divided by microbatches, scaled by remat."""
    settings = dict(zip(one.overrides, one.overrides[1:], strict=False))
    parts = int(settings.get("--optim.accumulate", 2))
    less = {"none": 2, "ends": 1, "block": 0.5}[settings.get("--model.remat", "ends")]
    return findings(2**30 * 160 / parts * less, estimate=estimate)


def found(monkeypatch: pytest.MonkeyPatch, kind: str, limit: int, **how: Any) -> Any:
    said: list[str] = []
    asked: list[planner.PlanRequest] = []

    def compiled(one: planner.PlanRequest, timeout_s: float) -> dict[str, Any]:
        asked.append(one)
        return compile_step(one, timeout_s, **how)

    monkeypatch.setattr("jaxtrain.planning.planner.compile_step", compiled)
    return relief.find("h100_8", TYPED, kind, limit, said.append), said, asked


def test_the_variants_fit_and_were_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    ways, said, asked = found(monkeypatch, H100.name, 70 * 2**30)
    assert len(ways) == 2
    tried = [" ".join(one.overrides) for one in asked]
    for way in ways:
        overrides = way.partition(" (")[0]
        assert any(overrides in one for one in tried), "it was never compiled"
    assert all(one.gpu == "h100" for one in asked)
    assert said[0] == "the plan:"


def test_variants_that_do_not_fit_this_device_are_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may have less memory than its datasheet, for example if shared with a program."""
    ways, _, asked = found(monkeypatch, H100.name, 2**20)
    assert ways == []
    assert len(asked) > 2


def test_an_estimate_yields_no_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    ways, _, asked = found(monkeypatch, H100.name, 70 * 2**30, estimate=True)
    assert ways == []
    assert len(asked) == 1


def test_an_unsupported_gpu_yields_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    ways, said, asked = found(monkeypatch, "NVIDIA Odd", 70 * 2**30)
    assert (ways, asked) == ([], [])
    assert said == [f"no plan: NVIDIA Odd is not a supported GPU ({', '.join(cards.CARDS)})"]
