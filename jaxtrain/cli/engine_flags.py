"""Flags that choose where the work of a command runs."""

import argparse
import math
import os
import secrets
from collections.abc import Mapping

from jaxtrain import terminal
from jaxtrain.data import engine, worker_count
from jaxtrain.errors import InputError


def add(parser: argparse.ArgumentParser, local: str = "") -> None:
    """Adds ``--workers``, ``--engine``, and ``--ray-address``.

    Args:
        parser: receives the flags.
        local: precedes the default number of local processes in the help text.
    """
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help=f"worker processes (default: {local}{worker_count.cores()}; all CPUs of a Ray "
        "cluster)",
    )
    _add_engine(parser)


def add_ray(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that run the work of a model on a Ray cluster."""
    _add_engine(parser)
    parser.add_argument(
        "--ray-gpus",
        metavar="X",
        type=float,
        help="GPUs per Ray worker, such as 0.25 (default: 1, or 0 if there are none)",
    )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--engine",
        choices=engine.NAMES,
        default="local",
        help="run here, or on a Ray cluster (default: local)",
    )
    parser.add_argument(
        "--ray-address",
        metavar="ADDR",
        help="HOST:PORT of the cluster, or local to start one here (default: $RAY_ADDRESS, or this "
        "machine's cluster)",
    )


def cluster(flags: argparse.Namespace) -> engine.Ray | None:
    """Returns the Ray cluster that the flags choose; None without one.

    Keeps this process off the GPUs, which the workers of the cluster need. Call it before jax looks
    for devices.

    Args:
        flags: with those of :func:`add_ray`, and of :func:`add_share` if the command has it.

    Raises:
        InputError: the flags contradict each other.
    """
    if flags.engine == "local":
        _refuse_ray_flags(flags)
        return None
    if vars(flags).get("share"):
        raise InputError("--share is for commands without Ray: omit it, or omit --engine ray")
    if flags.ray_gpus is not None and not 0 <= flags.ray_gpus < math.inf:
        raise InputError(f"--ray-gpus {flags.ray_gpus}: use 0 or more")
    if flags.ray_gpus is not None and flags.ray_gpus > 1 and flags.ray_gpus % 1:
        raise InputError(f"--ray-gpus {flags.ray_gpus}: above 1, use a whole number")
    import jax

    jax.config.update("jax_platforms", "cpu")
    return engine.Ray(_address(flags), gpus=flags.ray_gpus, say=terminal.say)


def _refuse_ray_flags(flags: argparse.Namespace) -> None:
    for name in ("ray_address", "ray_gpus"):
        if (value := vars(flags).get(name)) is not None:
            raise InputError(f"--{name.replace('_', '-')} {value} requires --engine ray")


def _address(flags: argparse.Namespace) -> str:
    return str(flags.ray_address or os.environ.get("RAY_ADDRESS") or "auto")


def chosen(flags: argparse.Namespace) -> engine.Engine:
    """Returns the engine that the flags choose.

    Raises:
        InputError: the flags contradict each other.
    """
    if flags.workers is not None and flags.workers < 1:
        raise InputError(f"--workers {flags.workers}: use at least 1")
    if flags.engine == "ray":
        return engine.Ray(_address(flags), flags.workers, say=terminal.say)
    _refuse_ray_flags(flags)
    if flags.workers and (text := worker_count.too_many(flags.workers, 0, "--workers")):
        raise InputError(text)
    return engine.Local(flags.workers or worker_count.most_allowed(worker_count.cores(), 0))


# Variables with a task's number, and with the number of tasks if one may be alone. A task may have
# several, for example of srun in an element of a SLURM array.
_TASKS = (
    ("SLURM_ARRAY_TASK_ID", ""),  # sbatch --array
    ("JOB_COMPLETION_INDEX", ""),  # an Indexed Job of Kubernetes
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # srun; a batch script has only the first
)


def add_share(parser: argparse.ArgumentParser) -> None:
    """Adds ``--share``."""
    parser.add_argument(
        "--share",
        action="store_true",
        help="share the work with the same command on other machines; tasks of srun, of a SLURM "
        "array, and of a Kubernetes Indexed Job always do",
    )


def announced_share(flags: argparse.Namespace, where: object) -> str | None:
    """Prints that this command shares its work with others, if it does.

    Args:
        flags: with ``share``.
        where: the results, for the message.

    Returns:
        A text that no other command has; None if there are no others.
    """
    found = share(flags)
    if found is None:
        return None
    terminal.say(f"sharing {where} with other commands: {found[1]}")
    return found[0]


def share(
    flags: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> tuple[str, str] | None:
    """Returns how this command differs from those that it shares the work with.

    Args:
        flags: with ``share``.
        environment: ``os.environ``.

    Returns:
        A text that no other command has, and a description; None if there are no others.
    """
    found = {}
    for variable, count in _TASKS:
        number = environment.get(variable, "")
        several = not count or environment.get(count, "1") != "1"
        if number.isdecimal() and several:
            found[variable] = number
    if found:
        task = ".".join(found.values())
        return task, f"this is task {task} ({', '.join(found)})"
    return (secrets.token_hex(8), "--share") if flags.share else None
