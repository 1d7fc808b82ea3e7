"""Starts a run: connects its processes, trains, reports the end, and returns the exit code."""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxtrain import config, terminal
from jaxtrain.config import invocation
from jaxtrain.config.mesh_fit import fit_to_present_devices
from jaxtrain.config.run_flags import RunFlags
from jaxtrain.distributed import key_value, leave_notice, process_group
from jaxtrain.distributed.heartbeat import Heartbeat
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.distributed.watchdog import Watchdog
from jaxtrain.errors import DONE, InputError, Stopped, stop_inside
from jaxtrain.jobs import worker_process
from jaxtrain.ops import cpu
from jaxtrain.reporting.result import TrainResult
from jaxtrain.storage import cache, lock
from jaxtrain.telemetry import tracker
from jaxtrain.training import loop, preflight, run_summary
from jaxtrain.training.run_log import RunLog
from jaxtrain.training.save_policy import patience_over
from jaxtrain.training.setup import TrainSetup, open_training
from jaxtrain.training.stopping import CODE_OF_STOP, CONTINUE, STOP_BAD_DATA
from jaxtrain.xla import gpu_memory, options

# Bytes of records: of a run that is stopped, a larger report would take more than some seconds.
_REPORT_OF_STOPPED = 2**23


def train(
    run: config.Run,
    *,
    output_dir: str | None = None,
    resume: str | None = None,
    simulate_devices: int | None = None,
    track: Sequence[str] = (),
    quiet: bool = False,
) -> TrainResult:
    """Trains inside a Python program or a notebook; :func:`jaxtrain.train` documents it.

    The process outlives the run. Only a hang ends it
    (:class:`jaxtrain.distributed.watchdog.Watchdog`).

    Raises:
        InputError: wrong use or input.
        RunAgain: a temporary failure.
        KeyboardInterrupt: stopped before the first step, or by a second Ctrl-C.
    """
    flags = RunFlags(
        output_dir=output_dir,
        resume=resume,
        simulate_devices=simulate_devices,
        track=tracker.names(track),
    )
    with (
        StopSignals(ends_process=False) as signals,
        worker_process.started_by_us(),
        lock.released(),
    ):
        preflight.refuse(run, flags)
        try:
            code, directory = _start(run, flags, signals, quiet=quiet)
        except Stopped as stopped:
            raise KeyboardInterrupt(f"stopped by {stopped}; there was nothing to save") from None
    if code == CODE_OF_STOP[STOP_BAD_DATA]:
        raise InputError(
            f"too many input files are broken (data.max_bad_share {run.data.max_bad_share}): "
            f"{directory / 'quarantine.jsonl'} lists them; fix or remove them, or raise the limit, "
            'and resume with resume="latest"'
        )
    return TrainResult(directory, code)


def start(run: config.Run, flags: RunFlags, signals: StopSignals) -> int:
    """Connects the processes, trains, and returns the exit code. It may end the process itself.

    Args:
        run: the config; :func:`jaxtrain.config.problems` has found nothing wrong.

    Raises:
        InputError: wrong use or input.
        RunAgain: a temporary failure, such as a full disk or an unreachable process.
    """
    code, _ = _start(run, flags, signals)
    return code


def _start(
    run: config.Run, flags: RunFlags, signals: StopSignals, *, quiet: bool = False
) -> tuple[int, Path]:
    gpu_memory.reserve_memory(os.environ)
    if flags.simulate_devices or process_group.will_use_cpu(os.environ):
        cpu.keep_freed()
    # Before it connects, so that no other process is inside a step with a machine that leaves.
    with leave_notice.heard(run.loop.leave_notice, lambda: signals.request("SIGTERM")):
        process_group.connect(os.environ, flags.simulate_devices)
        return _connected(run, flags, signals, quiet=quiet)


def _connected(
    run: config.Run, flags: RunFlags, signals: StopSignals, *, quiet: bool
) -> tuple[int, Path]:
    with (
        Heartbeat(key_value.of_run(), signals) as heartbeat,
        Watchdog(run.loop.hang_timeout_s, heartbeat) as watchdog,
    ):
        signals.before_exit(heartbeat.leave)
        signals.when_received(lambda: watchdog.end_within(run.loop.stop_timeout_s))
        try:  # from here on, other processes may be waiting for this one
            process_group.check_accelerator(os.environ)
            run, _ = fit_to_present_devices(run)
            process_group.check_same_program(
                run, {"--resume": flags.resume, "--debug": flags.debug}
            )
            options.use_cache(os.environ, cache.root(run.data.cache_dir) / "compiled")
            code, directory = _train(run, flags, signals, heartbeat, watchdog, quiet=quiet)
        except BaseException as error:
            reason = stop_inside(error) or error
            process_group.leave(reason, heartbeat)
            if reason is not error:
                raise reason from None
            raise
        ends = signals.ends_process
        several = jax.process_count() > 1 and code != DONE
        if ends and (options.still_compiling() or tracker.still_sending() or several):
            process_group.end(code, heartbeat)
        return code, directory


def _train(
    run: config.Run,
    flags: RunFlags,
    signals: StopSignals,
    heartbeat: Heartbeat,
    watchdog: Watchdog,
    *,
    quiet: bool,
) -> tuple[int, Path]:
    with (
        RunLog(signals, watchdog, quiet=quiet) as log,
        heartbeat.collectives(),
        open_training(run, flags, log, signals, watchdog.beat) as setup,
    ):
        if isinstance(setup, int):  # nothing left to train
            return setup, log.directory
        loop.train(setup)
        if setup.uploader is not None:
            with log.phases.within("upload", allowance_s=None):
                setup.uploader.finish(watchdog.beat)
        heartbeat.ending()
        return _end(setup, flags), setup.directory


def _end(setup: TrainSetup, flags: RunFlags) -> int:
    """Reports why the run has ended and how to resume it; returns the exit code."""
    run, log, recorder, decision = setup.run, setup.log, setup.recorder, setup.stopping.decision
    stopped_early = patience_over(run.loop, setup.save_policy.run_progress)
    ending = run_summary.ending(
        run, recorder.step, setup.total, decision, stopped_early, setup.stopping.why
    )
    log.say(ending)
    if jax.process_index() and (why := setup.stopping.why_here):  # process 0 cannot print it
        terminal.warn(why)
    program, arguments = invocation.program(), run_summary.train_arguments(run, flags)
    if decision != CONTINUE:
        again = run_summary.resume_command(program, arguments, setup.location)
        each = run_summary.in_each(jax.process_count())
        # A resume ends again if a gate is not met.
        progress = setup.save_policy.run_progress
        nothing = run_summary.nothing_to_do(run, recorder.step, setup.total, progress)
        log.say(nothing or (f"resume{each} with: {again}" if arguments else again))
    else:
        run_summary.print_summary(
            run,
            program,
            arguments,
            setup.location,
            results=recorder.results,
            validations=[entry.values for entry in setup.save_policy.run_progress.validations],
            example_file=setup.example_file,
            stopped_early=stopped_early,
            processes=jax.process_count(),
            say=log.say,
        )
    log.ended(CODE_OF_STOP[decision], ending)
    if jax.process_index() == 0:
        with log.phases.within("report"):  # takes up to a minute for a run with many records
            largest = math.inf if decision == CONTINUE else _REPORT_OF_STOPPED
            run_summary.write_report(setup.directory, log.say, largest)
    return CODE_OF_STOP[decision]
