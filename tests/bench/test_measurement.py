"""Tests the rates of steps that wait for their batches."""

import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from program import TINY_MLM

from jaxtrain import config
from jaxtrain.bench import ceilings, measurement, timing
from jaxtrain.planning import cards

AT_ONCE, PAUSE_S = 4, 0.1


class Bursts:
    """Batches of workers that started together: bursts of four, with pauses in between."""

    def __init__(self) -> None:
        self.wait_s = 0.0

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count():
            if number % AT_ONCE == 0:
                time.sleep(PAUSE_S)
                self.wait_s += PAUSE_S
            yield number


def test_the_rate_of_bursts_includes_the_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "product_rate", lambda _: 1.0)
    built: Any = SimpleNamespace(run=SimpleNamespace(precision="float32"))
    session = measurement._Session(
        built, lambda state, _: (state, jnp.zeros(())), jnp.zeros(()), None, seconds=8 * PAUSE_S
    )
    batches: Any = Bursts()
    waits: list[float] = []
    times = session.times(measurement._watched(batches, waits), first=6)
    assert len(waits) == 6 + 1 + len(times.seconds)  # includes the warm-up steps
    assert times.median_s < PAUSE_S / AT_ONCE / 2
    assert times.mean_s == pytest.approx(PAUSE_S / AT_ONCE, rel=0.3)
    assert measurement._waited_share(waits, times) > 0.7


def test_rates_are_relative_to_the_matmul_rates_before_and_after() -> None:
    """8 examples in half a second on two devices, with matmul rates of 2 and 3 GFLOP/s."""
    run = config.load("demo_mlm", [*TINY_MLM[2:], "--data.batch_size", "8"])
    mesh = SimpleNamespace(size=2)
    built = SimpleNamespace(run=run, rule=SimpleNamespace(mesh=mesh))
    session: Any = SimpleNamespace(built=built, product_rates=(2e9, 3e9))
    rows = measurement._rates(session, timing.Times((0.5,)), 0.5, "x")
    assert rows["x/examples_per_second"] == 16
    assert rows["x/machine_drift"] == 0.5
    flops = 16 * run.model.flops_per_example() / 2
    assert rows["x/share_of_measured_flops"] == pytest.approx(flops / 2.5e9)


def test_the_efficiency_is_the_time_at_the_peaks_of_the_measured_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step of one matmul, by the arithmetic of plan, which takes twice as long as at the peak."""
    h100 = cards.CARDS["h100"]
    monkeypatch.setattr(cards, "of_device", lambda kind: h100)
    monkeypatch.setattr(ceilings, "measure", lambda: ceilings.Ceilings(1e12, 1e12, 1e12))
    x = jnp.zeros((256, 256), jnp.bfloat16)
    traced = jax.jit(jnp.matmul).trace(x, x)
    built = SimpleNamespace(
        trace_step=lambda: traced,
        rule=SimpleNamespace(mesh=SimpleNamespace(size=1)),
        run=SimpleNamespace(precision="bfloat16"),
    )
    text = "ENTRY %main (x: f32[1]) -> f32[1] {\n}\n"  # moves nothing
    session: Any = SimpleNamespace(built=built, step=SimpleNamespace(as_text=lambda: text))
    at_peak = 2 * 256**3 / h100.bf16_flops
    rows = measurement._shares(session, {"synthetic/step": {"median_s": 2 * at_peak}})
    assert rows["synthetic/step_at_peaks"] == pytest.approx(at_peak)
    assert rows["synthetic/efficiency"] == pytest.approx(0.5)
