"""Out of memory on a GPU: the plan of the run, and changes with which it was compiled and fits."""

from collections.abc import Callable, Sequence

from jaxtrain.errors import InputError
from jaxtrain.planning import cards, report
from jaxtrain.planning.planner import Planner
from jaxtrain.telemetry.hardware import GIB

_BUDGET_S = 240.0  # one way compiles in half a minute
_ENOUGH = 2


def find(
    config: str, typed: Sequence[str], kind: str, limit: int, say: Callable[[str], None]
) -> list[str]:
    """Overrides with which the same global batch fits, each compiled for this GPU.

    Args:
        config: the name or path that was typed.
        typed: overrides that were typed.
        kind: of the GPUs, as jax calls it.
        limit: bytes that jax may take of each, measured.
        say: takes the plan and what is compiled.

    Returns:
        ``["--optim.accumulate 2 (33.1 GiB)", ...]``, the fastest (predicted) first; none where
        nothing that was compiled fits, or nothing could be.
    """
    short = next((name for name, card in cards.CARDS.items() if card.name == kind), None)
    if short is None:
        say(f"no plan: {kind} is not among the GPUs that plan knows ({', '.join(cards.CARDS)})")
        return []
    planner = Planner(config, list(typed), short, None, None, say)
    try:
        found = planner.compiled(())
    except InputError as error:
        say(f"no plan: {error}")
        return []
    for line in ("the plan:", *report.memory(found).split("\n")):
        say(line)
    if found["compiled"]["estimate"]:  # the compiler for GPUs is not installed
        return []
    # Whatever was predicted, what ran out of memory does not fit.
    found["memory"]["spare"] = min(found["memory"]["spare"], -1.0)
    say(f"compiling ways that need less, for at most {_BUDGET_S:.0f} s ...")
    tried, _ = planner.search(found, _BUDGET_S, _ENOUGH)
    return [
        f"{' '.join(one.overrides)} ({one.needed / GIB:.1f} GiB)"
        for one in tried
        if one.fits and one.needed <= limit
    ]
