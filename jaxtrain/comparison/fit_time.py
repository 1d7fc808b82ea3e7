"""The number of steps that fit into a time, by a step that is measured on this machine."""

import math
import os
from typing import Any

from jaxtrain import config
from jaxtrain.config import field_values
from jaxtrain.config.run_flags import RunFlags
from jaxtrain.distributed import cluster_env
from jaxtrain.errors import InputError
from jaxtrain.jobs.subprocess_worker import SubprocessWorker, WorkerFailed, environment
from jaxtrain.reporting import run_files
from jaxtrain.storage import atomic, bucket
from jaxtrain.terminal import Say

_NO_LENGTH = ("--loop.epochs", "None", "--loop.tokens_per_param", "None")


def seconds(duration: str) -> float:
    """Returns the seconds of a duration such as ``"90s"``, ``"5m"`` or ``"1.5h"``."""
    value_s = field_values.duration_s(duration)
    if value_s is None:
        raise InputError(f"--fit-time {duration}: use a duration such as 90s, 5m, or 1.5h")
    return value_s


def overrides(steps: int, warmup_steps: int | None) -> tuple[str, ...]:
    """Returns the overrides of a run of this length."""
    length = ("--loop.steps", str(steps), *_NO_LENGTH)
    if warmup_steps is None:
        return length
    return (*length, "--optim.warmup_steps", str(warmup_steps))


def fitted(run: config.Run, before: int, steps: float) -> tuple[str, ...]:
    """Returns the overrides of a run of other length, whose schedule keeps its shape."""
    count, warmup = max(1, round(steps)), run.optim.warmup_steps
    return overrides(count, warmup and max(1, warmup * count // before))


def length(flags: RunFlags, say: Say) -> tuple[str, ...]:
    """Returns the overrides that ``train --fit-time`` adds, as recorded in the run or measured."""
    assert flags.fit_time is not None, "the flag was given"
    wanted = seconds(flags.fit_time)
    if flags.output_dir is None or bucket.is_bucket(flags.output_dir):
        raise InputError(
            "--fit-time requires --output-dir with a folder, where a resume finds the number of "
            "steps that was measured"
        )
    if cluster_env.find(os.environ) is not None:
        raise InputError("--fit-time measures in one process: set --loop.steps for several")
    recorded = atomic.expanded(flags.output_dir) / run_files.CONFIG
    if recorded.exists():
        try:
            settings = atomic.read_json(recorded)
            return overrides(settings["loop"]["steps"], settings["optim"]["warmup_steps"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise InputError(f"--fit-time: {recorded} cannot be read ({error})") from None
    request = {
        "config": flags.config,
        "overrides": [*flags.overrides],
        "simulate_devices": flags.simulate_devices,
        "fit_s": wanted,
    }
    measured: dict[str, Any] = {}
    try:
        function = "jaxtrain.comparison.side:measure"
        with SubprocessWorker(function, request, environment()) as worker:
            for message in worker.messages(math.inf):
                measured = message
    except WorkerFailed as failed:
        raise InputError(f"--fit-time: a step cannot be measured: {failed}") from None
    say(
        f"--fit-time {flags.fit_time}: {int(measured['length'][1]):,} steps of "
        f"{measured['step_s'] * 1e3:.4g} ms, as measured without validations and saves"
    )
    return tuple(measured["length"])
