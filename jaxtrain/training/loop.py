"""The story of a run: build, restore, and for each step: batch -> step -> record -> save.

:func:`train` is the whole of it. What it calls is named after what it does.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxtrain import config
from jaxtrain import sharding as meshes
from jaxtrain.checkpoint import saver as checkpoint
from jaxtrain.config import invocation
from jaxtrain.data import cache
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.distributed import process_group
from jaxtrain.distributed.heartbeat import Peers
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.distributed.watchdog import Watchdog
from jaxtrain.errors import DONE, stop_inside
from jaxtrain.interop import weights
from jaxtrain.ops import cpu
from jaxtrain.storage.atomic import expanded
from jaxtrain.telemetry.phases import Phases
from jaxtrain.training import out_of_memory, preflight, preparation, profiler, run_directory, setup
from jaxtrain.training.progress import Progress
from jaxtrain.training.rollback import Rollback
from jaxtrain.training.run_log import Journal
from jaxtrain.training.run_summary import farewell, go_on, in_each, report, ways_to_fit
from jaxtrain.training.save_policy import Meta, Saver, describe, patience_over
from jaxtrain.training.stopping import EXIT_CODES, GO_ON, REASONS, Stopping
from jaxtrain.xla import options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of the command line that are no fields of a config.

    Attributes:
        relief: looks for a way out when device memory is full.
        arguments: of the command line, to print what to type next; () where there was none.
    """

    output_dir: str | None = None
    resume: str | None = None
    simulate_devices: int | None = None
    debug: bool = False
    profile: tuple[int, int] | None = None
    arguments: tuple[str, ...] = ()
    relief: out_of_memory.Relief | None = None


def start(run: config.Run, flags: Flags, signals: StopSignals) -> int:
    """Connects the processes, trains, and returns the exit code."""
    options.reserve_memory(os.environ)
    if flags.simulate_devices or process_group.will_use_cpu(os.environ):
        cpu.keep_freed()
    process_group.connect(os.environ, flags.simulate_devices)
    with (
        process_group.peers(signals) as peers,
        Watchdog(run.loop.hang_timeout_s, peers) as watchdog,
    ):
        signals.before_exit = peers.leave
        signals.when_heard(lambda: watchdog.end_within(run.loop.stop_timeout_s))
        try:  # from here on others may wait for this process
            process_group.check_accelerator(os.environ)
            process_group.check_same_run(run, {"--resume": flags.resume, "--debug": flags.debug})
            options.use_cache(os.environ, cache.root(run.data.cache_dir) / "compiled")
            code = train(run, flags, signals, peers, watchdog)
        except BaseException as error:
            told = stop_inside(error) or error
            process_group.leave(told, peers)
            if told is not error:
                raise told from None
            raise
        if options.still_compiling() or (code != DONE and jax.process_count() > 1):
            process_group.end(code, peers)
        return code


def train(
    run: config.Run, flags: Flags, signals: StopSignals, peers: Peers, watchdog: Watchdog
) -> int:
    """One run from start to end."""
    damage: list[str] = []
    phases = Phases(watchdog)
    with contextlib.ExitStack() as stack:
        journal = stack.enter_context(Journal(phases, signals, peers, watchdog))
        with phases.within("start"):  # which may read a whole checkpoint
            preflight.check(run, resumes=flags.resume is not None)
            mesh = meshes.make(run.mesh)
            before = run_directory.before(run.name, flags.output_dir)  # a resume makes a lock there
            start_from = run_directory.start_from(
                run.name,
                flags.resume,
                flags.output_dir,
                say=damage.append,
                little=run.checkpoint.every,
            )
            directory = run_directory.prepare(run.name, flags.output_dir, flags.resume, start_from)
            position = preparation.position(start_from)
        journal.open(run, directory, start_from, position, flags.arguments, before)
        recorder, history, say = journal.recorder, journal.history, journal.recorder.say
        for line in damage:
            recorder.log(line)
        if flags.resume and start_from is None:
            say(f"--resume {flags.resume}: no checkpoint to resume from, starting anew")
        quarantine = Quarantine.open(directory, jax.process_index())
        if start_from is None and run.model.init_from is not None:
            weights.check_there(expanded(run.model.init_from))
        with phases.within("data", allowance_s=None):
            sources = preparation.open_data(run, start_from, say)
        bad_share = preparation.quarantined(run, sources, quarantine, say)

        built = setup.build(run, mesh, len(sources.train), say, position)
        total = built.total
        history.started(total)
        to_fit = ways_to_fit(invocation.program(), _typed(run, flags))
        explained = functools.partial(out_of_memory.explained, built, flags.relief, to_fit, say)
        meta = describe(run, sources.train.fingerprint)
        with phases.within("restore"), explained():
            state = preparation.first_state(built, start_from, directory, meta, say)
        evaluation_due = meta["evaluation_due"]
        if nothing := _nothing_to_do(run, position.done, total, meta):
            say(nothing)
            history.end(DONE, nothing)
            return DONE
        profiler.check(flags.profile, position.done, total, say)
        recorder.rewind(position.done, position.seen, validated=not evaluation_due)
        run_directory.write_config(directory, meta["config"], say)
        # Cached, a warning is said once and not after each save.
        link_latest = functools.partial(
            run_directory.link_latest, directory, say=functools.cache(say)
        )
        if start_from is not None and start_from.is_relative_to(directory):
            link_latest()  # it has saved; otherwise its first save does it

        batches = preparation.open_batches(built, sources, quarantine, start=position.seen)
        stack.callback(batches.close)
        evaluator = preparation.evaluator(built, sources, quarantine)
        with phases.within("compile"), explained():
            train_step = preparation.compiled_step(built, flags.debug, say, history)

        checkpoints = checkpoint.Checkpoints(
            directory / checkpoint.CHECKPOINTS,
            run.checkpoint.keep,
            say,
            run.checkpoint.every,
            sources.files_to_keep,
        )
        stack.callback(checkpoints.close)
        saver = Saver(run, checkpoints, meta, say, link_latest)
        bad_in_a_row = int(state.guard["bad_in_a_row"])
        progress = Progress(
            run,
            recorder,
            phases,
            total,
            position,
            batches,
            mesh,
            bad_in_a_row=bad_in_a_row,
            waits=flags.debug,
            faster=sources.faster,
        )
        stack.callback(progress.close)
        train_step, before_step = stack.enter_context(
            profiler.profiled(
                flags.profile, directory / "profile", train_step, say, progress.interrupted
            )
        )
        rollback = Rollback(directory, run.checkpoint.every, built.target, say)
        stopping = Stopping(signals, bad_share, process_group.Agreement(mesh))

        def validate() -> bool:
            """Whether this state is the best so far."""
            assert evaluator is not None, "a run without validations never gets here"
            with progress.interrupted("compile"):
                evaluator.compile(stopping)
            with progress.interrupted("evaluation", allowance_s=0.0):  # for each batch
                found = evaluator(state, stopping, watchdog.beat)
                meta["evaluation_due"] = found is None  # broken off: a resume begins with it
                if found is None:
                    return False
                progress.validated(progress.done, found)
                return saver.judge(progress.position(), found.values)

        signals.hold()
        phases.training()
        with explained():
            if evaluation_due and validate():
                saver.save(progress.position(), state, regular=False, best=True)
            while not (stopping.decision or patience_over(run.loop, meta) or progress.finished()):
                if progress.too_many_bad():
                    with progress.interrupted("rollback"):
                        saver.settle()
                        state, back_to = rollback(state)
                        checkpoints.forget_after(back_to.done)
                        progress.rewind(back_to)
                before_step(progress.done, state)
                state, found = train_step(state, next(batches))
                progress.push(found, batches.ids)  # looks at the step before this one

                evaluate = evaluator and _due(progress.done, run.loop.eval_every, total)
                regular = _due(progress.done, run.checkpoint.every, total)
                if (evaluate or regular) and progress.settled():
                    best = bool(evaluate) and validate()
                    if (regular or best) and not meta["evaluation_due"]:
                        with progress.interrupted("save"):
                            saver.save(progress.position(), state, regular=regular, best=best)
                if stopping.decision or stopping.after_step():
                    break
            progress.flush()
            phases.ending()
            jax.block_until_ready(state)  # on all devices: none needs the last batch any more
            batches.close()
            with progress.interrupted("save"):
                saver.finish(progress.position(), state)
            peers.ending()
        stopped_early = patience_over(run.loop, meta)
        ending = _ending(run, progress.done, total, stopping.decision, stopped_early)
        say(ending)
        _say_what_next(run, flags, directory, progress, stopping.decision, stopped_early)
        history.end(EXIT_CODES[stopping.decision], ending)
        if stopping.decision == GO_ON and jax.process_index() == 0:
            with phases.within("report"):  # which takes a minute where a run has many records
                report(directory, say)
        return EXIT_CODES[stopping.decision]


def _typed(run: config.Run, flags: Flags) -> Sequence[str]:
    """The command line; from Python one that gives the same run, or empty where there is none."""
    if flags.arguments:
        return flags.arguments
    typed = config.as_typed(run)
    if typed and flags.simulate_devices:
        return (*typed, "--simulate-devices", str(flags.simulate_devices))
    return typed


def _say_what_next(
    run: config.Run,
    flags: Flags,
    directory: Path,
    progress: Progress,
    decision: int,
    stopped_early: bool,
) -> None:
    typed = _typed(run, flags)
    if decision != GO_ON:
        again = go_on(invocation.program(), typed, directory)
        progress.say(f"go on{in_each(jax.process_count())} with: {again}" if typed else again)
        return
    farewell(
        run,
        invocation.program(),
        typed,
        directory,
        first=progress.first,
        last=progress.last,
        samples=progress.samples,
        since=progress.began,
        stopped_early=stopped_early,
        processes=jax.process_count(),
        say=progress.say,
    )


def _due(done: int, every: int | None, total: int) -> bool:
    return every is not None and (done % every == 0 or done == total)


def _nothing_to_do(run: config.Run, done: int, total: int, meta: Meta) -> str | None:
    if done >= total and not meta["evaluation_due"]:
        return f"nothing to do: {done} updates are done, the run has {total}"
    if patience_over(run.loop, meta):
        return (
            f"nothing to do: early stopping ended this run after {done} updates; "
            f"raise --loop.early_stop_patience (now {run.loop.early_stop_patience}) to go on"
        )
    return None


def _ending(run: config.Run, done: int, total: int, decision: int, stopped_early: bool) -> str:
    if decision:
        return f"{REASONS[decision]}; {done} of {total} updates are done and saved"
    if stopped_early and done < total:
        return (
            f"stopped early: {run.loop.early_stop_patience} validations without a better "
            f"{run.checkpoint.best_metric}; {done} of {total} updates are done and saved"
        )
    return f"done: {done} of {total} updates"
