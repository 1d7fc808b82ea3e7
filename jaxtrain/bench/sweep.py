"""Lists the points of a sweep: one config with several batch sizes, remat modes or shardings.

A point that runs out of memory is shown in the curve and does not end the sweep.
"""

from typing import Any

from jaxtrain import config
from jaxtrain.config import overrides
from jaxtrain.errors import InputError

KINDS = ("batch", "remat", "shard")
_DOUBLINGS = (-2, -1, 0, 1, 2, 3)


def points(run: config.Run, kind: str) -> dict[str, tuple[str, ...]]:
    """Returns label -> overrides, in the order of measurement.

    Args:
        run: the config to vary.
        kind: ``"batch"`` (per-device microbatch size, from 1/4 to 8 times the config's),
            ``"remat"`` or ``"shard"`` (all values of the field).

    Raises:
        InputError: the config lacks the field, or has only one device to shard over.
    """
    if kind == "batch":
        unit = run.mesh.devices * run.optim.accumulate
        sizes = sorted({int(run.microbatch_size * 2.0**power) for power in _DOUBLINGS} - {0})
        return {str(size): ("--data.batch_size", str(size * unit)) for size in sizes}
    if kind == "remat":
        if not hasattr(run.model, "remat"):
            raise InputError(f"--sweep remat: {type(run.model).__name__} has no model.remat")
        return {mode: ("--model.remat", mode) for mode in overrides.choices(run.model, "remat")}
    if kind == "shard":
        if run.mesh.fsdp == 1:
            raise InputError(
                "--sweep shard: mesh.fsdp is 1, so there is nothing to shard over: "
                "set --mesh.fsdp to the number of devices"
            )
        return {mode: ("--mesh.shard", mode) for mode in overrides.choices(run.mesh, "shard")}
    raise InputError(f"--sweep {kind} is unknown: use one of {', '.join(KINDS)}")


def summary(findings: dict[str, Any]) -> tuple[float | str, float | str]:
    """Returns examples per second, and GiB per device (the allocator's peak, else as planned)."""
    if "failure" in findings:
        return findings["failure"], findings["failure"]
    rows = findings["rows"]
    if "synthetic/examples_per_second" not in rows:
        return (findings["notes"]["steps"],) * 2
    memory = rows.get("memory/device_peak_gib", rows["memory/compiled_gib"])
    return rows["synthetic/examples_per_second"], memory
