"""What a step of each side costs, for a comparison at equal time or equal FLOPs."""

import tempfile
from collections.abc import Callable

from jaxtrain import config
from jaxtrain.errors import InputError

_ROUNDS = 2  # in turn, so that a machine that becomes slower affects both sides
_SECONDS = 10.0


def of_times(
    a: config.Run, b: config.Run, simulate_devices: int | None, say: Callable[[str], None]
) -> tuple[float, float]:
    """Measures a step of each side alone, in turn; returns the shortest median of each, in seconds.

    A validation, a save and the input pipeline are not in it.

    Raises:
        InputError: a step cannot be measured.
    """
    from jaxtrain.bench import request

    times: list[list[float]] = [[], []]
    with tempfile.TemporaryDirectory() as compiled:
        for _ in range(_ROUNDS):
            for side, run in enumerate((a, b)):
                name, *overrides = config.equivalent_arguments(run)[1:]
                findings = request.findings(
                    name,
                    overrides,
                    compiled=compiled,
                    parts=("steps",),
                    seconds=_SECONDS,
                    simulate_devices=simulate_devices,
                )
                rows = findings.get("rows", {})
                if "synthetic/step" not in rows:
                    why = findings.get("failure") or findings.get("notes", {}).get("steps")
                    raise InputError(f"--at time: a step of side {'ab'[side]} failed: {why}")
                times[side].append(rows["synthetic/step"]["median_s"])
    costs = min(times[0]), min(times[1])
    say(f"a step takes {costs[0] * 1e3:.4g} ms with a, {costs[1] * 1e3:.4g} ms with b (measured)")
    return costs


def of_flops(a: config.Run, b: config.Run, say: Callable[[str], None]) -> tuple[float, float]:
    """Counts the FLOPs of a step of each side, as MFU does."""
    from jaxtrain.training.model_flops import model_flops

    costs = tuple(model_flops(run.training_model) * run.data.batch_size for run in (a, b))
    say(f"a step takes {costs[0]:.4g} FLOPs with a, {costs[1]:.4g} with b (counted)")
    return costs[0], costs[1]
