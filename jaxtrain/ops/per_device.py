"""Gives operations access to the platform and the mesh that they are traced for.

Models do not depend on the mesh, but two kinds of operations do: attention and convolution choose
their implementation by the platform, and :func:`by_device` makes each device compute the gradients
of its own rows of the batch. The training step sets the mesh, and the planner the platform, with
:func:`tracing` around the code that they trace.
"""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

Rows = TypeVar("Rows")
Shared = TypeVar("Shared")
Gradients = tuple[Any, Any]
"""Gradients by row, and gradients of shared arrays; None for one that is not needed."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which gradients are needed, as found out by a layer's forward rule."""

    of_rows: bool
    of_shared: bool


@dataclasses.dataclass(frozen=True)
class _Devices:
    """The devices that a function is being traced for.

    Attributes:
        platform: "cpu", "gpu" or "cuda"; None is this machine's.
        mesh: the devices over which the batch is split; None if unknown.
    """

    platform: str | None = None
    mesh: jax.sharding.Mesh | None = None
    shard_map: bool = True


_UNKNOWN = _Devices()
_devices: contextvars.ContextVar[_Devices] = contextvars.ContextVar("devices", default=_UNKNOWN)


@contextlib.contextmanager
def tracing(
    *, platform: str | None = None, mesh: jax.sharding.Mesh | None = None
) -> Iterator[None]:
    """Sets the devices that functions are traced for; None keeps the current value.

    Args:
        platform: "cpu", "gpu" or "cuda", for functions that are only compiled. The default is this
            machine's platform.
    """
    before = _devices.get()
    token = _devices.set(
        _Devices(platform or before.platform, mesh or before.mesh, before.shard_map)
    )
    try:
        yield
    finally:
        _devices.reset(token)


@contextlib.contextmanager
def without_shard_map() -> Iterator[None]:
    """Lets the compiler choose what each device computes, within functions that are traced here."""
    token = _devices.set(dataclasses.replace(_devices.get(), shard_map=False))
    try:
        yield
    finally:
        _devices.reset(token)


def platform() -> str:
    """Returns the platform that is being traced for: "cpu", "gpu" or "cuda".

    For operations whose choice affects the backward pass. `lax.platform_dependent` decides later,
    but then also keeps the residuals of its other branch, as zeros.
    """
    return _devices.get().platform or jax.default_backend()


def at_once(backward: Callable[[Rows, Shared], Gradients], rows: Rows, shared: Shared) -> Gradients:
    """Computes all gradients of a layer when the first of them is needed.

    Nothing needs a parameter's gradient before the end of the step, so XLA would delay it and keep
    its large operands until then: 32.3 GiB of temporaries instead of 25.2 in `h100_8` on 8 H100
    (jax 0.10.2). A barrier ties it to the other gradients. The barrier follows each device's own
    computation: the sum over devices may still be delayed, and merged with other
    sums. There is no barrier on CPUs, or if the mesh is unknown or does not divide the rows.

    Args:
        backward: (rows, shared) -> gradients by row and gradients of the shared arrays, in the
            dtype in which they are communicated. The barrier keeps even unused results, so it must
            return None for a gradient that is not needed.
        rows: arrays whose first axis is split over all devices.
        shared: arrays that each device has in full, such as parameters.

    Returns:
        The result of ``backward`` for all rows.
    """
    if platform() == "cpu" or (not _is_one_device() and _mesh_that_divides(rows) is None):
        return backward(rows, shared)

    def tied(rows: Rows, shared: Shared) -> Gradients:
        gradients: Gradients = lax.optimization_barrier(backward(rows, shared))
        return gradients

    return by_device(tied, rows, shared)


def batch_sum(x: jax.Array, axes: int, dtype: Any = None) -> jax.Array:
    """Sums the first `axes` axes, the batch among them, in float32.

    Each device rounds the sum of its own rows to `dtype`, or the dtype of `x`, and in that dtype
    these are summed over devices. In bfloat16, a sum of equal numbers stops growing at 256 of them.
    XLA adds bfloat16 in float32 on CPUs, but not on H100 and later.
    """

    def own_gradients(x: jax.Array, _: None) -> Gradients:
        return None, jnp.sum(x, range(axes), dtype=jnp.float32).astype(dtype or x.dtype)

    total: jax.Array = by_device(own_gradients, x, None)[1]
    return total


def by_device(
    backward: Callable[[Rows, Shared], Gradients], rows: Rows, shared: Shared
) -> Gradients:
    """Computes the gradients of each device's rows on that device, and sums those of shared arrays.

    The sum over devices is in the dtype that ``backward`` returns. So a device may add in float32
    and communicate in bfloat16: without this, XLA would communicate the float32 sums. On CPUs, or
    if the mesh is unknown or does not divide the rows, it only calls ``backward``.
    """
    mesh = _mesh_that_divides(rows)
    if platform() == "cpu" or _is_one_device() or mesh is None:
        return backward(rows, shared)

    def by_itself(rows: Rows, shared: Shared) -> Gradients:
        of_rows, of_shared = backward(rows, shared)
        return of_rows, jax.tree.map(lambda leaf: leaf[None], of_shared)

    over, replicated = PartitionSpec(mesh.axis_names), PartitionSpec()
    of_rows, of_devices = jax.shard_map(
        by_itself, mesh=mesh, in_specs=(over, replicated), out_specs=(over, over), check_vma=False
    )(rows, shared)
    return of_rows, jax.tree.map(_sum, of_devices)


def gathered(array: jax.Array) -> jax.Array:
    """Returns an array that each device has in full, without a gradient.

    A sharded array is gathered in its own dtype: cast it before, and the barrier keeps the compiler
    from casting after the gather. Nothing happens if the mesh is unknown or has one device.
    """
    devices = _devices.get()
    if devices.mesh is None or devices.mesh.size == 1 or _is_one_device():
        return array
    shard = lax.optimization_barrier(lax.stop_gradient(array))
    return lax.with_sharding_constraint(shard, NamedSharding(devices.mesh, PartitionSpec()))


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["mesh"])
@dataclasses.dataclass(frozen=True)
class Copies:
    """Copies of an array that is used several times, one for each device.

    The gradients of all uses are added on each device, and their sum over devices is communicated
    once. Without copies, the compiler may sum each use's gradient over the devices.

    Attributes:
        array: [devices, ...], split over the devices.
    """

    array: jax.Array
    mesh: jax.sharding.Mesh

    def use(self, function: Callable[..., jax.Array], *rows: jax.Array) -> jax.Array:
        """Returns `function(array, *rows)`; the first axes of rows and result are split alike."""
        over = PartitionSpec(self.mesh.axis_names)

        def of_device(copies: jax.Array, *rows: jax.Array) -> jax.Array:
            return function(copies[0], *rows)

        result: jax.Array = jax.shard_map(
            of_device,
            mesh=self.mesh,
            in_specs=(over,) * (1 + len(rows)),
            out_specs=over,
            check_vma=False,
        )(self.array, *rows)
        return result


def rows_per_device(rows: int) -> int:
    """Returns how many rows of a batch each device computes; all if the mesh is unknown."""
    mesh = _devices.get().mesh
    return rows if mesh is None or _is_one_device() else -(-rows // mesh.size)


def copies(array: jax.Array, rows: int) -> Copies | None:
    """Returns copies of an array; None on CPUs, or if the mesh is unknown or has one device.

    Args:
        rows: the size of the axis that is split over all devices; None is returned if it cannot be
            split evenly.
    """
    mesh = _devices.get().mesh if _devices.get().shard_map else None
    if platform() == "cpu" or mesh is None or mesh.size == 1 or rows % mesh.size:
        return None
    return Copies(_copied(array, mesh), mesh)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copied(array: jax.Array, mesh: jax.sharding.Mesh) -> jax.Array:
    return jax.shard_map(
        lambda array: array[None],
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(mesh.axis_names),
        check_vma=False,
    )(array)


def _copied_forward(array: jax.Array, mesh: jax.sharding.Mesh) -> tuple[jax.Array, None]:
    return _copied(array, mesh), None


def _copied_backward(mesh: jax.sharding.Mesh, _: None, grad: jax.Array) -> tuple[jax.Array]:
    del mesh
    return (_sum(grad),)


_copied.defvjp(_copied_forward, _copied_backward)


def _is_one_device() -> bool:
    """Returns whether the code being traced runs on one device's own rows."""
    return bool(jax.sharding.get_abstract_mesh().manual_axes)


def _mesh_that_divides(rows: Any) -> jax.sharding.Mesh | None:
    mesh = _devices.get().mesh if _devices.get().shard_map else None
    divides = mesh is not None and all(
        leaf.shape[0] % mesh.size == 0 for leaf in jax.tree.leaves(rows)
    )
    return mesh if divides else None


def _sum(of_devices: jax.Array) -> jax.Array:
    """Not jnp.sum, which adds bfloat16 in float32, and would communicate float32."""
    return lax.reduce(of_devices, jnp.zeros((), of_devices.dtype), lax.add, (0,))
