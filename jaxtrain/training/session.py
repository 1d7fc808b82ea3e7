"""Starts a run: connects its processes, trains, reports the end, and returns the exit code."""

import os

import jax

from jaxtrain import config
from jaxtrain.config import invocation
from jaxtrain.data import cache
from jaxtrain.distributed import key_value, process_group
from jaxtrain.distributed.heartbeat import Heartbeat
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.distributed.watchdog import Watchdog
from jaxtrain.errors import DONE, stop_inside
from jaxtrain.ops import cpu
from jaxtrain.training import loop, out_of_memory, run_summary
from jaxtrain.training.preflight import Flags
from jaxtrain.training.run_log import RunLog
from jaxtrain.training.save_policy import patience_over
from jaxtrain.training.setup import TrainSetup, open_training
from jaxtrain.training.stopping import CONTINUE, EXIT_CODES
from jaxtrain.xla import options


def start(
    run: config.Run,
    flags: Flags,
    signals: StopSignals,
    relief: out_of_memory.Relief | None = None,
) -> int:
    """Connects the processes, trains, and returns the exit code.

    Args:
        run: the config; :func:`jaxtrain.config.problems` has found nothing wrong.
        flags: of the command line.
        signals: entered.
        relief: finds overrides that fit when device memory is full.

    Raises:
        InputError: wrong use or input.
        RunAgain: a temporary failure, such as a full disk or an unreachable process.
    """
    options.reserve_memory(os.environ)
    if flags.simulate_devices or process_group.will_use_cpu(os.environ):
        cpu.keep_freed()
    process_group.connect(os.environ, flags.simulate_devices)
    with (
        Heartbeat(key_value.of_run(), signals) as heartbeat,
        Watchdog(run.loop.hang_timeout_s, heartbeat) as watchdog,
    ):
        signals.before_exit(heartbeat.leave)
        signals.when_heard(lambda: watchdog.end_within(run.loop.stop_timeout_s))
        try:  # from here on, other processes may be waiting for this one
            process_group.check_accelerator(os.environ)
            process_group.check_same_run(run, {"--resume": flags.resume, "--debug": flags.debug})
            options.use_cache(os.environ, cache.root(run.data.cache_dir) / "compiled")
            code = _train(run, flags, signals, heartbeat, watchdog, relief)
        except BaseException as error:
            reason = stop_inside(error) or error
            process_group.leave(reason, heartbeat)
            if reason is not error:
                raise reason from None
            raise
        if options.still_compiling() or (code != DONE and jax.process_count() > 1):
            process_group.end(code, heartbeat)
        return code


def _train(
    run: config.Run,
    flags: Flags,
    signals: StopSignals,
    heartbeat: Heartbeat,
    watchdog: Watchdog,
    relief: out_of_memory.Relief | None,
) -> int:
    with (
        RunLog(signals, watchdog) as log,
        open_training(run, flags, log, signals, watchdog.beat, relief) as setup,
    ):
        if setup is None:  # nothing left to train
            return DONE
        loop.train(setup)
        heartbeat.ending()
        return _end(setup, flags)


def _end(setup: TrainSetup, flags: Flags) -> int:
    """Reports why the run has ended and how to resume it; returns the exit code."""
    run, log, progress, decision = setup.run, setup.log, setup.progress, setup.stopping.decision
    stopped_early = patience_over(run.loop, setup.saver.meta)
    ending = run_summary.ending(run, progress.done, setup.total, decision, stopped_early)
    log.say(ending)
    program, typed = invocation.program(), run_summary.typed(run, flags)
    if decision != CONTINUE:
        again = run_summary.resume_command(program, typed, setup.directory)
        each = run_summary.in_each(jax.process_count())
        log.say(f"resume{each} with: {again}" if typed else again)
    else:
        run_summary.print_summary(
            run,
            program,
            typed,
            setup.directory,
            results=progress.results,
            example_file=setup.example_file,
            stopped_early=stopped_early,
            processes=jax.process_count(),
            say=log.say,
        )
    log.ended(EXIT_CODES[decision], ending)
    if decision == CONTINUE and jax.process_index() == 0:
        with log.phases.within("report"):  # takes up to a minute for a run with many records
            run_summary.write_report(setup.directory, log.say)
    return EXIT_CODES[decision]
