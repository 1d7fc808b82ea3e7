"""What a run says of itself in a few numbers."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.reporting import formats, times
from jaxtrain.reporting.run_files import RecordedRun

# Smaller is better for these; for the others larger is.
_SMALLER = ("loss", "lpips", "perplexity", "bits_per_byte", "distance", "flicker")
_NO_RESULT = (
    "learning_rate",
    "grad_norm",
    "per_second",
    "mfu",
    "fraction",
    "gpu_",
    "memory",
    "shm",
)
_PRECIOUS = ("loss", "psnr", "ssim", "lpips", "accuracy", "pseudo_perplexity", "bits_per_byte")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run stands.

    Attributes:
        word: "done", "running", "stopped", "failed", "killed" or "unknown".
        sentence: the same in words.
    """

    word: str
    sentence: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What became of a metric.

    Attributes:
        first, last, best: values; None where none was finite.
        best_step: None likewise.
        nonfinite: records of it that are NaN or infinite.
        nonfinite_step: of the first such record.
    """

    first: float | None
    last: float | None
    best: float | None
    best_step: int | None
    nonfinite: int
    nonfinite_step: int | None


def ending(run: RecordedRun) -> Ending:
    """How the run ended, or that it did not."""
    if run.at_work:
        return Ending(word="running", sentence=f"at work ({run.at_work})")
    found = times.attempts(run.history)
    if not found:
        return Ending(word="unknown", sentence="nothing tells how it ended")
    end = found[-1].end
    if end is None:
        return Ending(
            word="killed",
            sentence=f"no end is recorded; last sign of life {formats.moment(found[-1].last)}",
        )
    code, why = end.get("code"), str(end.get("why") or "")
    words: dict[Any, str] = {0: "done", 75: "stopped", 130: "stopped"}
    word = words.get(code, "failed")
    return Ending(word=word, sentence=why.removeprefix("done: ") or f"exit code {code}")


def steps_done(run: RecordedRun) -> int | None:
    """Completed updates; None if nothing tells."""
    if run.history:
        newest = run.history[-1]
        later = [record["step"] for record in run.records if record["time"] > newest["time"]]
        return max([int(newest["step"]), *later])
    return run.records[-1]["step"] if run.records else None


def steps_of_run(run: RecordedRun) -> int | None:
    """Updates that the run is to have; None if nothing tells."""
    totals = [start["total"] for start in run.starts if start.get("total") is not None]
    total = totals[-1] if totals else None
    if total is None:
        total = run.config.get("loop", {}).get("steps")
    return None if total is None else int(total)


def span(run: RecordedRun) -> tuple[float, float] | None:
    """When the run began and its last sign of life, seconds since 1970; None if nothing tells."""
    found = times.attempts(run.history)
    ends = [record["time"] for record in run.records]
    if found:
        return found[0].began, max([found[-1].last, *ends])
    return (min(ends), max(ends)) if ends else None


def devices(run: RecordedRun) -> tuple[str, str]:
    """How many, and of which kind; both are "" if nothing tells."""
    start = run.last("start")
    if not start:
        return "", ""
    processes = int(start.get("processes") or 1)
    among = f" in {processes} processes" if processes > 1 else ""
    return f"{start.get('devices', '?')}{among}", str(start.get("device_kind", "?"))


def smaller_is_better(name: str) -> bool:
    """Whether less of a metric is more."""
    return any(word in name for word in _SMALLER)


def results(run: RecordedRun) -> dict[str, Result]:
    """The metrics that say how good it is, each with what became of it; the validation's first."""
    names = {name for record in run.records for name in record if "/" in name}
    kept = [
        name
        for name in names
        if not name.endswith("_std") and not any(word in name for word in _NO_RESULT)
    ]

    def rank(name: str) -> tuple[bool, int, str]:
        last = name.rpartition("/")[2]
        place = _PRECIOUS.index(last) if last in _PRECIOUS else len(_PRECIOUS)
        return not name.startswith("val/"), place, name

    return {name: _result(run, name) for name in sorted(kept, key=rank)}


def _result(run: RecordedRun, name: str) -> Result:
    every = [(record["step"], record[name]) for record in run.records if name in record]
    finite = [(step, value) for step, value in every if value is not None and math.isfinite(value)]
    bad = [step for step, value in every if value is None or not math.isfinite(value)]
    choose = min if smaller_is_better(name) else max
    best = choose(finite, key=lambda pair: pair[1], default=(None, None))
    return Result(
        first=finite[0][1] if finite else None,
        last=every[-1][1],
        best=best[1],
        best_step=best[0],
        nonfinite=len(bad),
        nonfinite_step=bad[0] if bad else None,
    )


def leading(run: RecordedRun, found: Mapping[str, Result]) -> list[str]:
    """The one or two metrics that the head shows: what the best checkpoint goes by, and a loss."""
    chosen = [run.config.get("checkpoint", {}).get("best_metric"), "val/loss", "train/loss"]
    return list(dict.fromkeys(name for name in chosen if name in found))[:2]


def series(run: RecordedRun, name: str) -> list[float]:
    """The finite values of a metric in order."""
    found = [record[name] for record in run.records if record.get(name) is not None]
    return [value for value in found if math.isfinite(value)]


def typical(values: Sequence[float]) -> float | None:
    """The median, without the first one, whose window holds the start of the workers."""
    return statistics.median(values[1:] or values) if values else None


def flops_per_second(run: RecordedRun) -> float | None:
    """FLOP/s of all devices: the model's formula for a step, at the measured speed."""
    needed: Any = run.last("compiled").get("flops_per_step")
    rate = typical(series(run, "train/steps_per_second"))
    return needed * rate if needed and rate else None


def peak_flops(run: RecordedRun) -> float | None:
    """Datasheet bf16 FLOP/s of all devices; None for devices without."""
    peak = run.last("compiled").get("peak_flops")
    count = run.last("start").get("devices")
    return peak * count if peak and count else None


def tokens_per_example(run: RecordedRun) -> int | None:
    """By the ratio of both rates; None of a model that counts no tokens."""
    tokens = typical(series(run, "train/tokens_per_second"))
    samples = typical(series(run, "train/samples_per_second"))
    ratio = tokens / samples if tokens and samples else 0.0
    return round(ratio) if ratio and math.isfinite(ratio) else None
