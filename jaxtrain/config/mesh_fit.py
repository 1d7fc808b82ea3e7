"""Compares the devices that a config needs with those that are present, and fits it to them."""

from collections.abc import Sequence

import jax

from jaxtrain.config.run import Mesh, Run
from jaxtrain.errors import InputError


def device_count_problem(settings: Mesh, devices: Sequence[jax.Device] | None = None) -> str | None:
    """Explains a wrong number of devices and how to fix it; returns None if it is right.

    Args:
        settings: number of devices along each axis.
        devices: used instead of jax's devices.
    """
    present = jax.devices() if devices is None else devices
    wanted = settings.devices
    if len(present) == wanted or wanted < 1:  # the field itself is wrong
        return None
    count, first = len(present), present[0]
    needs = f"mesh.data {settings.data} x mesh.fsdp {settings.fsdp} needs {_devices(wanted)}"
    if first.platform == "cpu" and count > jax.process_count():  # a CPU is one device
        return (
            f"{needs}, but --simulate-devices gives {count}: use --simulate-devices {wanted}, or "
            f"add --mesh.auto True to fit the mesh to {count}, if that divides data.batch_size"
        )
    mismatch = f"{needs}, but jax sees {count} ({first.device_kind})"
    auto = "add --mesh.auto True to fit the mesh to what is there, with the same data.batch_size"
    if count < wanted:
        return (
            f"{mismatch}: {auto}; or start the run on {_devices(wanted)}; or try it without them "
            f"with --simulate-devices {wanted}"
        )
    if first.platform == "gpu" and jax.process_count() == 1:
        visible = ",".join(map(str, range(wanted)))
        return f"{mismatch}: {auto}, or set CUDA_VISIBLE_DEVICES={visible} to use only {wanted}"
    return f"{mismatch}: {auto}, or use {_devices(wanted)}"


def _devices(count: int) -> str:
    return f"{count} device" if count == 1 else f"{count} devices"


def fit_mesh(run: Run, nodes: int, per_node: int, requested_by: str) -> dict[str, int]:
    """Returns changes that put a run on other devices with the same global batch size.

    Microbatches per device keep their size, or the next smaller one that divides evenly. If
    parameters are sharded only inside a node, they stay so.

    Args:
        run: the config.
        nodes: number of nodes.
        per_node: devices in each node.
        requested_by: what requested these devices, for the message.

    Returns:
        Dotted field -> value, for ``mesh.data``, ``mesh.fsdp`` and ``optim.accumulate``.

    Raises:
        InputError: the number of devices does not divide the batch size; names the nearest that
            does, and the nearest batch sizes.
    """
    devices, batch = nodes * per_node, run.data.batch_size
    if batch % devices:
        below = max(count for count in range(1, devices) if batch % count == 0)
        above = next((n for n in range(devices + 1, batch + 1) if batch % n == 0), None)
        counts = f"{below} or {above}" if above else str(below)
        multiple = batch // devices * devices
        batches = f"{multiple} or {multiple + devices}" if multiple else str(devices)
        raise InputError(
            f"data.batch_size {batch} cannot be split over {_devices(devices)} ({requested_by}): "
            f"use {counts} devices, or --data.batch_size {batches}",
            about=("data.batch_size", "mesh.auto"),
        )
    rows = batch // devices
    accumulate = next(
        microbatches
        for microbatches in range(1, rows + 1)
        if rows % microbatches == 0 and rows // microbatches <= run.microbatch_size
    )
    fsdp = devices
    if run.mesh.data > 1 and nodes > 1:
        fsdp = per_node
        if per_node == 1:  # each device has a process of its own
            fsdp = max(n for n in range(1, run.mesh.fsdp + 1) if devices % n == 0)
    return {
        "mesh.data": devices // fsdp,
        "mesh.fsdp": fsdp,
        "optim.accumulate": accumulate,
    }


def fit_to_present_devices(run: Run) -> tuple[Run, str]:
    """Fits a run with ``mesh.auto`` to the devices of all its processes; others stay as they are.

    Returns:
        The run, and a line that states what was chosen and why; empty if nothing was.

    Raises:
        InputError: the number of devices does not divide the batch size.
    """
    if not run.mesh.auto:
        return run, ""
    devices = jax.devices()
    processes = jax.process_count()
    nodes = processes if len(devices) % processes == 0 else 1
    changes = fit_mesh(run, nodes, len(devices) // nodes, "mesh.auto")
    flags = " ".join(f"--{name} {value}" for name, value in changes.items())
    rows = run.data.batch_size // len(devices)
    return run.override(changes), (
        f"mesh.auto: {flags}, for the {len(devices)} devices found ({devices[0].device_kind}): "
        f"the global batch stays {run.data.batch_size}, {rows} per device, in microbatches of at "
        f"most {run.microbatch_size} as in the config"
    )
