"""A plan: what was compiled, and what follows from it, as JSON holds it."""

import dataclasses
from typing import Any

from jaxtrain.planning import prediction
from jaxtrain.planning.cards import Card

HOUR_S = 3600.0
Plan = dict[str, Any]


def make(
    findings: dict[str, Any],
    card: Card,
    *,
    name: str,
    devices: int,
    gpus_per_node: int,
    precision: str,
    price: float | None,
) -> Plan:
    """Adds memory, time, hours and money to what the compiler said.

    Args:
        findings: of :func:`jaxtrain.planning.compilation.compile_step`.
        card: that it was compiled for.
        name: of the config.
        devices: of the run.
        gpus_per_node: of each node.
        precision: of the computation.
        price: of a GPU for an hour, in any currency; None leaves the money out.
    """
    memory = prediction.memory(findings, card, devices, gpus_per_node)
    time = prediction.time(findings, card, devices, precision)
    total = findings["total"]
    hours = None if total is None else [total * s / HOUR_S for s in (time.best, time.worst)]
    money = None
    if hours is not None and price is not None:
        money = [one * devices * price for one in hours]
    return {
        "config": name,
        "card": dataclasses.asdict(card),
        "devices": devices,
        "nodes": -(-devices // gpus_per_node),
        "compiled": findings,
        "memory": dataclasses.asdict(memory) | {"spare": memory.spare},
        "time": dataclasses.asdict(time) | {"bound": time.bound},
        "run": {
            "updates": total,
            "steps_per_second": [1 / time.worst, 1 / time.best],
            "hours": hours,
            "price_per_gpu_hour": price,
            "money": money,
        },
    }
