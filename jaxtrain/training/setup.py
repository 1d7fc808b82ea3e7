"""Builds everything the training loop needs from a config.

:func:`open_training` opens, in this order: the run directory and the checkpoint to resume from
(``run_start.py``), the data (``run_data.py``), the state (``first_state.py``), the compiled step
(``step_setup.py``, ``run_programs.py``), and the objects that validate, save and stop.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxtrain import config
from jaxtrain.checkpoint.saver import Checkpoints
from jaxtrain.config import invocation
from jaxtrain.data import pipeline
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.errors import DONE
from jaxtrain.telemetry.events import Rewound
from jaxtrain.training import (
    out_of_memory,
    preflight,
    profiler,
    replay,
    run_directory,
    run_summary,
)
from jaxtrain.training.first_state import first_state, has_best, progress_of
from jaxtrain.training.mirror import Mirror
from jaxtrain.training.progress import Progress
from jaxtrain.training.rollback import Rollback
from jaxtrain.training.run_data import (
    OpenedData,
    evaluator_of,
    open_batches,
    open_data,
    what_validates,
    workers_here,
)
from jaxtrain.training.run_log import RunLog
from jaxtrain.training.run_programs import compile_in_all_processes, nan_search, replayed
from jaxtrain.training.run_progress import RunProgress
from jaxtrain.training.run_start import OpenedDirectory, open_directory
from jaxtrain.training.save_policy import (
    RunMeta,
    Saver,
    describe,
    patience_over,
)
from jaxtrain.training.state import (
    State,
)
from jaxtrain.training.step import (
    TrainStep,
)
from jaxtrain.training.step_setup import StepSetup, build
from jaxtrain.training.stopping import CONTINUE, Stopping
from jaxtrain.training.validation import Evaluator


@dataclasses.dataclass
class TrainSetup:
    """Everything the training loop needs.

    Attributes:
        run: the config.
        total: steps of the complete run.
        directory: of the run.
        state: the first state; :meth:`take_state` releases it.
        step: compiled; (state, batch) -> (state, metrics).
        before_step: called before each step with the number of completed steps and the state; it
            starts the profiler for ``--profile``.
        batches: the global training batches from the run's position on.
        example_file: path of an input file, on which a user can try the model; may be empty.
        evaluator: validates a state; None for a run without validation.
        progress: records the metrics of each step, and counts steps.
        saver: saves checkpoints, and keeps track of the best validation.
        rollback: restores a checkpoint after too many bad steps.
        replay: computes a step twice; None without ``loop.replay_every``.
        stopping: whether the processes have agreed to stop.
        log: everything the run reports.
        still_alive: called regularly during long work between steps, or the watchdog ends the run.
        mirror: of the run directory in a bucket; None without one.
    """

    run: config.Run
    total: int
    directory: Path
    state: State | None
    step: TrainStep
    before_step: Callable[[int, State], None]
    batches: pipeline.TrainingBatches
    example_file: str
    evaluator: Evaluator | None
    progress: Progress
    saver: Saver
    rollback: Rollback
    replay: replay.Replay | None
    stopping: Stopping
    log: RunLog
    mirror: Mirror | None = None
    still_alive: Callable[[], None] = lambda: None

    @property
    def shown(self) -> str | Path:
        """Returns the run directory as ``--output-dir`` and other commands take it."""
        return self.directory if self.mirror is None else self.mirror.shown

    def take_state(self) -> State:
        """Returns the first state, once, so that this object does not keep its memory occupied."""
        state, self.state = self.state, None
        assert state is not None, "the state was taken before"
        return state


@contextlib.contextmanager
def open_training(
    run: config.Run,
    flags: preflight.Flags,
    log: RunLog,
    signals: StopSignals,
    still_alive: Callable[[], None],
) -> Iterator[TrainSetup | None]:
    """Opens everything the training loop needs, and closes it at the end.

    Args:
        run: the config.
        flags: of the command line.
        log: entered; its files are opened here.
        signals: of this process.
        still_alive: called regularly during long work between steps.

    Yields:
        The setup; None if nothing is left to train, which was then reported.

    Raises:
        InputError: the config, the flags, the data, the weights or the machine do not match.
        RunAgain: a disk is full or does not respond, or another run uses the directory.
    """
    with contextlib.ExitStack() as stack:
        directory = open_directory(run, flags, log, stack)
        data = open_data(run, directory, log)
        built = build(run, directory.mesh, len(data.sources.train), log.say, directory.position)
        log.started(built.total)
        explained = functools.partial(
            out_of_memory.explained,
            run,
            built.target,
            built.spec,
            run_summary.fit_command(invocation.program(), run_summary.typed(run, flags)),
            log.say,
        )
        with log.phases.within("restore"), explained():
            first = open_state(built, directory, data, log)
        if _is_over(built, directory, first, log, still_alive):
            yield None
            return
        with explained():
            setup = open_step(built, directory, data, first, flags, log, signals, stack)
        setup.still_alive = still_alive
        del first
        signals.hold()
        log.phases.training()
        with explained():
            yield setup


@dataclasses.dataclass
class OpenedState:
    """What a run starts with.

    Attributes:
        state: the first state; None after it was taken.
        meta: the metadata of its checkpoints.
        run_progress: its validations so far.
    """

    state: State | None
    meta: RunMeta
    run_progress: RunProgress


def open_state(
    built: StepSetup, directory: OpenedDirectory, data: OpenedData, log: RunLog
) -> OpenedState:
    """Makes or restores the first state, and reads what the run has recorded of its progress.

    Raises:
        InputError: the checkpoint or the weights do not fit.
        RunAgain: a disk does not respond.
    """
    run, sources = built.run, data.sources
    meta = describe(run, sources.train.fingerprint)
    state = first_state(
        built, data.init_from, directory.start_from, meta, log.say, shown=directory.shown_source
    )
    progress = progress_of(
        built,
        directory.path,
        directory.position,
        what_validates(run, sources),
        log.say,
        resumed=directory.resumes,
        has_best=functools.partial(has_best, directory.path, directory.mirror),
    )
    return OpenedState(state, meta, progress)


def _is_over(
    built: StepSetup,
    directory: OpenedDirectory,
    first: OpenedState,
    log: RunLog,
    still_alive: Callable[[], None],
) -> bool:
    """Whether nothing is left to train, which is reported."""
    run, done, progress = built.run, directory.position.done, first.run_progress
    nothing = run_summary.nothing_to_do(run, done, built.total, progress)
    if not nothing:
        return False
    log.say(nothing)
    if directory.mirror is not None:  # an earlier start may have ended before its last upload
        _start_copy(directory.mirror, built, directory, progress)
        directory.mirror.finish(still_alive)
    early, last = patience_over(run.loop, progress), max(built.total, done)
    log.ended(DONE, run_summary.ending(run, done, last, CONTINUE, early))
    return True


def open_step(
    built: StepSetup,
    directory: OpenedDirectory,
    data: OpenedData,
    first: OpenedState,
    flags: preflight.Flags,
    log: RunLog,
    signals: StopSignals,
    stack: contextlib.ExitStack,
) -> TrainSetup:
    """Compiles the step, and opens the batches and what validates, saves, and stops.

    Raises:
        InputError: a flag does not match the run.
    """
    run, say, mirror, position = built.run, log.say, directory.mirror, directory.position
    profiler.check(profiler.span(flags.profile), position.done, built.total, say)
    log.emit(Rewound(position.done, position.seen, validated=not first.run_progress.evaluation_due))
    run_directory.write_config(directory.path, first.meta.config, say)
    workers = workers_here(run, directory.mesh)
    if run.data.workers != 0:  # chosen, and no worker processes: the line would explain nothing
        say(workers.sentence)
    batches = open_batches(
        built, data.sources, data.quarantine, start=position.seen, workers=workers.number
    )
    stack.callback(batches.close)
    evaluator = evaluator_of(built, data.sources, data.quarantine, threads=workers.number)
    with log.phases.within("compile"):
        step = compile_in_all_processes(built, flags, log)
    checkpoints, saver = _open_saver(built, directory, data, first, log, stack)
    replays = replayed(
        step, built, checkpoints, first.run_progress, position.done, saver, log, mirror
    )
    state, first.state = first.state, None
    assert state is not None, "it was not taken before"
    progress = Progress(
        run,
        log,
        log.phases,
        built.total,
        position,
        batches,
        directory.mesh,
        bad_in_a_row=int(state.guard["bad_in_a_row"]),
        waits=flags.debug,
        faster=data.sources.faster,
        find_nan=nan_search(built, directory.path, say),
    )
    stack.callback(progress.close)
    span, folder = profiler.span(flags.profile), directory.path / "profile"
    step, before_step = stack.enter_context(
        profiler.profiled(span, folder, step, say, progress.interrupted)
    )
    return TrainSetup(
        run=run,
        total=built.total,
        directory=directory.path,
        state=state,
        step=step,
        before_step=before_step,
        batches=batches,
        example_file=data.sources.example_file,
        evaluator=evaluator,
        progress=progress,
        saver=saver,
        rollback=Rollback(
            directory.path,
            run.checkpoint.every,
            built.saved,
            say,
            progress.advice,
            mirror,
            replays.rewound if replays else lambda position: None,
        ),
        replay=replays,
        stopping=Stopping(signals, data.bad_share, directory.mesh, run.loop.max_hours),
        log=log,
        mirror=mirror,
    )


def _open_saver(
    built: StepSetup,
    directory: OpenedDirectory,
    data: OpenedData,
    first: OpenedState,
    log: RunLog,
    stack: contextlib.ExitStack,
) -> tuple[Checkpoints, Saver]:
    """Opens what writes checkpoints, and begins to copy them to the bucket, if there is one."""
    run, say, mirror = built.run, log.say, directory.mirror
    # The cache prints a warning once, not after each save.
    link_latest = functools.partial(
        run_directory.link_latest, directory.path, say=functools.cache(say)
    )
    if directory.resumes:
        link_latest()  # otherwise the first save links it
    checkpoints = Checkpoints(
        directory.path,
        run.checkpoint.keep,
        say,
        run.checkpoint.every,
        data.sources.files_to_keep,
        own_disk=mirror is not None and mirror.own_disk,
        copy=mirror,
        resumed=directory.start_from if directory.resumes else None,
    )
    stack.callback(checkpoints.close)
    if mirror is not None:
        _start_copy(mirror, built, directory, first.run_progress)
    saver = Saver(
        run,
        checkpoints,
        first.meta,
        first.run_progress,
        say,
        _after_save(link_latest, mirror),
        built.definition.constants,
    )
    return checkpoints, saver


def _start_copy(
    mirror: Mirror, built: StepSetup, directory: OpenedDirectory, progress: RunProgress
) -> None:
    settings = built.run.checkpoint
    resumed = directory.position.done if directory.resumes else None
    mirror.start(settings.keep, settings.every, progress.agreed, resumed)


def _after_save(saved: Callable[[], None], mirror: Mirror | None) -> Callable[[], None]:
    """Returns what to do after each complete save."""

    def action() -> None:
        saved()
        if mirror is not None:
            mirror.check()

    return action
