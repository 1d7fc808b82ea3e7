"""What is saved when, and what is said beside the state.

Beside a state stands what says which run it belongs to: the fingerprint of the data, the config,
the versions, the step, the examples seen, and the best validation so far.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from jaxtrain import config, terminal, versions
from jaxtrain.checkpoint import saver
from jaxtrain.config.run_length import Position
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.training.state import State

# A run that cannot save is stopped before it loses more than this many times checkpoint.every.
FAILURES_IN_A_ROW = 3
# The last save cannot wait for the next one: so many tries, so far apart.
LAST_TRIES, BETWEEN_TRIES_S = 3, 5.0


@dataclasses.dataclass(frozen=True)
class Best:
    """The best validation so far.

    Attributes:
        metric, mode: ``checkpoint.best_metric`` and ``checkpoint.best_mode`` then.
        value: of that metric.
        step: completed steps of the state that was validated.
        validations_since: that brought nothing better.
    """

    metric: str
    mode: str
    value: float
    step: int
    validations_since: int = 0

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Self:
        """As it is stored beside a state; fields that this version does not know are ignored."""
        return cls(**{field.name: saved[field.name] for field in dataclasses.fields(cls)})


@dataclasses.dataclass
class RunMeta:
    """What is stored beside each state of a run; the :class:`Saver` keeps it up to date.

    Attributes:
        fingerprint: of the training data.
        config: every field.
        versions: of jaxtrain and its dependencies.
        best: the best validation so far; None before the first.
        evaluation_due: whether the validation of this state is still to come, because a stop
            interrupted it: a resume begins with it.
    """

    fingerprint: str
    config: dict[str, Any]
    versions: dict[str, Any]
    best: Best | None = None
    evaluation_due: bool = False

    def to_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return dataclasses.asdict(self)


def describe(run: config.Run, fingerprint: str) -> RunMeta:
    """What is stored beside the states of a run, at its beginning."""
    return RunMeta(fingerprint, config.to_dict(run), versions.versions())


def patience_over(settings: config.Loop, meta: RunMeta) -> bool:
    """Whether so many validations brought nothing better that the run should end."""
    patience, best = settings.early_stop_patience, meta.best
    return patience is not None and best is not None and best.validations_since >= patience


class Saver:
    """Saves at cadence, keeps the best apart, and counts validations without improvement.

    A save that fails, as on a full disk, does not end the run: the next one may work. Three in a
    row do, and so does the last one of the run.

    Args:
        run: the config.
        checkpoints: writes them.
        meta: what is stored beside each state.
        say: takes a line when a save fails.
        saved: called each time a checkpoint is complete.

    Attributes:
        meta: the same, up to date.
    """

    def __init__(
        self,
        run: config.Run,
        checkpoints: saver.Checkpoints,
        meta: RunMeta,
        say: Callable[[str], None] = terminal.out,
        saved: Callable[[], None] = lambda: None,
    ) -> None:
        self._run = run
        self._checkpoints = checkpoints
        self.meta = meta
        self._say = say
        self._saved = saved
        self._failures = 0  # in a row
        self._begun = False  # a save whose end nobody has looked at
        self._best_kept = meta.best  # the newest that is on the disk
        self._best_begun: Best | None = None  # of the save whose end was not looked at yet
        self._best_at: Position | None = None  # where the best state of this start was

    def judge(self, position: Position, values: dict[str, float]) -> bool:
        """Compares a validation with the best so far; whether its state is now the best."""
        settings, best = self._run.checkpoint, self.meta.best
        if settings.best_metric is None:
            return False
        value = values[settings.best_metric]
        sign = 1 if settings.best_mode == "max" else -1
        if not math.isfinite(value) or (best and sign * value <= sign * best.value):
            if best:
                more = best.validations_since + 1
                self.meta.best = dataclasses.replace(best, validations_since=more)
            return False
        if best and self._best_kept and best.step == self._best_kept.step:
            self._best_kept = best
        self.meta.best = Best(settings.best_metric, settings.best_mode, value, position.done)
        self._best_at = position
        return True

    def save(
        self, position: Position, state: State, *, regular: bool = True, best: bool = False
    ) -> None:
        """Saves a state; returns once it is copied to the host.

        Args:
            position: where the run is.
            state: there.
            regular: as the newest checkpoint.
            best: as the best one.

        Raises:
            RunAgain: so many saves in a row have failed that the run should end.
        """
        for part in (self.settle, lambda: self._start(position, state, regular, best)):
            failure = part()
            if failure and self._failures >= FAILURES_IN_A_ROW:
                raise _given_up(f"{self._failures} saves in a row have failed", failure)

    def finish(self, position: Position, state: State) -> None:
        """Saves the last state and returns when it is complete; tries again before it gives up.

        Args:
            position: where the run is.
            state: there.

        Raises:
            RunAgain: it cannot be saved.
        """
        judged = self.meta.best
        # After a rollback another state may have as many updates as the best one: not by the step.
        best = judged is not None and self._best_at == position
        self.settle()
        for tries_left in reversed(range(LAST_TRIES)):
            if best:
                self.meta.best = judged  # also after a failure
            failure = self._start(position, state, regular=True, best=best) or self.settle()
            if failure is None:
                return
            if not tries_left:
                raise _given_up("the last state is not saved", failure)
            self._say(f"the last save is tried again in {BETWEEN_TRIES_S:g} s")
            time.sleep(BETWEEN_TRIES_S)

    def forget_after(self, step: int) -> None:
        """After a rollback: checkpoints of later steps no longer count."""
        self._checkpoints.forget_after(step)

    def _start(
        self, position: Position, state: State, regular: bool, best: bool
    ) -> saver.SaveFailed | None:
        """Begins a save, unless it fails at once."""
        meta = self.meta.to_dict() | position.to_meta()
        try:
            if regular:
                self._checkpoints.save(state, meta, best=best)
            elif best:
                self._checkpoints.save_best(state, meta)
        except saver.SaveFailed as failure:
            return self._failed(failure)
        self._begun = True
        self._best_begun = self.meta.best if best else None
        return None

    def settle(self) -> saver.SaveFailed | None:
        """Waits for the save that has begun; returns its failure, which was said."""
        if not self._begun:
            return None
        self._begun = False
        try:
            self._checkpoints.wait()
        except saver.BestNotKept as failure:
            self._best_is_not(failure.target)
        except saver.SaveFailed as failure:
            return self._failed(failure)
        else:
            self._best_kept = self._best_begun or self._best_kept
        self._failures = 0
        self._saved()
        return None

    def _failed(self, failure: saver.SaveFailed) -> saver.SaveFailed:
        self._failures += 1
        self._best_is_not(failure.target)
        if not failure.said:
            self._say(f"warning: {failure}")
        return failure

    def _best_is_not(self, target: Path) -> None:
        """What is not on the disk cannot be the best: the one before it is."""
        best = self.meta.best
        if best is not None and target.name == str(best.step):
            self.meta.best = self._best_kept


def _given_up(what: str, failure: saver.SaveFailed) -> RunAgain:
    return RunAgain(f"{what}: {failure}; then go on with --resume latest")


def check_best_metric(settings: config.Checkpoint, names: Iterable[str]) -> None:
    """The metric that says which checkpoint is best has to be one of the validation's.

    Raises:
        InputError: it is none; names those that there are.
    """
    if settings.best_metric is not None and settings.best_metric not in names:
        raise InputError(
            f"checkpoint.best_metric is {settings.best_metric!r}, the model's validation gives "
            f"{', '.join(sorted(names))}: set --checkpoint.best_metric to one of these"
        )
