"""Building the parts of a step from a config."""

from typing import Any

import pytest
from program import TINY_MLM

from jaxtrain import config, sharding
from jaxtrain.training import setup, skip_step


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
