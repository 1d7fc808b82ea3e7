"""The rates of devices, and which of them are slow."""

import math

import jax
import pytest

from jaxtrain.training.device_rates import (
    COMPUTE,
    COPIES,
    DeviceRates,
    ProgramSizes,
    Rates,
    SlowDevice,
    slow_devices,
)

USUAL = Rates(100.0, 10.0)
NAN = math.nan


def test_a_device_is_compared_with_the_median_of_the_others() -> None:
    assert slow_devices([USUAL] * 4) == []
    assert slow_devices([USUAL, Rates(80.0, 10.0), USUAL]) == [SlowDevice(1, COMPUTE, 80.0, 100.0)]
    assert slow_devices([USUAL, Rates(100.0, 8.0)]) == [SlowDevice(1, COPIES, 8.0, 10.0)]
    # All devices of one of two hosts.
    slow = slow_devices([USUAL] * 4 + [Rates(50.0, 10.0)] * 4)
    assert [one.device for one in slow] == [4, 5, 6, 7]
    # A fast one does not make the others slow.
    assert slow_devices([USUAL, USUAL, USUAL, Rates(300.0, 30.0)]) == []
    assert slow_devices([USUAL, Rates(86.0, 8.6)]) == []


def test_devices_without_a_measurement_are_ignored() -> None:
    assert slow_devices([USUAL, Rates(NAN, NAN), Rates(50.0, 10.0)]) == [
        SlowDevice(2, COMPUTE, 50.0, 100.0)
    ]
    assert slow_devices([Rates(NAN, NAN), USUAL]) == slow_devices([USUAL]) == []


def test_each_device_of_the_process_is_measured() -> None:
    devices = jax.devices()[2:6]
    sizes = ProgramSizes(side=64, matmuls=3, copied_bytes=2**12, copies=5, times=2)
    found = DeviceRates(devices, sizes)()
    assert len(found.rates) == 4
    assert all(rate > 0 for rates in found.rates for rate in rates)
    assert found.cost_s > 0


class Clock:
    """A second passes whenever it is read."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_rates_are_work_per_second() -> None:
    sizes = ProgramSizes(side=64, matmuls=3, copied_bytes=2**12, copies=5, times=2)
    found = DeviceRates(jax.devices()[:1], sizes, Clock())()
    assert found.rates == [Rates(2 * 64**3 * 3, 2 * 2**12 * 5)]
    # Two measurements of both programs read the clock twice each, and the first one took a second.
    assert found.cost_s == pytest.approx(8 + 1 + 1)
