"""What was measured beside what ``plan`` said about each start of a run."""

from pathlib import Path
from typing import Any

import pytest
from reporting import written_run
from reporting.written_run import BEGAN, compiled, end, phase, start, training

from jaxtrain.reporting import page, planned, run_files
from jaxtrain.reporting.run_files import RecordedRun

PLAN = {"planned_gib": 12.0, "planned_step_s": [0.9, 1.1], "planned_input_s": [0.1, 0.5]}


def attempt(
    at: float, first: int, last: int, *, took: float = 1.0, wait: float = 0.0, plan: Any = PLAN
) -> list[dict[str, Any]]:
    """A start that compiles for 10 s and trains steps of ``took`` seconds."""
    after, seconds = at + 20, (last - first) * took
    return [
        start(at + 3, first, began=at),
        phase("compile", after, 10, first),
        {name: value for name, value in compiled(after, first).items() if "planned" not in name}
        | plan,
        training(after + seconds, seconds, first, last, waited_s=seconds * wait),
    ]


def records(
    at: float, first: int, last: int, *, took: float = 1.0, wait: float = 0.0, gib: float = 12.0
) -> list[dict[str, Any]]:
    """The records of such a start; the first one includes the start of the workers."""
    return [
        {
            "step": step,
            "time": at + 20 + (step - first) * took,
            "train/steps_per_second": 1 / took if step > first + 10 else 0.001,
            "train/data_wait_fraction": wait if step > first + 10 else 0.99,
            "train/gpu_memory_usage": gib,
        }
        for step in range(first + 10, last + 1, 10)
    ]


def read(folder: Path, history: list[dict[str, Any]], metrics: list[dict[str, Any]]) -> RecordedRun:
    directory = written_run.write(folder, history=history, metrics=metrics)
    return run_files.read(directory, "run")


def lines(run: RecordedRun) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in planned.deviations(run))


@pytest.mark.parametrize(
    ("alone", "wait", "gib", "deviating"),
    [
        (0.9, 0.0, 12.0, {}),
        (1.37, 0.19, 14.9, {}),  # each a little less than a quarter more
        (1.39, 0.19, 14.9, {planned.STEP}),
        (0.69, 0.0, 9.1, {}),
        (0.67, 0.0, 9.1, {planned.STEP}),
        (1.0, 0.21, 12.0, {planned.WAIT}),
        (1.0, 0.0, 15.1, {planned.MEMORY}),
        (1.0, 0.0, 8.9, {planned.MEMORY}),
    ],
)
def test_a_quarter_beyond_the_plan_is_a_line(
    tmp_path: Path, alone: float, wait: float, gib: float, deviating: set[str]
) -> None:
    took = alone / (1 - wait)
    run = read(
        tmp_path,
        attempt(BEGAN, 0, 100, took=took, wait=wait),
        records(BEGAN, 0, 100, took=took, wait=wait, gib=gib),
    )
    found = planned.compared(run)
    assert found[planned.STEP].measured == pytest.approx(alone)
    assert found[planned.WAIT].measured == wait
    assert found[planned.MEMORY].measured == gib
    # 100 steps are too few to judge their time as a sum.
    assert found[planned.HOURS].planned == pytest.approx((90, 110))
    assert found[planned.HOURS].measured == pytest.approx(100 * took)
    assert set(lines(run)) == set(deviating)


def test_planned_waits_do_not_deviate(tmp_path: Path) -> None:
    plan = PLAN | {"planned_input_s": [2.0, 4.0]}
    run = read(
        tmp_path,
        attempt(BEGAN, 0, 400, took=3.0, wait=0.6, plan=plan),
        records(BEGAN, 0, 400, took=3.0, wait=0.6),
    )
    least, most = planned.compared(run)[planned.WAIT].planned
    assert least == pytest.approx(1 - 1.1 / 2)
    assert most == pytest.approx(1 - 0.9 / 4)
    assert planned.compared(run)[planned.HOURS].planned == (800, 1600)
    assert not lines(run)


def test_each_start_is_compared_with_its_own_plan(tmp_path: Path) -> None:
    """The run moves to a device that is three times as fast, and was interrupted before."""
    fast = {name: _divided(value) for name, value in PLAN.items()}
    later = BEGAN + 10_000
    run = read(
        tmp_path,
        [
            *(*attempt(BEGAN, 0, 600), *attempt(BEGAN + 5_000, 600, 610, plan=fast, took=1 / 3)),
            *(*attempt(later, 610, 1210, plan=fast, took=1 / 3), end(later + 300, 1210)),
        ],
        [
            *records(BEGAN, 0, 600),
            *records(BEGAN + 5_000, 600, 610, took=1 / 3),
            *records(later, 610, 1210, took=1 / 3, gib=4.0),
        ],
    )
    found = planned.compared(run)
    assert found[planned.STEP].measured == pytest.approx(1 / 3)
    assert found[planned.HOURS].measured == pytest.approx(600 + 610 / 3)
    assert found[planned.HOURS].planned == pytest.approx(
        (0.9 * (600 + 610 / 3), 1.1 * (600 + 610 / 3))
    )
    assert set(lines(run)) == {planned.MEMORY}  # of the short start, 12 instead of 4


def _divided(value: Any) -> Any:
    return [each / 3 for each in value] if isinstance(value, list) else value / 3


@pytest.mark.parametrize(
    ("repeated", "wait", "took", "reason"),
    [(400, 0.0, 1.0, "repeated"), (0, 0.5, 2.0, "waits for data"), (0, 0.0, 2.0, "slower steps")],
)
def test_the_time_of_all_steps_names_what_is_most_of_the_excess(
    tmp_path: Path, repeated: int, wait: float, took: float, reason: str
) -> None:
    first, after = 500, BEGAN + 5_000
    run = read(
        tmp_path,
        [
            *attempt(BEGAN, 0, first + repeated, took=took, wait=wait),
            *attempt(after, first, 1000, took=took, wait=wait),
        ],
        [
            *records(BEGAN, 0, first + repeated, took=took, wait=wait),
            *records(after, first, 1000, took=took, wait=wait),
        ],
    )
    assert reason in lines(run)[planned.HOURS]
    assert planned.compared(run)[planned.HOURS].planned == pytest.approx((900, 1100))


@pytest.mark.parametrize("plan", [{"planned_gib": 1.0}, {}])
def test_a_run_recorded_without_a_plan_has_none(tmp_path: Path, plan: dict[str, Any]) -> None:
    run = read(tmp_path, attempt(BEGAN, 0, 900, took=9.0, plan=plan), records(BEGAN, 0, 900))
    assert planned.compared(run) == {}
    assert not lines(run)
    assert "<small> planned" not in page.page([run])
    assert planned.compared(read(tmp_path / "none", [], records(BEGAN, 0, 90))) == {}


def test_a_device_without_rates_has_only_planned_memory(tmp_path: Path) -> None:
    plan = {"planned_gib": 12.0, "planned_step_s": None, "planned_input_s": None}
    run = read(tmp_path, attempt(BEGAN, 0, 900, plan=plan), records(BEGAN, 0, 900))
    assert planned.compared(run) == {planned.MEMORY: ((12.0, 12.0), 12.0, "")}
    text = page.page([run])
    assert "not in plan&#x27;s table of cards, no times are planned" in text
    assert "<small> planned" not in text


def test_hours_need_a_plan_of_every_step_that_counts(tmp_path: Path) -> None:
    old, new = {"planned_gib": 12.0}, BEGAN + 9_000
    both = [*records(BEGAN, 0, 500), *records(new, 500, 900)]
    run = read(tmp_path / "old", [*attempt(BEGAN, 0, 500, plan=old), *attempt(new, 500, 900)], both)
    assert set(planned.compared(run)) == {planned.MEMORY, planned.STEP, planned.WAIT}
    # All steps of the old start were trained again.
    run = read(tmp_path / "again", [*attempt(BEGAN, 0, 500, plan=old), *attempt(new, 0, 900)], both)
    assert planned.compared(run)[planned.HOURS].planned == pytest.approx((810, 990))


def test_the_page_shows_both_and_the_reason(tmp_path: Path) -> None:
    run = read(
        tmp_path, attempt(BEGAN, 0, 900, took=2.0), records(BEGAN, 0, 900, took=2.0, gib=11.0)
    )
    text = page.page([run])
    assert "2 s<small> planned 0.9 s to 1.1 s</small>" in text
    assert "0.0%<small> planned 0.0%</small>" in text
    assert "30 min<small> planned 13.5 to 16.5 min</small>" in text
    assert text.count("likely: a low clock") == 1
