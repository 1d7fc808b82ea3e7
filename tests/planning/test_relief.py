"""Out of memory on a GPU: only overrides that were compiled and fit are given."""

from typing import Any

import pytest
from step_findings import findings

from jaxtrain.planning import cards, planner, relief

H100 = cards.CARDS["h100"]
TYPED = ["--data.path", "clips"]


def compile_step(one: planner.PlanRequest, _: float, *, estimate: bool = False) -> dict[str, Any]:
    """A step whose temporaries are 40 GiB at four examples at a time, without rematerialization."""
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


def test_ways_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    ways, said, asked = found(monkeypatch, H100.name, 70 * 2**30)
    assert len(ways) == 2
    tried = [" ".join(one.overrides) for one in asked]
    for way in ways:
        overrides = way.partition(" (")[0]
        assert any(overrides in one for one in tried), "it was never compiled"
    assert all(one.gpu == "h100" for one in asked)
    assert said[0] == "the plan:"


def test_what_does_not_fit_this_device_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have less than its datasheet says, as where another program holds some."""
    ways, _, asked = found(monkeypatch, H100.name, 2**20)
    assert ways == []
    assert len(asked) > 2


def test_an_estimate_gives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ways, _, asked = found(monkeypatch, H100.name, 70 * 2**30, estimate=True)
    assert ways == []
    assert len(asked) == 1


def test_a_gpu_that_plan_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    ways, said, asked = found(monkeypatch, "NVIDIA Odd", 70 * 2**30)
    assert (ways, asked) == ([], [])
    assert said == [
        f"no plan: NVIDIA Odd is not among the GPUs that plan knows ({', '.join(cards.CARDS)})"
    ]
