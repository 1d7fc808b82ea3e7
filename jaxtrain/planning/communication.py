"""Sums the communication volume of the compiled step, and computes the sharding's by formula."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from jaxtrain import config
from jaxtrain.planning.cards import Card
from jaxtrain.sharding import AXES, HasShape, ShardingRule
from jaxtrain.xla.hlo import Collective

_BF16 = 2


@dataclasses.dataclass(frozen=True)
class Row:
    """Collectives of one kind, dtype, and group, summed over a step.

    Attributes:
        kind: such as "all-gather".
        dtype: of the arrays; several are joined by "+".
        axis: mesh axis: "data", "fsdp", or both.
        crosses_nodes: whether a group includes GPUs of several nodes.
        count: collectives per step.
        wire_bytes: bytes sent per step and device, with ring algorithms.
        seconds: at the stated link rate.
        overlapped: fraction of the bytes whose collective overlaps computation.
    """

    kind: str
    dtype: str
    axis: str
    crosses_nodes: bool
    count: int
    wire_bytes: float
    seconds: float
    overlapped: float


def rows(
    found: Sequence[Collective], settings: config.Mesh, card: Card, gpus_per_node: int
) -> list[Row]:
    """Sums collectives of the same kind, dtype, and group; the largest first."""
    groups: dict[tuple[str, str, str, bool], list[Collective]] = {}
    for one in found:
        dtype = "+".join(sorted({array.dtype for array in one.outputs}))
        crosses = any(
            len({device // gpus_per_node for device in group}) > 1 for group in one.groups
        )
        key = (one.kind, dtype, axis_of(one.groups, settings), crosses)
        groups.setdefault(key, []).append(one)
    result = []
    for (kind, dtype, axis, crosses), members in groups.items():
        sent = sum(one.times * one.wire_bytes for one in members)
        beside = sum(one.times * one.wire_bytes for one in members if one.overlapped)
        rate = _rate(members[0].groups[0], card, gpus_per_node) if crosses else card.link_rate
        count = sum(one.times for one in members)
        share = beside / sent if sent else 0.0
        result.append(Row(kind, dtype, axis, crosses, count, sent, sent / rate, share))
    return sorted(result, key=lambda row: -row.wire_bytes)


def _rate(group: Sequence[int], card: Card, gpus_per_node: int) -> float:
    """Returns the bytes/s per device in a group across nodes: the slower of its two links.

    If a group has several GPUs in a node, their adapters share the traffic between nodes: NCCL
    builds as many rings.
    """
    nodes = [device // gpus_per_node for device in group]
    return min(card.link_rate, card.node_rate * nodes.count(nodes[0]))


def axis_of(groups: Sequence[Sequence[int]], settings: config.Mesh) -> str:
    """Returns the mesh axes along which the members of a group differ."""
    places = np.arange(settings.devices).reshape(settings.data, settings.fsdp)
    axes = set()
    for group in groups:
        data, fsdp = np.nonzero(np.isin(places, list(group)))
        axes |= {"data"} if len(set(data)) > 1 else set()
        axes |= {"fsdp"} if len(set(fsdp)) > 1 else set()
    return "+".join(name for name in AXES if name in axes) or "none"


def formula_bytes(
    params: Mapping[str, HasShape],
    constants: Mapping[str, HasShape],
    rule: ShardingRule,
    settings: config.Mesh,
    accumulate: int,
) -> float:
    """Computes the bytes that a device sends per step, with parameters and gradients in bfloat16.

    A program may send a little less: the backward pass does not read the first layer's kernel. With
    ``shard="params"``, each microbatch gathers the sharded parameters in both passes and
    reduce-scatters their gradients; ``"optimizer"`` gathers once per step. In each microbatch, the
    gradients of unsharded parameters are all-reduced over all devices, and those of shards over
    ``data``. Each microbatch gathers the sharded constants once: they have no gradient, and a
    teacher that was kept for the next microbatch would need its full memory.

    Args:
        params: the trained parameters; frozen ones are not communicated.
        constants: the weights of a teacher and of LPIPS.
        rule: where arrays are stored.
        settings: the mesh.
        accumulate: microbatches per step.
    """
    sharded, unsharded = _sizes(params, rule)
    gathered, _ = _sizes(constants, rule)
    n, d, all_devices = settings.fsdp, settings.data, settings.devices
    if settings.shard == "none":
        sharded, unsharded, gathered = 0, sharded + unsharded, 0
    gathers = {"params": 2 * accumulate, "optimizer": 1, "none": 0}[settings.shard]
    along_fsdp = (sharded * (gathers + accumulate) + gathered * accumulate) * (n - 1) / n
    along_data = 2 * sharded / n * (d - 1) / d * accumulate
    whole = 2 * unsharded * (all_devices - 1) / all_devices * accumulate
    return along_fsdp + along_data + whole


def _sizes(arrays: Mapping[str, HasShape], rule: ShardingRule) -> tuple[int, int]:
    """Returns the bytes in bfloat16 of sharded and of other arrays."""
    sharded = unsharded = 0
    for array in arrays.values():
        size = int(np.prod(array.shape)) * _BF16
        if any(axis is not None for axis in rule(array).spec):
            sharded += size
        else:
            unsharded += size
    return sharded, unsharded
