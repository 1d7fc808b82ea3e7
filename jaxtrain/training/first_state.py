"""The state that a run begins with: new, from weights, or from a checkpoint."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain import config
from jaxtrain.checkpoint import pointer, same_run
from jaxtrain.checkpoint.restore import restore
from jaxtrain.checkpoint.uploader import Uploader
from jaxtrain.config import record
from jaxtrain.config.run_length import Position
from jaxtrain.distributed import process_group
from jaxtrain.errors import InputError
from jaxtrain.interop import hub, weights
from jaxtrain.optim.schedule import schedule_change
from jaxtrain.storage.atomic import expanded
from jaxtrain.storage.disks import disk_trouble
from jaxtrain.terminal import Say
from jaxtrain.training.run_progress import Criterion, RunProgress, is_due
from jaxtrain.training.save_policy import RunMeta
from jaxtrain.training.state import State, checksums, with_values
from jaxtrain.training.step_setup import StepSetup


def with_source(run: config.Run, say: Say) -> Any:
    """Returns the model's config with an ``init_from`` that is on this machine and has a model."""
    model = hub.with_local_source(run.model, say, run.data.cache_dir)
    if model.init_from is not None:
        weights.check_there(expanded(model.init_from))
    return model


def first_state(
    setup: StepSetup,
    init_from: str | None,
    start_from: Path | None,
    meta: RunMeta,
    say: Say,
    *,
    display_path: str,
) -> State:
    """Returns a new state, or that of a checkpoint."""
    file_weights = weights_from_files(setup)
    meta.file_weights = checksums(file_weights)
    if start_from is None:
        return _first_values(setup, init_from, file_weights, say)
    saved = pointer.read_meta(start_from)
    same_run.check_same_run(
        display_path,
        saved,
        model=setup.run.model,
        fingerprint=meta.fingerprint,
        settings=meta.config,
        versions=meta.versions,
        code=meta.code,
        say=say,
    )
    same_run.check_file_weights(display_path, saved["file_weights"], meta.file_weights)
    state = restore(start_from, setup.saved, verified=True)
    everything = dataclasses.replace(state, extras=setup.target.extras | state.extras)
    state = with_values(everything, {}, file_weights)
    step = Position.of_checkpoint(saved).step
    say(
        f"resumed from {display_path}: step {step} of {setup.total}, {saved['examples_seen']} "
        f"examples seen, learning rate {setup.schedule.learning_rate(step):.3g}"
    )
    if changed := _schedule_change(setup, saved["config"], step):
        say(changed)
    return state


def progress_of(
    setup: StepSetup,
    directory: Path,
    position: Position,
    examples: str,
    say: Say,
    *,
    resumed: bool,
    has_best: Callable[[int], bool],
) -> RunProgress:
    """Returns what the run directory has recorded of the run up to a position."""
    run = setup.run
    criterion = Criterion(run.checkpoint.best_metric, config.best_mode(run), examples)
    if not resumed:
        return RunProgress(directory, criterion)
    run_progress = RunProgress.read(directory, criterion, position, say)
    while (best := run_progress.best) and not process_group.process_zero_decides(
        lambda: "yes" if has_best(best.validated.done) else ""
    ):
        run_progress.mark(best, kept=False)
    due = is_due(position.step, run.loop.eval_every, setup.total)
    run_progress.validation_due = due and not run_progress.has(position)
    if run.loop.eval_every is not None and run_progress.last_was_on_other_examples:
        say(
            "the validation set differs from the checkpoint's: earlier validations do not count "
            "for the best checkpoint, the patience, and the gates"
        )
    return run_progress


def has_best(directory: Path, uploader: Uploader | None, step: int) -> bool:
    """Whether the best checkpoint is of a step. Process 0.

    Raises:
        InputError, RunAgain: it is unknown, because the disk or the bucket does not respond.
    """
    if uploader is not None:
        return uploader.has_best(step)
    try:
        return pointer.is_complete(directory / pointer.name_of(pointer.BEST, step))
    except OSError as error:
        raise disk_trouble(error, f"{directory} cannot be read", "make it readable") from error


def _schedule_change(setup: StepSetup, saved: Mapping[str, Any], step: int) -> str | None:
    """Returns how the learning rate changes because the run was resumed with other settings."""
    # A checkpoint of another version may have other fields: each difference is printed anyway.
    with contextlib.suppress(InputError, ArithmeticError):
        before = dataclasses.replace(
            setup.run,
            optim=record.section(config.Optim, saved.get("optim"), "the checkpoint", "optim"),
            loop=record.section(config.Loop, saved.get("loop"), "the checkpoint", "loop"),
            data=dataclasses.replace(setup.run.data, batch_size=saved["data"].get("batch_size")),
            mesh=dataclasses.replace(setup.run.mesh, auto=True),  # the devices may be others
        )
        if not config.problems(before):
            old = before.optim, setup.total_steps_of(before)
            return schedule_change(old, (setup.run.optim, setup.total), step)
    return None


def _first_values(
    setup: StepSetup, init_from: str | None, file_weights: Mapping[str, np.ndarray], say: Say
) -> State:
    params: dict[str, np.ndarray] = {}
    if init_from is not None:
        source = expanded(init_from)
        params, notes = weights.params_for(source, setup.run.model, setup.definition.params)
        # A slice follows from what each process computes, and kernels of GPUs may round otherwise.
        process_group.check_same(
            "initial parameters",
            str(checksums(params)),
            "give every process the same files; slice in a run of one process, and pass that run",
        )
        say("; ".join([f"parameters from {source}", *notes]))
    elif setup.definition.frozen:
        say(
            f"warning: model.freeze={' '.join(setup.run.model.freeze)} without model.init_from: "
            "the frozen parameters keep the values of a new model; set --model.init_from"
        )
    return with_values(setup.fresh_state(), params, file_weights)


def weights_from_files(setup: StepSetup) -> dict[str, np.ndarray]:
    """Reads the values that the model loads from files."""
    model = setup.run.model
    file_weights: dict[str, np.ndarray] = model.file_weights()
    if file_weights.keys() != setup.definition.file_weights:
        raise TypeError(
            f"{type(model)}.file_weights must return all variables of the type FromFile"
        )
    if file_weights:
        process_group.check_same(
            "weights of the losses",
            str(checksums(file_weights)),
            "give every process the same files",
        )
    return file_weights
