"""A small state with every kind of leaf and node, sharded over devices, and how to save it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtrain.checkpoint.saver import CheckpointSaver
from jaxtrain.optim import muon


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "examples_seen", "params", "extras", "opt"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    step: Any
    examples_seen: Any
    params: dict[str, Any]
    extras: dict[str, Any]
    opt: Any


def mesh_of(devices: int) -> Mesh:
    return Mesh(
        np.array(jax.devices()[:devices]).reshape(1, devices),
        ("data", "fsdp"),
        axis_types=(AxisType.Auto,) * 2,
    )


def sharding(leaf: Any, mesh: Mesh) -> NamedSharding:
    axes = ["fsdp" if size % mesh.size == 0 else None for size in leaf.shape[:1]]
    return NamedSharding(mesh, PartitionSpec(*axes))


def make_state(step: int, *, mesh: Mesh | None = None, width: int = 8, big: int = 0) -> State:
    """Returns a state with empty extras, NamedTuples, nodes without leaves, and dotted names."""
    rng = np.random.default_rng(step)
    params = {
        "encoder.0.kernel": rng.normal(size=(16, width)).astype(np.float32),
        "encoder.0.bias": rng.normal(size=(width,)).astype(np.float32),
    }
    if big:
        params["big"] = rng.normal(size=(big,)).astype(np.float32)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.masked(optax.adamw(1e-3), dict.fromkeys(params, True))
    )
    host = State(
        step=np.uint32(step),
        examples_seen=np.uint32(3 * step),
        params=params,
        extras={},
        opt=jax.tree.map(np.asarray, optimizer.init(jax.tree.map(jnp.asarray, params))),
    )
    place = mesh or mesh_of(8)
    return jax.tree.map(lambda leaf: jax.device_put(leaf, sharding(leaf, place)), host)


def target_of(state: State, mesh: Mesh) -> State:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(x, mesh)), state
    )


def meta_of(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "examples_seen": 3 * step,
        "examples_skipped": 0,
        "config": {"seed": 0},
    }


def save(saver: CheckpointSaver, *steps: int) -> None:
    """Saves a state at each step."""
    for step in steps:
        saver.save(make_state(step), meta_of(step))
    saver.wait()


def found_momentum(state: object) -> dict[str, jax.Array]:
    """Returns parameter -> Muon's momentum, from an optimizer's state."""
    (one,) = (
        part
        for part in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, muon.MuonState))
        if isinstance(part, muon.MuonState)
    )
    return {n: m for n, m in one.momentum.items() if isinstance(m, jax.Array)}
