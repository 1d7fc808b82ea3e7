"""Plans the shipped configs for their own GPUs, with each choice of rematerialization.

    python benchmarks/programs.py [CONFIG ...] [--larger]

Prints a table row for each config: the planned step with the `model.remat` that is fastest, by the
plan, among those that fit in 90% of the card's memory; then the other choices, and with `--larger`
a per-device microbatch of twice the size. Requires jax's CUDA plugin (extra ``cuda12``).
"""

import argparse
from typing import Any

import common_start  # noqa: F401

from jaxtrain import config
from jaxtrain.config import files, overrides
from jaxtrain.errors import InputError
from jaxtrain.formats import GIB
from jaxtrain.planning.planner import Plan, Planner

COLUMNS = (
    *("config", "GPUs", "examples per device", "`model.remat`", "sent", "moved"),
    *("arithmetic, bandwidth", "temporaries", "memory", "other choices", "twice the microbatch"),
)


def main() -> None:
    """Prints the table, row by row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shipped = [name for name in files.names() if not name.startswith("demo")]  # demos run on CPUs
    parser.add_argument("configs", nargs="*", default=shipped, help="default: all for GPUs")
    parser.add_argument("--larger", action="store_true", help="also plan larger microbatches")
    flags = parser.parse_args()
    _print(COLUMNS)
    _print(["---"] * len(COLUMNS))
    for name in flags.configs:
        _print(_row(name, larger=flags.larger))


def by_remat(planner: Planner, run: config.Run) -> dict[str, Plan]:
    """Plans a config with each choice of ``model.remat``."""
    choices = overrides.choices(run.model, "remat")
    return {remat: planner.plan(("--model.remat", remat)) for remat in choices}


def fastest(plans: dict[str, Plan]) -> str:
    """Returns the choice with the shortest step, by the plan, of those that fit."""
    fitting = [remat for remat, plan in plans.items() if plan.fits]
    return min(fitting, key=lambda remat: _best(plans[remat]))


def _best(plan: Plan) -> float:
    """Returns the fewest predicted seconds of a step."""
    assert plan.time is not None, "the GPU compiler is installed"
    return plan.time.best


def _row(name: str, *, larger: bool) -> list[str]:
    planner, run = Planner(name, []), config.named(name)
    plans = by_remat(planner, run)
    best = fastest(plans)
    plan, ships = plans[best], run.model.remat
    cost, time = plan.step.cost, plan.time
    assert time is not None, "the GPU compiler is installed"
    rows = run.data.batch_size // cost.devices // run.optim.accumulate
    others = [f"{one}: {_step(plans[one])}, {_memory(plans[one])}" for one in plans if one != best]
    return [
        f"`{name}`",
        f"{cost.devices} {plan.card.name.removeprefix('NVIDIA ')}",
        f"{rows} x {run.optim.accumulate}",
        best if best == ships else f"{best} (ships {ships})",
        f"{cost.sent_bytes / 1e6:.1f} MB",
        f"{cost.moved_bytes / 1e9:.1f} GB",
        f"{1e3 * time.arithmetic:.1f} ms, {1e3 * time.memory:.1f} ms",
        f"{cost.temporaries / GIB:.1f} GiB",
        _memory(plan),
        "; ".join(others),
        _larger(planner, run, plan, best) if larger else "",
    ]


def _larger(planner: Planner, run: config.Run, plan: Plan, remat: str) -> str:
    """Describes a step with twice the microbatch: half as many of them, or twice the batch."""
    batch, parts = run.data.batch_size, run.optim.accumulate
    if parts % 2 == 0:
        change = ("--optim.accumulate", str(parts // 2))
    else:
        change = ("--data.batch_size", str(batch := 2 * batch))
    try:
        found = planner.plan(("--model.remat", remat, *change))
    except InputError as error:
        return f"{' '.join(change)}: {str(error).splitlines()[0]}"
    now, then = (
        _best(each) / examples for each, examples in ((plan, run.data.batch_size), (found, batch))
    )
    return f"`{' '.join(change)}`: {_memory(found)}, {then / now - 1:+.1%} time per example"


def _step(plan: Plan) -> str:
    return f"{1e3 * _best(plan):.1f} ms"


def _memory(plan: Plan) -> str:
    return f"{plan.memory.needed / GIB:.1f} of {plan.memory.capacity / GIB:.1f} GiB"


def _print(cells: Any) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
