"""Invented findings of the compiler about a step."""

import dataclasses
from typing import Any

from jaxtrain.cost.operations import Work
from jaxtrain.cost.step_cost import StepCost, Traffic
from jaxtrain.planning.compilation import CompiledStep

KERNELS = {"attention_forward": 0, "attention_backward": 0, "other_convolutions": 0}
COST = StepCost(
    devices=16,
    model_flops=1e15,
    flops=1e15,
    convolutions=False,
    work=(Work(1e15 / 16, 0.0, 0, 1), Work(0.0, 1e12, 0, 1)),
    arguments=3,
    temporaries=0,
    outputs=1,
    program=0,
    kernels=KERNELS,
    traffic=(),
)
COMPILED = CompiledStep(
    cost=COST,
    parameters=1,
    optimizer=1,
    gradients=1,
    second_state=0,
    largest=(),
    elements=1,
    file_weights=0,
    frozen=0,
    checkpoint=12,
    samples={"image": 0, "clip": 0},
    unsharded={},
    batch_of="",
    total=9,
    compile_s=1.0,
    jax="0",
)


def compiled(**changes: Any) -> CompiledStep:
    """Returns :data:`COMPILED` with changes to it or to its cost.

    Args:
        changes: attributes of the step or of its cost; ``moved_bytes`` are those of instructions
            without arithmetic, which run beside one with all FLOPs of a device.
    """
    flops = changes.get("flops", COST.flops) / changes.get("devices", COST.devices)
    moved = changes.pop("moved_bytes", COST.moved_bytes)
    changes["work"] = (Work(flops, 0.0, 0, 1), Work(0.0, moved, 0, 1))
    of_cost = {field.name for field in dataclasses.fields(StepCost)} & changes.keys()
    cost = dataclasses.replace(COST, **{name: changes.pop(name) for name in of_cost})
    return dataclasses.replace(COMPILED, cost=cost, **changes)


def traffic(**changes: Any) -> Traffic:
    """Returns an all-gather between nodes, with changes."""
    values = {"kind": "all-gather", "dtype": "bf16", "axis": "fsdp", "crosses_nodes": True}
    sizes = {"gpus_of_node": 1, "count": 2, "wire_bytes": 1e9, "overlapped": 0.5}
    return Traffic(**values | sizes | changes)
