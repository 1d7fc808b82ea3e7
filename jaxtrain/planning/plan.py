"""Builds a plan, JSON-able, from what the compiler reported."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxtrain import config
from jaxtrain.planning import prediction
from jaxtrain.planning.cards import Card
from jaxtrain.storage import addresses

HOUR_S = 3600.0
Plan = dict[str, Any]


def make(
    findings: dict[str, Any],
    card: Card,
    run: config.Run,
    *,
    overrides: Sequence[str],
    gpus_per_node: int,
    price: float | None,
) -> Plan:
    """Adds predicted memory, time and cost to the compiler's findings.

    Args:
        findings: from :func:`jaxtrain.planning.compilation.compile_step`.
        card: the card compiled for.
        run: the config compiled.
        overrides: those applied to the config.
        gpus_per_node: GPUs in each node.
        price: per GPU-hour, in any currency; None omits the cost.
    """
    devices = run.mesh.devices
    memory = prediction.memory(findings, card, devices, gpus_per_node)
    about = (findings, card, devices, run.precision)
    time = None if findings["estimate"] else prediction.time(*about)
    return {
        "config": run.name,
        "overrides": addresses.scrubbed(list(overrides)),
        "precision": run.precision,
        "batch_size": run.data.batch_size,
        "accumulate": run.optim.accumulate,
        "mesh": dataclasses.asdict(run.mesh),
        "card": dataclasses.asdict(card)
        | {"bf16_flops": card.bf16_flops, "memory_rate": card.memory_rate},
        "devices": devices,
        "gpus_per_node": gpus_per_node,
        "nodes": -(-devices // gpus_per_node),
        "compiled": findings,
        "memory": dataclasses.asdict(memory) | {"spare": memory.spare},
        "arithmetic_s": prediction.arithmetic(*about),
        "time": None if time is None else dataclasses.asdict(time) | {"bound": time.bound},
        "worst_efficiency": prediction.WORST_EFFICIENCY,
        "run": _run(time, findings["total"], devices, price),
        "workers": run.data.workers,
        "examples_per_host": run.data.batch_size / -(-devices // gpus_per_node),
    }


def _run(
    time: prediction.Time | None, total: int | None, devices: int, price: float | None
) -> dict[str, Any]:
    """Returns rates, hours and cost as [best, worst]; None where unknown."""
    band = None if time is None else (time.best, time.worst)
    hours = None if band is None or total is None else [total * s / HOUR_S for s in band]
    money = None if hours is None or price is None else [one * devices * price for one in hours]
    return {
        "updates": total,
        "steps_per_second": None if band is None else [1 / s for s in band],
        "hours": hours,
        "price_per_gpu_hour": price,
        "money": money,
    }
