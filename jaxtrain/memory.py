"""When memory runs out: what was held, and which overrides to try."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxtrain import config, overrides
from jaxtrain import state as states
from jaxtrain.devices import GIB
from jaxtrain.errors import InputError, first_line


@contextlib.contextmanager
def explained(
    run: config.Run,
    target: states.State,
    spec: dict[str, jax.ShapeDtypeStruct],
    say: Callable[[str], None],
) -> Iterator[None]:
    """Turns an out-of-memory error of the runtime into what was held and what to try.

    Args:
        run: the config.
        target: shapes and shardings of the state.
        spec: of the global batch.
        say: prints the compiler's own words before the error's one line.

    Raises:
        InputError: in place of the runtime's RESOURCE_EXHAUSTED.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        say(first_line(error))
        raise InputError(
            f"out of device memory: {_held(run, target, spec)}; try {_ways_out(run)}"
        ) from error


def _held(run: config.Run, target: states.State, spec: dict[str, Any]) -> str:
    devices = run.mesh.devices
    batch = sum(int(np.prod(part.shape)) * part.dtype.itemsize for part in spec.values())
    return (
        f"each device holds {states.bytes_per_device(target) / GIB:.3f} GiB of state and "
        f"{batch / devices / GIB:.3f} GiB of batch (computed), and the activations of "
        f"{run.rows_at_once} examples at a time"
    )


def _ways_out(run: config.Run) -> str:
    """Overrides that lower memory, cheapest first; only those that this config allows."""
    devices = run.mesh.devices
    per_device = run.data.batch_size // devices
    ways = []
    deeper = [
        parts
        for parts in range(run.optim.accumulate + 1, per_device + 1)
        if per_device % parts == 0
    ]
    if deeper:
        ways.append(
            f"--optim.accumulate {deeper[0]} (same batch, {per_device // deeper[0]} at once)"
        )
    if hasattr(run.model, "remat"):
        modes = overrides.choices(run.model, "remat")  # the more is computed again the later
        for mode in modes[modes.index(run.model.remat) + 1 :]:
            ways.append(f"--model.remat {mode} (more is computed again)")
    if run.mesh.fsdp == 1 and devices > 1:  # there is no axis to shard along
        ways.append(f"--mesh.data 1 --mesh.fsdp {devices} --mesh.shard params (ZeRO-3)")
    elif run.mesh.shard != "params" and devices > 1:
        ways.append("--mesh.shard params (ZeRO-3)")
    unit = devices * run.optim.accumulate
    if run.data.batch_size > unit:  # else a device has one example at a time already
        ways.append(f"--data.batch_size {run.data.batch_size // unit // 2 * unit}")
    ways.append("more devices, or a smaller model")
    return ", or ".join(ways)
