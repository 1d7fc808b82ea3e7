"""Tests timing repeated actions."""

import pytest

from jaxtrain.bench import timing


class Clock:
    """Advances only when an action runs."""

    def __init__(self, *durations: float) -> None:
        self.now = 0.0
        self._durations = list(durations)
        self.done = 0

    def __call__(self) -> float:
        return self.now

    def action(self) -> None:
        self.now += self._durations[min(self.done, len(self._durations) - 1)]
        self.done += 1


def test_the_first_call_is_not_timed() -> None:
    clock = Clock(100.0, 1.0, 2.0, 3.0)
    found = timing.measure(clock.action, at_least=3, at_most_s=0.0, clock=clock)
    assert found.seconds == (1.0, 2.0, 3.0)
    assert found.median_s == 2.0


@pytest.mark.parametrize(
    ("least", "at_most_s", "most", "count"), [(3, 0, 100, 3), (1, 9.5, 100, 10), (1, 50, 7, 7)]
)
def test_number_of_measurements(least: int, at_most_s: float, most: int, count: int) -> None:
    clock = Clock(1.0)
    found = timing.measure(
        clock.action, at_least=least, at_most_s=at_most_s, at_most=most, clock=clock
    )
    assert len(found.seconds) == count


def test_spread_is_relative_and_ignores_outliers() -> None:
    quiet = timing.Times((10.0,) * 20 + (1000.0,))
    assert quiet.spread == 0
    assert timing.Times((9.0, 10.0, 11.0)).spread == pytest.approx(0.05)
    assert timing.Times((90.0, 100.0, 110.0)).spread == pytest.approx(0.05)
    assert quiet.p95_s == 10
    assert quiet.summary() == {"median_s": 10, "p95_s": 10, "spread": 0, "count": 21}
