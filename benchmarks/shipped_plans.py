"""Plans the shipped configs on the GPUs that ``plan`` takes, for ``plan`` without their compiler.

Requires the extra ``cuda12``, but no GPU, and about a minute for each config:

    PYTHONPATH=. python benchmarks/shipped_plans.py [CONFIG ...]
"""

import json
import sys
from collections.abc import Sequence

from jaxtrain.config import files
from jaxtrain.cost import cards
from jaxtrain.formats import GIB
from jaxtrain.planning import shipped
from jaxtrain.planning.planner import Planner


def planned(name: str) -> shipped.Row:
    """Plans a config."""
    gpu = cards.card_of_config(name) or cards.usual_card(name)
    plan = Planner(name, (), gpu).plan()
    return shipped.Row(
        config=name,
        gpu=gpu,
        gpus=plan.step.cost.devices,
        needed_gib=round(plan.memory.needed / GIB, 2),
        capacity_gib=round(plan.memory.capacity / GIB, 2),
        step_s=_rounded(plan.time.best, plan.time.worst),
        steps=plan.run.steps,
        hours=None if plan.run.hours is None else _rounded(*plan.run.hours),
        jax=plan.step.jax,
    )


def _rounded(least: float, most: float) -> tuple[float, float]:
    return float(f"{least:.3g}"), float(f"{most:.3g}")


def main(names: Sequence[str]) -> None:
    """Writes the plans of some configs, or of all; keeps the others."""
    old = {row.config: row for row in shipped.rows()} if shipped.PATH.is_file() else {}
    for name in names or files.names():
        old[name] = planned(name)
        rows = [json.dumps(row._asdict()) for _, row in sorted(old.items())]
        shipped.PATH.write_text("[\n" + ",\n".join(rows) + "\n]\n")
        print(name, shipped.described(old[name]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
