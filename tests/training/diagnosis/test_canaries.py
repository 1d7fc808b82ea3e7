"""Canaries notice planted faults, warn once, and stop only what cannot succeed."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain import config
from jaxtrain.config.run_length import Position
from jaxtrain.ops import token_frequencies
from jaxtrain.training.diagnosis.canaries import Canaries
from jaxtrain.training.run_progress import Criterion, RunProgress
from jaxtrain.training.validation import Validation

TOTAL = 1000
MLM, VIDEO, GPT = config.named("demo_mlm"), config.named("demo"), config.named("demo_gpt")
AVERAGED = dataclasses.replace(
    MLM, optim=dataclasses.replace(MLM.optim, average=config.Average(decay=0.9))
)


class Run:
    """A run with two parts and a norm, whose parameters change by what a test says."""

    def __init__(
        self,
        run: config.Run = MLM,
        *,
        rate: float = 1e-3,
        gates: tuple[str, ...] = (),
        earlier: tuple[tuple[int, float], ...] = (),
    ) -> None:
        loop = dataclasses.replace(run.loop, gates=gates)
        self.said: list[str] = []
        self.canaries = Canaries(
            dataclasses.replace(run, loop=loop),
            SimpleNamespace(trained=lambda params: params),  # type: ignore[arg-type]
            TOTAL,
            warmup=100,
            rate=lambda done: rate,
            say=self.said.append,
        )
        self.progress = RunProgress(Path(), Criterion(None, None, "5 texts"))
        for done, value in earlier:  # before this start
            self.progress.add(Position(done, examples_seen=done), {"val/loss": value})
        self.params = {
            name: np.full((4, 3), 0.5, np.float32)
            for name in ("encoder.kernel", "encoder.bias", "layers.0.kernel", "layers.1.kernel")
        }

    def validate(
        self, done: int, changed: Any = None, *, loss: float | None = None, **more: Any
    ) -> str:
        """Judges a validation; without ``changed``, all parameters have changed since the last."""
        for name in self.params if changed is None else changed:
            self.params[name] = self.params[name] + np.float32(1e-3)
        values = {"val/loss": 5.0 - done / TOTAL if loss is None else loss}
        validation = Validation(more.pop("values", values), {}, **more)
        state: Any = SimpleNamespace(params={k: jnp.asarray(v) for k, v in self.params.items()})
        self.progress.add(Position(done, examples_seen=done), validation.values)
        return self.canaries.judge(state, validation, self.progress)


def test_a_good_run_is_silent() -> None:
    run = Run(AVERAGED)
    for done in range(50, TOTAL + 1, 50):
        assert not run.validate(
            done,
            baseline={"val/loss": 5.2},
            averaged={"val/loss": 4.0},
            raw={"val/loss": 4.1},
        )
    assert run.said == []


def test_a_frozen_part_warns_once_and_does_not_stop() -> None:
    run = Run()
    moving = ["encoder.kernel", "layers.0.kernel"]
    assert not any(run.validate(done, moving) for done in (10, 20, 30))
    (line,) = run.said
    assert "layers.1 did not change from step 10 to 20" in line
    assert "encoder" not in line  # one of its parameters moves


def test_nothing_that_changes_stops_the_run() -> None:
    run = Run()
    assert not run.validate(10)
    assert "no parameter changed from step 10 to 20, at a learning rate of 0.001" in run.validate(
        20, []
    )


def test_a_rate_of_zero_warns() -> None:
    run = Run(rate=0.0)
    assert not any(run.validate(done, []) for done in (10, 20, 30))
    (line,) = run.said
    assert "the learning rate is 0" in line


def test_a_nan_in_the_parameters_stops_the_run() -> None:
    run = Run()
    run.params["encoder.bias"][1, 2] = math.nan
    assert "encoder.bias became NaN/Inf" in run.validate(10, ["layers.0.kernel"])


def test_a_model_that_is_worse_than_a_constant_warns_after_the_warm_up() -> None:
    run = Run(VIDEO)
    for done in (100, 150, 300, 400):  # shuffled targets, for example
        run.validate(
            done,
            values={"val/loss": 1.0, "val/psnr": 9.0 + done / 1e3},
            baseline={"val/psnr": 12.0},
        )
    (line,) = run.said
    assert "val/psnr is 9.3 after 300 steps: worse than 12" in line


def test_equal_validations_warn() -> None:
    run = Run()
    run.validate(10, loss=4.0)
    run.validate(20, loss=4.0)
    (line,) = run.said
    assert "after 10 and 20 steps are equal to the last digit" in line


def test_an_average_that_does_not_follow_warns_once_it_could() -> None:
    run = Run(AVERAGED)
    broken = {"averaged": {"val/loss": 6.0}, "raw": {"val/loss": 2.0}}
    run.validate(20, **broken)
    assert run.said == []
    run.validate(60, **broken)
    run.validate(70, **broken)
    (line,) = run.said
    assert "has a loss of 6 on the first batch, the parameters themselves 2" in line


def test_a_masked_model_at_the_level_of_frequencies_ends_after_long() -> None:
    def reasons_of(run: Run) -> list[str]:
        return [
            run.validate(done, loss=5.0 + done * 1e-6, baseline={"val/loss": 5.0})
            for done in range(100, TOTAL + 1, 100)
        ]

    reasons = reasons_of(Run())
    ended = reasons.index(next(filter(None, reasons)))
    assert (ended + 1) * 100 == 800
    assert "for 5 validations: this masked LM does not learn" in reasons[ended]
    assert not any(reasons_of(Run(GPT)))


def test_a_gate_is_judged_once_at_the_first_validation_from_its_step() -> None:
    run = Run(gates=("val/loss < 4.9 at 150", "val/loss < 4.7 at 300"))
    assert not run.validate(100, loss=8.0)
    assert not run.validate(200, loss=4.8)
    assert not run.validate(250, loss=8.0)
    assert run.validate(300, loss=4.75) == "gate val/loss < 4.7 at 300 is not met: val/loss is 4.75"


def test_a_resumed_run_knows_the_validations_before_it() -> None:
    gates = ("val/loss < 4.9 at 150",)
    assert not Run(gates=gates, earlier=((100, 5.0), (200, 4.8))).validate(300, loss=8.0)
    assert Run(gates=gates, earlier=((100, 4.8),)).validate(300, loss=8.0)
    again = Run(earlier=((100, 4.5),))
    again.validate(200, loss=4.5)
    assert "after 100 and 200 steps are equal to the last digit" in again.said[0]
    level = {"baseline": {"val/loss": 5.0}, "loss": 5.0}
    four = tuple((done, 5.0 + done * 1e-6) for done in (400, 500, 600, 700))
    assert "for 5 validations" in Run(earlier=four).validate(800, **level)
    assert not Run(earlier=(*four, (800, 5.0))).validate(900, **level)  # resumed with another rate


@pytest.mark.parametrize("size", [2, 50, 5000])
def test_the_loss_of_frequencies_is_near_the_entropy_and_never_flatters(size: int) -> None:
    rng = np.random.default_rng(0)
    shares = rng.dirichlet(np.full(size, 0.5))
    entropy = -(shares * np.log(np.maximum(shares, 1e-30))).sum()
    for count in (1000, 100_000):
        found = token_frequencies.loss_of_frequencies(rng.multinomial(count, shares))
        assert found > entropy - 0.05
        if count > 10 * size:
            assert found < entropy + 0.05


def test_broken_examples_alone_have_no_loss_of_frequencies() -> None:
    assert math.isnan(token_frequencies.loss_of_frequencies(np.zeros(5)))
    run = Run()
    run.validate(500, loss=math.nan, baseline={"val/loss": math.nan})
    assert run.said == []
