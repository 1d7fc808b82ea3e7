"""The same config at several batch sizes, rematerialisations or shardings, each in its own process.

A point that runs out of memory is a point of the curve, not the end of the sweep.
"""

from typing import Any

from jaxtrain import config
from jaxtrain.config import overrides
from jaxtrain.errors import InputError

KINDS = ("batch", "remat", "shard")
_DOUBLINGS = (-2, -1, 0, 1, 2, 3)


def points(run: config.Run, kind: str) -> dict[str, tuple[str, ...]]:
    """Label -> overrides, in the order in which they are measured.

    Args:
        run: the config that the points change.
        kind: ``"batch"`` (examples a device at a time, from a quarter to eightfold), ``"remat"`` or
            ``"shard"`` (all values that the field takes).

    Raises:
        InputError: the config has no such field, or only one device to shard over.
    """
    if kind == "batch":
        unit = run.mesh.devices * run.optim.accumulate
        sizes = sorted({int(run.rows_at_once * 2.0**power) for power in _DOUBLINGS} - {0})
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
    raise InputError(f"--sweep {kind}: it takes {', '.join(KINDS)}")


def summary(findings: dict[str, Any]) -> tuple[float | str, float | str]:
    """Examples a second, and GiB a device (the allocator's peak, else the compiler's plan)."""
    if "failure" in findings:
        return findings["failure"], findings["failure"]
    rows = findings["rows"]
    if "synthetic/examples_per_second" not in rows:
        return (findings["notes"]["steps"],) * 2
    memory = rows.get("memory/device_peak_gib", rows["memory/compiled_gib"])
    return rows["synthetic/examples_per_second"], memory
