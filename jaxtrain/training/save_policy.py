"""Saves the state of a run: survives failed saves, keeps track of the best validation.

The loop decides when. The metadata identifies the run: the fingerprint of the data, the config, the
versions, the step, and the examples seen.
"""

import dataclasses
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any

from jaxtrain import config, terminal, versions
from jaxtrain.checkpoint import saver
from jaxtrain.checkpoint.pointer import BEST, CHECKPOINTS
from jaxtrain.config.gates import Gate
from jaxtrain.config.run_length import Position
from jaxtrain.distributed import consistency
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.models import from_file
from jaxtrain.storage.disks import reason
from jaxtrain.training.run_progress import NAME, Best, RunProgress
from jaxtrain.training.state import State, saved_part

# A run stops after this many failed saves in a row, so that at most this many intervals of
# checkpoint.every are lost.
FAILURES_IN_A_ROW = 3
# The last save is retried, because no other one follows.
LAST_TRIES, BETWEEN_TRIES_S = 3, 5.0


@dataclasses.dataclass
class RunMeta:
    """The metadata of each checkpoint of a run.

    Attributes:
        file_weights: part of the model -> SHA-256 of the values that it reads from files, which
            checkpoints lack.
        start: id of the start that saved it (:class:`jaxtrain.checkpoint.start.Intent`).
        model_file: the file of the model's class, if it is not part of jaxtrain: for messages.
        code: source file -> digest (:func:`jaxtrain.distributed.consistency.code_digests`).
    """

    fingerprint: str
    config: dict[str, Any]
    versions: dict[str, Any]
    file_weights: dict[str, str] = dataclasses.field(default_factory=dict)
    start: str = ""
    model_file: str | None = None
    code: dict[str, str] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns a dictionary that can be written as JSON."""
        return dataclasses.asdict(self)


def describe(run: config.Run, fingerprint: str, start: str = "") -> RunMeta:
    """Returns the metadata of a new run."""
    file = from_file.file_of(run.model)
    about = config.to_dict(run), versions.versions()
    code = consistency.code_digests(run)
    return RunMeta(fingerprint, *about, start=start, model_file=file, code=code)


def patience_over(settings: config.Loop, run_progress: RunProgress) -> bool:
    """Returns whether early stopping ends the run."""
    if settings.early_stop_patience is None:
        return False
    best = run_progress.best
    return best is not None and best.validations_since >= settings.early_stop_patience


class SavePolicy:
    """Saves checkpoints, keeps the best one, and counts validations without improvement.

    A save that fails, for example on a full disk, does not end the run: the next one may succeed.
    Three failures in a row end it, and so does a failure of the last save.
    """

    def __init__(
        self,
        checkpoints: saver.CheckpointSaver,
        meta: RunMeta,
        run_progress: RunProgress,
        say: Callable[[str], None] = terminal.out,
        saved: Callable[[], None] = lambda: None,
        file_weights: Collection[str] = (),
    ) -> None:
        self._checkpoints = checkpoints
        self._meta = meta
        self.run_progress = run_progress
        self._say = say
        self._saved = saved
        self._file_weights = file_weights
        self._failures = 0  # in a row
        self._started = False  # a save whose result was not checked yet
        self._best_started: Best | None = None  # the best one, if that save is of its state

    def judge(self, position: Position, values: dict[str, float]) -> bool:
        """Compares a validation with the best so far; returns whether its state is the best."""
        is_best = self.run_progress.add(position, values)
        self.write_progress()
        return is_best

    def save(
        self, position: Position, state: State, *, regular: bool = True, best: bool = False
    ) -> None:
        """Saves a state; returns once it is copied to the host.

        Raises:
            RunAgain: too many saves in a row have failed.
        """
        validated = self.run_progress.best if best else None
        self._check_failures(self.await_save())
        self._check_failures(self._start(position, state, validated, regular=regular))

    def finish(self, position: Position, state: State) -> None:
        """Saves the last state and waits until it is complete; retries if that fails.

        Raises:
            RunAgain: the state cannot be saved.
        """
        best = self.run_progress.best
        # Not by step: after a rollback, another state may have the same step as the best one.
        if best is not None and best.validated.seen != position.examples_seen:
            best = None
        self.await_save()
        for tries_left in reversed(range(LAST_TRIES)):
            failure = self._start(position, state, best) or self.await_save()
            if failure is None:
                return
            if not tries_left:
                raise _save_failed("the last state is not saved", failure)
            self._say(f"retrying the last save in {BETWEEN_TRIES_S:g} s")
            time.sleep(BETWEEN_TRIES_S)

    def _start(
        self, position: Position, state: State, best: Best | None, *, regular: bool = True
    ) -> saver.SaveFailed | None:
        kinds = (*((CHECKPOINTS,) if regular else ()), *((BEST,) if best else ()))
        if not kinds:
            return None
        self._best_started = best
        if best is not None:
            self.run_progress.mark(best, kept=True)  # an earlier try may have failed
        meta = self._meta.to_dict() | position.to_meta()
        try:
            self._checkpoints.save(saved_part(state, self._file_weights), meta, kinds)
        except saver.SaveFailed as failure:
            return self._failed(failure)
        self._started = True
        return None

    def await_save(self) -> saver.SaveFailed | None:
        """Waits for the current save; returns its failure, which was reported."""
        if not self._started:
            return None
        self._started = False
        try:
            self._checkpoints.wait()
        except saver.SaveFailed as failure:
            return self._failed(failure)
        self._failures = 0
        self._saved()
        return None

    def _check_failures(self, failure: saver.SaveFailed | None) -> None:
        if failure and self._failures >= FAILURES_IN_A_ROW:
            raise _save_failed(f"{self._failures} saves in a row have failed", failure)

    def _failed(self, failure: saver.SaveFailed) -> saver.SaveFailed:
        self._failures += 1
        if self._best_started is not None:  # the one before is still the best with a checkpoint
            self.run_progress.mark(self._best_started, kept=False)
            self._best_started = None
            self.write_progress()
        if not failure.reported:
            self._say(f"warning: {failure}")
        return failure

    def write_progress(self) -> None:
        """Writes ``progress.json``; a failure is only a warning."""
        try:
            self.run_progress.write()
        except OSError as error:  # the next validation writes it again
            self._say(f"warning: {NAME} cannot be written ({reason(error)})")


def _save_failed(problem: str, failure: saver.SaveFailed) -> RunAgain:
    return RunAgain(f"{problem}: {failure}; then resume with --resume latest")


def check_best_metric(settings: config.Checkpoint, names: Iterable[str]) -> None:
    """Checks that ``checkpoint.best_metric`` is a metric of the validation."""
    if settings.best_metric is not None and settings.best_metric not in names:
        raise InputError(
            f"checkpoint.best_metric={settings.best_metric} is not a metric of this model's "
            f"validation: set --checkpoint.best_metric to one of {', '.join(sorted(names))}"
        )


def check_gates(settings: config.Loop, names: Iterable[str]) -> None:
    """Checks that the metrics of ``loop.gates`` are metrics of the validation."""
    for text in settings.gates:
        if (metric := Gate.parse(text).metric) not in names:
            raise InputError(
                f"loop.gates '{text}': {metric} is not a metric of this model's validation: use "
                f"one of {', '.join(sorted(names))}"
            )
