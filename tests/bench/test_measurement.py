"""Tests the rates of steps that wait for their batches."""

import dataclasses
import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from planning.step_findings import COST
from training import toy

from jaxtrain.bench import measurement, peaks
from jaxtrain.cost import cards, operations, step_time
from jaxtrain.optim.schedule import Schedule

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


def test_the_rate_of_bursts_includes_the_pauses() -> None:
    built: Any = SimpleNamespace(
        run=SimpleNamespace(precision="float32"), schedule=Schedule(toy.OPTIM, 10)
    )
    state: Any = jnp.zeros(())
    session = measurement._Session(
        built,
        lambda state, *_: (state, jnp.zeros(())),
        COST,
        state,
        None,
        seconds=8 * PAUSE_S,
    )
    batches: Any = Bursts()
    waits: list[float] = []
    times = session.times(measurement._watched(batches, waits), first=6)
    assert len(waits) == 6 + 1 + len(times.seconds)  # includes the warm-up steps
    assert times.median_s < PAUSE_S / AT_ONCE / 2
    assert times.mean_s == pytest.approx(PAUSE_S / AT_ONCE, rel=0.3)
    assert measurement._waited_fraction(waits, times) > 0.7


def test_the_step_is_compared_with_the_peaks_and_with_its_serial_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step of one matmul, by the arithmetic of plan, which takes twice as long as at the peak."""
    h100 = cards.CARDS["h100"]
    monkeypatch.setattr(cards, "of_device", lambda kind: h100)
    monkeypatch.setattr(peaks, "measure", lambda: peaks.Peaks(1e12, 2e12, 3e12))
    work = (operations.Work(256**3, 0.0, 0, 2),)
    cost = dataclasses.replace(COST, devices=1, flops=2 * 256**3, work=work)
    built = SimpleNamespace(run=SimpleNamespace(precision="bfloat16"))
    session: Any = SimpleNamespace(built=built, cost=cost)
    at_peak = 2 * 256**3 / h100.bf16_flops
    found = measurement._of_plan(session, 2 * at_peak)
    assert found["synthetic/step_at_peaks"] == pytest.approx(at_peak)
    assert found["synthetic/serial_bound"] == pytest.approx(at_peak / step_time.MATMULS)
    assert found["synthetic/of_serial_bound"] == pytest.approx(0.5 / step_time.MATMULS)
    rows = {
        "synthetic/step": {"median_s": 2 * at_peak},
        "synthetic/flops_per_second_per_device": 0.25e12,
    }
    assert (
        measurement._compared_with_peaks(session, rows)["synthetic/share_of_measured_flops"] == 0.25
    )
