"""Computes where a run's time went, by categories that add up to the total."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.errors import RUN_AGAIN

# In the order of the bar: first the useful time, last the lost time.
STEPS, INPUT, VALIDATION, SAVE, COMPILE, START, ROLLBACK, OTHER, REPEATED, DOWN = (
    "training",
    "data wait",
    "validation",
    "saving",
    "compiling",
    "start, data, restore, end",
    "rollback",
    "other",
    "repeated training",
    "down between starts",
)
CATEGORIES = {
    STEPS: "steps that count toward the final model",
    INPUT: "time in which the step waited for its batch",
    VALIDATION: "validations and their samples",
    SAVE: "time in which training, or the end of the run, waited for saves and their upload",
    COMPILE: "XLA compilation for training and validation",
    START: "imports, connecting, reading the data index, restoring, writing the report, closing",
    ROLLBACK: "restoring a checkpoint after skipped steps in a row",
    OTHER: "reading a profile, and between the measured phases",
    REPEATED: "steps trained twice because the run was resumed from an older checkpoint",
    DOWN: "from the last record of a start that was killed or interrupted to the next start",
}
_PHASES = {
    "evaluation": VALIDATION,
    "save": SAVE,
    "upload": SAVE,
    "compile": COMPILE,
    "rollback": ROLLBACK,
    "start": START,
    "end": START,
    "data": START,
    "restore": START,
    "report": START,
    "profile": OTHER,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the run.

    Attributes:
        began: when the process started, seconds since 1970.
        last: time of its last event, seconds since 1970.
        end: its ``end`` event; None if it was killed or is still running.
    """

    start: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]
    began: float
    last: float
    end: Mapping[str, Any] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
    """Seconds by category; they add up to the total.

    Attributes:
        seconds: for each of :data:`CATEGORIES`.
        idle_s: time between a start that was not killed or interrupted and the next one, not part
            of the total. Ctrl-C and ``loop.max_hours`` are planned stops, no interruptions.
    """

    seconds: Mapping[str, float]
    kept_steps: int
    repeated_steps: int
    idle_s: float

    @property
    def total_s(self) -> float:
        """Returns the sum of all categories."""
        return math.fsum(self.seconds.values())


def attempts(history: Sequence[Mapping[str, Any]]) -> list[Attempt]:
    """Splits the history into the starts of the run, in order."""
    groups: list[list[Mapping[str, Any]]] = []
    for event in history:
        if event["event"] == "start":
            groups.append([])
        if groups:
            groups[-1].append(event)
    return [
        Attempt(
            start=group[0],
            events=group,
            began=float(group[0].get("began", group[0]["time"])),
            last=max(float(event["time"]) for event in group),
            end=next((event for event in group if event["event"] == "end"), None),
        )
        for group in groups
    ]


def used_hours(attempts: Sequence[Attempt]) -> float:
    """Returns the hours of starts, each from the start of its program to its last record."""
    return math.fsum(max(0.0, attempt.last - attempt.began) for attempt in attempts) / 3600


def account(history: Sequence[Mapping[str, Any]]) -> Account | None:
    """Computes where the time of a run went; None if no start was recorded."""
    accounts = [each for _, each in by_start(history)]
    if not accounts:
        return None
    return Account(
        seconds={name: math.fsum(each.seconds[name] for each in accounts) for name in CATEGORIES},
        kept_steps=sum(each.kept_steps for each in accounts),
        repeated_steps=sum(each.repeated_steps for each in accounts),
        idle_s=math.fsum(each.idle_s for each in accounts),
    )


def by_start(history: Sequence[Mapping[str, Any]]) -> list[tuple[Attempt, Account]]:
    """Computes where the time of each start went, and that until the next one."""
    starts, kept_up_to = attempts(history), _kept_up_to(history)
    accounts = []
    for attempt, following in itertools.zip_longest(starts, starts[1:]):
        seconds = dict.fromkeys(CATEGORIES, 0.0)
        inside = kept = repeated = idle_s = 0.0
        first = next((start for start in attempt.events if start["event"] == "phase"), None)
        if first is not None:  # before the first phase: imports, connecting
            before = float(first["time"]) - float(first["seconds"]) - attempt.began
            seconds[START] += max(0.0, before)
            inside += max(0.0, before)
        for event in attempt.events:
            if event["event"] != "phase":
                continue
            took = max(0.0, float(event["seconds"]))
            inside += took
            if event.get("name") != "training":
                seconds[_PHASES.get(str(event.get("name")), OTHER)] += took
                continue
            steps, lost = _steps(event, kept_up_to[id(event)])
            fraction = lost / steps if steps else 0.0
            waited = min(took, max(0.0, float(event.get("waited_s") or 0.0)))
            kept += steps - lost
            repeated += lost
            seconds[REPEATED] += took * fraction
            seconds[INPUT] += waited * (1 - fraction)
            seconds[STEPS] += (took - waited) * (1 - fraction)
        seconds[OTHER] += max(0.0, attempt.last - attempt.began - inside)
        gap = 0.0 if following is None else max(0.0, following.began - attempt.last)
        if attempt.end is None or attempt.end.get("code") == RUN_AGAIN:
            seconds[DOWN] += gap
        else:
            idle_s += gap
        of_start = Account(
            seconds=seconds, kept_steps=round(kept), repeated_steps=round(repeated), idle_s=idle_s
        )
        accounts.append((attempt, of_start))
    return accounts


def _kept_up_to(history: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """Returns the lowest step that the run went back to after each event."""
    lowest_after: dict[int, float] = {}
    lowest = math.inf
    for event in reversed(history):
        lowest_after[id(event)] = lowest
        if event["event"] == "start" or event.get("name") == "rollback":
            lowest = min(lowest, int(event["step"]))
    return lowest_after


def _steps(event: Mapping[str, Any], kept: float) -> tuple[float, float]:
    last = int(event["step"])
    first = last if event.get("from_step") is None else int(event["from_step"])
    if last <= first:  # only skipped steps, which are not counted
        return 1.0, float(last > kept)
    return float(last - first), max(0.0, last - max(float(first), kept))
