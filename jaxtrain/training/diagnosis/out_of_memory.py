"""Explains an out-of-memory error: predicted and measured memory, and the command that helps."""

import contextlib
from collections.abc import Iterator, Mapping

import jax
import numpy as np

from jaxtrain import config
from jaxtrain.errors import InputError, first_line
from jaxtrain.formats import GIB
from jaxtrain.terminal import Say
from jaxtrain.training.state import State
from jaxtrain.training.state_size import bytes_per_device


@contextlib.contextmanager
def explained(
    run: config.Run,
    state: State,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    fit_command: str,
    say: Say,
) -> Iterator[None]:
    """Turns an out-of-memory error of the runtime into an explanation and a fix.

    Raises:
        InputError: replaces the runtime's RESOURCE_EXHAUSTED.
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
                f"measured: at most {used / GIB:.1f} GiB in use on a device, of "
                f"{limit / GIB:.1f} GiB available to jax"
            )
        tried = "this run was built in Python, and plan reads config files: "
        if fit_command:
            tried = f"`{fit_command}` finds overrides that fit; otherwise "
        raise InputError(
            f"out of device memory: {tried}lower --data.batch_size, use more devices, or use a "
            "smaller model"
        ) from error


def _state_and_batch(
    run: config.Run, state: State, batch: Mapping[str, jax.ShapeDtypeStruct]
) -> str:
    batch_bytes = sum(int(np.prod(part.shape)) * part.dtype.itemsize for part in batch.values())
    return (
        f"computed: per device {bytes_per_device(state) / GIB:.3f} GiB of state and "
        f"{batch_bytes / run.mesh.devices / GIB:.3f} GiB of batch, plus the activations of "
        f"{run.microbatch_size} examples"
    )


def _measured() -> tuple[int, int]:
    """Returns the peak bytes in use on a device of this process, and the limit; (0, 0) on CPUs.

    https://docs.jax.dev/en/latest/gpu_memory_allocation.html
    """
    statistics = [device.memory_stats() or {} for device in jax.local_devices()]
    return (
        max((stats.get("peak_bytes_in_use", 0) for stats in statistics), default=0),
        min((stats.get("bytes_limit", 0) for stats in statistics), default=0),
    )
