"""A piece of the backward pass that each device does by itself, for its own rows of the batch."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxtrain.xla.target import platform

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


_mesh: contextvars.ContextVar[jax.sharding.Mesh | None] = contextvars.ContextVar(
    "mesh", default=None
)
_alone: contextvars.ContextVar[bool] = contextvars.ContextVar("alone", default=False)


@contextlib.contextmanager
def rows_over(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Says, while a step is traced, over which devices the rows of its batch lie."""
    token = _mesh.set(mesh)
    try:
        yield
    finally:
        _mesh.reset(token)


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
    if _alone.get():
        return _tied(backward(rows, shared))
    mesh = _mesh.get()
    if mesh is None or any(leaf.shape[0] % mesh.size for leaf in jax.tree.leaves(rows)):
        return backward(rows, shared)

    def by_itself(rows: Rows, shared: Shared) -> Gradients:
        token = _alone.set(True)
        try:
            found, of_shared = _tied(backward(rows, shared))
        finally:
            _alone.reset(token)
        return found, jax.tree.map(lambda leaf: leaf[None], of_shared)

    over, whole = PartitionSpec(mesh.axis_names), PartitionSpec()
    found, parts = jax.shard_map(
        by_itself, mesh=mesh, in_specs=(over, whole), out_specs=(over, over), check_vma=False
    )(rows, shared)
    return found, jax.tree.map(_sum, parts)


def _tied(found: Gradients) -> Gradients:
    tied: Gradients = lax.optimization_barrier(found)
    return tied


def _sum(parts: jax.Array) -> jax.Array:
    """Not jnp.sum, which adds bfloat16 in float32: that is what would travel then."""
    return lax.reduce(parts, jnp.zeros((), parts.dtype), lax.add, (0,))
