"""Tests what a step costs: its communication, compiled and by formula, FLOPs, and memory."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from training import toy

from jaxtrain.cost import cards, step_time
from jaxtrain.cost.hlo import Array, Collective
from jaxtrain.cost.step_cost import StepCost, axis_of, traffic

AXES = {"data": 2, "fsdp": 4}


def collective(kind: str, groups: Any, size: int = 1000, **more: Any) -> Collective:
    array = (Array("bf16", (size,)),)
    values: dict[str, Any] = {"times": 1, "overlapped": False}
    return Collective("x", kind, array, array, groups, **(values | more))


@pytest.mark.parametrize(
    ("groups", "axis"),
    [
        (((0, 1, 2, 3), (4, 5, 6, 7)), "fsdp"),
        (((0, 4), (1, 5), (2, 6), (3, 7)), "data"),
        ((tuple(range(8)),), "data+fsdp"),
    ],
)
def test_groups_map_to_mesh_axes(groups: Any, axis: str) -> None:
    assert axis_of(groups, AXES) == axis


def test_rows_sum_collectives_of_the_same_kind() -> None:
    inside, across = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))
    found = [
        collective("all-gather", inside, times=3, overlapped=True),
        collective("all-gather", inside),
        collective("all-reduce", across),
    ]
    h100 = cards.card("h100")
    gather, reduce = traffic(found, AXES, gpus_per_node=4)
    assert (gather.kind, gather.axis, gather.crosses_nodes, gather.count) == (
        *("all-gather", "fsdp", False),
        4,
    )
    assert gather.wire_bytes == 4 * 2000 * 3 / 4
    assert gather.overlapped == 3 / 4
    assert step_time.seconds(gather, h100) == gather.wire_bytes / h100.link_rate
    assert (reduce.axis, reduce.crosses_nodes) == ("data", True)
    assert step_time.seconds(reduce, h100) == 2 * 2000 / 2 / h100.node_rate


def test_adapters_of_a_node_share_traffic_between_nodes() -> None:
    h100, found = cards.card("h100"), [collective("all-gather", (tuple(range(16)),))]
    (row,) = traffic(found, {"data": 1, "fsdp": 16}, gpus_per_node=8)
    assert (row.axis, row.crosses_nodes) == ("fsdp", True)
    fastest = min(8 * h100.node_rate, h100.link_rate)
    assert step_time.seconds(row, h100) == row.wire_bytes / fastest
    (row,) = traffic(found, {"data": 1, "fsdp": 16}, gpus_per_node=2)
    assert step_time.seconds(row, h100) == row.wire_bytes / (2 * h100.node_rate)


def test_the_cost_of_a_real_step_on_eight_devices() -> None:
    """Each device multiplies its rows by a replicated matrix, and the sums are all-reduced."""
    mesh = toy.mesh_of(1, 8)
    rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp",), ()))
    step = jax.jit(
        lambda x, y: (x @ y).sum(axis=0), in_shardings=(rows, whole), out_shardings=whole
    )
    traced = step.trace(
        jax.ShapeDtypeStruct((16, 32), np.float32), jax.ShapeDtypeStruct((32, 64), np.float32)
    )
    compiled = traced.lower().compile()
    cost = StepCost.of(traced.jaxpr, compiled, mesh, model_flops=1.0, gpus_per_node=4)
    assert (cost.devices, cost.flops, cost.convolutions) == (8, 2 * 16 * 32 * 64, False)
    assert cost.arguments == 4 * (2 * 32 + 32 * 64)
    assert cost.outputs == 4 * 64
    assert cost.planned_bytes == cost.arguments + cost.temporaries + cost.outputs
    assert cost.moved_bytes > cost.arguments
    assert cost.traffic is not None
    (row,) = cost.traffic
    assert (row.kind, row.axis, row.crosses_nodes) == ("all-reduce", "fsdp", True)
    assert (row.gpus_of_node, row.count) == (4, 1)
    assert cost.sent_bytes == 2 * 4 * 64 * 7 / 8
    unread = StepCost.of(traced.jaxpr, compiled, mesh, model_flops=1.0)
    assert (unread.traffic, unread.kernels, unread.sent_bytes) == (None, None, 0)
