"""After running out of memory on a GPU: finds overrides with which the run fits."""

from collections.abc import Callable, Sequence

from jaxtrain import config
from jaxtrain.errors import InputError
from jaxtrain.planning import cards, report
from jaxtrain.planning.planner import Planner
from jaxtrain.telemetry.hardware import GIB

_BUDGET_S = 240.0  # one variant compiles in half a minute
_ENOUGH = 2


def find(
    name: str,
    typed: Sequence[str],
    kind: str,
    limit: int,
    say: Callable[[str], None],
    mesh: config.Mesh | None = None,
) -> list[str]:
    """Finds overrides with which the same global batch fits, each compiled for this GPU.

    Args:
        name: the config's name or path, as typed.
        typed: the typed overrides.
        kind: of the GPUs, as jax reports it.
        limit: bytes per GPU that jax may allocate, measured.
        say: receives lines about the plan and the candidates.
        mesh: the mesh that was fitted to the devices, with ``mesh.auto``; None for the config's.

    Returns:
        ``["--optim.accumulate 2 (33.1 GiB)", ...]``, the fastest (predicted) first; empty if no
        compiled candidate fits, or none could be compiled.
    """
    short = next((name for name, card in cards.CARDS.items() if card.name == kind), None)
    if short is None:
        say(f"no plan: {kind} is not a supported GPU ({', '.join(cards.CARDS)})")
        return []
    devices = None if mesh is None else str(mesh.devices)
    planner = Planner(name, list(typed), short, devices, None, say)
    try:
        found = planner.compiled(())
    except InputError as error:
        say(f"no plan: {error}")
        return []
    for line in ("the plan:", *report.memory(found).split("\n")):
        say(line)
    if found["compiled"]["estimate"]:  # the GPU compiler is not installed
        return []
    # It ran out of memory, so it does not fit, whatever was predicted.
    found["memory"]["spare"] = min(found["memory"]["spare"], -1.0)
    say(f"compiling variants that need less memory, for at most {_BUDGET_S:.0f} s ...")
    tried, _ = planner.search(found, _BUDGET_S, _ENOUGH)
    return [
        f"{' '.join(one.overrides)} ({one.needed / GIB:.1f} GiB)"
        for one in tried
        if one.fits and one.needed <= limit
    ]
