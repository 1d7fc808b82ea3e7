"""The serial bounds of the steps that were measured on an H100; requires ``cuda12``.

The default suite does not collect this file. Run ``python -m pytest
tests/gpu_programs/serial_bound.py``.
"""

import functools

import plan_vs_measured
import pytest

from jaxtrain.planning.planner import Plan, Planner

# Milliseconds. A change that makes a step faster lowers its bound: then record it. Those of
# f59f3878 (jax 0.10.2) were 107.35, 50.57 and 146.60; by hand, from a list of its instructions,
# 107.5, 50.5 and 146.0. These are of 2026-11-29, jax 0.12.0.
BOUNDS = {"h100_8, 8 clips": 103.5, "BERT base": 48.1, "gpt_h200_1": 138.0}
ADAMW = ("--optim.muon", "None", "--optim.peak_lr", "3e-4")  # as it was measured


@functools.cache
def plan(name: str) -> Plan:
    config, *typed = plan_vs_measured.GPU[name]
    more = ADAMW if config.startswith("gpt") else ()
    return Planner(config, [*typed, *more], "h100", "1x1").plan()


@pytest.mark.parametrize("name", BOUNDS)
def test_the_bound_is_that_of_the_measured_program(name: str) -> None:
    time = plan(name).time
    assert time is not None
    assert 1000 * time.serial == pytest.approx(BOUNDS[name], rel=0.03)


@pytest.mark.parametrize("name", BOUNDS)
def test_the_instructions_do_the_work_of_the_traced_step(name: str) -> None:
    """The traced step counts what a causal mask hides, half of the scores."""
    cost = plan(name).step.cost
    half = name == "gpt_h200_1"
    counted = sum(row.count * row.flops * (1 + (half and row.head_width > 0)) for row in cost.work)
    assert counted == pytest.approx(cost.flops, rel=0.01)
