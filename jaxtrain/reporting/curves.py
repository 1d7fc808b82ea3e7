"""The data of the page's charts: the metrics of each run, thinned if there are too many points."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain import formats
from jaxtrain.config import metrics
from jaxtrain.reporting import facts
from jaxtrain.reporting.run_files import RecordedRun

MOST_POINTS = 2000


def charts(runs: Sequence[RecordedRun]) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns a chart for each metric, with the training and validation curves of all runs.

    Returns:
        The charts, as JSON-able dicts; and sentences about metrics that never changed, which need
        no chart, and about thinned curves. A chart has ``name``, ``title``, ``percent`` (shown in
        percent), ``zero`` (y axis begins at 0), ``unit`` (prefixes such as 1k are confusing before
        it), ``log`` (allows a log scale) and ``curves``. A curve has ``run`` (index), ``kind``
        ("train" or "val"), ``step``, ``time`` (seconds since the run began) and ``value`` (None for
        NaN/Inf).
    """
    names = {
        name.partition("/")[2]
        for run in runs
        for record in run.records
        for name in record
        if "/" in name and not name.endswith("_std")
    }
    rate = next((name for name in metrics.RATES if name in names), None)
    names -= set(metrics.RATES) - {rate}
    added = {name: metric for run in runs for name, metric in run.metrics.items()}
    known = metrics.table(added)
    thinned = False
    drawn = []
    constants: list[str] = []
    for name in sorted(names, key=lambda name: metrics.position(name, known)):
        metric = metrics.describe(name, known)
        lines: list[dict[str, Any]] = []
        for index, run in enumerate(runs):
            for kind in ("train", "val"):
                points = _points(run, f"{kind}/{name}")
                kept = thin(points, MOST_POINTS)
                thinned = thinned or len(kept) < len(points)
                if any(value is not None for _, _, value in kept):
                    step, time, value = zip(*kept, strict=True)
                    line: dict[str, Any] = {"run": index, "kind": kind, "step": step, "time": time}
                    lines.append(line | {"value": [_rounded(number) for number in value]})
        if lines and not metric.better and _is_constant(lines):
            for kind in dict.fromkeys(line["kind"] for line in lines):
                values = [line["value"][0] for line in lines if line["kind"] == kind]
                texts = dict.fromkeys(formats.metric(value, metric.unit) for value in values)
                constants.append(f"{kind}/{name} {' or '.join(texts)}")
        elif lines:
            # Plotly's own range around a single value is too narrow to read.
            single = len({value for line in lines for value in line["value"]}) == 1
            from_zero = metric.unit in ("fraction", "1/s", "GiB") or name == "learning_rate"
            unit = "" if metric.unit in ("fraction", "1/s") else metric.unit
            drawn.append(
                {
                    "name": name,
                    "title": f"{metric.title}, {unit}" if unit else metric.title,
                    "percent": metric.unit == "fraction",
                    "zero": from_zero or single,
                    "unit": unit == "GiB",
                    "log": metric.better == "min" or name == "grad_norm",
                    "curves": lines,
                }
            )
    notes = [f"Constant, without a chart: {', '.join(constants)}."] if constants else []
    if thinned:
        notes.append(
            f"Curves of more than {MOST_POINTS:,} points are thinned to the lowest and highest "
            "point of each interval; metrics.jsonl has all points."
        )
    return drawn, notes


def _is_constant(lines: Sequence[Mapping[str, Any]]) -> bool:
    several = any(len(line["value"]) > 1 for line in lines)
    return several and all(len(set(line["value"])) == 1 for line in lines)


def thin(
    points: Sequence[tuple[int, float, float | None]], max_points: int
) -> list[tuple[int, float, float | None]]:
    """Thins a curve to its first and last point and each interval's lowest and highest point.

    Args:
        points: (step, time, value). A value of None is kept where its entire interval has only
            None.
        max_points: at least 4.
    """
    if len(points) <= max_points:
        return list(points)
    intervals = (max_points - 2) // 2
    inside = points[1:-1]
    kept = {0, len(points) - 1}
    for number in range(intervals):
        low = 1 + number * len(inside) // intervals
        high = 1 + (number + 1) * len(inside) // intervals
        finite = [index for index in range(low, high) if points[index][2] is not None]
        if not finite:
            kept.add(low)
            continue
        kept.add(min(finite, key=lambda index: points[index][2] or 0.0))
        kept.add(max(finite, key=lambda index: points[index][2] or 0.0))
    return [points[index] for index in sorted(kept)]


def described(run: RecordedRun) -> dict[str, Any]:
    """Returns what page.js needs to know about a run.

    Returns:
        A JSON-able dict: ``label``; ``seen``, a list of [step, examples seen
        by then, examples per step from there on]; ``tokens`` per example, or None; ``resumes``, the
        steps from which the run was resumed.
    """
    starts = run.starts
    batch = int(run.config.get("data", {}).get("batch_size") or 0)
    seen = [
        [
            int(start["step"]),
            int(start.get("seen") or 0),
            int((start.get("config") or {}).get("data", {}).get("batch_size") or batch),
        ]
        for start in starts
    ]
    return {
        "label": run.label,
        "seen": seen or ([[0, 0, batch]] if batch else []),
        "tokens": facts.tokens_per_example(run),
        "resumes": sorted({int(start["step"]) for start in starts[1:]}),
    }


def _points(run: RecordedRun, name: str) -> list[tuple[int, float, float | None]]:
    began = facts.span(run)
    start = began[0] if began else 0.0
    return [
        (record["step"], round(record["time"] - start, 3), _finite(record[name]))
        for record in run.records
        if name in record
    ]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _rounded(value: float | None) -> float | None:
    """Rounds to seven digits, the precision of float32."""
    return None if value is None else float(f"{value:.7g}")


def nonfinite(run: RecordedRun, by_name: Mapping[str, facts.Result]) -> list[str]:
    """Returns a sentence for each metric with NaN/Inf records, where its curve has gaps."""
    return [
        f"{run.label}: {name} is NaN/Inf in {series.nonfinite} records, first at step "
        f"{series.nonfinite_step:,}; the curve has gaps there."
        for name, series in by_name.items()
        if series.nonfinite
    ]
