"""Explains an out-of-memory error: predicted and measured memory, and overrides that fit."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from jaxtrain import config
from jaxtrain.errors import InputError, first_line
from jaxtrain.telemetry.hardware import GIB
from jaxtrain.training.state import State, bytes_per_device

Say = Callable[[str], None]
Relief = Callable[[str, int, Say, config.Mesh | None], list[str]]
"""(GPU model, bytes available to jax, prints a line, the mesh if it was fitted to the devices) ->
descriptions of overrides that fit, each verified by compilation."""


@contextlib.contextmanager
def explained(
    run: config.Run,
    state: State,
    batch: Mapping[str, jax.ShapeDtypeStruct],
    relief: Relief | None,
    fit_command: str,
    say: Say,
) -> Iterator[None]:
    """Turns an out-of-memory error of the runtime into an explanation and a fix.

    Args:
        run: the config.
        state: shapes and shardings of the state.
        batch: shapes and dtypes of a global batch.
        relief: finds overrides that fit; None prints ``fit_command`` instead.
        fit_command: the command that finds them; empty for a run built in Python.
        say: prints the lines before the error message.

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
        raise InputError(
            f"out of device memory: {_fix(run, relief, fit_command, limit, say)}"
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
    found = [device.memory_stats() or {} for device in jax.local_devices()]
    return (
        max((stats.get("peak_bytes_in_use", 0) for stats in found), default=0),
        min((stats.get("bytes_limit", 0) for stats in found), default=0),
    )


def _fix(run: config.Run, relief: Relief | None, fit_command: str, limit: int, say: Say) -> str:
    if relief is not None and limit and jax.process_count() == 1:
        mesh = run.mesh if run.mesh.auto else None
        if ways := relief(jax.devices()[0].device_kind, limit, say, mesh):
            return (
                "as compiled for this GPU, these overrides fit with the same global batch: "
                f"{', or '.join(ways)}"
            )
        tried = "no overrides with the same global batch are known to fit: "
    elif not fit_command:
        tried = "this run was built in Python, and plan reads config files: "
    else:  # other processes are waiting for this one, or there is no GPU to compile for
        tried = f"`{fit_command}` finds overrides that fit; otherwise "
    return tried + "lower --data.batch_size, use more devices, or use a smaller model"
