"""Predicts memory, time, and cost from what the compiler reported. Pure arithmetic.

A step reaches a fraction of the card's roofline: a range that is assumed, or that around a measured
one (:mod:`jaxtrain.planning.efficiency`).
Communication that overlaps other work costs nothing in the best case, and its full time in the
worst.
"""

import dataclasses
from typing import Any

from jaxtrain.planning.cards import Card
from jaxtrain.telemetry.hardware import GIB
from jaxtrain.xla.gpu_memory import MEMORY_FRACTION

EFFICIENCY = (0.4, 0.65)
"""The least and the largest fraction of the roofline without a measurement. On one H100, a GPT of
depth 12 reached 56% (101.4 ms at the roofline, 180.7 measured), the video autoencoder 49% (71.1,
144.2) and BERT base 47% (26.1, 56.0) (benchmarks/RESULTS.md, 2026-11-26). The ends leave room for
other models and cards, which have not been measured."""
ERROR = 0.15
"""Factor, less one, by which a time from a measured efficiency is uncertain in both directions.
The three models above differ by up to 14% from the one in the middle."""

DRIVER = 0.7 * GIB
"""The part of the memory printed by nvidia-smi that CUDA does not see. From error messages with
CUDA's total: 0.48 GiB on an RTX 5090 (31.36), 0.54 on an H100 (79.11), 0.67 on an A800 (79.33)."""

# Memory that the runtime uses besides the compiled program, bytes per device, assumed. On one H100,
# the sums for a whole step agreed with the allocator's peak: 24.63 GiB planned (with CUDNN) and
# 24.13 measured for the video autoencoder, 12.10 and 12.04 for BERT base, 26.85 and 27.35 for a
# GPT. The first two are outside XLA's pool, as is the driver's, and must fit there: that peak does
# not include them.
CONTEXT = 0.7 * GIB
"""CUDA's context, the libraries' kernels, the compiled program."""
NCCL = {"one device": 0.0, "one node": 0.5 * GIB, "several nodes": 1.0 * GIB}
"""NCCL's buffers and channels."""
CUDNN = 0.5 * GIB
"""Convolution workspaces. cuDNN chooses its algorithms on the GPU when the program starts."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes per device.

    Attributes:
        rows: purpose -> bytes needed.
        needed: their sum.
        capacity: bytes that a program can use.
        outside: user of memory outside XLA's pool -> bytes, assumed.
        total: the card's memory.
    """

    rows: dict[str, float]
    needed: float
    capacity: float
    outside: dict[str, float]
    total: float

    @property
    def spare(self) -> float:
        """Bytes left over; negative if the run does not fit."""
        return self.capacity - self.needed


@dataclasses.dataclass(frozen=True)
class Time:
    """Predicted seconds per step.

    Attributes:
        arithmetic: all matmuls and convolutions at the card's matmul peak.
        memory: bytes read and written by instructions, at the memory-bandwidth peak.
        communication: all collectives at the stated link rates.
        hidden: the part of ``communication`` that overlaps other work.
        best: arithmetic or memory at the largest fraction of the peaks, while the hidden
            communication runs.
        worst: no communication is hidden and the rest reaches the least fraction.
        efficiency: the least and the largest fraction.
        measured: the fraction that was measured; None if the range is assumed.
    """

    arithmetic: float
    memory: float
    communication: float
    hidden: float
    best: float
    worst: float
    efficiency: tuple[float, float]
    measured: float | None

    @property
    def bound(self) -> str:
        """The slowest of arithmetic, memory, and communication."""
        times = {
            "arithmetic": self.arithmetic,
            "memory": self.memory,
            "communication": self.communication,
        }
        return max(times, key=lambda name: times[name])


def memory(findings: dict[str, Any], card: Card, devices: int, gpus_per_node: int) -> Memory:
    """Predicts the memory that a device needs and has.

    Args:
        findings: from :func:`jaxtrain.planning.compilation.compile_step`.
        card: the card planned for.
        devices: number of devices of the run.
        gpus_per_node: GPUs in each node.
    """
    names = ("parameters", "optimizer", "batch", "temporaries", "outputs", "program")
    outputs = "second state" if findings["replayed"] else "outputs"
    shown = {"outputs": outputs}
    rows = {shown.get(name, name): float(findings[name]) for name in names}
    rows["cuDNN workspaces"] = CUDNN if findings["convolutions"] else 0.0
    where = "one device" if devices == 1 else "one node"
    nccl = NCCL["several nodes" if devices > gpus_per_node else where]
    outside = {"driver": DRIVER, "CUDA": CONTEXT, "NCCL": nccl}
    left = card.memory - sum(outside.values())
    pool = min(MEMORY_FRACTION * (card.memory - DRIVER), left)
    return Memory(rows, sum(rows.values()), pool, outside, float(card.memory))


def arithmetic(findings: dict[str, Any], card: Card, devices: int, precision: str) -> float:
    """Predicts the seconds that a step's matmuls and convolutions take at the matmul peak.

    Args:
        findings: from :func:`jaxtrain.planning.compilation.compile_step`.
        card: the card planned for.
        devices: number of devices of the run.
        precision: of the computation; float32 matmuls run as TF32, at half the rate [D].
    """
    rate = card.bf16_flops * (1.0 if precision == "bfloat16" else 0.5)
    return float(findings["flops"] / devices / rate)


def time(
    findings: dict[str, Any],
    card: Card,
    devices: int,
    precision: str,
    efficiency: float | None = None,
) -> Time:
    """Predicts the time of a step; the first arguments are those of :func:`arithmetic`.

    The findings must include the communication, so they must not be an estimate.

    Args:
        efficiency: measured on this card; None assumes :data:`EFFICIENCY`.
    """
    computing = arithmetic(findings, card, devices, precision)
    moving = findings["moved_bytes"] / card.memory_rate
    communication = sum(row["seconds"] for row in findings["traffic"])
    hidden = sum(row["seconds"] * row["overlapped"] for row in findings["traffic"])
    roofline = max(computing, moving)
    least, most = EFFICIENCY
    if efficiency is not None:
        least, most = efficiency / (1 + ERROR), efficiency * (1 + ERROR)
    return Time(
        computing,
        moving,
        communication,
        hidden,
        best=max(roofline / most, hidden) + communication - hidden,
        worst=roofline / least + communication,
        efficiency=(least, most),
        measured=efficiency,
    )
