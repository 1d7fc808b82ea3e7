"""Builds everything the training loop needs from a config.

:func:`open_training` opens, in this order: the run directory and the checkpoint to resume from
(:func:`open_directory`), the data (:func:`open_data`), the state (:func:`open_state`), and the
compiled step with the objects that validate, save and stop (:func:`open_step`).
"""

import contextlib
import dataclasses
import functools
import json
import os
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxtrain import config, terminal
from jaxtrain.checkpoint import pointer, resume, start
from jaxtrain.checkpoint.candidates import CheckpointCandidates
from jaxtrain.checkpoint.saver import CheckpointSaver
from jaxtrain.checkpoint.store import CheckpointStore, Folder, Place
from jaxtrain.checkpoint.uploader import Uploader
from jaxtrain.config import invocation
from jaxtrain.config.mesh_fit import fit_to_present_devices
from jaxtrain.config.run_flags import RunFlags
from jaxtrain.config.run_length import Position
from jaxtrain.data import pipeline, validation, worker_count
from jaxtrain.data.contract import Preparation
from jaxtrain.data.quarantine import BrokenFileLimit, Quarantine
from jaxtrain.data.source import Sources
from jaxtrain.distributed import consistency, process_group
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.distributed.watchdog import PAUSE_ALLOWANCE_S
from jaxtrain.errors import DONE, HOPELESS, InputError, RunAgain
from jaxtrain.jobs import resumable
from jaxtrain.optim.build import rate_flag
from jaxtrain.optim.schedule import Schedule, warmup_steps
from jaxtrain.reporting import run_files
from jaxtrain.sharding import batch_sharding, make_mesh
from jaxtrain.storage import addresses, bucket, cache, disks
from jaxtrain.storage.atomic import expanded
from jaxtrain.telemetry.events import Rewound, StepCompiled
from jaxtrain.terminal import Say
from jaxtrain.training import preflight, run_directory, run_summary
from jaxtrain.training.diagnosis import (
    bad_step,
    model_check,
    out_of_memory,
    planned,
    profiler,
    replay,
)
from jaxtrain.training.diagnosis.canaries import Canaries
from jaxtrain.training.diagnosis.nan_origin import checked
from jaxtrain.training.first_state import first_state, has_best, progress_of, with_source
from jaxtrain.training.rollback import Rollback
from jaxtrain.training.run_log import RunLog
from jaxtrain.training.run_progress import RunProgress, unmet_gate
from jaxtrain.training.save_policy import (
    RunMeta,
    SavePolicy,
    check_best_metric,
    check_gates,
    describe,
    patience_over,
)
from jaxtrain.training.state import State
from jaxtrain.training.state_size import bytes_per_device, parameter_count, total_bytes
from jaxtrain.training.step import TrainStep
from jaxtrain.training.step_recorder import StepRecorder
from jaxtrain.training.step_setup import StepSetup, build_step_setup, validation_batch_size
from jaxtrain.training.stopping import CODE_OF_STOP, CONTINUE, STOP_MAX_HOURS, Stopping
from jaxtrain.training.validation import Evaluator
from jaxtrain.xla import options

_SHARE = (
    "set --data.cache_dir to storage that every host sees, or to a folder of a bucket; or run "
    "jaxtrain prepare clips once, and give every host its output with --data.path"
)


@dataclasses.dataclass
class TrainSetup:
    """Everything the training loop needs.

    Attributes:
        state: the first state; :meth:`take_state` releases it.
        before_step: called before each step with the number of completed steps and the state; it
            starts the profiler for ``--profile``.
        still_alive: called regularly during long work between steps, or the watchdog ends the run.
    """

    run: config.Run
    total: int
    directory: Path
    state: State | None
    step: TrainStep
    schedule: Schedule
    before_step: Callable[[int, State], None]
    batches: pipeline.TrainingBatches
    example_file: str
    evaluator: Evaluator | None
    canaries: Canaries
    recorder: StepRecorder
    save_policy: SavePolicy
    rollback: Rollback
    replay: replay.Replay | None
    stopping: Stopping
    log: RunLog
    uploader: Uploader | None = None
    still_alive: Callable[[], None] = lambda: None

    @property
    def location(self) -> str | Path:
        """Returns the run directory as ``--output-dir`` and other commands take it."""
        return self.directory if self.uploader is None else self.uploader.url

    def take_state(self) -> State:
        """Returns the first state, once, so that this object does not keep its memory occupied."""
        state, self.state = self.state, None
        assert state is not None, "the state was taken before"
        return state


@contextlib.contextmanager
def open_training(
    run: config.Run,
    flags: RunFlags,
    log: RunLog,
    signals: StopSignals,
    still_alive: Callable[[], None],
) -> Iterator[TrainSetup | int]:
    """Opens everything the training loop needs, and closes it at the end.

    Yields:
        The setup; or, if nothing is left to train, the exit code, after that was reported.

    Raises:
        InputError: the config, the flags, the data, the weights or the machine do not match.
        RunAgain: a disk is full or does not respond, or another run uses the directory.
    """
    with contextlib.ExitStack() as stack:
        model_check.check(run)  # before data are read, and anything is compiled
        directory = open_directory(run, flags, log, stack)
        try:
            data = open_data(run, directory, log)
            built = build_step_setup(
                run, directory.mesh, len(data.sources.train), log.say, directory.position
            )
            _check_room(built, directory)
            log.started(built.total)
            explained = functools.partial(
                out_of_memory.explained,
                run,
                built.target,
                built.spec,
                run_summary.fit_command(
                    invocation.program(), run_summary.train_arguments(run, flags)
                ),
                log.say,
            )
            with log.phases.within("restore"), explained():
                first = open_state(built, directory, data, log)
        except InputError:
            if jax.process_index() == 0:
                directory.start.refused(directory.place)
            raise
        hours = run_directory.hours_left(run, directory.path)
        code = _code_if_over(built, directory, first, log, hours)
        if code is not None:
            yield code
            return
        with explained():
            setup = open_step(built, directory, data, first, flags, log, signals, hours, stack)
        setup.still_alive = still_alive
        del first
        signals.hold()
        log.phases.training()
        with explained():
            yield setup


@dataclasses.dataclass(frozen=True)
class OpenedDirectory:
    """Where a run writes, and where it starts.

    Attributes:
        path: the run directory; for a run in a bucket, its folder in the cache.
        start: the verified checkpoint to start from, if any, and the intent that is recorded.
    """

    path: Path
    place: Place
    mesh: jax.sharding.Mesh
    uploader: Uploader | None
    start: start.Start
    position: Position

    @property
    def resumes(self) -> bool:
        """Whether the checkpoint is one of this run directory."""
        return start.is_in(self.path, self.start.path)


def open_directory(
    run: config.Run, flags: RunFlags, log: RunLog, stack: contextlib.ExitStack
) -> OpenedDirectory:
    """Locks the run directory, chooses the checkpoint to start from, and opens the run's log."""
    say = log.say
    with log.phases.within("start"):  # may read a complete checkpoint
        preflight.check(run, resumes=flags.resume is not None or flags.again)
        mesh = make_mesh(run.mesh)
        uploader = Uploader.of(flags.output_dir, cache.root(run.data.cache_dir), say)
        if uploader is None:
            path = run_directory.prepare(run.name, flags.output_dir, flags.resume)
            place: Place = Folder(path)
        else:
            stack.callback(uploader.close)  # also after a claim that fails with the lease
            uploader.claim()
            run_directory.prepare_cache(uploader.directory, uploader.place)
            path, place = uploader.directory, uploader.place
        begun = _open_start(run, flags, path, place, uploader, log)
        if uploader is not None:
            uploader.fetch(begun.path)
            uploader.fetch_files()
        position = Position()
        if begun.path is not None:
            position = Position.of_checkpoint(pointer.read_meta(begun.path))
    log.open(
        run,
        path,
        begun.display_path or None,
        position,
        flags.arguments,
        flags.track,
        described="" if uploader is None else f"{uploader.url}, local copies in {path}",
    )
    stack.push(log.failed)  # before the uploader uploads log.txt for the last time
    if fit := fit_to_present_devices(run)[1]:
        say(fit)
    if jax.process_index() == 0:
        with contextlib.suppress(OSError, RunAgain):  # it is not worth the end of a start
            if aside := run_files.describe_aside(CheckpointStore(place)):
                quoted = shlex.quote(place.location)
                say(f"{aside}; to delete them: {invocation.program()} checkpoints {quoted} --prune")
    return OpenedDirectory(path, place, mesh, uploader, begun, position)


def _open_start(
    run: config.Run,
    flags: RunFlags,
    directory: Path,
    place: Place,
    uploader: Uploader | None,
    log: RunLog,
) -> start.Start:
    cache_root = cache.root(run.data.cache_dir)

    def say(line: str) -> None:
        if line.startswith("warning"):
            terminal.warn(line)
            log.log(line)  # already on the console
        else:
            log.say(line)

    def decide() -> str:
        checkpoints = (
            CheckpointCandidates(directory, say) if uploader is None else uploader.candidates(say)
        )
        begun = start.open_start(
            preflight.start_flags(run, flags), place, checkpoints, cache_root, say
        )
        own = start.is_in(directory, begun.path)
        path = begun.path.relative_to(directory) if own and begun.path else begun.path
        earlier.append(begun.before)
        about = {"intent": dataclasses.asdict(begun.intent), "display_path": begun.display_path}
        return json.dumps(about | {"path": "" if path is None else str(path)})

    earlier: list[start.Intent | None] = []  # only in process 0
    about = json.loads(process_group.process_zero_decides(decide))
    path = directory / about["path"] if about["path"] else None
    display_path = about["display_path"]
    if bucket.is_bucket(display_path) and not start.is_in(directory, path):  # of another run
        if jax.process_index() != 0:
            path, _ = resume.checkpoint_at_url(display_path, "--resume", cache_root, log.say)
        assert path is not None, "it was fetched"
        process_group.check_same(
            "checkpoint",
            pointer.read(path).data,
            f"{display_path} was replaced while it was fetched: start again",
        )
    return start.Start(start.Intent(**about["intent"]), path, display_path, *earlier)


@dataclasses.dataclass(frozen=True)
class OpenedData:
    """What a run reads.

    Attributes:
        init_from: local path of the initial parameters, if any.
    """

    sources: Sources
    quarantine: Quarantine
    broken_file_limit: BrokenFileLimit
    init_from: str | None


def open_data(run: config.Run, directory: OpenedDirectory, log: RunLog) -> OpenedData:
    """Opens the data, and downloads the initial parameters of a new run."""
    quarantine = Quarantine.open(directory.path, jax.process_index())
    with log.phases.within("data", allowance_s=None):  # may download
        model = run.model
        if directory.start.path is None:
            model = _with_weights(run, directory, log.say)
        sources = open_sources(run, model, directory.start.path, log.say)
    broken_file_limit = _quarantined(run, sources, quarantine, log.say)
    return OpenedData(sources, quarantine, broken_file_limit, model.init_from)


def _with_weights(run: config.Run, directory: OpenedDirectory, say: Say) -> Any:
    """Returns the model's config with the local weights of a new run, which may not change."""
    intent = directory.start.intent
    if intent.kind == "weights":
        model = dataclasses.replace(run.model, init_from=intent.typed)
        run = dataclasses.replace(run, model=model)
    model = with_source(run, say)
    if model.init_from is None:
        return model
    local = expanded(model.init_from)

    def check() -> str:
        try:
            digest = resume.digest_of_weights(local)
            if intent.digest not in ("", digest):
                raise InputError(
                    f"model.init_from {intent.typed} has changed since this run was started from "
                    "it: restore it, or choose another --output-dir"
                )
            if not intent.digest and intent.kind == "weights":
                dataclasses.replace(intent, digest=digest).write(directory.place)
        except OSError as error:
            problem = f"{error.filename} cannot be read or written"
            raise disks.disk_trouble(error, problem, "make it readable") from error
        return ""

    process_group.process_zero_decides(check)
    return model


def open_sources(run: config.Run, model: Any, start_from: Path | None, say: Say) -> Sources:
    """Opens both splits, in process 0 first, which writes the caches.

    A resume loads the files that the checkpoint stores for the data, such as a tokenizer.
    """
    data = run.data if start_from is None else run.data.for_resume(start_from)
    if jax.process_count() > 1:
        _prepare_together(data, model, say)
    sources = process_group.process_zero_first(
        lambda: data.open(model, seed=run.seed, say=say), "data"
    )
    say(sources.summary)
    if run.loop.eval_every is not None:
        say(validation.described(sources, run.loop.eval_examples))
    if sources.small_training:
        say(sources.small_training)
    process_group.check_same(
        "data",
        f"{sources.train.fingerprint} {sources.val.fingerprint} {sorted(run.sent_spec(1))}",
        "give every process the same files, and do not change them during the run",
    )
    return sources


def _prepare_together(data: Any, model: Any, say: Say) -> None:
    """Makes a part in each process of what the data need and the cache lacks."""
    missing = list[Preparation]()

    def begin() -> str:
        missing.extend(data.to_prepare(model, say))
        for preparation in missing:
            preparation.begin(jax.process_count())
        return ""

    process_group.process_zero_decides(begin)
    if jax.process_index() > 0:
        missing.extend(data.to_prepare(model, lambda line: None))
    folders = [preparation.folder for preparation in missing]
    process_group.check_same("sets to make", json.dumps(folders), _SHARE)
    for folder in folders:
        if not addresses.is_address(folder):
            run_directory.check_shared(Path(folder), _SHARE)
    for preparation in missing:
        part = resumable.Part(jax.process_index(), jax.process_count())
        preparation.make(say, part, process_group.processes_on_this_host(os.environ))
    process_group.wait_for_all("parts of the data")


def _quarantined(
    run: config.Run, sources: Sources, quarantine: Quarantine, say: Say
) -> BrokenFileLimit:
    if jax.process_index() == 0:
        quarantine.add_all(sources.bad, during="index")
    limit = BrokenFileLimit(sources, quarantine, run.data.max_bad_share, say=say)
    if reason := limit.stop_reason():
        raise InputError(reason)
    return limit


def open_batches(
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
        continues=True,
        index_limits=run.model.index_limits(),
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


def evaluator_of(
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
        index_limits=run.model.index_limits(),
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
    names = evaluator.names()
    check_best_metric(run.checkpoint, names)
    check_gates(run.loop, names)
    return evaluator


def digest_of_data(sources: Sources) -> str:
    """Returns a digest of the examples of both splits."""
    return cache.digest(sources.train.fingerprint, sources.val.fingerprint)


def digest_of_validation(run: config.Run, sources: Sources) -> str:
    """Returns a digest of the examples of a validation; "" for a run without validation."""
    if run.loop.eval_every is None:
        return ""
    examples = min(run.loop.eval_examples, len(sources.val))
    return cache.digest(sources.val.fingerprint, examples, run.seed)


@dataclasses.dataclass
class OpenedState:
    """What a run starts with.

    Attributes:
        state: the first state; None after it was taken.
    """

    state: State | None
    meta: RunMeta
    run_progress: RunProgress


def open_state(
    built: StepSetup, directory: OpenedDirectory, data: OpenedData, log: RunLog
) -> OpenedState:
    """Makes or restores the first state, and reads what the run has recorded of its progress."""
    run, sources = built.run, data.sources
    meta = describe(run, sources.train.fingerprint, directory.start.intent.id)
    state = first_state(
        built,
        data.init_from,
        directory.start.path,
        meta,
        log.say,
        display_path=directory.start.display_path,
    )
    run_progress = progress_of(
        built,
        directory.path,
        directory.position,
        digest_of_validation(run, sources),
        log.say,
        resumed=directory.resumes,
        has_best=functools.partial(has_best, directory.path, directory.uploader),
    )
    return OpenedState(state, meta, run_progress)


def _check_room(built: StepSetup, directory: OpenedDirectory) -> None:
    """Checks that the disk has room for the first checkpoint, before anything is compiled.

    Not at a resume, where a save may make room by deleting an older one.

    Raises:
        RunAgain: it has not.
    """
    if directory.resumes:
        return
    shares_disk = directory.uploader is None
    need = total_bytes(built.saved) // (1 if shares_disk else jax.process_count())
    cure = "free space there, or set another --output-dir"

    def check() -> str:
        disks.check_room(directory.path, need, "a checkpoint of this run", cure)
        return ""

    if shares_disk:
        process_group.process_zero_decides(check)
    else:
        check()


def _code_if_over(
    built: StepSetup,
    directory: OpenedDirectory,
    first: OpenedState,
    log: RunLog,
    hours: float | None,
) -> int | None:
    """Returns the exit code if no step or no time is left, which is reported; else None."""
    run, step, run_progress = built.run, directory.position.step, first.run_progress
    if hours is not None and hours <= 0:
        ending = run_summary.ending(run, step, built.total, STOP_MAX_HOURS, stopped_early=False)
        log.say(f"{ending}: raise --loop.max_total_hours {run.loop.max_total_hours:g}")
        log.ended(CODE_OF_STOP[STOP_MAX_HOURS], ending)
        return CODE_OF_STOP[STOP_MAX_HOURS]
    nothing = run_summary.nothing_to_do(run, step, built.total, run_progress)
    if not nothing:
        return None
    log.say(nothing)
    code = HOPELESS if unmet_gate(run.loop, run_progress) else DONE
    early, last = patience_over(run.loop, run_progress), max(built.total, step)
    log.ended(code, run_summary.ending(run, step, last, CONTINUE, early))
    return code


def open_step(
    built: StepSetup,
    directory: OpenedDirectory,
    data: OpenedData,
    first: OpenedState,
    flags: RunFlags,
    log: RunLog,
    signals: StopSignals,
    hours: float | None,
    stack: contextlib.ExitStack,
) -> TrainSetup:
    """Compiles the step, and opens the batches and what validates, saves, and stops."""
    run, say, uploader, position = built.run, log.say, directory.uploader, directory.position
    profiler.check(profiler.span(flags.profile), position.step, built.total, say)
    log.emit(
        Rewound(
            position.step, position.examples_seen, validated=not first.run_progress.validation_due
        )
    )
    run_directory.write_config(directory.path, first.meta.config, say)
    workers = workers_here(run, directory.mesh)
    if run.data.workers != 0:  # chosen, and no worker processes: the line would explain nothing
        say(workers.sentence)
    batches = open_batches(
        built, data.sources, data.quarantine, start=position.examples_seen, workers=workers.number
    )
    stack.callback(batches.close)
    evaluator = evaluator_of(built, data.sources, data.quarantine, threads=workers.number)
    with log.phases.within("compile"):
        code = consistency.digest_of(first.meta.code)
        step = compile_in_all_processes(built, flags, log, code, digest_of_data(data.sources))
    checkpoints, save_policy = _open_saver(built, directory, data, first, log, stack)
    state, first.state = first.state, None
    assert state is not None, "it was not taken before"
    location = directory.path if uploader is None else uploader.url
    keep = bad_step.Keeper(
        checkpoints,
        first.meta,
        built.saved,
        batch_sharding(directory.mesh),
        run_summary.find_nan_command(invocation.program(), flags.config, location),
        save_policy.await_save,
        (lambda: None) if uploader is None else functools.partial(uploader.finish, lambda: None),
        say,
    )
    recorder = StepRecorder(
        run,
        log,
        log.phases,
        built.total,
        position,
        batches,
        directory.mesh,
        bad_in_a_row=int(state.skip_step["bad_in_a_row"]),
        waits=flags.debug,
        keep=keep,
    )
    stack.callback(recorder.close)
    if flags.debug:
        step = checked(
            step,
            rate_flag(run.optim),
            lambda state, batch, why: keep(
                bad_step.KeptStep(
                    recorder.position(), recorder.bad_in_a_row, batch, batches.ids.tolist(), why
                ),
                state,
            ),
        )
    replays = None
    if run.loop.replay_every is None:
        first.run_progress.last_equal = None
    else:
        replays = replay.Replay(
            step,
            replay.described(built.rule.mesh),
            checkpoints,
            first.run_progress,
            position.step,
            save_policy.await_save,
            log.say,
            uploader,
        )
    span, folder = profiler.span(flags.profile), directory.path / "profile"
    step, before_step = stack.enter_context(
        profiler.profiled(span, folder, step, say, recorder.paused_for)
    )
    return TrainSetup(
        run=run,
        total=built.total,
        directory=directory.path,
        state=state,
        step=step,
        schedule=built.schedule,
        before_step=before_step,
        batches=batches,
        example_file=data.sources.example_file,
        evaluator=evaluator,
        canaries=Canaries(
            run,
            built.definition,
            built.total,
            warmup_steps(run.optim, built.total),
            built.schedule.learning_rate,
            say,
        ),
        recorder=recorder,
        save_policy=save_policy,
        rollback=Rollback(
            directory.path,
            run.checkpoint.every_steps,
            built.saved,
            say,
            recorder.advice,
            uploader,
            replays.rewound if replays else lambda position: None,
        ),
        replay=replays,
        stopping=Stopping(
            signals,
            data.broken_file_limit,
            directory.mesh,
            hours,
            run.checkpoint.every_s,
            lambda: batches.lost,
        ),
        log=log,
        uploader=uploader,
    )


def _open_saver(
    built: StepSetup,
    directory: OpenedDirectory,
    data: OpenedData,
    first: OpenedState,
    log: RunLog,
    stack: contextlib.ExitStack,
) -> tuple[CheckpointSaver, SavePolicy]:
    run, say, uploader = built.run, log.say, directory.uploader
    # The cache prints a warning once, not after each save.
    point_latest = functools.partial(
        run_directory.point_latest, directory.path, say=functools.cache(say)
    )
    if directory.resumes:
        point_latest()  # otherwise the first save does
    resumed = directory.start.path if directory.resumes else None
    checkpoints = CheckpointSaver(
        directory.path,
        run.checkpoint.keep,
        say,
        run.checkpoint.every_steps,
        data.sources.files_to_keep,
        milestones=run.checkpoint.milestones,
        uploads=uploader,
        resumed=resumed,
    )
    stack.callback(checkpoints.close)
    if uploader is not None:
        kept = run.checkpoint
        uploader.start(kept.keep, kept.every_steps, resumed, kept.milestones)

    def saved() -> None:
        point_latest()
        if uploader is not None:
            uploader.check()

    save_policy = SavePolicy(
        checkpoints,
        first.meta,
        first.run_progress,
        say,
        saved,
        built.definition.file_weights,
    )
    # Validations after the position, if the run went back, must not count at a later start.
    save_policy.write_progress()
    return checkpoints, save_policy


def compile_in_all_processes(
    setup: StepSetup, flags: RunFlags, log: RunLog, code: str = "", data: str = ""
) -> TrainStep:
    """Compiles the training step; returns when all processes have compiled theirs.

    Otherwise the first step would include the time that the slowest process still compiles.
    """
    began = time.perf_counter()
    traced = setup.trace_step(donate=not flags.debug, profiled=flags.profile is not None)
    with setup.lowering(), options.cache_hits() as hits:
        compiled = traced.lower().compile()
    read = " (read from the compilation cache)" if hits else ""
    log.say(f"compiled in {time.perf_counter() - began:.1f} s{read}")
    cost, state_bytes = planned.cost(setup, traced, compiled), bytes_per_device(setup.target)
    log.emit(
        StepCompiled(
            step=log.phases.now.step or 0,
            cost=cost,
            state_bytes=state_bytes,
            params=parameter_count(setup.definition.params),
            code=code,
            data=data,
            planned=planned.planned(setup.run, cost, state_bytes, jax.devices()[0]),
        )
    )
    process_group.wait_for_all("compiled", PAUSE_ALLOWANCE_S)
    return compiled
