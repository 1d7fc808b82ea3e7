"""Predicts the time of a compiled step on a card, for ``plan`` and for a run that starts.

The kernels of a step run one after another, so its time has a serial bound: the sum over its
instructions of the time of their arithmetic or of their memory traffic, whichever is more. A step
reaches a fraction of that bound: a range that is assumed, or that around a measured fraction
(``plan --efficiency``). Communication that overlaps other work costs nothing in the best case, and
its full time in the worst.
"""

import dataclasses

import numpy as np

from jaxtrain.cost.cards import Card
from jaxtrain.cost.step_cost import StepCost, Traffic

Range = tuple[float, float]
"""In the best and in the worst case."""

# Fractions of the datasheet's peaks that kernels reach: measured on one H100 (benchmarks/LOG.md),
# and assumed for other cards.
MATMULS = 0.704
"""A large matmul in bfloat16: 696 of 989 TFLOP/s. Convolutions are assumed to reach it, too."""
BANDWIDTH = 0.887
"""A large copy: 2.97 of 3.35 TB/s."""
ATTENTION = {0: 0.0, 64: 0.253, 128: 0.359}
"""cuDNN's attention, by channels of a head, without what a causal mask hides: 250 TFLOP/s over 512
tokens (0.361 ms forward and backward for 32 sequences of BERT base), 355 over 2,048 (24.4 ms in a
step of a GPT). Others are interpolated."""

EFFICIENCY = (0.74, 1.01)
"""The least and the largest fraction of the serial bound without a measurement. On one H100, the
video autoencoder reached 74% (a bound of 107.4 ms, 144.7 measured), BERT base 91% (50.6, 55.3) and
a GPT of depth 12 101% (146.6, 144.9) (benchmarks/RESULTS.md). Other models and cards have not been
measured."""
ERROR = 0.15
"""Factor, less one, by which a time from a measured efficiency is uncertain in both directions: as
much as an assumed one, because the run may have another batch or model than the measured step."""


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Predicted seconds per step, without waiting for input.

    Attributes:
        arithmetic: all matmuls and convolutions at the card's matmul peak.
        memory: bytes read and written by instructions, at the memory-bandwidth peak.
        communication: all collectives at the stated link rates.
        best: at the largest fraction of the serial bound, while the hidden communication runs.
        worst: no communication is hidden and the rest reaches the least fraction.
        efficiency: the least and the largest fraction of the serial bound.
        measured: the fraction that was measured; None if the range is assumed.
    """

    arithmetic: float
    memory: float
    serial: float
    communication: float
    hidden: float
    best: float
    worst: float
    bound: str
    efficiency: tuple[float, float]
    measured: float | None


def arithmetic(cost: StepCost, card: Card, precision: str) -> float:
    """Predicts the seconds that a step's matmuls and convolutions take at the matmul peak.

    Float32 matmuls run as TF32, at half the rate [D].
    """
    return cost.flops / cost.devices / (card.bf16_flops * (1.0 if precision == "bfloat16" else 0.5))


def serial_bound(cost: StepCost, card: Card, precision: str) -> float:
    """Predicts the fewest seconds of a device's step whose instructions run one after another.

    Each takes the time of its arithmetic or that of its memory traffic, whichever is more, at the
    rates that large kernels reach (:data:`MATMULS`, :data:`BANDWIDTH`, :data:`ATTENTION`).
    """
    peak = card.bf16_flops * (1.0 if precision == "bfloat16" else 0.5)
    attention = np.interp(
        [row.head_width for row in cost.work], [*ATTENTION], [*ATTENTION.values()]
    )
    return sum(
        row.count
        * max(
            row.flops / (peak * (float(fraction) if row.head_width else MATMULS)),
            row.moved_bytes / (card.memory_rate * BANDWIDTH),
        )
        for row, fraction in zip(cost.work, attention, strict=True)
    )


def step_time(
    cost: StepCost, card: Card, precision: str, efficiency: float | None = None
) -> StepTime:
    """Predicts the time of a step.

    Args:
        cost: of the step; without communication if it was not read.
        efficiency: measured on this card; None assumes :data:`EFFICIENCY`.
    """
    times = {
        "arithmetic": arithmetic(cost, card, precision),
        "memory": cost.moved_bytes / card.memory_rate,
        "communication": sum(seconds(row, card) for row in cost.traffic or ()),
    }
    hidden = sum(row.overlapped * seconds(row, card) for row in cost.traffic or ())
    serial = serial_bound(cost, card, precision)
    lowest, highest = EFFICIENCY
    if efficiency is not None:
        lowest, highest = efficiency / (1 + ERROR), efficiency * (1 + ERROR)
    return StepTime(
        **times,
        serial=serial,
        hidden=hidden,
        best=max(serial / highest, hidden) + times["communication"] - hidden,
        worst=serial / lowest + times["communication"],
        bound=max(times, key=lambda name: times[name]),
        efficiency=(lowest, highest),
        measured=efficiency,
    )


def seconds(row: Traffic, card: Card) -> float:
    """Predicts the seconds of collectives at the rate of the slower of a GPU's links.

    If a group across nodes has several GPUs in a node, their adapters share the traffic between
    nodes: NCCL builds as many rings.
    """
    rate = card.link_rate
    if row.crosses_nodes:
        rate = min(rate, card.node_rate * row.gpus_of_node)
    return row.wire_bytes / rate
