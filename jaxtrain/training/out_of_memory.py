"""When device memory runs out: what was planned beside what happened, and what fits."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from jaxtrain import config
from jaxtrain.errors import InputError, first_line
from jaxtrain.telemetry.hardware import GIB
from jaxtrain.training.state import State, bytes_per_device

Say = Callable[[str], None]
Relief = Callable[[str, int, Say], list[str]]
"""(kind of GPU, bytes that jax may take of it, takes lines) -> overrides that were compiled and
fit, in words."""


@contextlib.contextmanager
def explained(
    run: config.Run,
    state: State,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    relief: Relief | None,
    fit_command: str,
    say: Say,
) -> Iterator[None]:
    """Turns an out-of-memory error of the runtime into what is known about it.

    Args:
        run: the config.
        state: shapes and shardings of the state.
        batch: shapes and dtypes of a global batch.
        relief: looks for overrides that fit; None prints the command that does.
        fit_command: that command; empty for a run that was built in Python.
        say: takes the lines before the error's own.

    Raises:
        InputError: in place of the runtime's RESOURCE_EXHAUSTED.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        say(first_line(error))
        say(_state_and_batch(run, state, batch))
        used, limit = _measured()
        if used:
            say(
                f"what happened (measured): a device held {used / GIB:.1f} GiB at most, and jax "
                f"may take {limit / GIB:.1f} GiB of it"
            )
        raise InputError(
            f"out of device memory: {_fix(relief, fit_command, limit, say)}"
        ) from error


def _state_and_batch(
    run: config.Run, state: State, batch: Mapping[str, jax.ShapeDtypeStruct]
) -> str:
    batch_bytes = sum(int(np.prod(part.shape)) * part.dtype.itemsize for part in batch.values())
    return (
        f"each device holds {bytes_per_device(state) / GIB:.3f} GiB of state and "
        f"{batch_bytes / run.mesh.devices / GIB:.3f} GiB of batch (computed), and the "
        f"activations of {run.rows_at_once} examples at a time"
    )


def _measured() -> tuple[int, int]:
    """Bytes: the most that a device of this process held, and the most that it may; (0, 0) on CPUs.

    https://docs.jax.dev/en/latest/gpu_memory_allocation.html
    """
    found = [device.memory_stats() or {} for device in jax.local_devices()]
    return (
        max((stats.get("peak_bytes_in_use", 0) for stats in found), default=0),
        min((stats.get("bytes_limit", 0) for stats in found), default=0),
    )


def _fix(relief: Relief | None, fit_command: str, limit: int, say: Say) -> str:
    if relief is not None and limit and jax.process_count() == 1:
        if ways := relief(jax.devices()[0].device_kind, limit, say):
            return (
                f"these fit, as compiled for this GPU, with the same global batch: "
                f"{', or '.join(ways)}"
            )
        tried = "no way to run the same global batch is known to fit: "
    elif not fit_command:
        tried = "this run was built in Python, and plan reads config files: "
    else:  # the others wait for this process, or there is no GPU to plan for
        tried = f"`{fit_command}` finds ways that fit; otherwise "
    return tried + "lower --data.batch_size, take more devices, or a smaller model"
