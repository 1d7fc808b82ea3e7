"""Tests the predicted time of a step, from its bytes and operations."""

import dataclasses
import random
from typing import Any

import pytest
from planning.step_findings import compiled, traffic

from jaxtrain.cost import cards, step_time
from jaxtrain.cost.operations import Work
from jaxtrain.cost.step_cost import StepCost

H100 = cards.card("h100")


def cost(**changes: Any) -> StepCost:
    """A step of 16 devices that takes about 0.1 s and 36 GB."""
    work = {"flops": 1e15, "moved_bytes": 1e11, "traffic": (traffic(),)}
    return compiled(**work | changes).cost


def time_of(found: StepCost, precision: str = "bfloat16") -> step_time.StepTime:
    return step_time.step_time(found, H100, precision)


@pytest.mark.parametrize("seed", range(20))
def test_best_time_is_at_most_the_worst_and_at_least_each_peak(seed: int) -> None:
    rng = random.Random(seed)
    found = cost(
        flops=rng.uniform(1e9, 1e17),
        moved_bytes=rng.uniform(1e6, 1e13),
        traffic=(traffic(wire_bytes=rng.uniform(1e3, 1e11)),),
    )
    time = time_of(found)
    assert time.arithmetic <= time.best <= time.worst
    assert max(time.memory, time.communication) <= time.best
    assert time.best >= max(time.arithmetic, time.memory) + time.communication - time.hidden
    parts = {"arithmetic": time.arithmetic, "memory": time.memory}
    slowest = (parts | {"communication": time.communication})[time.bound]
    assert slowest == max(time.arithmetic, time.memory, time.communication)


def test_the_serial_bound_is_the_slower_of_both_for_each_instruction() -> None:
    flops, rate = 0.704 * H100.bf16_flops, 0.887 * H100.memory_rate
    rows = (
        *(Work(flops, 0.5 * rate, 0, 3), Work(flops, 2 * rate, 0, 1), Work(0.0, rate, 0, 1)),
        # Attention: slower for narrow heads; between 64 and 128 channels in the middle of both.
        *(Work(0.253 * H100.bf16_flops, 0.0, 64, 1), Work(0.306 * H100.bf16_flops, 0.0, 96, 1)),
        *(
            Work(0.253 / 2 * H100.bf16_flops, 0.0, 32, 1),
            Work(0.359 * H100.bf16_flops, 0.0, 256, 1),
        ),
    )
    found = dataclasses.replace(cost(), work=rows)
    assert step_time.serial_bound(found, H100, "bfloat16") == pytest.approx(3 + 2 + 1 + 4)
    matmuls = dataclasses.replace(found, work=rows[:3])
    assert step_time.serial_bound(matmuls, H100, "float32") == pytest.approx(6 + 2 + 1)


def test_float32_matmuls_run_at_half_the_rate() -> None:
    assert time_of(cost(), "float32").arithmetic == 2 * time_of(cost()).arithmetic
