"""From what the compiler said to memory, time and money; pure arithmetic, and labelled predicted.

Assumed, until a row of a real GPU says otherwise: a step reaches between 40% and 100% of what the
card's two ceilings allow. Communication that the program runs beside other work costs nothing in
the best case; in the worst all of it costs its time.
"""

import dataclasses
from typing import Any

from jaxtrain.planning.cards import Card
from jaxtrain.telemetry.hardware import GIB
from jaxtrain.xla.options import MEMORY_FRACTION

WORST_EFFICIENCY = 0.4

DRIVER = 0.7 * GIB
"""What CUDA does not see of the memory that nvidia-smi prints. Seen in error messages that name
CUDA's total: 0.48 GiB on an RTX 5090 (31.36), 0.54 on an H100 (79.11), 0.67 on an A800 (79.33)."""

# What the runtime keeps besides the compiled program, bytes a device. All are assumptions: none was
# measured yet. The first two lie outside XLA's pool, as the driver's does, and have to fit there.
CONTEXT = 0.7 * GIB
"""CUDA's context, the libraries' kernels, the compiled program."""
NCCL = {"one device": 0.0, "one node": 0.5 * GIB, "several nodes": 1.0 * GIB}
"""NCCL's buffers and channels."""
CUDNN = 0.5 * GIB
"""Workspaces of convolutions. cuDNN's algorithm is chosen when the program starts, on the GPU."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes a device.

    Attributes:
        rows: what is needed -> bytes.
        needed: their sum.
        capacity: that a program can use.
        outside: beside XLA's pool: kept by whom -> bytes, assumed.
        total: of the card.
    """

    rows: dict[str, float]
    needed: float
    capacity: float
    outside: dict[str, float]
    total: float

    @property
    def spare(self) -> float:
        """Left over; below zero it does not fit."""
        return self.capacity - self.needed


@dataclasses.dataclass(frozen=True)
class Time:
    """Seconds of a step, predicted.

    Attributes:
        arithmetic: all products at the card's dense rate.
        memory: the bytes that instructions read and write, at its bandwidth.
        communication: all collectives at the stated link speeds.
        hidden: that of the collectives which the program runs beside other work.
        best: if arithmetic, memory and hidden communication go on at once, at their ceilings.
        worst: if communication hides nothing and the rest reaches :data:`WORST_EFFICIENCY`.
    """

    arithmetic: float
    memory: float
    communication: float
    hidden: float
    best: float
    worst: float

    @property
    def bound(self) -> str:
        """The slowest of the three."""
        times = {
            "arithmetic": self.arithmetic,
            "memory": self.memory,
            "communication": self.communication,
        }
        return max(times, key=lambda name: times[name])


def memory(findings: dict[str, Any], card: Card, devices: int, gpus_per_node: int) -> Memory:
    """What a device needs and has.

    Args:
        findings: of :func:`jaxtrain.planning.compilation.compile_step`.
        card: that it is planned for.
        devices: of the run.
        gpus_per_node: of each node.
    """
    names = ("parameters", "optimizer", "batch", "temporaries", "outputs", "program")
    rows = {name: float(findings[name]) for name in names}
    rows["cuDNN workspaces"] = CUDNN if findings["convolutions"] else 0.0
    where = "one device" if devices == 1 else "one node"
    nccl = NCCL["several nodes" if devices > gpus_per_node else where]
    outside = {"driver": DRIVER, "CUDA": CONTEXT, "NCCL": nccl}
    left = card.memory - sum(outside.values())
    pool = min(MEMORY_FRACTION * (card.memory - DRIVER), left)
    return Memory(rows, sum(rows.values()), pool, outside, float(card.memory))


def arithmetic(findings: dict[str, Any], card: Card, devices: int, precision: str) -> float:
    """Seconds of a step's products at the card's dense rate.

    Args:
        findings: of :func:`jaxtrain.planning.compilation.compile_step`.
        card: that it is planned for.
        devices: of the run.
        precision: of the computation; float32 products run as TF32, at half the rate [D].
    """
    rate = card.bf16_flops * (1.0 if precision == "bfloat16" else 0.5)
    return float(findings["flops"] / devices / rate)


def time(findings: dict[str, Any], card: Card, devices: int, precision: str) -> Time:
    """How long a step takes, at the card's ceilings; arguments as of :func:`arithmetic`.

    The findings are no estimate: they hold the traffic.
    """
    computing = arithmetic(findings, card, devices, precision)
    moving = findings["moved_bytes"] / card.memory_rate
    communication = sum(row["seconds"] for row in findings["traffic"])
    hidden = sum(row["seconds"] * row["overlapped"] for row in findings["traffic"])
    busy = max(computing, moving)
    return Time(
        computing,
        moving,
        communication,
        hidden,
        best=max(busy, hidden) + communication - hidden,
        worst=busy / WORST_EFFICIENCY + communication,
    )
