"""The story of a run: build, restore, and for each step: batch -> step -> record -> save.

:func:`train` is the whole of it. What it calls is named after what it does.
"""

import contextlib
import dataclasses
import functools
import os
import time
from pathlib import Path

import jax

from jaxtrain import (
    building,
    checkpoint,
    compiling,
    config,
    debugging,
    memory,
    metrics,
    processes,
    profiling,
    rundir,
    versions,
)
from jaxtrain import mesh as meshes
from jaxtrain import state as states
from jaxtrain import step as steps
from jaxtrain.building import Built, Say
from jaxtrain.data import cache, pipeline
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.data.source import Sources
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.evaluation import Evaluator
from jaxtrain.farewell import farewell, go_on
from jaxtrain.progress import Progress
from jaxtrain.saving import (
    Meta,
    Saver,
    carried_best,
    check_best_metric,
    check_resume,
    describe,
    patience_over,
)
from jaxtrain.signals import DONE, INTERRUPTED, RUN_AGAIN, WRONG_USE, StopSignals
from jaxtrain.watchdog import Watchdog

# What a process asks for when it wants the run to stop; the largest wins.
GO_ON, STOP_SIGTERM, STOP_SIGINT, STOP_BAD_DATA = range(4)
EXIT_CODES = {
    GO_ON: DONE,
    STOP_SIGTERM: RUN_AGAIN,
    STOP_SIGINT: INTERRUPTED,
    STOP_BAD_DATA: WRONG_USE,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of the command line that are no fields of a config.

    Attributes:
        program: what was typed before the arguments, to say what to type next.
        arguments: of the command line.
    """

    output_dir: str | None = None
    resume: str | None = None
    simulate_devices: int | None = None
    debug: bool = False
    profile: tuple[int, int] | None = None
    program: str = "python -m jaxtrain.main"
    arguments: tuple[str, ...] = ()


def start(run: config.Run, flags: Flags) -> int:
    """Connects the processes, trains, and returns the exit code."""
    with StopSignals() as signals:
        compiling.reserve_memory(os.environ)
        processes.connect(os.environ, flags.simulate_devices)
        try:  # from here on others may wait for this process
            signals.listen()  # jax.distributed has put its own handler over ours
            processes.check_accelerator(os.environ)
            compiling.use_cache(os.environ, cache.root(run.data.cache_dir) / "compiled")
            return train(run, flags, signals)
        except RunAgain:  # in all processes alike: none waits for this one
            raise
        except Exception as error:
            processes.leave(error)
            raise


def train(run: config.Run, flags: Flags, signals: StopSignals) -> int:
    """One run from start to end."""
    mesh = meshes.make(run.mesh)
    damage: list[str] = []
    start_from = rundir.start_from(run.name, flags.resume, flags.output_dir, say=damage.append)
    directory = rundir.prepare(run.name, flags.output_dir, flags.resume, start_from)
    with contextlib.ExitStack() as stack:
        recorder = metrics.Recorder(directory, jax.process_index(), jax.process_count())
        stack.callback(recorder.close)
        say = recorder.say
        say(f"run directory {directory}")
        say(f"{run.name}: {mesh.size} x {jax.devices()[0].device_kind}, {versions.line()}")
        stack.push(recorder.log_error)
        for line in damage:
            say(line)
        watchdog = stack.enter_context(Watchdog(run.loop.hang_timeout_s, directory, say))
        if flags.resume and start_from is None:
            say(f"--resume {flags.resume}: no checkpoint to resume from, starting anew")
        quarantine = Quarantine.open(directory, jax.process_index())
        with watchdog.pause("data", allowance_s=None):
            sources = _open_data(run, say)
        bad_share = _quarantined(run, sources, quarantine)

        position = _position(start_from)
        built = building.build(run, mesh, len(sources.train), say, position)
        total = built.total
        explained = functools.partial(memory.explained, run, built.target, built.spec, say)
        meta = describe(run, sources.train.fingerprint)
        with watchdog.pause("start"), explained():
            state = _first_state(built, start_from, directory, meta, say)
        done, seen = position.done, position.seen
        if done >= total:
            say(f"nothing to do: {done} updates are done, the run has {total}")
            return DONE
        if patience_over(run.loop, meta):
            say(
                f"nothing to do: early stopping ended this run after {done} updates; raise "
                f"--loop.early_stop_patience (now {run.loop.early_stop_patience}) to go on"
            )
            return DONE
        profiling.check(flags.profile, done, total, say)
        rundir.write_config(directory, meta["config"])
        rundir.link_latest(directory)
        recorder.rewind(done)

        batches = _open_batches(built, sources, quarantine, start=seen, batches=total - done)
        stack.callback(batches.close)
        evaluator = _evaluator(built, sources, quarantine)
        with watchdog.pause("compile"), explained():
            train_step = _compile(built, flags, say)

        checkpoints = checkpoint.Checkpoints(
            directory / checkpoint.CHECKPOINTS, run.checkpoint.keep, say
        )
        stack.callback(checkpoints.close)
        saver = Saver(run, checkpoints, meta, say)
        progress = Progress(run, recorder, watchdog, total, batches, mesh)
        stack.callback(progress.close)
        before_step = stack.enter_context(profiling.profiler(flags.profile, directory / "profile"))
        agreement = processes.Agreement(mesh)
        wanted, stop_early = GO_ON, False
        with explained():
            while done < total:
                before_step(done)
                state, found = train_step(state, next(batches))
                done += 1
                progress.push(done, found)  # looks at the step before this one

                best = False
                if evaluator and _due(done, run.loop.eval_every, total):
                    with progress.interrupted("evaluation"):
                        values = evaluator.metrics(state)
                        progress.validated(done, values, evaluator.samples(state))
                        best = saver.judge(done, values)
                        stop_early = patience_over(run.loop, meta)
                regular = _due(done, run.checkpoint.every, total)
                if regular or best:
                    with progress.interrupted("save"):
                        saver.save(done, state, regular=regular, best=best)

                wanted = int(agreement.exchange(_wish(signals, bad_share)) or GO_ON)
                if wanted or stop_early:
                    break
            progress.flush()
            jax.block_until_ready(state)  # on all devices: none needs the last batch any more
            batches.close()
            with progress.interrupted("save"):
                saver.finish(done, state)
        progress.say(_ending(run, done, total, wanted, stop_early))
        if wanted == GO_ON:
            farewell(
                run,
                flags.program,
                flags.arguments,
                directory,
                first=progress.first,
                last=progress.last,
                pictures=progress.pictures,
                stopped_early=stop_early,
                say=progress.say,
            )
        else:
            progress.say(f"go on with: {go_on(flags.program, flags.arguments, directory)}")
        return EXIT_CODES[wanted]


def _position(start_from: Path | None) -> config.Position:
    if start_from is None:
        return config.Position()
    saved = checkpoint.read_meta(start_from)
    return config.Position(saved["step"], saved["examples_seen"])


def _first_state(
    built: Built, start_from: Path | None, directory: Path, meta: Meta, say: Say
) -> states.State:
    """A fresh state, or that of a checkpoint; takes over the best so far into ``meta``."""
    if start_from is None:
        return built.fresh_state()
    saved = checkpoint.read_meta(start_from)
    check_resume(saved, meta, start_from, say)
    state = checkpoint.restore(start_from, built.target, verified=True)
    meta["best"] = carried_best(saved["best"], built.run.checkpoint, start_from, directory)
    say(f"resumed from {start_from}: {saved['examples_seen']} examples seen")
    return state


def _compile(built: Built, flags: Flags, say: Say) -> steps.TrainStep:
    began = time.perf_counter()
    compiled = built.compile_step(donate=not flags.debug)
    say(f"compiled in {time.perf_counter() - began:.1f} s")
    return debugging.checked(compiled) if flags.debug else compiled


def _open_batches(
    built: Built, sources: Sources, quarantine: Quarantine, *, start: int, batches: int
) -> pipeline.TrainingBatches:
    run = built.run
    return pipeline.TrainingBatches(
        sources.train,
        built.rule.mesh,
        built.spec,
        start=start,
        batches=batches,
        seed=run.seed,
        workers=run.data.workers,
        prefetch=run.data.prefetch,
        quarantine=quarantine,
    )


def _open_data(run: config.Run, say: Say) -> Sources:
    sources = processes.process_zero_first(
        lambda: run.data.open(run.model, seed=run.seed, say=say), "data"
    )
    say(sources.summary)
    processes.check_same(
        "data",
        sources.train.fingerprint,
        "give every process the same files, and let none change them during the run",
    )
    return sources


def _quarantined(run: config.Run, sources: Sources, quarantine: Quarantine) -> pipeline.BadShare:
    """Records the inputs that were found broken when the data was opened."""
    if jax.process_index() == 0:
        quarantine.add_all(sources.bad, found="index")
    share = pipeline.BadShare(sources, quarantine, run.data.max_bad_share)
    complaint = share.complaint()
    if complaint:
        raise InputError(complaint)
    return share


def _evaluator(built: Built, sources: Sources, quarantine: Quarantine) -> Evaluator | None:
    run = built.run
    if run.loop.eval_every is None:
        return None
    # A microbatch's size, so that evaluation never needs more memory than a step.
    batch_size = run.data.batch_size // run.optim.accumulate
    batches = pipeline.ValidationBatches(
        sources.val,
        built.rule.mesh,
        run.model.batch_spec(batch_size),
        examples=run.loop.eval_examples,
        seed=run.seed,
        threads=run.data.workers,
        quarantine=quarantine,
    )
    evaluator = Evaluator(built.definition, built.rule, run.precision, built.target, batches)
    check_best_metric(run.checkpoint, evaluator.names())
    return evaluator


def _wish(signals: StopSignals, bad_share: pipeline.BadShare) -> int:
    """What this process would like to do now; all processes then do the same."""
    if bad_share.complaint():
        return STOP_BAD_DATA
    return {None: GO_ON, "SIGTERM": STOP_SIGTERM, "SIGINT": STOP_SIGINT}[signals.requested]


def _due(done: int, every: int | None, total: int) -> bool:
    return every is not None and (done % every == 0 or done == total)


def _ending(run: config.Run, done: int, total: int, wanted: int, stopped_early: bool) -> str:
    if wanted:
        reason = {
            STOP_SIGTERM: "stopped by SIGTERM",
            STOP_SIGINT: "stopped by Ctrl-C",
            STOP_BAD_DATA: "stopped: too many broken input files (quarantine.jsonl names them)",
        }[wanted]
        return f"{reason}; {done} of {total} updates are done and saved"
    if stopped_early and done < total:
        return (
            f"stopped early: {run.loop.early_stop_patience} validations without a better "
            f"{run.checkpoint.best_metric}; {done} of {total} updates are done and saved"
        )
    return f"done: {done} of {total} updates"
