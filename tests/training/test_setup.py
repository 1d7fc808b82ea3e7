"""Building the parts of a step from a config."""

from typing import Any

import pytest
from program import TINY_MLM

from jaxtrain import config, sharding
from jaxtrain.training import setup, skip_step


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({"optim.peak_lr": 3e-4}, True),
        ({"optim.peak_lr": 3e-4, "optim.muon": None}, False),
        ({"loop.steps": 7}, False),
    ],
)
def test_a_rate_that_no_parameter_uses_is_reported(changes: dict[str, Any], warned: bool) -> None:
    run = config.named("demo_gpt").override({"mesh.fsdp": 8, **changes})
    said: list[str] = []
    setup.build(run, sharding.make_mesh(run.mesh), 1000, said.append)
    found = [line for line in said if line.startswith("warning")]
    assert found == warned * [
        "warning: optim.peak_lr 0.0003 has no effect, because optim.muon sets the rates of all "
        "parameters: set --optim.muon.peak_lr, --optim.muon.embedding_lr, "
        "--optim.muon.unembedding_lr, or --optim.muon None to use AdamW"
    ]


def test_norms_are_compared_only_after_the_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step receives the run's warm-up; test_skip_step checks its effect."""
    asked: list[Any] = []
    detector = skip_step.detector

    def recorded(*given: Any) -> skip_step.Detector:
        asked.append(given)
        return detector(*given)

    monkeypatch.setattr(skip_step, "detector", recorded)
    warm = ["--optim.warmup_steps", "7", "--mesh.fsdp", "8", "--loop.steps", "20"]
    run = config.load("demo_mlm", [*TINY_MLM[2:], *warm])
    setup.build_without_data(run, sharding.make_mesh(run.mesh)).trace_step()
    ((_, _, warmup),) = asked
    assert warmup == 7
