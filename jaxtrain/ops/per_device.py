"""What an operation may know of the devices that its program is traced for.

Models know no mesh. Two operations have to know a little: attention and convolution choose their
backward pass by the platform, and :func:`at_once` has each device compute the gradients for its own
rows of the batch. Both read what :func:`tracing` says, which the training step (the mesh) and the
planner (the platform) call around the code that they trace.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

Rows = TypeVar("Rows")
Shared = TypeVar("Shared")
Gradients = tuple[Any, Any]
"""By row, and of what is shared; None where nobody asks for one."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which gradients somebody asks for: a layer's forward rule knows, and hands it on."""

    of_rows: bool
    of_shared: bool


@dataclasses.dataclass(frozen=True)
class _Devices:
    """What is known of the devices that a program is being traced for.

    Attributes:
        platform: "cpu", "gpu" or "cuda"; None is the machine's own.
        mesh: the devices over which the batch's rows lie; None where nobody said.
        inside: whether the code that is being traced is one device's own part.
    """

    platform: str | None = None
    mesh: jax.sharding.Mesh | None = None
    inside: bool = False


_UNKNOWN = _Devices()
_devices: contextvars.ContextVar[_Devices] = contextvars.ContextVar("devices", default=_UNKNOWN)


@contextlib.contextmanager
def tracing(
    *, platform: str | None = None, mesh: jax.sharding.Mesh | None = None
) -> Iterator[None]:
    """Says, while a program is traced, what it is for; what is not given stays as it was.

    Args:
        platform: "cpu", "gpu" or "cuda", for a program that is only compiled; otherwise it is the
            machine's own.
        mesh: the devices over which the rows of the batch lie.
    """
    before = _devices.get()
    with _traced_for(
        dataclasses.replace(before, platform=platform or before.platform, mesh=mesh or before.mesh)
    ):
        yield


@contextlib.contextmanager
def _traced_for(devices: _Devices) -> Iterator[None]:
    token = _devices.set(devices)
    try:
        yield
    finally:
        _devices.reset(token)


def platform() -> str:
    """The platform of the program that is being traced: "cpu", or "gpu" or "cuda".

    For operations whose choice reaches into the backward pass. `lax.platform_dependent` decides
    later, but what its other branch would keep is then kept too, as zeros.
    """
    return _devices.get().platform or jax.default_backend()


def at_once(backward: Callable[[Rows, Shared], Gradients], rows: Rows, shared: Shared) -> Gradients:
    """Computes all gradients of a layer where the first of them is needed.

    Nothing needs a parameter's gradient before the end of the step, so XLA would put it off, and
    hold the large arrays that it is made of until then. A barrier ties it to the others. It stands
    behind what each device finds by itself: the sum over devices is free to wait, and to be joined
    with other sums. Where it is not known which rows a device has, and on CPUs, there is none.

    Args:
        backward: of (rows, shared): gradients by row, and gradients of what is shared, in the dtype
            in which they are to travel. The barrier keeps what nobody asks for, too: in its place
            it has to return None.
        rows: arrays whose first axis is shared out over all devices alike.
        shared: arrays that each device has whole, such as parameters.

    Returns:
        What ``backward`` returns for all rows.
    """
    if platform() == "cpu":
        return backward(rows, shared)
    devices = _devices.get()
    if devices.inside:
        return _tied(backward(rows, shared))
    mesh = devices.mesh
    if mesh is None or any(leaf.shape[0] % mesh.size for leaf in jax.tree.leaves(rows)):
        return backward(rows, shared)

    def by_itself(rows: Rows, shared: Shared) -> Gradients:
        with _traced_for(dataclasses.replace(devices, inside=True)):
            of_rows, of_shared = _tied(backward(rows, shared))
        return of_rows, jax.tree.map(lambda leaf: leaf[None], of_shared)

    over, whole = PartitionSpec(mesh.axis_names), PartitionSpec()
    of_rows, parts = jax.shard_map(
        by_itself, mesh=mesh, in_specs=(over, whole), out_specs=(over, over), check_vma=False
    )(rows, shared)
    return of_rows, jax.tree.map(_sum, parts)


def _tied(gradients: Gradients) -> Gradients:
    tied: Gradients = lax.optimization_barrier(gradients)
    return tied


def _sum(parts: jax.Array) -> jax.Array:
    """Not jnp.sum, which adds bfloat16 in float32: that is what would travel then."""
    return lax.reduce(parts, jnp.zeros((), parts.dtype), lax.add, (0,))
