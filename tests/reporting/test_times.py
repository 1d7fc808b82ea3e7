"""Where a run's time went: each second counts once."""

import math

import pytest
from reporting import written_run
from reporting.written_run import BEGAN, end, phase, start, training

from jaxtrain.reporting import times
from jaxtrain.telemetry import console
from jaxtrain.telemetry.phases import TRAINING


def test_the_categories_add_up_to_the_total() -> None:
    found = times.account(written_run.full_history())
    assert found is not None
    assert found.total_s == pytest.approx(200)
    assert {name: seconds for name, seconds in found.seconds.items() if seconds} == pytest.approx(
        {
            times.STEPS: 2 * 18 + 60,
            times.INPUT: 4,
            times.VALIDATION: 20,
            times.SAVE: 11,
            times.COMPILE: 14,
            times.START: 3 + 2 + 6,
            times.OTHER: 2,
            times.REPEATED: 20,
            times.DOWN: 22,
        }
    )
    assert (found.repeated_steps, found.idle_s) == (20, 0)


def test_the_starts_add_up_to_the_run() -> None:
    history = written_run.full_history()
    whole, starts = times.account(history), times.by_start(history)
    assert whole is not None
    assert len(starts) > 1
    for name in times.CATEGORIES:
        assert whole.seconds[name] == pytest.approx(sum(part.seconds[name] for _, part in starts))
    hours = times.used_hours([attempt for attempt, _ in starts])
    assert hours * 3600 == pytest.approx(whole.total_s - whole.seconds[times.DOWN])


def test_a_resume_from_scratch_repeats_all_starts_before_it() -> None:
    history = [
        start(BEGAN, began=BEGAN),
        training(BEGAN + 10, 10, 0, 10),
        start(BEGAN + 10, 10, began=BEGAN + 10),
        training(BEGAN + 20, 10, 10, 20),
        start(BEGAN + 20, 0, began=BEGAN + 20),  # found no complete checkpoint
    ]
    found = times.account(history)
    assert found is not None
    assert found.seconds[times.REPEATED] == pytest.approx(20)
    assert found.repeated_steps == 20


def test_a_rollback_repeats_the_steps_after_its_checkpoint() -> None:
    history = [
        start(BEGAN, began=BEGAN),
        training(BEGAN + 30, 30, 0, 30),
        training(BEGAN + 35, 5, 30, 30),  # only skipped steps
        phase("rollback", BEGAN + 37, 2, 20),
        training(BEGAN + 47, 10, 20, 30),
    ]
    found = times.account(history)
    assert found is not None
    assert found.seconds[times.REPEATED] == pytest.approx(10 + 5)
    assert found.seconds[times.ROLLBACK] == pytest.approx(2)
    assert found.seconds[times.STEPS] == pytest.approx(30)


@pytest.mark.parametrize(("code", "down", "idle"), [(75, 90, 0), (130, 0, 90), (0, 0, 90)])
def test_time_after_a_planned_end_is_idle_not_lost(code: int, down: float, idle: float) -> None:
    history = [
        start(BEGAN, began=BEGAN),
        end(BEGAN + 10, 5, code),
        start(BEGAN + 101, 5, began=BEGAN + 100),
    ]
    found = times.account(history)
    assert found is not None
    assert found.seconds[times.DOWN] == pytest.approx(down)
    assert found.idle_s == pytest.approx(idle)


def test_every_phase_has_a_category() -> None:
    assert {*times._PHASES, TRAINING} == set(console._LABELS)
    account = times.account([start(BEGAN, began=BEGAN), phase("upload", BEGAN + 60, 60)])
    assert account is not None
    assert account.seconds[times.SAVE] == pytest.approx(60)


def test_a_clock_that_goes_back_gives_no_negative_time() -> None:
    history = [
        start(BEGAN, began=BEGAN + 5),
        phase("compile", BEGAN + 1, 3),
        start(BEGAN - 50, began=BEGAN - 60),
    ]
    found = times.account(history)
    assert found is not None
    assert all(seconds >= 0 and math.isfinite(seconds) for seconds in found.seconds.values())
    assert times.account([phase("compile", 1, 1)]) is None
