"""Spot machines: the formulas against a simulation, and what is printed."""

import math

import numpy as np
import pytest
from planning.test_prediction import plan_of

from jaxtrain.planning import report, spot

COSTS = [  # seconds: interval, save, restart, mean time between preemptions
    (600.0, 5.0, 400.0, 21_600.0),
    (60.0, 10.0, 120.0, 600.0),
    (900.0, 30.0, 900.0, 3_600.0),
]


def simulated_s(
    training_s: float, every_s: float, save_s: float, restart_s: float, mean_s: float, notice: bool
) -> float:
    """Returns how long a run takes whose preemptions are drawn, by events, not by the formula."""
    rng = np.random.default_rng(7)
    times = []
    for _ in range(400):
        now, done = 0.0, 0.0
        fails_at = rng.exponential(mean_s)
        while done < training_s:
            segment = min(every_s, training_s - done)
            if now + segment + save_s <= fails_at:
                now, done = now + segment + save_s, done + segment
                continue
            if notice:  # stops training in time to save
                done += max(0.0, min(segment, fails_at - now))
                now = max(now, fails_at) + save_s
            else:
                now = fails_at
            while True:  # another machine, which may be taken while it starts
                fails_at = now + rng.exponential(mean_s)
                if fails_at >= now + restart_s:
                    now += restart_s
                    break
                now = fails_at
        times.append(now)
    return float(np.mean(times))


@pytest.mark.parametrize("costs", COSTS)
def test_the_formulas_agree_with_a_simulation(costs: tuple[float, ...]) -> None:
    training_s = 20 * costs[3]
    killed = spot.expected_s(training_s, *costs)
    assert killed == pytest.approx(simulated_s(training_s, *costs, notice=False), rel=0.03)
    noticed = spot.expected_with_notice_s(training_s, *costs)
    assert noticed == pytest.approx(simulated_s(training_s, *costs, notice=True), rel=0.03)
    assert noticed < killed


@pytest.mark.parametrize(("save_s", "mean_s"), [(1.0, 21_600.0), (30.0, 3_600.0), (20.0, 60.0)])
def test_no_other_interval_is_much_better(save_s: float, mean_s: float) -> None:
    best = spot.best_interval_s(save_s, mean_s)
    tried = [best * factor for factor in np.geomspace(0.1, 10, 201)]
    hours = [spot.expected_s(1e6, every_s, save_s, 100.0, mean_s) for every_s in tried]
    assert spot.expected_s(1e6, best, save_s, 100.0, mean_s) <= 1.002 * min(hours)
    if save_s < mean_s / 1000:
        assert best == pytest.approx(math.sqrt(2 * save_s * mean_s), rel=0.02), "as Young has it"


def test_a_plan_on_spot_machines_names_the_cadence_and_the_share_of_the_cost() -> None:
    plan = plan_of(price=3.0)
    expected = spot.predict(plan, 1.0, 6.0)
    assert expected is not None
    assert plan.run.hours is not None
    assert plan.run.hours[1] < expected.noticed[1] < expected.hours[1]
    page = report.on_spot(plan, expected)
    assert max(map(len, page.splitlines())) <= 80
    assert "6 preemptions a day" in page
    assert f"--checkpoint.every {round(expected.every_s / 60)}m" in page
    assert "% of the cost above" in page
    hopeless = spot.predict(plan, 1.0, 1e5)
    assert "it makes no progress" in report.on_spot(plan, hopeless)
    assert "unknown" in report.on_spot(plan, spot.predict(plan_of(total=None), 1.0, 6.0))
