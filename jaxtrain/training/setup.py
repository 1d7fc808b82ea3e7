"""Builds everything the training loop needs from a config.

:func:`open_training` opens, in this order: the run directory and the checkpoint to resume from,
the data, the state, the compiled step, and the objects that validate, save and stop.
"""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxtrain import config
from jaxtrain.checkpoint import pointer, resume
from jaxtrain.checkpoint.saver import Checkpoints
from jaxtrain.config import invocation
from jaxtrain.config.run_length import Position
from jaxtrain.data import cache, pipeline, worker_count
from jaxtrain.data.quarantine import Quarantine, TooManyBroken
from jaxtrain.data.source import Sources
from jaxtrain.distributed import process_group
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.distributed.watchdog import PAUSE_ALLOWANCE_S
from jaxtrain.errors import DONE, InputError
from jaxtrain.sharding import as_found, make_mesh
from jaxtrain.storage import bucket
from jaxtrain.telemetry import hardware
from jaxtrain.telemetry.events import Rewound, StepCompiled
from jaxtrain.training import (
    debugging,
    out_of_memory,
    preflight,
    profiler,
    replay,
    run_directory,
    run_files,
    run_summary,
)
from jaxtrain.training.first_state import first_state, has_best, progress_of, with_source
from jaxtrain.training.mirror import Mirror
from jaxtrain.training.nan_origin import FindNan
from jaxtrain.training.progress import Progress
from jaxtrain.training.rollback import Rollback
from jaxtrain.training.run_log import RunLog
from jaxtrain.training.run_progress import RunProgress
from jaxtrain.training.save_policy import (
    Saver,
    check_best_metric,
    describe,
    patience_over,
)
from jaxtrain.training.state import (
    State,
    bytes_per_device,
    model_flops,
    parameter_count,
)
from jaxtrain.training.step import (
    TrainStep,
    build_gradients,
)
from jaxtrain.training.step_setup import StepSetup, build, validation_batch_size
from jaxtrain.training.stopping import CONTINUE, Stopping
from jaxtrain.training.validation import Evaluator
from jaxtrain.xla import operations

Say = Callable[[str], None]
T = TypeVar("T")


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
    still_alive: Callable[[], None]
    mirror: Mirror | None = None

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
    say, phases = log.say, log.phases
    with contextlib.ExitStack() as stack:
        with phases.within("start"):  # may read a complete checkpoint
            preflight.check(run, resumes=flags.resume is not None)
            mesh = make_mesh(run.mesh)
            mirror = Mirror.of(run, flags.output_dir, say)
            if mirror is not None:
                stack.callback(mirror.close)
                mirror.claim()
                flags = dataclasses.replace(flags, output_dir=str(mirror.directory))
            own_disk = mirror is not None and mirror.own_disk
            # Before a resume writes its lock there.
            before = run_directory.before(run.name, flags.output_dir)
            resume_from, shown_source = flags.resume, ""
            if resume_from is not None and bucket.is_bucket(resume_from):
                fetched, shown_source = process_group.process_zero_first(
                    functools.partial(
                        resume.of_url,
                        resume_from,
                        "--resume",
                        cache.root(run.data.cache_dir),
                        say,
                    ),
                    "checkpoint",
                )
                resume_from = str(fetched)
            start_from = run_directory.start_from(
                run.name,
                resume_from,
                flags.output_dir,
                say=log.log,  # already on the console
                own_disk=own_disk,
                opened=None if mirror is None else mirror.opened,
            )
            directory = run_directory.prepare(
                run.name, flags.output_dir, flags.resume, start_from, own_disk=own_disk
            )
            if mirror is not None:
                mirror.refuse_other(flags.resume, start_from)
                mirror.fetch(start_from)
            position = _position(start_from)
            shown = directory if mirror is None else mirror.shown
            if start_from is not None and not shown_source:
                own = start_from.is_relative_to(directory)
                path = start_from.relative_to(directory) if own else start_from
                path = path.with_suffix("")
                shown_source = f"{shown}/{path}" if own else str(path)
        log.open(
            run,
            directory,
            shown_source or None,
            position,
            flags.arguments,
            before,
            flags.track,
            described="" if mirror is None else mirror.both,
        )
        stack.push(log.failed)  # before the mirror uploads log.txt for the last time
        if fit := as_found(run)[1]:
            say(fit)
        if flags.resume and start_from is None:
            say(f"--resume {flags.resume}: no checkpoint to resume from, starting from scratch")

        quarantine = Quarantine.open(directory, jax.process_index())
        with phases.within("data", allowance_s=None):  # may download
            model = with_source(run, say) if start_from is None else run.model
            try:
                sources = open_data(run, model, start_from, say)
            except TooManyBroken as error:
                if jax.process_index() == 0:
                    quarantine.add_all(error.bad, found="index")
                raise
        bad_share = _quarantined(run, sources, quarantine, say)

        step_setup = build(run, mesh, len(sources.train), say, position)
        total = step_setup.total
        log.started(total)
        explained = functools.partial(
            out_of_memory.explained,
            run,
            step_setup.target,
            step_setup.spec,
            run_summary.fit_command(invocation.program(), run_summary.typed(run, flags)),
            say,
        )
        meta = describe(run, sources.train.fingerprint)
        with phases.within("restore"), explained():
            state = first_state(
                step_setup, model.init_from, start_from, meta, say, shown=shown_source
            )
        so_far = progress_of(
            step_setup,
            directory,
            position,
            _what_validates(run, sources),
            say,
            resumed=start_from is not None and resume.is_of(directory, start_from),
            has_best=functools.partial(has_best, directory, mirror),
        )
        if nothing := run_summary.nothing_to_do(run, position.done, total, so_far):
            say(nothing)
            early, last = patience_over(run.loop, so_far), max(total, position.done)
            if mirror is not None:  # an earlier start may have ended before its last upload
                mirror.start(run.checkpoint.keep, run.checkpoint.every)
                mirror.finish(still_alive)
            log.ended(DONE, run_summary.ending(run, position.done, last, CONTINUE, early))
            yield None
            return
        profiler.check(profiler.span(flags.profile), position.done, total, say)
        log.emit(Rewound(position.done, position.seen, validated=not so_far.evaluation_due))
        run_directory.write_config(directory, meta.config, say)
        # The cache prints a warning once, not after each save.
        link_latest = functools.partial(
            run_directory.link_latest, directory, say=functools.cache(say)
        )
        if start_from is not None and start_from.is_relative_to(directory):
            link_latest()  # otherwise the first save links it

        workers = workers_here(run, mesh)
        if run.data.workers != 0:  # chosen, and no worker processes: the line would explain nothing
            say(workers.sentence)
        batches = _open_batches(
            step_setup, sources, quarantine, start=position.seen, workers=workers.number
        )
        stack.callback(batches.close)
        evaluator = _evaluator(step_setup, sources, quarantine, threads=workers.number)
        with phases.within("compile"), explained():
            step = compile_in_all_processes(step_setup, flags, log)
        checkpoints = Checkpoints(
            directory,
            run.checkpoint.keep,
            say,
            run.checkpoint.every,
            sources.files_to_keep,
            own_disk=own_disk,
            copy=mirror,
            resumed=start_from if resume.is_of(directory, start_from) else None,
        )
        stack.callback(checkpoints.close)
        if mirror is not None:
            mirror.start(run.checkpoint.keep, run.checkpoint.every)
        constants = step_setup.definition.constants
        saver = Saver(
            run, checkpoints, meta, so_far, say, _after_save(link_latest, mirror), constants
        )
        replays = None
        if run.loop.replay_every is None:
            so_far.agreed = None
        else:
            with phases.within("compile"), explained():
                replays = _replay(
                    step_setup, checkpoints, so_far, position.done, saver.settle, say, mirror
                )
        progress = Progress(
            run,
            log,
            phases,
            total,
            position,
            batches,
            mesh,
            bad_in_a_row=int(state.guard["bad_in_a_row"]),
            waits=flags.debug,
            faster=sources.faster,
            find_nan=_find_nan(step_setup, directory, say),
        )
        stack.callback(progress.close)
        step, before_step = stack.enter_context(
            profiler.profiled(
                profiler.span(flags.profile),
                directory / "profile",
                step,
                say,
                progress.interrupted,
            )
        )
        setup = TrainSetup(
            run=run,
            total=total,
            directory=directory,
            state=state,
            step=step,
            before_step=before_step,
            batches=batches,
            example_file=sources.example_file,
            evaluator=evaluator,
            progress=progress,
            saver=saver,
            rollback=Rollback(
                directory,
                run.checkpoint.every,
                step_setup.saved,
                say,
                progress.advice,
                mirror,
            ),
            replay=replays,
            stopping=Stopping(signals, bad_share, mesh, run.loop.max_hours),
            log=log,
            still_alive=still_alive,
            mirror=mirror,
        )
        del state
        signals.hold()
        phases.training()
        with explained():
            yield setup


def _after_save(saved: Callable[[], None], mirror: Mirror | None) -> Callable[[], None]:
    """Returns what to do after each complete save."""

    def action() -> None:
        saved()
        if mirror is not None:
            mirror.check()

    return action


def _position(start_from: Path | None) -> Position:
    """Returns the position of the checkpoint, or the beginning of a run."""
    if start_from is None:
        return Position()
    return Position.of_checkpoint(pointer.read_meta(start_from))


def compile_in_all_processes(setup: StepSetup, flags: preflight.Flags, log: RunLog) -> TrainStep:
    """Compiles the training step; returns when all processes have compiled theirs.

    Otherwise the first step would include the time that the slowest process still compiles.

    Args:
        setup: of the step.
        flags: of the run.
        log: of the run.
    """
    began = time.perf_counter()
    compiled = setup.compile_step(donate=not flags.debug, profiled=flags.profile is not None)
    log.say(f"compiled in {time.perf_counter() - began:.1f} s")
    memory = compiled.memory_analysis()
    log.emit(
        StepCompiled(
            step=log.phases.now.step or 0,
            planned_bytes=memory
            and (
                memory.argument_size_in_bytes
                + memory.output_size_in_bytes
                - memory.alias_size_in_bytes
                + memory.temp_size_in_bytes
            ),
            state_bytes=bytes_per_device(setup.target),
            params=parameter_count(setup.definition.params),
            flops_per_step=model_flops(setup.run.model) * setup.run.data.batch_size,
            moved_bytes=_moved_bytes(compiled),
        )
    )
    process_group.wait_for_all("compiled", PAUSE_ALLOWANCE_S)
    return debugging.checked(compiled) if flags.debug else compiled


def _replay(
    setup: StepSetup,
    checkpoints: Checkpoints,
    so_far: RunProgress,
    done: int,
    settle: Callable[[], object],
    say: Say,
    mirror: Mirror | None,
) -> replay.Replay:
    """Compiles the step that ``loop.replay_every`` computes twice."""
    began = time.perf_counter()
    step = setup.compile_step(donate=False)
    say(f"step for loop.replay_every compiled in {time.perf_counter() - began:.1f} s")
    process_group.wait_for_all("compiled the step to replay", PAUSE_ALLOWANCE_S)
    return replay.Replay(step, checkpoints, so_far, done, settle, say, mirror)


def _find_nan(setup: StepSetup, directory: Path, say: Say) -> FindNan | None:
    """Returns what ``loop.find_nan`` calls at a bad step; None if it is off.

    It is off if it may have ended an earlier start, which would otherwise repeat at each restart.
    """
    run, begun = setup.run, directory / run_files.FINDING_NAN
    if not run.loop.find_nan:
        return None
    if step := process_group.process_zero_decides(
        lambda: begun.read_text().strip() or "?" if begun.is_file() else ""
    ):
        say(
            f"warning: loop.find_nan is off, because an earlier start ended while it examined step "
            f"{step}: to try again, delete {begun}"
        )
        return None
    gradients = build_gradients(
        setup.definition,
        setup.rule,
        precision=run.precision,
        accumulate=run.optim.accumulate,
        seed=run.seed,
        receive=run.received,
    )
    return FindNan(gradients, setup.rule.mesh, say, begun)


def _moved_bytes(step: jax.stages.Compiled) -> float | None:
    """Returns the bytes that a step moves; None if the rate of this memory is unknown."""
    text = step.as_text()
    if text is None or hardware.memory_bytes_per_second(jax.devices()[0].device_kind) is None:
        return None
    return operations.moved_bytes(text)


def _open_batches(
    setup: StepSetup, sources: Sources, quarantine: Quarantine, *, start: int, workers: int
) -> pipeline.TrainingBatches:
    """Opens the training batches from example ``start`` on."""
    run = setup.run
    return pipeline.TrainingBatches(
        sources.train,
        setup.rule.mesh,
        setup.spec,
        start=start,
        seed=run.seed,
        workers=workers,
        prefetch=run.data.prefetch,
        quarantine=quarantine,
    )


def workers_here(run: config.Run, mesh: jax.sharding.Mesh) -> worker_count.WorkerCount:
    """Returns the number of worker processes of this process: the config's, or this host's."""
    devices = mesh.local_devices
    return worker_count.choose(
        run.data,
        run.model,
        rows=run.data.batch_size * len(devices) // mesh.size,
        devices=len(devices),
        on_cpu=devices[0].platform == "cpu",
        processes=process_group.processes_on_this_host(os.environ),
    )


def open_data(run: config.Run, model: Any, start_from: Path | None, say: Say) -> Sources:
    """Opens both splits, in process 0 first, which writes the caches.

    A resume loads the files that the checkpoint stores for the data, such as a tokenizer.

    Args:
        run: the config.
        model: the run's model, with a local ``init_from``.
        start_from: the checkpoint to resume from, if any.
        say: prints what is opened.

    Raises:
        InputError: the processes have different data.
    """
    resumes = start_from is not None and hasattr(run.data, "for_resume")
    data = run.data.for_resume(start_from) if resumes else run.data
    sources = process_group.process_zero_first(
        lambda: data.open(model, seed=run.seed, say=say), "data"
    )
    say(sources.summary)
    if sources.small_training:
        say(sources.small_training)
    process_group.check_same(
        "data",
        f"{sources.train.fingerprint} {sources.val.fingerprint} {sorted(run.batch_spec(1))}",
        "give every process the same files, and do not change them during the run",
    )
    return sources


def _quarantined(
    run: config.Run, sources: Sources, quarantine: Quarantine, say: Say
) -> pipeline.BadShare:
    """Records the input files that were found broken when the data was opened.

    Raises:
        InputError: too many are broken.
    """
    if jax.process_index() == 0:
        quarantine.add_all(sources.bad, found="index")
    share = pipeline.BadShare(sources, quarantine, run.data.max_bad_share, say=say)
    complaint = share.complaint()
    if complaint:
        raise InputError(complaint)
    return share


def _what_validates(run: config.Run, sources: Sources) -> str:
    """Returns a digest of the examples of a validation; "" for a run without validation."""
    if run.loop.eval_every is None:
        return ""
    examples = min(run.loop.eval_examples, len(sources.val))
    return cache.digest(sources.val.fingerprint, examples, run.seed)


def _evaluator(
    setup: StepSetup, sources: Sources, quarantine: Quarantine, *, threads: int
) -> Evaluator | None:
    """Builds the evaluator; returns None for a run without validation."""
    run = setup.run
    if run.loop.eval_every is None:
        return None
    # At most a microbatch, so that validation never needs more memory than a step; no more than the
    # existing examples, rounded up to a multiple of the devices.
    batch_size = validation_batch_size(run, len(sources.val))
    batches = pipeline.ValidationBatches(
        sources.val,
        setup.rule.mesh,
        run.model.batch_spec(batch_size),
        examples=run.loop.eval_examples,
        seed=run.seed,
        threads=threads,
        quarantine=quarantine,
    )
    evaluator = Evaluator(
        setup.definition,
        setup.rule,
        run.precision,
        setup.target,
        batches,
        deterministic=run.deterministic,
        decode=sources.decode,
    )
    check_best_metric(run.checkpoint, evaluator.names())
    return evaluator
