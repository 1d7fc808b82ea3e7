"""Computes the key numbers of a run: state, steps, results, speed."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain import formats
from jaxtrain.config import metrics
from jaxtrain.config.gates import Gate
from jaxtrain.errors import DONE, INTERRUPTED, RUN_AGAIN
from jaxtrain.reporting import times
from jaxtrain.reporting.run_files import RecordedRun


class Ending(NamedTuple):
    """The state of a run.

    Attributes:
        state: "done", "running", "stopped", "failed", "killed" or "unknown".
    """

    state: str
    sentence: str


class Result(NamedTuple):
    """How a metric developed.

    Attributes:
        first, last, best: values; None if all were NaN/Inf.
        best_step: step of ``best``.
        nonfinite: number of NaN/Inf records.
        nonfinite_step: step of the first such record.
    """

    unit: str
    first: float | None
    last: float | None
    best: float | None
    best_step: int | None
    nonfinite: int
    nonfinite_step: int | None


def ending(run: RecordedRun) -> Ending:
    """Returns how the run ended, or that it is running."""
    if run.active_process:
        return Ending("running", f"running ({run.active_process})")
    attempts = times.attempts(run.history)
    if not attempts:
        return Ending("unknown", "how it ended was not recorded")
    end = attempts[-1].end
    if end is None:
        last = formats.moment(attempts[-1].last)
        return Ending("killed", f"no end was recorded; last record {last}")
    code, why = end.get("code"), str(end.get("why") or "")
    states: dict[Any, str] = {DONE: "done", RUN_AGAIN: "stopped", INTERRUPTED: "stopped"}
    return Ending(states.get(code, "failed"), why.removeprefix("done: ") or f"exit code {code}")


def how_ended(run: RecordedRun, attempt: times.Attempt) -> str:
    """Describes how a start of the run ended, or that it is running."""
    end = attempt.end
    if end is not None:
        return f"{end.get('why') or ''} (code {end.get('code')})".strip()
    is_newest = attempt.events[-1] is run.history[-1]
    return "running" if run.active_process and is_newest else "killed: no end was recorded"


def steps_done(run: RecordedRun) -> int | None:
    """Returns the completed steps; None if unknown."""
    if run.history:
        newest = run.history[-1]
        later = [record["step"] for record in run.records if record["time"] > newest["time"]]
        return max([int(newest["step"]), *later])
    return run.records[-1]["step"] if run.records else None


def steps_of_run(run: RecordedRun) -> int | None:
    """Returns the planned length of the run in steps; None if unknown."""
    totals = [start["total"] for start in run.starts if start.get("total") is not None]
    return totals[-1] if totals else run.config.get("loop", {}).get("steps")


def gates(run: RecordedRun) -> dict[str, str]:
    """Returns each gate of ``loop.gates``, and what the run showed of it."""
    outcomes = {}
    for text in run.config.get("loop", {}).get("gates") or ():
        gate = Gate.parse(text)
        decided = gate.decided_by((record["step"], record) for record in run.records)
        if decided is None:
            outcomes[text] = "not decided yet"
            continue
        step, value = decided
        unit = metrics.describe(gate.metric, run.metrics).unit
        outcomes[text] = (
            f"{'met' if gate.is_met(value) else 'not met'}: {formats.metric(value, unit)} at step "
            f"{step:,}"
        )
    return outcomes


def span(run: RecordedRun) -> tuple[float, float] | None:
    """Returns when the run started and its last record, seconds since 1970; None if unknown."""
    attempts = times.attempts(run.history)
    ends = [record["time"] for record in run.records]
    if attempts:
        return attempts[0].began, max([attempts[-1].last, *ends])
    return (min(ends), max(ends)) if ends else None


def results(run: RecordedRun) -> dict[str, Result]:
    """Returns how each metric of quality developed; those of the validation come first."""

    def is_quality(name: str) -> bool:
        kind, _, last = name.rpartition("/")
        better = metrics.describe(name, run.metrics).better
        # A validation metric that is not in the table has no direction, but may show quality.
        unknown = kind == "val" and last not in run.metrics and not last.endswith("_std")
        return bool(kind) and (better is not None or unknown)

    def rank(name: str) -> tuple[bool, tuple[int, bool, str]]:
        return not name.startswith("val/"), metrics.position(name, run.metrics)

    names = {name for record in run.records for name in record if is_quality(name)}
    return {name: _result(run, name) for name in sorted(names, key=rank)}


def _result(run: RecordedRun, name: str) -> Result:
    points = [(record["step"], record[name]) for record in run.records if name in record]
    finite = [(step, value) for step, value in points if value is not None and math.isfinite(value)]
    bad = [step for step, value in points if value is None or not math.isfinite(value)]
    metric = metrics.describe(name, run.metrics)
    choose = min if metric.better == "min" else max
    best = choose(finite if metric.better else [], key=lambda pair: pair[1], default=(None, None))
    return Result(
        unit=metric.unit,
        first=finite[0][1] if finite else None,
        last=points[-1][1],
        best=best[1],
        best_step=best[0],
        nonfinite=len(bad),
        nonfinite_step=bad[0] if bad else None,
    )


def leading(run: RecordedRun, by_name: Mapping[str, Result]) -> list[str]:
    """Returns the one or two metrics for the header: the best checkpoint's criterion and a loss."""
    chosen = [run.config.get("checkpoint", {}).get("best_metric"), "val/loss", "train/loss"]
    return list(dict.fromkeys(name for name in chosen if name in by_name))[:2]


def series(run: RecordedRun, name: str) -> list[float]:
    """Returns the values of a metric in order, without NaN/Inf."""
    values = (record.get(name) for record in run.records)
    return [value for value in values if value is not None and math.isfinite(value)]


def typical(values: Sequence[float]) -> float | None:
    """Returns the median, without the first value, which includes the start of the workers."""
    return statistics.median(values[1:] or values) if values else None


def peak_flops(run: RecordedRun) -> float | None:
    """Returns the datasheet's bf16 FLOP/s of all devices; None for a device not in the table."""
    peak = run.last("compiled").get("peak_flops")
    count = run.last("start").get("devices")
    return peak * count if peak and count else None


def tokens_per_example(run: RecordedRun) -> int | None:
    """Returns tokens per example, from the two rates; None for a model that counts no tokens."""
    tokens = typical(series(run, "train/tokens_per_second"))
    samples = typical(series(run, "train/samples_per_second"))
    return round(tokens / samples) if tokens and samples else None
