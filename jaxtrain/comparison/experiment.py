"""Compares a config with changes of it by pairs of runs, until intervals answer the question.

The two runs of a pair have the same seed, and so the same order of the data, the same randomness in
each step, and, where the change leaves all parameters as they are, the same initial ones. What the
runs share cancels out in their difference; seeds vary between pairs. After each pair,
:mod:`jaxtrain.comparison.sequential` says which differences are still possible.

Several changes share the runs of the baseline. Each has an interval of its own, at the level
divided by their number: so the probability of *any* false verdict of a difference stays 5%.
"""

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

from jaxtrain import config, formats
from jaxtrain.comparison import runs, sequential
from jaxtrain.comparison.identities import FOLDER, Identities
from jaxtrain.comparison.sequential import Interval
from jaxtrain.comparison.side import At, Facts, Side
from jaxtrain.config import field_values, metrics
from jaxtrain.errors import InputError
from jaxtrain.storage import atomic
from jaxtrain.terminal import Say

NAME = "compare.json"
ROOT = Path("output/compare")

Verdict = Literal["better", "worse", "equivalent", "identical", "undecided", "diverged"]
VERDICTS: dict[Verdict, int] = {
    "better": 0,
    "equivalent": 20,
    "identical": 21,
    "undecided": 22,
    "worse": 23,
    "diverged": 24,
}
"""Verdict -> exit code of ``compare``; with several changes, the first of these that one has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked.

    Attributes:
        sides: the config without a change, then with each change.
        metric: such as ``"val/psnr"``; None takes ``checkpoint.best_metric``.
        practical: a difference that is too small to matter; None if any matters.
        fit_s: seconds of training into which the steps of each side fit; None keeps the steps.
        pairs: the most pairs.
        hours: the most hours of training; None for no limit.
    """

    sides: tuple[Side, ...]
    metric: str | None = None
    practical: float | None = None
    at: At = "steps"
    fit_s: float | None = None
    pairs: int = 20
    hours: float | None = None
    keep_checkpoints: bool = False
    simulate_devices: int | None = None

    def __post_init__(self) -> None:
        """Checks that one of both sets the steps."""
        if self.fit_s is not None and self.at != "steps":
            raise InputError(f"--at {self.at} and --fit-time both set the steps: omit one")

    def to_dict(self) -> dict[str, Any]:
        """Returns what is asked, as JSON has it: not how many pairs there are."""
        return {
            "sides": [
                {
                    "words": side.description,
                    "config": side.config,
                    "overrides": list(side.overrides),
                    "code": None if side.code is None else side.code.commit,
                }
                for side in self.sides
            ],
            "metric": self.metric,
            "at": self.at,
            "fit_s": self.fit_s,
            "simulate_devices": self.simulate_devices,
        }

    @property
    def labels(self) -> tuple[str, ...]:
        """Returns the names of the sides: a and b, or a, b1, b2 and so on."""
        if len(self.sides) == 2:
            return "a", "b"
        return ("a", *(f"b{number}" for number in range(1, len(self.sides))))

    @property
    def level(self) -> float:
        """Returns the probability of a false verdict of a difference, for each change."""
        return sequential.LEVEL / (len(self.sides) - 1)


def seconds(duration: str) -> float:
    """Returns the seconds of ``--fit-time``, such as ``"90s"``, ``"5m"`` or ``"1.5h"``."""
    value_s = field_values.duration_s(duration)
    if value_s is None:
        raise InputError(f"--fit-time {duration}: use a duration such as 90s, 5m, or 1.5h")
    return value_s


def default_folder(question: Question) -> Path:
    """Returns the folder of a question, so that the same command continues there."""
    text = json.dumps(question.to_dict(), sort_keys=True)
    name = Path(question.sides[0].config).stem
    return ROOT / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:10]}"


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two runs that have ended.

    Attributes:
        a: value of the metric; None if the run diverged.
        b: likewise.
        diverged: how each run did; "" if it did not.
    """

    seed: int
    a: float | None
    b: float | None
    seconds: float
    identical: bool
    directories: tuple[str, str]
    diverged: tuple[str, str] = ("", "")

    @classmethod
    def of(cls, seed: int, a: runs.Result, b: runs.Result) -> "Pair":
        """Returns the pair of two results."""
        return cls(
            seed,
            a.value,
            b.value,
            a.seconds + b.seconds,
            not a.diverged and not b.diverged and runs.are_identical(a.directory, b.directory),
            (str(a.directory), str(b.directory)),
            (a.diverged, b.diverged),
        )

    @property
    def difference(self) -> float | None:
        """Returns b - a; None if a run diverged."""
        return None if self.a is None or self.b is None else self.b - self.a


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The answer about one change so far.

    Attributes:
        level: probability that the interval ever misses the center.
        pairs_needed: an estimate of the pairs in total; None if unknown.
    """

    change: str
    metric: str
    mode: metrics.Mode
    level: float
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
        return math.fsum(pair.seconds for pair in self.pairs)

    @property
    def warnings(self) -> list[str]:
        """Returns what makes the interval doubtful, one sentence each."""
        if self.interval.symmetric:
            return []
        interval, mean = self.interval, self.interval.mean
        outside = "" if interval.low <= mean <= interval.high else f"; their mean is {mean:+.4g}"
        return [
            f"the differences do not look symmetric{outside}: the interval is for their center, "
            "and says which side is better in most pairs, not which is better on average"
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON has it: NaN/Inf, such as an endless interval's end, is None."""

        def finite(value: float) -> float | None:
            return value if math.isfinite(value) else None

        interval = self.interval
        return {
            "change": self.change,
            "verdict": self.verdict,
            "reason": self.reason,
            "warnings": self.warnings,
            "difference": {
                "center": finite(interval.center),
                "mean": finite(interval.mean),
                "low": finite(interval.low),
                "high": finite(interval.high),
            },
            "evidence": self.evidence,
            "pairs_needed": self.pairs_needed,
            "seconds": self.seconds,
            "steps": {"a": self.steps[0], "b": self.steps[1]},
            "diverged": {
                "a": sum(bool(pair.diverged[0]) for pair in self.pairs),
                "b": sum(bool(pair.diverged[1]) for pair in self.pairs),
            },
            "pairs": [dataclasses.asdict(pair) for pair in self.pairs],
        }


def judge(
    pairs: Sequence[Pair],
    metric: str,
    mode: metrics.Mode,
    practical: float | None,
    steps: tuple[int | None, int | None] = (None, None),
    directory: Path | None = None,
    level: float = sequential.LEVEL,
    change: str = "",
) -> Comparison:
    """Judges pairs: the interval of their differences, and what follows from it."""
    differences = [pair.difference for pair in pairs if pair.difference is not None]
    interval = sequential.interval(differences, level)
    verdict, reason = _verdict(pairs, interval, mode, practical)
    return Comparison(
        change,
        metric,
        mode,
        level,
        tuple(pairs),
        interval,
        verdict,
        reason,
        sequential.evidence(differences),
        sequential.pairs_needed(differences, level),
        steps,
        directory,
    )


def _verdict(
    pairs: Sequence[Pair], interval: Interval, mode: metrics.Mode, practical: float | None
) -> tuple[Verdict, str]:
    diverged = [[pair for pair in pairs if pair.diverged[side]] for side in (0, 1)]
    if any(diverged):
        side = 1 if diverged[1] else 0
        first = diverged[side][0]
        return "diverged", (
            f"{'ab'[side]} diverged in {len(diverged[side])} of {len(pairs)} runs, "
            f"{'ba'[side]} in {len(diverged[1 - side])} (seed {first.seed}: "
            f"{first.diverged[side]})"
        )
    if pairs and all(pair.identical for pair in pairs):
        return "identical", "both sides have recorded the same values, to the bit"
    if practical is not None and interval.is_within(practical):
        return "equivalent", f"the difference is smaller than --practical {practical:g}"
    if interval.excludes(0.0):
        if (interval.low > 0) == (mode == "max"):
            return "better", "b is better: 0 is not in the interval"
        return "worse", "b is worse: 0 is not in the interval"
    return "undecided", "0 is in the interval"


def _is_final(answer: Comparison) -> bool:
    if answer.verdict == "identical":
        return len(answer.pairs) > 1
    return answer.verdict != "undecided"


class Experiment:
    """A comparison in a folder, which continues where it was interrupted."""

    def __init__(
        self,
        question: Question,
        directory: Path,
        shared: Path,
        trainer: runs.Trainer,
        slots: Sequence[str | None],
        say: Say,
    ) -> None:
        self._question, self._say = question, say
        self._directory, self._shared = directory, shared
        self._trainer = trainer
        self._known = Identities(shared / FOLDER)
        self._slots: SimpleQueue[str | None] = SimpleQueue()
        self._parallel = len(slots)
        for slot in slots:
            self._slots.put(slot)
        self._question_dict = question.to_dict()
        self._check_stored()
        self._facts: list[Facts] = []
        self._starts_s: list[float] = []
        self._answers: list[Comparison] = []
        self._seconds = 0.0

    def _check_stored(self) -> None:
        path = self._directory / NAME
        if not path.exists():
            return
        try:
            stored = dict(atomic.read_json(path)["question"].items())
        except (ValueError, LookupError, AttributeError) as error:
            raise InputError(
                f"{path} was not written by a comparison: choose another --output-dir"
            ) from error
        if stored != self._question_dict:
            other = [
                name
                for name in self._question_dict
                if stored.get(name) != self._question_dict[name]
            ]
            raise InputError(
                f"{path} is of another comparison (its {' and '.join(other)} differ): choose "
                "another --output-dir"
            )

    def run(self) -> list[Comparison]:
        """Trains pairs until each change has a verdict, or the limits are reached.

        Raises:
            RunAgain: stopped, or a run had only temporary failures; the same command continues.
        """
        question = self._question
        fewest = sequential.fewest_pairs(question.level)
        if question.pairs < fewest:
            self._say(
                f"warning: --pairs {question.pairs} cannot show that a side is better: no verdict "
                f"of a difference is possible before pair {fewest}"
            )
        for side, label in zip(question.sides, question.labels, strict=True):
            self._say(f"{label}: {side.description}")
        for side, label in zip(question.sides, question.labels, strict=True):
            began = time.monotonic()
            self._facts.append(self._examined(side, label))
            self._starts_s.append(time.monotonic() - began)
        self._say(self._cost())
        pairs: list[list[Pair]] = [[] for _ in question.sides[1:]]
        self._answers = [self._judge(change, pairs[change]) for change in range(len(pairs))]
        for seed, results in self._rounds():
            self._seconds += math.fsum(result.seconds for result in results.values())
            for change in self._open():
                pairs[change].append(Pair.of(seed, results[0], results[change + 1]))
                self._answers[change] = self._judge(change, pairs[change])
                for line in self.described(change):
                    self._say(line)
            self._directory.mkdir(parents=True, exist_ok=True)
            atomic.write_json(self._directory / NAME, self.to_dict())
            if not question.keep_checkpoints:
                for result in results.values():
                    if not result.diverged:  # find-nan needs those
                        runs.delete_checkpoints(result.directory)
            if not self._open():
                break
            if question.hours is not None and self._seconds / 3600 >= question.hours:
                self._say(f"--hours {question.hours:g} are over")
                break
        return self._answers

    def _open(self) -> list[int]:
        return [number for number, answer in enumerate(self._answers) if not _is_final(answer)]

    def _examined(self, side: Side, label: str) -> Facts:
        """Finds the facts of a side, and says what has changed since an earlier comparison."""
        first = self._facts[0] if self._facts else None
        facts = self._trainer.examine(
            side,
            label,
            metric=self._question.metric or (first.metric if first else None),
            flops=first.flops if first and self._question.at == "flops" else None,
            fit_s=self._question.fit_s,
            known=str(self._known.folder),
        )
        if changed := self._known.changed(facts.identity, facts.parts):
            self._say(
                f"side {label}: {', '.join(changed)} changed since an earlier comparison of this "
                "config, whose runs are not used"
            )
        return facts

    def _cost(self) -> str:
        """Returns what the comparison costs at least and at most, by the measured steps."""
        question = self._question
        # A start imports, opens the data, and traces the step, as the examination did.
        each = [
            facts.steps * facts.step_s + start_s
            for facts, start_s in zip(self._facts, self._starts_s, strict=True)
        ]
        fewest = min(question.pairs, sequential.fewest_pairs(question.level))
        sides = ", ".join(
            f"{label} {facts.steps:,} steps of {facts.step_s * 1e3:.4g} ms"
            for label, facts in zip(question.labels, self._facts, strict=True)
        )
        beside = f", {self._parallel} runs at a time" if self._parallel > 1 else ""
        costs = [
            f"{hours(math.fsum(each) * pairs / self._parallel)} for "
            + formats.counted(pairs, "pair")
            for pairs in sorted({fewest, question.pairs})
        ]
        return (
            f"{sides}: about {', '.join(costs)}{beside}, with starts, without validations and saves"
        )

    def _judge(self, change: int, pairs: Sequence[Pair]) -> Comparison:
        question, a, b = self._question, self._facts[0], self._facts[change + 1]
        return judge(
            pairs,
            a.metric,
            a.mode,
            question.practical,
            (a.steps, b.steps),
            self._directory,
            question.level,
            question.sides[change + 1].description,
        )

    def _rounds(self) -> Iterator[tuple[int, dict[int, runs.Result]]]:
        """Yields the seed and the results of each pair, by side.

        It trains as many runs beside each other as there are devices for them.
        """
        Waiting = dict[int, "futures.Future[runs.Result]"]
        with futures.ThreadPoolExecutor(self._parallel) as pool:
            ahead: list[tuple[int, Waiting]] = []
            try:
                for seed in range(self._facts[0].seed, self._facts[0].seed + self._question.pairs):
                    sides = [0, *(change + 1 for change in self._open())]
                    ahead.append(
                        (seed, {side: pool.submit(self._trained, seed, side) for side in sides})
                    )
                    # One pair more than fits, so that no device waits for the slower side.
                    waiting = sum(len(submitted) for _, submitted in ahead)
                    if waiting > self._parallel + (self._parallel > 1):
                        yield self._finished(*ahead.pop(0))
                while ahead:
                    yield self._finished(*ahead.pop(0))
            finally:  # also at a verdict, which closes this generator
                self._trainer.stop()
                for _, submitted in ahead:
                    for future in submitted.values():
                        future.cancel()

    def _trained(self, seed: int, side: int) -> runs.Result:
        """Trains a run of a pair, unless it has ended, and returns its result."""
        facts, label = self._facts[side], self._question.labels[side]
        directory = runs.folder_of(facts, seed, self._shared)
        if side and facts.identity == self._facts[0].identity:
            directory = directory.with_name(f"{directory.name}-again")
        codes = self._known.codes(facts.identity)
        if not runs.is_of(directory, facts.data, codes):
            self._say(f"{directory.name} was trained by other code or data: it is deleted")
            runs.discard(directory)
        if not runs.has_ended(directory):
            slot = self._slots.get()
            try:
                self._trainer.train(self._question.sides[side], facts, seed, directory, slot, label)
            except runs.Failed as error:
                raise InputError(f"side {label} with seed {seed}: {error}") from None
            finally:
                self._slots.put(slot)
            self._check_trained(side, label, directory)
        return runs.read(directory, facts.metric)

    def _check_trained(self, side: int, label: str, directory: Path) -> None:
        """Checks that a run has the identity of its side, although code may have been edited."""
        facts = self._facts[side]
        if runs.is_of(directory, facts.data, self._known.codes(facts.identity)):
            return
        now = self._examined(self._question.sides[side], label)
        codes = self._known.codes(facts.identity)
        if now.identity != facts.identity or not runs.is_of(directory, facts.data, codes):
            changed = [name for name in now.parts if now.parts[name] != facts.parts[name]]
            raise InputError(
                f"{', '.join(changed) or 'the code'} changed while side {label} was compared, so "
                f"{directory.name} does not count: repeat the command to compare what is there now"
            )

    def _finished(
        self, seed: int, submitted: "dict[int, futures.Future[runs.Result]]"
    ) -> tuple[int, dict[int, runs.Result]]:
        done, _ = futures.wait(submitted.values(), return_when=futures.FIRST_EXCEPTION)
        for future in done:
            if error := future.exception():
                self._trainer.stop()
                raise error
        return seed, {side: future.result() for side, future in submitted.items()}

    def to_dict(self) -> dict[str, Any]:
        """Returns all answers, as JSON has them; docs/guides/compare-in-a-loop.md describes it."""
        first = self._facts[0]
        return {
            "question": self._question_dict,
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "metric": first.metric,
            "better": first.mode,
            "level": self._question.level,
            "seconds": self._seconds,
            "identities": {
                label: facts.identity
                for label, facts in zip(self._question.labels, self._facts, strict=True)
            },
            "answers": [answer.to_dict() for answer in self._answers],
        }

    def described(self, change: int) -> list[str]:
        """Returns the lines about a change after a pair."""
        answer, label = self._answers[change], self._question.labels[change + 1]
        last, count = answer.pairs[-1], len(answer.pairs)
        a, b = ("diverged" if value is None else f"{value:.6g}" for value in (last.a, last.b))
        difference = "" if last.difference is None else f", difference {last.difference:+.4g}"
        lines = [
            f"pair {count} of at most {self._question.pairs} (seed {last.seed}): a {a}, "
            f"{label} {b}{difference}"
        ]
        lines.append("  " + summary(answer, label))
        lines += [f"  warning: {warning}" for warning in answer.warnings]
        if answer.verdict == "undecided":
            lines.append("  " + _still_needed(answer, self._question.pairs))
        return lines


def summary(answer: Comparison, label: str = "b") -> str:
    """Returns the answer about a side in one line."""
    return (
        f"{label} - a: {answer.interval.center:+.4g} ({coverage(answer.level)} at every look: "
        f"{ends(answer.interval)}); {answer.verdict}: {answer.reason}; {hours(answer.seconds)} of "
        "training"
    )


def coverage(level: float) -> str:
    """Returns the probability of an interval in percent, such as ``95%`` or ``99.5%``."""
    return f"{100 * (1 - level):.4g}%"


def _still_needed(answer: Comparison, max_pairs: int) -> str:
    count, fewest = len(answer.pairs), sequential.fewest_pairs(answer.level)
    if count < fewest:
        return f"no verdict of a difference is possible before pair {fewest}"
    if answer.pairs_needed is None:
        return "the differences so far point in no direction"
    more = max(answer.pairs_needed - count, 1)
    each = answer.seconds / count
    beyond = f", more than --pairs {max_pairs}" if answer.pairs_needed > max_pairs else ""
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
    directories: Sequence[tuple[Path, Path]], metric: str | None, practical: float | None
) -> Comparison:
    """Compares runs that exist, in the order given.

    Args:
        metric: None takes ``checkpoint.best_metric`` of the first run.
    """
    from jaxtrain.reporting import run_files

    pairs: list[Pair] = []
    sides: tuple[dict[str, Any], ...] = ()
    for paths in directories:
        read = [run_files.read(directory, directory.name) for directory in paths]
        seeds = [run.config.get("seed") for run in read]
        if seeds[0] != seeds[1]:
            raise InputError(
                f"{paths[0]} and {paths[1]} do not form a pair: their seeds are {seeds[0]} and "
                f"{seeds[1]}, so their data differ, too; pair runs with equal seeds"
            )
        if seeds[0] in [pair.seed for pair in pairs]:
            raise InputError(
                f"{paths[0]} has seed {seeds[0]}, as a pair before it, and a repeated run adds "
                "nothing; each pair needs a seed of its own (--seed)"
            )
        if not sides:
            sides = tuple(dict(run.config) for run in read)
        for side, first, run in zip("ab", sides, read, strict=True):
            different = config.differences(
                {**first, "seed": None, "name": None}, {**run.config, "seed": None, "name": None}
            )
            if different:
                raise InputError(
                    f"{run.directory} is not of the same config as the first run of side {side} "
                    f"({'; '.join(different[:3])}): the runs of a side differ in their seed alone"
                )
        metric = metric or read[0].config.get("checkpoint", {}).get("best_metric")
        if metric is None:
            raise InputError(f"{paths[0]} has no checkpoint.best_metric: name one with --metric")
        mode = metrics.describe(metric, read[0].metrics).better
        if mode is None:
            raise InputError(f"--metric {metric}: neither larger nor smaller values are better")
        a, b = (runs.read(path, metric) for path in paths)
        pairs.append(Pair.of(int(seeds[0] or 0), a, b))
    assert metric is not None, "there is a pair"
    assert mode is not None, "there is a pair"
    return judge(pairs, metric, mode, practical)
