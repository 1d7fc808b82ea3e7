"""Plans of the shipped configs, to print where JAX's compiler for GPUs is not installed.

``benchmarks/shipped_plans.py`` writes them; the tests of GPU programs compare them with new plans.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain import formats, versions
from jaxtrain.cost import cards
from jaxtrain.planning import prediction

PATH = Path(__file__).with_name("shipped_plans.json")


class Row(NamedTuple):
    """The plan of a config as it is shipped.

    Attributes:
        needed_gib, capacity_gib: memory that each GPU needs and has.
        step_s: least and most seconds of a step.
        steps: length of the run; None if it depends on the data.
    """

    config: str
    gpu: str
    gpus: int
    needed_gib: float
    capacity_gib: float
    step_s: tuple[float, float]
    steps: int | None
    hours: tuple[float, float] | None
    jax: str


def rows() -> list[Row]:
    """Returns all shipped plans."""
    values: list[dict[str, Any]] = json.loads(PATH.read_text())
    return [Row(**row) for row in values]


def without_compiler(
    config: str, gpu: str, overrides: Sequence[str], price: float | None = None
) -> str:
    """Returns an error: the shipped plan, that the compiler is missing, and how to install it."""
    install = (
        "JAX's compiler for GPUs, but no GPU: install it, which takes some minutes and 6 GB, with "
        f"{versions.install('cuda12')}"
    )
    plans = [row for row in rows() if row.config == config]
    row = next((row for row in plans if row.gpu == gpu), None) or next(iter(plans), None)
    if row is None:
        return f"plan requires {install}"
    changed = " (without your changes)" if overrides or row.gpu != gpu else ""
    return (
        f"the plan of {config} as shipped{changed} {described(row, price)}. Any other plan "
        f"requires {install}"
    )


def described(row: Row, price: float | None = None) -> str:
    """Returns a plan in one line."""
    fast, slow = row.step_s
    items = [
        f"{row.needed_gib:.1f} of {row.capacity_gib:.1f} GiB per GPU",
        f"{fast:.3g} to {slow:.3g} s per step",
    ]
    if row.hours is not None:
        items.append(f"{row.steps:,} steps in {formats.hours(*row.hours)}")
        cost = prediction.money(row.hours, row.gpus, price)
        if cost is not None:
            items.append(f"cost {cost[0]:,.0f} to {cost[1]:,.0f} at {price:g} per GPU-hour")
    return f"on {row.gpus} x {cards.card(row.gpu).name}, jax {row.jax}: {'; '.join(items)}"
