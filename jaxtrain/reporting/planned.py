"""Compares what a run took with what ``plan`` predicts for the step and devices of its starts.

Without a plan, there is nothing to compare: on a device that is not in the table of cards, or in a
run that was recorded before there was one.
"""

import bisect
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain import formats
from jaxtrain.reporting import times
from jaxtrain.reporting.run_files import RecordedRun

MEMORY, STEP, WAIT, HOURS = "memory", "a step without data wait", "data wait", "all steps"
_MOST = 0.25  # deviation from the planned range above which a line names the likely reason
_LEAST_S = 360.0  # shorter runs mostly start workers and take first steps, which no plan counts
_REASONS = {  # for more than was planned, and for less
    MEMORY: ("validations and gaps between arrays, which also count", "smaller workspaces"),
    STEP: (
        "a low clock, slow links, or another program on the GPU (jaxtrain doctor checks them)",
        "faster kernels than assumed (jaxtrain bench --efficiency measures them for plan)",
    ),
    WAIT: ("a slow disk, or too few cores (jaxtrain doctor measures the input)", "faster input"),
    HOURS: ("slower steps", "faster steps"),
}
_LOST = {
    times.REPEATED: "steps repeated after restarts (a smaller checkpoint.every repeats fewer)",
    times.INPUT: "waits for data",
}


class Compared(NamedTuple):
    """A quantity beside its plan.

    Attributes:
        planned: the least and the most; bytes in GiB, times in seconds, a wait as a fraction.
        measured: None if it was not.
        reason: the likely one of a deviation, if it is not the usual one.
    """

    planned: tuple[float, float]
    measured: float | None
    reason: str = ""


def compared(run: RecordedRun) -> dict[str, Compared]:
    """Returns what has a plan: of memory and a step, over all starts with the newest one's plan.

    "all steps" is the time of all, with repeated ones and waits, beside the plan of those that
    count.
    """
    starts = times.by_start(run.history)
    plans = [_plan(attempt.events) for attempt, _ in starts]
    newest = next((plan for plan in reversed(plans) if plan), None)
    if newest is None:
        return {}
    gib, step, loading = newest
    began = [attempt.began for attempt, _ in starts]
    intervals: list[list[tuple[float, float]]] = [[] for _ in starts]
    peaks = []
    for record in run.records:
        start = max(0, bisect.bisect(began, record["time"]) - 1)
        if plans[start] == newest and (rate := record.get("train/steps_per_second")):
            intervals[start].append((1 / rate, record.get("train/data_wait_fraction") or 0.0))
            peaks.append(record.get("train/gpu_memory_usage"))
    known = {MEMORY: Compared((gib, gib), max(filter(None, peaks), default=None))}
    if step is None:
        return known
    # The first interval of a start includes that of the workers.
    usual = [interval for of_start in intervals for interval in of_start[1:]]
    alone = statistics.median(took * (1 - wait) for took, wait in usual) if usual else None
    wait = statistics.median(wait for _, wait in usual) if usual else None
    known[STEP] = Compared(step, alone)
    low, high = (max(0.0, 1 - step[1 - end] / loading[end]) for end in (0, 1))
    known[WAIT] = Compared((low, high), wait)
    hours = _all_steps([(account, plan) for (_, account), plan in zip(starts, plans, strict=True)])
    return known | ({HOURS: hours} if hours else {})


def deviations(run: RecordedRun) -> Iterator[str]:
    """Yields a line with the likely reason for each deviation of more than a quarter."""
    for name, (planned, measured, reason) in compared(run).items():
        if measured is None or (name == HOURS and planned[1] < _LEAST_S):
            continue
        # A wait counts by how far it prolongs a step.
        low, high, value = (
            1 / max(1e-3, 1 - each) if name == WAIT else each for each in (*planned, measured)
        )
        above, below = _REASONS[name]
        if value > (1 + _MOST) * high or value < (1 - _MOST) * low:
            yield (
                f"{name}: {formatted(name, measured)} measured, {formatted(name, *planned)} "
                f"planned; likely: {reason or (above if value > high else below)}"
            )


def formatted(name: str, *values: float) -> str:
    """Formats a value or a range of a quantity."""
    if name == HOURS:
        return formats.hours(values[0] / 3600, values[-1] / 3600)
    unit = {MEMORY: "GiB", WAIT: "fraction"}.get(name)
    texts = [formats.metric(value, unit) if unit else f"{value:.3g} s" for value in values]
    return " to ".join(dict.fromkeys(texts))


def _plan(events: Sequence[Mapping[str, Any]]) -> tuple[Any, Any, Any] | None:
    for event in events:
        if "planned_step_s" in event:
            return event["planned_gib"], event["planned_step_s"], event["planned_input_s"]
    return None


def _all_steps(
    starts: Sequence[tuple[times.Account, tuple[Any, Any, Any] | None]],
) -> Compared | None:
    low = high = 0.0
    for account, plan in starts:
        if account.kept_steps:
            if plan is None or plan[1] is None:
                return None
            low += account.kept_steps * max(plan[1][0], plan[2][0])
            high += account.kept_steps * max(plan[1][1], plan[2][1])
    names = (times.STEPS, *_LOST)
    spent = {name: math.fsum(each.seconds[name] for each, _ in starts) for name in names}
    measured = sum(spent.values())
    lost = max(_LOST, key=lambda name: spent[name])
    reason = _LOST[lost] if spent[lost] > (measured - high) / 2 > 0 else ""
    return Compared((low, high), measured, reason)
