"""When device memory runs out: what was planned beside what happened, and what fits."""

import contextlib
from collections.abc import Callable, Iterator

import jax
import numpy as np

from jaxtrain.errors import InputError, first_line
from jaxtrain.telemetry.hardware import GIB
from jaxtrain.training import state as states
from jaxtrain.training.setup import Built, Say

Relief = Callable[[str, int, Say], list[str]]
"""(kind of GPU, bytes that jax may take of it, takes lines) -> overrides that were compiled and
fit, in words."""


@contextlib.contextmanager
def explained(built: Built, relief: Relief | None, ways_to_fit: str, say: Say) -> Iterator[None]:
    """Turns an out-of-memory error of the runtime into what is known about it.

    Args:
        built: the run.
        relief: looks for overrides that fit; None prints the command that does.
        ways_to_fit: that command; empty for a run that was built in Python.
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
        say(_state_and_batch(built))
        used, limit = _measured()
        if used:
            say(
                f"what happened (measured): a device held {used / GIB:.1f} GiB at most, and jax "
                f"may take {limit / GIB:.1f} GiB of it"
            )
        raise InputError(
            f"out of device memory: {_fix(relief, ways_to_fit, limit, say)}"
        ) from error


def _state_and_batch(built: Built) -> str:
    run = built.run
    batch = sum(int(np.prod(part.shape)) * part.dtype.itemsize for part in built.spec.values())
    return (
        f"each device holds {states.bytes_per_device(built.target) / GIB:.3f} GiB of state and "
        f"{batch / run.mesh.devices / GIB:.3f} GiB of batch (computed), and the activations of "
        f"{run.rows_at_once} examples at a time"
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


def _fix(relief: Relief | None, ways_to_fit: str, limit: int, say: Say) -> str:
    if relief is not None and limit and jax.process_count() == 1:
        if ways := relief(jax.devices()[0].device_kind, limit, say):
            return (
                f"these fit, as compiled for this GPU, with the same global batch: "
                f"{', or '.join(ways)}"
            )
        tried = "no way to run the same global batch is known to fit: "
    elif not ways_to_fit:
        tried = "this run was built in Python, and plan reads config files: "
    else:  # the others wait for this process, or there is no GPU to plan for
        tried = f"`{ways_to_fit}` finds ways that fit; otherwise "
    return tried + "lower --data.batch_size, take more devices, or a smaller model"
