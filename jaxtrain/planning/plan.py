"""Builds a plan, JSON-able, from what the compiler reported."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jaxtrain import config
from jaxtrain.planning import duration, input_rate, prediction
from jaxtrain.planning.cards import Card
from jaxtrain.planning.input_rate import Host, Input
from jaxtrain.storage import addresses

HOUR_S = 3600.0
Plan = dict[str, Any]


def make_plan(
    findings: dict[str, Any],
    card: Card,
    run: config.Run,
    *,
    overrides: Sequence[str],
    gpus_per_node: int,
    price: float | None,
    host: Host,
    efficiency: float | None = None,
) -> Plan:
    """Adds predicted memory, input, time, and cost to the compiler's findings.

    Args:
        findings: from :func:`jaxtrain.planning.compilation.compile_step`.
        card: the card compiled for.
        run: the config compiled.
        overrides: those applied to the config.
        gpus_per_node: GPUs in each node.
        price: per GPU-hour, in any currency; None omits the cost.
        host: what is known about the hosts that load the data.
        efficiency: measured on the card; None assumes a range.
    """
    devices = run.mesh.devices
    memory = prediction.memory(findings, card, devices, gpus_per_node)
    about = (findings, card, devices, run.precision)
    time = None if findings["estimate"] else prediction.time(*about, efficiency)
    nodes = -(-devices // gpus_per_node)
    gpus = min(devices, gpus_per_node)
    found = input_rate.predict(run, gpus, nodes, host)
    step = None if time is None else (time.best, time.worst)
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
        "nodes": nodes,
        "compiled": findings,
        "memory": dataclasses.asdict(memory) | {"spare": memory.spare},
        "arithmetic_s": prediction.arithmetic(*about),
        "time": None if time is None else dataclasses.asdict(time) | {"bound": _bound(time, found)},
        "input": dataclasses.asdict(found)
        | {
            "waits": None if step is None else _waits(step, found),
            "advice": []
            if step is None
            else input_rate.advice(run, found, step, gpus=gpus, nodes=nodes),
        },
        "run": _run(run, findings, step, found, price, nodes),
        "examples_per_host": run.data.batch_size / nodes,
    }


def _waits(step: duration.Range, found: Input) -> Literal["yes", "maybe", "no"]:
    """Whether steps wait for input, over the predicted ranges of both."""
    if found.seconds[0] > step[1]:
        return "yes"
    return "maybe" if found.seconds[1] > step[0] else "no"


def _bound(time: prediction.Time, found: Input) -> str:
    """States what bounds the step."""
    waits = _waits((time.best, time.worst), found)
    return {"yes": "input", "maybe": f"{time.bound} or input", "no": time.bound}[waits]


def _run(
    run: config.Run,
    findings: dict[str, Any],
    step: duration.Range | None,
    found: Input,
    price: float | None,
    nodes: int,
) -> dict[str, Any]:
    """Returns rates, hours, and cost as [best, worst]; None where unknown."""
    total = findings["total"]
    seconds = hours = money = None
    if step is not None and total is not None:
        seconds = duration.seconds(
            run,
            total,
            step,
            found,
            checkpoint=findings["checkpoint"],
            compile_s=findings["compile_s"],
            nodes=nodes,
            samples=findings["samples"],
        )
        hours = [sum(part) / HOUR_S for part in zip(*seconds.values(), strict=True)]
        if price is not None:
            money = [one * run.mesh.devices * price for one in hours]
    paced = [
        1 / max(own, given) for own, given in zip(step or (0.0, 0.0), found.seconds, strict=True)
    ]
    return {
        "steps": total,
        "steps_per_second": None if step is None else paced,
        "input_steps_per_second": [1 / given for given in found.seconds],
        "seconds": seconds,
        "hours": hours,
        "price_per_gpu_hour": price,
        "money": money,
    }
