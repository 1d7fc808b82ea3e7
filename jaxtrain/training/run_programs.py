"""The program that a run compiles, the step, and what else uses it: replay, the search for NaN."""

import time
from collections.abc import Callable
from pathlib import Path

from jaxtrain.checkpoint.saver import Checkpoints
from jaxtrain.distributed import process_group
from jaxtrain.distributed.watchdog import PAUSE_ALLOWANCE_S
from jaxtrain.telemetry.events import StepCompiled
from jaxtrain.training import (
    debugging,
    preflight,
    replay,
    run_files,
)
from jaxtrain.training.mirror import Mirror
from jaxtrain.training.nan_origin import FindNan
from jaxtrain.training.run_log import RunLog
from jaxtrain.training.run_progress import RunProgress
from jaxtrain.training.save_policy import (
    Saver,
)
from jaxtrain.training.state import (
    bytes_per_device,
    parameter_count,
)
from jaxtrain.training.step import (
    TrainStep,
    build_gradients,
)
from jaxtrain.training.step_setup import StepSetup

Say = Callable[[str], None]


def compile_in_all_processes(setup: StepSetup, flags: preflight.Flags, log: RunLog) -> TrainStep:
    """Compiles the training step; returns when all processes have compiled theirs.

    Otherwise the first step would include the time that the slowest process still compiles.

    Args:
        setup: of the step.
        flags: of the run.
        log: of the run.
    """
    began = time.perf_counter()
    traced = setup.trace_step(donate=not flags.debug, profiled=flags.profile is not None)
    with setup.lowering():
        compiled = traced.lower().compile()
    log.say(f"compiled in {time.perf_counter() - began:.1f} s")
    log.emit(
        StepCompiled(
            step=log.phases.now.step or 0,
            cost=setup.cost(traced, compiled),
            state_bytes=bytes_per_device(setup.target),
            params=parameter_count(setup.definition.params),
        )
    )
    process_group.wait_for_all("compiled", PAUSE_ALLOWANCE_S)
    return debugging.checked(compiled) if flags.debug else compiled


def replayed(
    step: TrainStep,
    setup: StepSetup,
    checkpoints: Checkpoints,
    progress: RunProgress,
    done: int,
    saver: Saver,
    log: RunLog,
    mirror: Mirror | None,
) -> replay.Replay | None:
    """Returns what computes every Nth step twice; None without ``loop.replay_every``."""
    if setup.run.loop.replay_every is None:
        progress.agreed = None
        return None
    devices = replay.described(setup.rule.mesh)
    return replay.Replay(step, devices, checkpoints, progress, done, saver.settle, log.say, mirror)


def nan_search(setup: StepSetup, directory: Path, say: Say) -> FindNan | None:
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
