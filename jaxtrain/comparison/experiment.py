"""Compares two configs by pairs of runs, until an interval answers the question.

The two runs of a pair have the same seed, and so the same order of the data, the same randomness in
each step, and, where the change leaves all parameters as they are, the same initial ones. What the
runs share cancels out in their difference; seeds vary between pairs. After each pair,
:mod:`jaxtrain.comparison.sequential` says which differences are still possible.
"""

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

from jaxtrain import config, versions
from jaxtrain.comparison import runs, sequential
from jaxtrain.comparison.sequential import Interval
from jaxtrain.config import metrics
from jaxtrain.errors import InputError
from jaxtrain.storage import atomic
from jaxtrain.terminal import Say

NAME = "compare.json"
ROOT = Path("output/compare")
SIDES = ("a", "b")

Verdict = Literal["better", "worse", "equivalent", "identical", "undecided", "failed"]
At = Literal["steps", "time", "flops"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked.

    Attributes:
        a: the config without the change.
        b: the config with the change.
        words: what was typed for each side, for people.
        metric: such as ``"val/psnr"``.
        mode: whether larger ("max") or smaller ("min") values of it are better.
        practical: a difference that is too small to matter; None if any matters.
        at: what the two sides have in common: the number of steps, the time, or the FLOPs.
        pairs: the most pairs.
        hours: the most hours of training; None for no limit.
    """

    a: config.Run
    b: config.Run
    words: tuple[str, str]
    metric: str
    mode: metrics.Mode
    practical: float | None = None
    at: At = "steps"
    pairs: int = 20
    hours: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns what determines the runs, as JSON has it: not how many pairs there are."""
        content = {
            "a": self.words[0],
            "b": self.words[1],
            "metric": self.metric,
            "at": self.at,
            "configs": [config.to_dict(self.a), config.to_dict(self.b)],
            "versions": versions.versions(),
        }
        as_json: dict[str, Any] = json.loads(json.dumps(content, default=str))
        return as_json


def asked(
    a: config.Run,
    b: config.Run,
    words: tuple[str, str],
    metric: str | None,
    practical: float | None,
    at: At,
    pairs: int,
    hours: float | None,
) -> Question:
    """Returns a question; see :class:`Question`.

    Raises:
        InputError: it has no answer.
    """
    if a.seed != b.seed:
        raise InputError(
            f"the sides of a pair share their seed, but side b has seed {b.seed}, and a {a.seed}: "
            "change other fields"
        )
    metric = metric or a.checkpoint.best_metric
    if metric is None:
        raise InputError(
            "checkpoint.best_metric is None: name what is compared with --metric, such as val/loss"
        )
    known = metrics.table({**metrics.added_by(a.model), **metrics.added_by(b.model)})
    mode = metrics.describe(metric, known).better or a.checkpoint.best_mode
    if mode is None or not metric.startswith("val/"):
        raise InputError(
            f"--metric {metric}: use a validation metric that is better when larger or smaller, "
            "such as val/loss"
        )
    for side, run in zip(SIDES, (a, b), strict=True):
        if run.loop.eval_every is None:
            raise InputError(
                f"side {side} has no validation: set --loop.eval_every, such as to its steps"
            )
        if at != "steps" and run.loop.steps is None:
            raise InputError(
                f"--at {at} needs the length of side {side} in steps: set --loop.steps N, and "
                "--loop.epochs None or --loop.tokens_per_param None"
            )
    return Question(
        a=a,
        b=b,
        words=words,
        metric=metric,
        mode=mode,
        practical=practical,
        at=at,
        pairs=pairs,
        hours=hours,
    )


def default_folder(question: Question) -> Path:
    """Returns the folder of a question, so that the same command continues there."""
    text = json.dumps(question.to_dict(), sort_keys=True)
    return ROOT / f"{question.a.name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two finished runs.

    Attributes:
        seed: of both.
        a: value of the metric.
        b: likewise.
        seconds: of both runs together.
        identical: whether they recorded the same, to the bit.
        directories: of the runs.
    """

    seed: int
    a: float
    b: float
    seconds: float
    identical: bool
    directories: tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The answer so far.

    Attributes:
        metric: that is compared.
        mode: which values of it are better.
        pairs: in order.
        interval: of b - a, in the units of the metric.
        verdict: about b.
        reason: one sentence.
        evidence: see :func:`jaxtrain.comparison.sequential.evidence`.
        pairs_needed: an estimate of the pairs in total; None if unknown.
        steps: of each side.
        directory: with ``compare.json`` and the report.
    """

    metric: str
    mode: metrics.Mode
    pairs: tuple[Pair, ...]
    interval: Interval
    verdict: Verdict
    reason: str
    evidence: float
    pairs_needed: int | None
    steps: tuple[int | None, int | None]
    directory: Path | None = None

    @property
    def seconds(self) -> float:
        """Returns the time of training of all pairs."""
        return sum(pair.seconds for pair in self.pairs)

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON has it: an endless interval has None for its end."""
        ends = {
            name: end if math.isfinite(end) else None
            for name, end in (("low", self.interval.low), ("high", self.interval.high))
        }
        mean = self.interval.mean
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "metric": self.metric,
            "better": self.mode,
            "difference": {"mean": mean if math.isfinite(mean) else None, **ends},
            "evidence": self.evidence,
            "pairs_needed": self.pairs_needed,
            "seconds": self.seconds,
            "steps": dict(zip(SIDES, self.steps, strict=True)),
            "pairs": [dataclasses.asdict(pair) for pair in self.pairs],
        }


def judged(
    pairs: Sequence[Pair],
    metric: str,
    mode: metrics.Mode,
    practical: float | None,
    steps: tuple[int | None, int | None] = (None, None),
    directory: Path | None = None,
) -> Comparison:
    """Judges pairs: the interval of their differences, and what follows from it.

    Raises:
        InputError: a value is NaN/Inf.
    """
    for pair in pairs:
        for side, value in zip(SIDES, (pair.a, pair.b), strict=True):
            if not math.isfinite(value):
                raise InputError(
                    f"{metric} of side {side} with seed {pair.seed} is {value}: this run has "
                    "diverged, and no mean of differences can include it; compare other settings"
                )
    differences = [pair.b - pair.a for pair in pairs]
    interval = sequential.interval(differences)
    verdict, reason = _verdict(pairs, interval, mode, practical)
    return Comparison(
        metric,
        mode,
        tuple(pairs),
        interval,
        verdict,
        reason,
        sequential.evidence(differences),
        sequential.pairs_needed(differences),
        steps,
        directory,
    )


def _verdict(
    pairs: Sequence[Pair], interval: Interval, mode: metrics.Mode, practical: float | None
) -> tuple[Verdict, str]:
    if pairs and all(pair.identical for pair in pairs):
        return "identical", "both sides have recorded the same values, to the bit"
    if interval.excludes(0.0):
        if (interval.low > 0) == (mode == "max"):
            return "better", "b is better: 0 is not in the interval"
        return "worse", "b is worse: 0 is not in the interval"
    if practical is not None and interval.is_within(practical):
        return "equivalent", f"the difference is smaller than --practical {practical:g}"
    return "undecided", "0 is in the interval"


class Experiment:
    """A comparison in a folder, which continues where it was interrupted.

    Args:
        question: what is asked.
        directory: with ``compare.json``.
        shared: folder of the runs; comparisons with the same one share equal runs.
        trainer: trains the runs.
        slots: from :func:`jaxtrain.comparison.runs.slots`.
        simulate_devices: as the flag of a run.
        measured: returns the cost of a step of each side, for a question at equal time or FLOPs.
        say: prints a line.
        written: called with the answer after each pair.

    Raises:
        InputError: the folder has the answer to another question.
    """

    def __init__(
        self,
        question: Question,
        directory: Path,
        shared: Path,
        trainer: runs.Trainer,
        slots: Sequence[str | None],
        simulate_devices: int | None,
        measured: Callable[[], tuple[float, float]],
        say: Say,
        written: Callable[[Comparison], None] = lambda answer: None,
    ) -> None:
        self._question, self._say, self._written = question, say, written
        self._directory, self._shared = directory, shared
        self._trainer = trainer
        self._simulate_devices = simulate_devices
        self._slots: SimpleQueue[str | None] = SimpleQueue()
        self._parallel = len(slots)
        for slot in slots:
            self._slots.put(slot)
        self._asked = question.to_dict()
        stored = self._stored()
        self._costs: list[float] | None = stored.get("costs")
        if question.at != "steps" and self._costs is None:
            self._costs = list(measured())
        self._sides = self._with_equal_costs()
        self.steps = (self._sides[0].loop.steps, self._sides[1].loop.steps)

    def _stored(self) -> dict[str, Any]:
        path = self._directory / NAME
        if not path.exists():
            return {}
        try:
            stored = atomic.read_json(path)
            asked = dict(stored["question"].items())
        except (ValueError, LookupError, AttributeError) as error:
            raise InputError(
                f"{path} was not written by a comparison: choose another --output-dir"
            ) from error
        if asked != self._asked:
            other = [name for name in self._asked if asked.get(name) != self._asked[name]]
            raise InputError(
                f"{path} is of another comparison (its {' and '.join(other)} differ): choose "
                "another --output-dir"
            )
        return stored

    def _with_equal_costs(self) -> tuple[config.Run, config.Run]:
        """Returns both configs; b with as many steps as cost what those of a cost."""
        a, b = self._question.a, self._question.b
        if self._costs is None:
            return a, b
        assert a.loop.steps is not None, "checked before"
        ratio = self._costs[0] / self._costs[1]
        steps = max(1, round(a.loop.steps * ratio))
        changes: dict[str, Any] = {"loop.steps": steps}
        if b.optim.warmup_steps:  # the schedule keeps its shape
            changes["optim.warmup_steps"] = max(1, round(b.optim.warmup_steps * ratio))
        return a, b.override(changes)

    def run(self) -> Comparison:
        """Trains pairs until there is a verdict, or the limits are reached.

        Raises:
            RunAgain: stopped, or a run had only temporary failures; the same command continues.
            InputError: a run cannot end well, or has diverged.
        """
        question, pairs = self._question, list[Pair]()
        answer = self._judged(pairs)
        for pair in self._pairs():
            pairs.append(pair)
            answer = self._judged(pairs)
            self._write(answer)
            self._written(answer)
            for line in self.described(answer):
                self._say(line)
            if answer.verdict not in ("undecided", "identical"):
                break
            if answer.verdict == "identical" and len(pairs) > 1:
                break
            if question.hours is not None and answer.seconds / 3600 >= question.hours:
                self._say(f"--hours {question.hours:g} are over")
                break
        return answer

    def _judged(self, pairs: Sequence[Pair]) -> Comparison:
        question = self._question
        return judged(
            pairs, question.metric, question.mode, question.practical, self.steps, self._directory
        )

    def _pairs(self) -> Iterator[Pair]:
        """Yields the pairs in order; trains as many runs beside each other as there are devices."""
        with futures.ThreadPoolExecutor(self._parallel) as pool:
            ahead: list[tuple[int, list[futures.Future[Path]]]] = []
            try:
                for number in range(self._question.pairs):
                    ahead.append(
                        (number, [pool.submit(self._trained, number, side) for side in (0, 1)])
                    )
                    # One pair more than fits, so that no device waits for the slower side.
                    if 2 * len(ahead) > self._parallel + (self._parallel > 1):
                        yield self._finished(*ahead.pop(0))
                while ahead:
                    yield self._finished(*ahead.pop(0))
            finally:  # also at a verdict, which closes this generator
                self._trainer.stop()
                for _, trained in ahead:
                    for future in trained:
                        future.cancel()

    def _trained(self, number: int, side: int) -> Path:
        """Trains a run of a pair, unless it is done; returns its directory."""
        base = self._sides[side]
        run = base.override({"seed": base.seed + number})
        directory = runs.folder_of(run, self._shared, self._simulate_devices)
        other = self._sides[0].override({"seed": self._sides[0].seed + number})
        if side and runs.folder_of(other, self._shared, self._simulate_devices) == directory:
            directory = directory.with_name(f"{directory.name}-again")
        if not runs.is_done(directory):
            slot = self._slots.get()
            try:
                self._trainer.train(run, directory, slot)
            except runs.Failed as error:
                raise InputError(
                    f"side {SIDES[side]} of pair {number + 1} (seed {run.seed}) {error}"
                ) from None
            finally:
                self._slots.put(slot)
        return directory

    def _finished(self, number: int, trained: Sequence[futures.Future[Path]]) -> Pair:
        done, _ = futures.wait(trained, return_when=futures.FIRST_EXCEPTION)
        for future in done:
            if error := future.exception():
                self._trainer.stop()
                raise error
        directories = [future.result() for future in trained]
        a, b = (runs.read(directory, self._question.metric) for directory in directories)
        return Pair(
            self._sides[0].seed + number,
            a.value,
            b.value,
            a.seconds + b.seconds,
            runs.are_identical(*directories),
            (str(directories[0]), str(directories[1])),
        )

    def _write(self, answer: Comparison) -> None:
        content = {
            "question": self._asked,
            "costs": self._costs,
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **answer.to_dict(),
        }
        self._directory.mkdir(parents=True, exist_ok=True)
        atomic.write_whole(self._directory / NAME, json.dumps(content, indent=1) + "\n")

    def described(self, answer: Comparison) -> list[str]:
        """Returns the lines after a pair."""
        last, count = answer.pairs[-1], len(answer.pairs)
        lines = [
            f"pair {count} of at most {self._question.pairs} (seed {last.seed}): a {last.a:.6g}, "
            f"b {last.b:.6g}, difference {last.b - last.a:+.4g}"
        ]
        lines.append("  " + summary(answer))
        if answer.verdict == "undecided":
            lines.append("  " + _still_needed(answer, self._question.pairs))
        return lines


def summary(answer: Comparison) -> str:
    """Returns the answer in one line."""
    return (
        f"b - a: {answer.interval.mean:+.4g} (95% at every look: {ends(answer.interval)}); "
        f"{answer.verdict}: {answer.reason}; {hours(answer.seconds)} of training"
    )


def _still_needed(answer: Comparison, most: int) -> str:
    count = len(answer.pairs)
    if count < 6:
        return "no verdict is possible before the sixth pair"
    if answer.pairs_needed is None:
        return "the differences so far point in no direction"
    more = max(answer.pairs_needed - count, 1)
    each = answer.seconds / count
    beyond = f", more than --pairs {most}" if answer.pairs_needed > most else ""
    return (
        f"a verdict may take about {more} more {'pair' if more == 1 else 'pairs'}{beyond} "
        f"({hours(more * each)}), if they are like these"
    )


def ends(interval: Interval) -> str:
    """Returns both ends of an interval."""
    low, high = (
        f"{end:+.4g}" if math.isfinite(end) else "no limit" for end in (interval.low, interval.high)
    )
    return f"{low} to {high}"


def hours(seconds: float) -> str:
    """Returns a duration in minutes or hours."""
    if seconds < 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def of_existing(
    directories: Sequence[tuple[Path, Path]],
    metric: str | None,
    mode: metrics.Mode | None,
    practical: float | None,
) -> Comparison:
    """Compares runs that exist, in the order given.

    Args:
        directories: of the runs of each pair.
        metric: None takes ``checkpoint.best_metric`` of the first run.
        mode: which values are better; None takes that of the table of metrics.
        practical: see :class:`Question`.

    Raises:
        InputError: a run is not done, lacks the metric, or the seeds of a pair differ.
    """
    from jaxtrain.reporting import run_files

    pairs = []
    for run_a, run_b in directories:
        read = [run_files.read(directory, directory.name) for directory in (run_a, run_b)]
        seeds = [run.config.get("seed") for run in read]
        if seeds[0] != seeds[1]:
            raise InputError(
                f"{run_a} and {run_b} do not form a pair: their seeds are {seeds[0]} and "
                f"{seeds[1]}, so their data differ, too; pair runs with equal seeds"
            )
        metric = metric or read[0].config.get("checkpoint", {}).get("best_metric")
        if metric is None:
            raise InputError(f"{run_a} has no checkpoint.best_metric: name a metric with --metric")
        mode = mode or metrics.describe(metric, read[0].metrics).better
        if mode is None:
            raise InputError(f"--metric {metric}: neither larger nor smaller values are better")
        a, b = runs.read(run_a, metric), runs.read(run_b, metric)
        pairs.append(
            Pair(
                int(seeds[0] or 0),
                a.value,
                b.value,
                a.seconds + b.seconds,
                runs.are_identical(run_a, run_b),
                (str(run_a), str(run_b)),
            )
        )
    assert metric is not None, "there is a pair"
    assert mode is not None, "there is a pair"
    return judged(pairs, metric, mode, practical)
