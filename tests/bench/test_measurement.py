"""Rates of steps that wait for their batches."""

import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from jaxtrain.bench import ceilings, measurement

AT_ONCE, PAUSE_S = 4, 0.1


class Bursts:
    """Batches of workers that started together: four at once, then a while nothing."""

    def __init__(self) -> None:
        self.wait_s = 0.0

    def __iter__(self) -> Iterator[int]:
        for number in itertools.count():
            if number % AT_ONCE == 0:
                time.sleep(PAUSE_S)
                self.wait_s += PAUSE_S
            yield number


def test_a_rate_of_bursts_is_that_of_all_of_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ceilings, "product_rate", lambda _: 1.0)
    built: Any = SimpleNamespace(run=SimpleNamespace(precision="float32"))
    session = measurement._Session(
        built, lambda state, _: (state, jnp.zeros(())), jnp.zeros(()), None, seconds=8 * PAUSE_S
    )
    batches: Any = Bursts()
    waits: list[float] = []
    times = session.times(measurement._watched(batches, waits), first=6)
    assert len(waits) == 6 + 1 + len(times.seconds)  # the first ones too
    assert times.median_s < PAUSE_S / AT_ONCE / 2
    assert times.mean_s == pytest.approx(PAUSE_S / AT_ONCE, rel=0.3)
    assert measurement._waited_share(waits, times) > 0.7
