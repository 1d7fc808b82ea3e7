"""Where the time of a run went: an account whose parts add up to the whole."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

# In the order of the bar. What a run is paid for comes first, what is lost last.
STEPS, INPUT, EVALUATION, SAVE, COMPILE, START, ROLLBACK, OTHER, AGAIN, DOWN = (
    "training",
    "waiting for input",
    "evaluation",
    "saving",
    "compiling",
    "start, data, restore, end",
    "going back to a checkpoint",
    "not accounted for",
    "trained again",
    "down between starts",
)
CATEGORIES = {
    STEPS: "updates that are in the result",
    INPUT: "the part of the training in which the step waited for its batch",
    EVALUATION: "validations and their samples",
    SAVE: "the part of the saves that held the loop",
    COMPILE: "XLA, also of the evaluation",
    START: "imports, connecting, reading the data's index, restoring, the end",
    ROLLBACK: "after bad updates in a row",
    OTHER: "between the phases that were measured",
    AGAIN: "updates done twice, as the checkpoint that was resumed from was older",
    DOWN: "from the last sign of life of a start that was killed or stopped to the next start",
}
_PHASES = {
    "evaluation": EVALUATION,
    "save": SAVE,
    "compile": COMPILE,
    "rollback": ROLLBACK,
    "start": START,
    "end": START,
    "data": START,
    "restore": START,
}
_RUN_AGAIN_CODES = (75, 130)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the run, up to its end.

    Attributes:
        start: its event.
        events: all of it, the start's own included.
        began: when the process started, seconds since 1970.
        last: its last sign of life, seconds since 1970.
        end: its ``end`` event; None where it was killed, or is at work.
    """

    start: Mapping[str, Any]
    events: Sequence[Mapping[str, Any]]
    began: float
    last: float
    end: Mapping[str, Any] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
    """Seconds by category; they add up to the whole.

    Attributes:
        seconds: each of :data:`CATEGORIES`.
        updates_again: updates that were trained a second time.
        idle_s: time after a start that had come to its own end, before the next. Not in the whole.
    """

    seconds: Mapping[str, float]
    updates_again: int
    idle_s: float

    @property
    def whole_s(self) -> float:
        """All of it."""
        return math.fsum(self.seconds.values())


def attempts(history: Sequence[Mapping[str, Any]]) -> list[Attempt]:
    """The starts of a run in order."""
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


def account(history: Sequence[Mapping[str, Any]]) -> Account | None:
    """Where the time went; None without a start."""
    found = attempts(history)
    if not found:
        return None
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    again = 0.0
    kept_up_to = _kept_up_to(history)
    for attempt in found:
        inside = 0.0
        first = next((one for one in attempt.events if one["event"] == "phase"), None)
        if first is not None:  # what came before the first phase: imports, connecting
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
            updates, lost = _updates(event, kept_up_to[id(event)])
            share = lost / updates if updates else 0.0
            waited = min(took, max(0.0, float(event.get("waited_s") or 0.0)))
            again += lost
            seconds[AGAIN] += took * share
            seconds[INPUT] += waited * (1 - share)
            seconds[STEPS] += (took - waited) * (1 - share)
        seconds[OTHER] += max(0.0, attempt.last - attempt.began - inside)
    idle_s = 0.0
    for one, following in itertools.pairwise(found):
        gap = max(0.0, following.began - one.last)
        if one.end is None or one.end.get("code") in _RUN_AGAIN_CODES:
            seconds[DOWN] += gap
        else:
            idle_s += gap
    return Account(seconds=seconds, updates_again=round(again), idle_s=idle_s)


def _kept_up_to(history: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """For each event the lowest step that the run has gone back to after it."""
    found: dict[int, float] = {}
    lowest = math.inf
    for event in reversed(history):
        found[id(event)] = lowest
        if event["event"] == "start" or event.get("name") == "rollback":
            lowest = min(lowest, int(event["step"]))
    return found


def _updates(event: Mapping[str, Any], kept: float) -> tuple[float, float]:
    """Updates of a training phase, and how many of them were done again."""
    last = int(event["step"])
    first = last if event.get("from_step") is None else int(event["from_step"])
    if last <= first:  # only bad updates, which leave the step where it was
        return 1.0, float(last > kept)
    return float(last - first), max(0.0, last - max(float(first), kept))
