"""Tests the communication volume of a step, compiled and by formula."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
import toy

from jaxtrain import config
from jaxtrain.optim import build
from jaxtrain.planning import cards, communication
from jaxtrain.sharding import ShardingRule
from jaxtrain.training.state import ModelDefinition, abstract_state
from jaxtrain.xla.hlo import Array, Collective

HYBRID = config.Mesh(data=2, fsdp=4, shard="params", min_shard_elements=64)


def collective(kind: str, groups: Any, size: int = 1000, **more: Any) -> Collective:
    array = (Array("bf16", (size,)),)
    values: dict[str, Any] = {"times": 1, "overlapped": False, "stack": 0}
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
    assert communication.axis_of(groups, HYBRID) == axis


def test_rows_sum_collectives_of_the_same_kind() -> None:
    inside, across = ((0, 1, 2, 3), (4, 5, 6, 7)), ((0, 4), (1, 5), (2, 6), (3, 7))
    found = [
        collective("all-gather", inside, times=3, overlapped=True),
        collective("all-gather", inside),
        collective("all-reduce", across),
    ]
    h100 = cards.card("h100")
    gather, reduce = communication.rows(found, HYBRID, h100, gpus_per_node=4)
    assert (gather.kind, gather.axis, gather.crosses_nodes, gather.count) == (
        *("all-gather", "fsdp", False),
        4,
    )
    assert gather.wire_bytes == 4 * 2000 * 3 / 4
    assert gather.overlapped == 3 / 4
    assert gather.seconds == gather.wire_bytes / h100.link_rate
    assert (reduce.axis, reduce.crosses_nodes) == ("data", True)
    assert reduce.seconds == 2 * 2000 / 2 / h100.node_rate


@pytest.mark.parametrize(("shard", "gathers"), [("params", 4), ("optimizer", 1)])
def test_formula_counts_all_gather_of_parameters_and_reduce_scatter_of_gradients(
    shard: Any, gathers: int
) -> None:
    settings = dataclasses.replace(HYBRID, data=1, fsdp=8, shard=shard)
    rule = ShardingRule(toy.mesh_of(1, 8), settings)
    definition = ModelDefinition(toy.Config().build)
    target = abstract_state(
        definition, build.make_optimizer(toy.OPTIM, 10, definition.params), rule
    )
    sizes = {name: array.size * 2 for name, array in definition.params.items()}
    whole = {name for name, array in definition.params.items() if not any(rule(array).spec)}
    assert 0 < len(whole) < len(sizes)
    sharded = sum(size for name, size in sizes.items() if name not in whole)
    rest = sum(size for name, size in sizes.items() if name in whole)
    expected = sharded * 7 / 8 * (gathers + 2) + 2 * rest * 7 / 8 * 2
    assert communication.formula_bytes(
        target.params, {}, rule, settings, accumulate=2
    ) == pytest.approx(expected)
    assert jax.device_count() == 8


@pytest.mark.parametrize(("shard", "times"), [("params", 2), ("optimizer", 2), ("none", 0)])
def test_formula_counts_a_gather_of_constants_in_each_microbatch(shard: Any, times: int) -> None:
    settings = dataclasses.replace(HYBRID, shard=shard)
    rule = ShardingRule(toy.mesh_of(2, 4), settings)
    constants = {
        "teacher.kernel": jax.ShapeDtypeStruct((64, 32), np.float32),
        "teacher.bias": jax.ShapeDtypeStruct((32,), np.float32),  # too small for shards
    }
    found = communication.formula_bytes({}, constants, rule, settings, accumulate=2)
    assert found == times * 2 * 64 * 32 * 3 / 4


def test_adapters_of_a_node_share_traffic_between_nodes() -> None:
    h100, everyone = cards.card("h100"), (tuple(range(16)),)
    mesh = config.Mesh(data=1, fsdp=16, shard="params")
    (row,) = communication.rows([collective("all-gather", everyone)], mesh, h100, gpus_per_node=8)
    assert row.crosses_nodes
    assert row.seconds == row.wire_bytes / min(8 * h100.node_rate, h100.link_rate)
    (row,) = communication.rows([collective("all-gather", everyone)], mesh, h100, gpus_per_node=2)
    assert row.seconds == row.wire_bytes / (2 * h100.node_rate)
