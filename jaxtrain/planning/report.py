"""A plan as a person reads it."""

from collections.abc import Sequence
from typing import Any

from jaxtrain.devices import GIB
from jaxtrain.planning.fit import Tried
from jaxtrain.planning.plan import Plan
from jaxtrain.planning.prediction import WORST_EFFICIENCY

_COUNTS = {
    "parameters": "float32, this device's shards; and what the model keeps besides",
    "optimizer": "float32, this device's shards",
    "batch": "as it comes from the host, this device's rows; and counters",
    "temporaries": "activations, gradients, gathered parameters: at their worst moment",
    "outputs": "metrics",
    "program": "as far as the compiler counts it",
    "cuDNN workspaces": "assumed; chosen on the GPU",
}


def text(plan: Plan) -> str:
    """All of a plan, in sections."""
    parts = [_heading(plan), _memory(plan), _largest(plan), _work(plan), _traffic(plan), _run(plan)]
    return "\n\n".join(part for part in parts if part)


def verdict(plan: Plan) -> str:
    """Whether it fits, and by how much."""
    spare = plan["memory"]["spare"] / GIB
    if spare < 0:
        return f"does not fit: {-spare:.1f} GiB too much on each device"
    return f"fits with {spare:.1f} GiB to spare on each device"


def ranking(tried: Sequence[Tried]) -> str:
    """Candidates, a line each: what was compiled, and the overrides to paste."""
    lines = ["  GiB a device    spare   s a step at best   overrides"]
    for one in tried:
        spare = f"{one.spare / GIB:+8.1f}" if one.fits else "too much"
        lines.append(
            f"  {one.needed / GIB:12.1f} {spare} {one.best:18.3f}   "
            + (" ".join(one.changes) or "(as it is)")
        )
    return "\n".join(lines)


def _heading(plan: Plan) -> str:
    compiled = plan["compiled"]
    versions = compiled["versions"]
    nodes = "1 node" if plan["nodes"] == 1 else f"{plan['nodes']} nodes"
    lines = [
        f"{plan['config']} on {plan['devices']} x {plan['card']['name']} ({nodes}): compiled in "
        f"{compiled['compile_s']:.0f} s by jax {versions['jax']}",
        f"{compiled['elements']:,} parameters; {compiled['batch_of']}",
        *(
            f"not sharded: {name} {tuple(shape)}: no dimension divides by mesh.fsdp"
            for name, shape in compiled["unsharded"].items()
        ),
    ]
    if compiled["estimate"]:
        lines.insert(
            0,
            "ESTIMATE: jax cannot compile for GPUs here (pip install -e '.[cuda12]' mends that, no "
            "GPU needed). State, batch and arithmetic are exact; temporaries are those of the "
            "CPU's program, often twice a GPU's; memory and link traffic are left out",
        )
    return "\n".join(lines)


def _memory(plan: Plan) -> str:
    memory, compiled = plan["memory"], plan["compiled"]
    estimated = " (estimate)" if compiled["estimate"] else ""
    lines = ["memory a device, GiB"]
    for name, size in memory["rows"].items():
        if size or name in ("parameters", "optimizer", "temporaries"):
            lines.append(f"  {name:<18}{size / GIB:9.3f}   {_COUNTS[name]}")
        if name == "temporaries":
            lines.append(
                f"    {'of which gradients':<18}{compiled['gradients'] / GIB:7.3f}   float32, "
                "computed: this device's shards, twice where microbatches are added up"
            )
    lines += [
        f"  {'needed':<18}{memory['needed'] / GIB:9.3f}{estimated}",
        f"  {'there is':<18}{memory['capacity'] / GIB:9.3f}   of {memory['total'] / GIB:.1f}: "
        f"{memory['outside'] / GIB:.1f} stay outside for CUDA and NCCL "
        "(XLA_PYTHON_CLIENT_MEM_FRACTION, set by the program)",
        verdict(plan),
    ]
    return "\n".join(lines)


def _largest(plan: Plan) -> str:
    found = plan["compiled"]["largest"]
    if not found:
        return ""
    lines = ["largest temporaries, GiB, and the lines that make them"]
    for one in found:
        made_by = ", ".join(one["made_by"][:2]) or "the compiler"
        more = f" and {len(one['made_by']) - 2} more" if len(one["made_by"]) > 2 else ""
        lines.append(f"  {one['size'] / GIB:9.3f}   {one['shape']:<28} {made_by}{more}")
    return "\n".join(lines)


def _work(plan: Plan) -> str:
    compiled, time, devices = plan["compiled"], plan["time"], plan["devices"]
    again = compiled["flops"] / compiled["model_flops"] - 1
    lines = [
        "work of a step, predicted",
        f"  {compiled['model_flops'] / devices / 1e12:9.3f} TFLOP a device by the model's "
        f"formula, {compiled['flops'] / devices / 1e12:.3f} in the program ({again:+.0%}: what "
        "is computed again, or left out)",
        f"  {1000 * time['arithmetic']:9.2f} ms at the card's dense rate",
    ]
    if not compiled["estimate"]:
        lines += [
            f"  {compiled['moved_bytes'] / 1e9:9.2f} GB read and written a device",
            f"  {1000 * time['traffic']:9.2f} ms at its bandwidth",
            f"  bound by {time['bound']}",
        ]
    return "\n".join(lines)


def _traffic(plan: Plan) -> str:
    compiled = plan["compiled"]
    if plan["devices"] == 1 or compiled["estimate"]:
        return ""
    lines = ["sent by a device in a step, predicted"]
    rows: list[dict[str, Any]] = compiled["traffic"]
    for row in rows:
        where = "crosses nodes" if row["crosses_nodes"] else "in the node"
        lines.append(
            f"  {row['count']:4} x {row['kind']:<15} {row['dtype']:<9} {row['axis']:<10} "
            f"{where:<13} {row['wire_bytes'] / 1e6:10.3f} MB {1000 * row['seconds']:9.3f} ms, "
            f"{row['overlapped']:.0%} beside other work"
        )
    sent = sum(row["wire_bytes"] for row in rows)
    least = compiled["least_bytes"]
    lines.append(
        f"  {sent / 1e6:.2f} MB, {sent / least:.2f} times what mesh.shard has to send by formula "
        f"({least / 1e6:.2f} MB); links: {plan['card']['link']}"
    )
    return "\n".join(lines)


def _run(plan: Plan) -> str:
    run, time = plan["run"], plan["time"]
    slow, fast = run["steps_per_second"]
    lines = [
        "the run, predicted",
        f"  {slow:.3g} to {fast:.3g} steps/s ({time['worst']:.3g} to {time['best']:.3g} s a step: "
        f"from {WORST_EFFICIENCY:.0%} of the ceilings and no communication hidden, to all of both)",
    ]
    if run["hours"] is None:
        lines.append("  loop.epochs: hours take the data; set --loop.steps to see them")
        return "\n".join(lines)
    least, most = run["hours"]
    lines.append(f"  {run['updates']:,} updates: {least:.3g} to {most:.3g} hours")
    if run["money"] is not None:
        cheap, dear = run["money"]
        lines[-1] += (
            f", {cheap:,.2f} to {dear:,.2f} at {run['price_per_gpu_hour']:g} for a GPU and hour"
        )
    return "\n".join(lines)
