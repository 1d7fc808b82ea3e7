"""Decides when to save which checkpoint, and the metadata stored with it.

The metadata identifies the run: the fingerprint of the data, the config, the versions, the step,
the examples seen, and the best validation so far.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from jaxtrain import config, terminal, versions
from jaxtrain.checkpoint import saver
from jaxtrain.config.run_length import Position
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.training.state import State, saved_part

# A run stops after this many failed saves in a row, so that at most this many intervals of
# checkpoint.every are lost.
FAILURES_IN_A_ROW = 3
# The last save is retried, because no other one follows.
LAST_TRIES, BETWEEN_TRIES_S = 3, 5.0


@dataclasses.dataclass(frozen=True)
class Best:
    """The best validation so far.

    Attributes:
        metric: ``checkpoint.best_metric`` at that time.
        mode: "max" if larger values of it are better, or "min".
        value: of that metric.
        step: completed steps of the validated state.
        validations_since: the number of later validations without improvement.
    """

    metric: str
    mode: str
    value: float
    step: int
    validations_since: int = 0

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Self:
        """Reads the stored form; ignores unknown fields."""
        return cls(**{field.name: saved[field.name] for field in dataclasses.fields(cls)})


@dataclasses.dataclass
class RunMeta:
    """The metadata of each checkpoint of a run; the :class:`Saver` updates it.

    Attributes:
        fingerprint: of the training data.
        validation: digest of what validates: the examples, and how many of them; "" without any.
        config: every field.
        versions: of jaxtrain and its dependencies.
        best: the best validation so far; None before the first.
        evaluation_due: whether a stop interrupted the validation of this state; a resumed run
            begins with it.
        constants: part of the model -> SHA-256 of the values that it reads from files, which
            checkpoints lack.
    """

    fingerprint: str
    validation: str
    config: dict[str, Any]
    versions: dict[str, Any]
    best: Best | None = None
    evaluation_due: bool = False
    constants: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns a dictionary that can be written as JSON."""
        return dataclasses.asdict(self)


def describe(run: config.Run, fingerprint: str, validation: str = "") -> RunMeta:
    """Returns the metadata of a new run."""
    return RunMeta(fingerprint, validation, config.to_dict(run), versions.versions())


def patience_over(settings: config.Loop, meta: RunMeta) -> bool:
    """Returns whether early stopping ends the run."""
    patience, best = settings.early_stop_patience, meta.best
    return patience is not None and best is not None and best.validations_since >= patience


class Saver:
    """Saves checkpoints, keeps the best one, and counts validations without improvement.

    A save that fails, for example on a full disk, does not end the run: the next one may succeed.
    Three failures in a row end it, and so does a failure of the last save.

    Args:
        run: the config.
        checkpoints: writes the checkpoints.
        meta: their metadata.
        say: prints a line when a save fails.
        saved: called each time a checkpoint is complete.
        constants: extras that are not saved.

    Attributes:
        meta: the metadata, updated.
    """

    def __init__(
        self,
        run: config.Run,
        checkpoints: saver.Checkpoints,
        meta: RunMeta,
        say: Callable[[str], None] = terminal.out,
        saved: Callable[[], None] = lambda: None,
        constants: Collection[str] = (),
    ) -> None:
        self._metric = run.checkpoint.best_metric
        self._mode = config.best_mode(run)
        self._checkpoints = checkpoints
        self.meta = meta
        self._say = say
        self._saved = saved
        self._constants = constants
        self._failures = 0  # in a row
        self._started = False  # a save whose result was not checked yet
        self._best_kept = meta.best  # the newest on the disk
        self._best_started: Best | None = None  # of the save whose result was not checked yet
        self._best_at: Position | None = None  # position of the best state of this start

    def judge(self, position: Position, values: dict[str, float]) -> bool:
        """Compares a validation with the best so far; returns whether its state is the best."""
        best = self.meta.best
        if self._metric is None or self._mode is None:
            return False
        value = values[self._metric]
        sign = 1 if self._mode == "max" else -1
        if not math.isfinite(value) or (best and sign * value <= sign * best.value):
            if best:
                more = best.validations_since + 1
                self.meta.best = dataclasses.replace(best, validations_since=more)
            return False
        if best and self._best_kept and best.step == self._best_kept.step:
            self._best_kept = best
        self.meta.best = Best(self._metric, self._mode, value, position.done)
        self._best_at = position
        return True

    def save(
        self, position: Position, state: State, *, regular: bool = True, best: bool = False
    ) -> None:
        """Saves a state; returns once it is copied to the host.

        Args:
            position: of the run.
            state: at that position.
            regular: whether to save it as the newest checkpoint.
            best: whether to save it as the best checkpoint.

        Raises:
            RunAgain: too many saves in a row have failed.
        """
        for part in (self.settle, lambda: self._start(position, state, regular, best)):
            failure = part()
            if failure and self._failures >= FAILURES_IN_A_ROW:
                raise _save_failed(f"{self._failures} saves in a row have failed", failure)

    def finish(self, position: Position, state: State) -> None:
        """Saves the last state and waits until it is complete; retries if that fails.

        Raises:
            RunAgain: the state cannot be saved.
        """
        judged = self.meta.best
        # Not by step: after a rollback, another state may have the same step as the best one.
        best = judged is not None and self._best_at == position
        self.settle()
        for tries_left in reversed(range(LAST_TRIES)):
            if best:
                self.meta.best = judged  # a failed try may have reset it
            failure = self._start(position, state, regular=True, best=best) or self.settle()
            if failure is None:
                return
            if not tries_left:
                raise _save_failed("the last state is not saved", failure)
            self._say(f"retrying the last save in {BETWEEN_TRIES_S:g} s")
            time.sleep(BETWEEN_TRIES_S)

    def forget_after(self, step: int) -> None:
        """Ignores checkpoints of later steps, after a rollback."""
        self._checkpoints.forget_after(step)

    def _start(
        self, position: Position, state: State, regular: bool, best: bool
    ) -> saver.SaveFailed | None:
        """Begins a save; returns the failure if it fails at once."""
        meta = self.meta.to_dict() | position.to_meta()
        state = saved_part(state, self._constants)
        try:
            if regular:
                self._checkpoints.save(state, meta, best=best)
            elif best:
                self._checkpoints.save_best(state, meta)
        except saver.SaveFailed as failure:
            return self._failed(failure)
        self._started = True
        self._best_started = self.meta.best if best else None
        return None

    def settle(self) -> saver.SaveFailed | None:
        """Waits for the current save; returns its failure, which was reported."""
        if not self._started:
            return None
        self._started = False
        try:
            self._checkpoints.wait()
        except saver.BestNotKept as failure:
            self._reset_best(failure.target)
        except saver.SaveFailed as failure:
            return self._failed(failure)
        else:
            self._best_kept = self._best_started or self._best_kept
        self._failures = 0
        self._saved()
        return None

    def _failed(self, failure: saver.SaveFailed) -> saver.SaveFailed:
        self._failures += 1
        self._reset_best(failure.target)
        if not failure.said:
            self._say(f"warning: {failure}")
        return failure

    def _reset_best(self, target: Path) -> None:
        """Restores the previous best, because the checkpoint of the new one was not written."""
        best = self.meta.best
        if best is not None and target.name == str(best.step):
            self.meta.best = self._best_kept


def _save_failed(what: str, failure: saver.SaveFailed) -> RunAgain:
    return RunAgain(f"{what}: {failure}; then resume with --resume latest")


def check_best_metric(settings: config.Checkpoint, names: Iterable[str]) -> None:
    """Checks that ``checkpoint.best_metric`` is a metric of the validation.

    Raises:
        InputError: it is not; lists the metrics.
    """
    if settings.best_metric is not None and settings.best_metric not in names:
        raise InputError(
            f"checkpoint.best_metric={settings.best_metric} is not a metric of this model's "
            f"validation: set --checkpoint.best_metric to one of {', '.join(sorted(names))}"
        )
