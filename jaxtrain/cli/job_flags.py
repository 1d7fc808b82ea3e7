"""Which engine does the work of :mod:`jaxtrain.jobs.resumable`, and which part, by the flags."""

import os
from collections.abc import Mapping

from jaxtrain import machine, terminal
from jaxtrain.cli import commands
from jaxtrain.errors import InputError
from jaxtrain.jobs import engines
from jaxtrain.jobs.resumable import Part


def part(flags: commands.Parts, environment: Mapping[str, str] = os.environ) -> Part:
    """Returns which part of its work this command does; prints one that the environment chose."""
    if flags.part is not None:
        index, slash, count = flags.part.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal()):
            raise InputError(f"--part {flags.part}: write I/N, such as 0/4")
        if int(index) >= int(count):
            parts = max(1, int(count))
            raise InputError(f"--part {flags.part}: use parts 0/{parts} to {parts - 1}/{parts}")
        return Part(int(index), int(count))
    of_task = _of_slurm(environment)
    if of_task.count > 1:
        terminal.say(f"SLURM: doing {of_task}; --part 0/1 does everything")
    return of_task


def _of_slurm(environment: Mapping[str, str]) -> Part:
    """Returns the part of a task of an array, of srun, or of both."""

    def number(name: str, default: int) -> int:
        text = environment.get(name, "")
        return int(text) if text.isdecimal() else default

    # Elements of an array may be numbered from any number and with any step.
    first, step = number("SLURM_ARRAY_TASK_MIN", 0), number("SLURM_ARRAY_TASK_STEP", 1)
    elements = number("SLURM_ARRAY_TASK_COUNT", 1)
    element = (number("SLURM_ARRAY_TASK_ID", first) - first) // max(1, step)
    if element >= elements:
        raise InputError(
            f"SLURM_ARRAY_TASK_ID {element * step + first}: the array's {elements} numbers are not "
            "a range, so its parts are unknown: pass --part I/N"
        )
    # A batch script, too, has SLURM_PROCID, which is 0; only tasks of srun have their number.
    tasks = number("SLURM_STEP_NUM_TASKS", 1)
    task = number("SLURM_PROCID", 0) if tasks > 1 else 0
    return Part(element * tasks + task, elements * tasks)


def engine(flags: commands.InProcesses) -> engines.Engine:
    """Returns the engine that the flags choose."""
    if flags.engine == "ray":
        return engines.Ray(_address(flags), flags.workers, say=terminal.say)
    _refuse_ray_flags(flags)
    if flags.workers and (text := machine.too_many(flags.workers, "--workers")):
        raise InputError(text)
    return engines.Processes(flags.workers or machine.cores())


def cluster(flags: commands.OnDevices) -> engines.Ray | None:
    """Returns the Ray cluster that the flags choose; None without one.

    Keeps this process off the GPUs, which the workers of the cluster need. Call it before jax looks
    for devices.
    """
    if flags.engine == "local":
        _refuse_ray_flags(flags)
        return None
    gpus = -1 if flags.ray_gpus is None else flags.ray_gpus
    if gpus > 1 and gpus % 1:
        raise InputError(f"--ray-gpus {flags.ray_gpus}: above 1, use a whole number")
    import jax

    jax.config.update("jax_platforms", "cpu")
    workers = vars(flags).get("workers")
    return engines.Ray(_address(flags), workers, gpus, terminal.say)


def _refuse_ray_flags(flags: commands.Engine) -> None:
    for name in ("ray_address", "ray_gpus"):
        if (value := vars(flags).get(name)) is not None:
            raise InputError(f"--{name.replace('_', '-')} {value} requires --engine ray")


def _address(flags: commands.Engine) -> str:
    return str(flags.ray_address or os.environ.get("RAY_ADDRESS") or "auto")
