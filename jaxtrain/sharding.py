"""Builds the mesh, decides where arrays are stored, and gathers sharded parameters (ZeRO, FSDP).

The mesh has two axes. ``fsdp`` shards parameters, gradients and optimizer state; ``data``
replicates them; the batch is split over both. So ``fsdp`` across all devices is plain ZeRO, and
``data`` x ``fsdp`` is the hybrid: shard inside a node, replicate across nodes. Models run only
on meshes of :func:`make_mesh`; other modules ask jax for devices to measure or describe them.

``mesh.shard`` is the stage:

- ``"params"``, ZeRO-3: :class:`ShardingRule` shards the state. A block gathers each parameter where
  it reads it (:class:`GatheredParam`), again in the backward pass, and its gradient is
  reduce-scattered.
- ``"optimizer"``, in effect ZeRO-2: the same state, but all parameters are gathered once per step,
  in the dtype of the computation.
- ``"none"``: every device has the full state, and gradients are all-reduced.

ZeRO-1, full gradients with sharded optimizer state, is not offered. ``stage_ops`` in
``training/step.py`` applies the stage to a step:

=============  ===================================  ================================
``shard``      parameters                           gradients
=============  ===================================  ================================
"params"       cast once per step, as shards;       reduce-scattered where a block
               gathered where a block reads them,   read the parameter, once per
               in the forward and the backward      microbatch
               pass
"optimizer"    cast as shards, then gathered, once  reduce-scattered after the
               per step                             backward pass, once per
                                                    microbatch
"none"         cast once per step                   all-reduced
=============  ===================================  ================================

Both are communicated in the dtype of the computation. Gradients are accumulated in float32, and
stored like the parameters.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtrain import config
from jaxtrain.config import mesh_fit
from jaxtrain.errors import InputError
from jaxtrain.ops import layers

AXES = ("data", "fsdp")


class HasShape(Protocol):
    """An array, or its abstract form under ``eval_shape``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the size of each dimension."""


def make_mesh(
    settings: config.Mesh, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """Builds the mesh over all devices of all processes.

    Axes are ``Auto`` (the compiler propagates shardings): with explicit axes, embeddings and
    sharded convolutions fail (jax 0.10).

    Args:
        settings: number of devices along each axis.
        devices: used instead of jax's devices, such as the described devices of a compiler.

    Raises:
        InputError: the machine has another number of devices than the config.
    """
    present = jax.devices() if devices is None else devices
    if problem := mesh_fit.device_count_problem(settings, present):
        raise InputError(problem)
    shape = (settings.data, settings.fsdp)
    types = (AxisType.Auto,) * len(AXES)
    # jax.make_mesh does the same, but refuses several nodes (jax 0.10.2: "multi-slice topologies").
    ordered = mesh_utils.create_device_mesh(shape, present)
    return jax.sharding.Mesh(ordered, AXES, axis_types=types)


def partition_spec(shape: tuple[int, ...], fsdp: int, min_elements: int) -> PartitionSpec:
    """Shards the largest dimension that ``fsdp`` divides; replicates small arrays.

    Of equal dimensions it takes the last one, the output features of a kernel, whose gather needs
    no transposition.

    Args:
        shape: of the array.
        fsdp: number of devices along the axis.
        min_elements: arrays with fewer elements are replicated; gathering them costs a message's
            latency and saves nothing.
    """
    if fsdp == 1 or int(np.prod(shape)) < min_elements:
        return PartitionSpec()
    divisible = [axis for axis, size in enumerate(shape) if size and size % fsdp == 0]
    if not divisible:
        return PartitionSpec()
    chosen = max(divisible, key=lambda axis: (shape[axis], axis))
    return PartitionSpec(*("fsdp" if axis == chosen else None for axis in range(chosen + 1)))


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Returns the sharding of arrays that every device stores in full."""
    return NamedSharding(mesh, PartitionSpec())


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Returns the sharding of a batch: split over all devices, in the mesh's order."""
    return NamedSharding(mesh, PartitionSpec(AXES))


class ShardingRule:
    """Maps shapes to shardings, for one mesh and one choice of ``mesh.shard``.

    Attributes:
        mesh: the mesh.
        shard: ``"params"`` (ZeRO-3), ``"optimizer"`` (ZeRO-2 in effect) or ``"none"``.
    """

    def __init__(self, mesh: jax.sharding.Mesh, settings: config.Mesh) -> None:
        self.mesh = mesh
        self.shard = settings.shard
        self._fsdp = 1 if settings.shard == "none" else settings.fsdp
        self._min_elements = settings.min_shard_elements

    def __call__(self, array: HasShape) -> NamedSharding:
        """Returns the sharding of an array of the state."""
        spec = partition_spec(tuple(array.shape), self._fsdp, self._min_elements)
        return NamedSharding(self.mesh, spec)

    def of_rows(self, array: HasShape) -> NamedSharding:
        """Returns the sharding of state with a row per example: that of a batch, in every stage.

        It is replicated if the devices do not divide the rows.
        """
        divides = array.shape[0] % self.mesh.size == 0
        return batch_sharding(self.mesh) if divides else replicated(self.mesh)

    def unsharded(self, arrays: Mapping[str, HasShape]) -> dict[str, tuple[int, ...]]:
        """Returns name and shape of large arrays without a dimension that can be sharded."""
        if self._fsdp == 1:
            return {}
        return {
            name: tuple(array.shape)
            for name, array in arrays.items()
            if int(np.prod(array.shape)) >= self._min_elements
            and self(array).spec == PartitionSpec()
        }


class GatheredParam(nnx.Param, layers.Gathered):
    """A sharded parameter that is gathered where it is read.

    :func:`jaxtrain.ops.layers.remat` saves neither the gathered copy nor the gather's result, also
    with mode "none", so each block must be called through it: as in ZeRO-3, the backward pass
    gathers again. The gradient is constrained to the shards' layout, so that the compiler emits a
    reduce-scatter.
    """

    def get_value(self, *, index: Any = ..., **kwargs: Any) -> Any:
        """Returns the gathered array; NNX calls this for each read."""
        value = super().get_value(**kwargs)
        sharding = self.get_metadata()["shard_sharding"]
        value = checkpoint_name(_gather(value, sharding), layers.GATHERED)
        return value if index is ... else value[index]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _gather(shard: jax.Array, sharding: NamedSharding) -> jax.Array:
    full = NamedSharding(sharding.mesh, PartitionSpec())
    return jax.lax.with_sharding_constraint(shard, full)


def _gather_forward(shard: jax.Array, sharding: NamedSharding) -> tuple[jax.Array, None]:
    return _gather(shard, sharding), None


def _gather_backward(sharding: NamedSharding, _: None, grad: jax.Array) -> tuple[jax.Array]:
    # First replicated: a sum over devices that is then sliced becomes a reduce-scatter. With the
    # shards' layout alone, the compiler may communicate a scatter's operands (an embedding's rows).
    full = jax.lax.with_sharding_constraint(grad, NamedSharding(sharding.mesh, PartitionSpec()))
    return (jax.lax.with_sharding_constraint(full, sharding),)


_gather.defvjp(_gather_forward, _gather_backward)


def local_rows(mesh: jax.sharding.Mesh, batch_size: int) -> slice:
    """Returns the rows of a global batch that this process loads.

    Raises:
        InputError: the process's devices do not have consecutive rows of the batch.
    """
    holders = batch_sharding(mesh).addressable_devices_indices_map((batch_size,))
    spans = sorted({rows[0].indices(batch_size)[:2] for rows in holders.values() if rows})
    start, stop = spans[0][0], spans[-1][1]
    if sum(end - begin for begin, end in spans) != stop - start:
        raise InputError(
            f"process {jax.process_index()} has rows {spans} of a batch of {batch_size}, which are "
            "not consecutive: start the processes in the order of their devices"
        )
    return slice(start, stop)
