"""A plan as a person reads it."""

from collections.abc import Sequence
from typing import Any

from jaxtrain import versions
from jaxtrain.planning.fit import Tried
from jaxtrain.planning.plan import Plan
from jaxtrain.telemetry.hardware import GIB

_COUNTS = {
    "parameters": "float32, this device's shards; and what the model keeps besides",
    "optimizer": "float32, this device's shards",
    "batch": "as it comes from the host, this device's rows; and counters",
    "temporaries": "activations, gradients, gathered parameters: at their worst moment",
    "outputs": "metrics",
    "program": "as far as the compiler counts it; else part of CUDA's, below",
    "cuDNN workspaces": "assumed; chosen on the GPU",
}


def text(plan: Plan) -> str:
    """All of a plan, in sections."""
    parts = [_heading(plan), memory(plan), _largest(plan), _work(plan), _traffic(plan), _run(plan)]
    return "\n\n".join(part for part in parts if part)


def fits(plan: Plan) -> bool | None:
    """Whether it fits; None where an estimate cannot tell."""
    if not plan["compiled"]["estimate"]:
        return bool(plan["memory"]["spare"] >= 0)
    return None if _certain(plan) <= plan["memory"]["capacity"] else False


def verdict(plan: Plan) -> str:
    """Whether it fits, and by how much."""
    memory = plan["memory"]
    spare, capacity = memory["spare"] / GIB, memory["capacity"] / GIB
    if not plan["compiled"]["estimate"]:
        if spare < 0:
            return f"does not fit: {-spare:.1f} GiB too much on each device"
        return f"fits with {spare:.1f} GiB to spare on each device"
    certain = (
        f"parameters, optimizer and batch take {_certain(plan) / GIB:.1f} of {capacity:.1f} GiB"
    )
    if fits(plan) is False:
        return f"does not fit: {certain} on each device before any temporaries"
    temporaries = memory["rows"]["temporaries"] / GIB
    return (
        f"cannot tell whether it fits: {certain} on each device; temporaries take "
        f"{temporaries:.1f} GiB on a CPU, and only the compiler for GPUs knows what they take there"
    )


def _certain(plan: Plan) -> float:
    """Bytes that a device needs whatever the compiler does."""
    memory = plan["memory"]
    return float(memory["needed"] - memory["rows"]["temporaries"])


def ranking(tried: Sequence[Tried]) -> str:
    """Candidates, a line each: what was compiled, and the overrides to paste."""
    lines = ["  GiB a device  GiB to spare  s a step at best   overrides"]
    for one in tried:
        lines.append(
            f"  {one.needed / GIB:12.1f}  {_spare(one):>12}  {one.best:16.4g}   "
            + (" ".join(one.overrides) or "(as it is)")
        )
    return "\n".join(lines)


def _spare(one: Tried) -> str:
    return "cannot tell" if one.fits is None else f"{one.spare / GIB:.1f}"


def _heading(plan: Plan) -> str:
    compiled = plan["compiled"]
    used = compiled["versions"]
    nodes = "1 node" if plan["nodes"] == 1 else f"{plan['nodes']} nodes"
    lines = [
        f"{plan['config']} on {plan['devices']} x {plan['card']['name']} ({nodes}): compiled in "
        f"{compiled['compile_s']:.0f} s by jax {used['jax']}",
        "; ".join([verdict(plan), *_cost(plan)]),
        f"{compiled['elements']:,} parameters; {compiled['batch_of']}",
        *(
            f"not sharded: {name} {tuple(shape)}: no dimension divides by mesh.fsdp"
            for name, shape in compiled["unsharded"].items()
        ),
    ]
    if compiled["estimate"]:
        lines.insert(
            0,
            "ESTIMATE: jax cannot compile for GPUs here. To know, install jax's compiler for GPUs, "
            f"which needs no GPU: {versions.install('cuda12')}. State, batch and arithmetic are "
            "exact; temporaries are those of the CPU's program (h100_16: 3.7 times the GPU's); "
            "memory and link traffic are omitted",
        )
    return "\n".join(lines)


def memory(plan: Plan) -> str:
    """What each device needs and has, a line each."""
    memory, compiled = plan["memory"], plan["compiled"]
    estimated = " (estimate)" if compiled["estimate"] else ""
    lines = ["memory a device, GiB, compiled" if not estimated else "memory a device, GiB"]
    for name, size in memory["rows"].items():
        if size or name in ("parameters", "optimizer", "temporaries", "program"):
            lines.append(f"  {name:<18}{size / GIB:9.3f}   {_COUNTS[name]}")
        if name == "temporaries":
            lines.append(
                f"    {'of which gradients':<18}{compiled['gradients'] / GIB:7.3f}   float32, "
                "computed: this device's shards, twice where microbatches are added up"
            )
    lines += [
        f"  {'needed':<18}{memory['needed'] / GIB:9.3f}{estimated}",
        f"  {'there is':<18}{memory['capacity'] / GIB:9.3f}   of {memory['total'] / GIB:.1f}: "
        f"outside stay {_kept(memory['outside'])} (assumed), and what is spare of a tenth "
        "(the program sets XLA_CLIENT_MEM_FRACTION)",
    ]
    return "\n".join(lines)


def _kept(outside: dict[str, float]) -> str:
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in outside.items() if size)


def _largest(plan: Plan) -> str:
    found = plan["compiled"]["largest"]
    if found is None:
        return ""
    if not found:
        return "largest temporaries: the compiler wrote no dump of them"
    lines = ["largest temporaries, GiB, and the lines that make them"]
    for one in found:
        made_by = ", ".join(one["made_by"][:2]) or "the compiler"
        more = f" and {len(one['made_by']) - 2} more" if len(one["made_by"]) > 2 else ""
        lines.append(f"  {one['size'] / GIB:9.3f}   {one['shape']:<28} {made_by}{more}")
    return "\n".join(lines)


def _work(plan: Plan) -> str:
    compiled, devices = plan["compiled"], plan["devices"]
    again = compiled["flops"] / compiled["model_flops"] - 1
    lines = [
        "work of a step, predicted",
        f"  {compiled['model_flops'] / devices / 1e12:9.3f} TFLOP a device by the model's "
        f"formula, {compiled['flops'] / devices / 1e12:.3f} in the program ({again:+.0%}: what "
        "is computed again, or left out)",
        f"  {1000 * plan['arithmetic_s']:9.2f} ms at the card's dense rate",
    ]
    if not compiled["estimate"]:
        lines += [
            f"  {compiled['moved_bytes'] / 1e9:9.2f} GB a device, if each operation reads and "
            "writes its operands once",
            f"  {1000 * plan['time']['memory']:9.2f} ms at its bandwidth",
            f"  bound by {plan['time']['bound']}",
        ]
        calls = compiled["attention"]
        if any(calls.values()):
            lines.append(
                f"  attention by cuDNN: {calls['forward']} calls forward, {calls['backward']} back"
            )
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
    formula = compiled["formula_bytes"]
    lines.append(
        f"  {sent / 1e6:.2f} MB, {sent / formula:.2f} times the formula's {formula / 1e6:.2f} MB "
        "(parameters gathered, gradients scattered, in bfloat16)"
    )
    lines.append(f"  links: {plan['card']['link']} ([D] datasheet, [A] assumed)")
    return "\n".join(lines)


def _run(plan: Plan) -> str:
    run, time = plan["run"], plan["time"]
    if time is None:
        return "the run: hours and money take the GPU's program"
    fast, slow = run["steps_per_second"]
    lines = [
        "the run, predicted",
        f"  {_rate(slow)} to {_rate(fast)} steps/s ({time['worst']:.3g} to {time['best']:.3g} s a "
        f"step: from {plan['worst_efficiency']:.0%} of the ceilings and no communication hidden, "
        "to all of both)",
    ]
    rows = plan["examples_per_host"]
    lines.append(
        f"  for that each host makes {rows * slow:.3g} to {rows * fast:.3g} examples/s of input "
        f"(data.workers {plan['workers']}; doctor measures what it can)"
    )
    if run["hours"] is None:
        lines.append("  loop.epochs: hours take the data; set --loop.epochs None --loop.steps N")
        return "\n".join(lines)
    lines.append(f"  {run['updates']:,} updates: {'; '.join(_cost(plan))}")
    lines.append("  steps only: no start, validation, checkpoint or wait for data")
    return "\n".join(lines)


def _cost(plan: Plan) -> list[str]:
    """Hours, and money where a price was given; nothing where the hours are not known."""
    run = plan["run"]
    if run["hours"] is None:
        return []
    least, most = run["hours"]
    cost = [f"{_duration(least)} to {_duration(most)}"]
    if run["money"] is not None:
        cheap, dear = run["money"]
        cost.append(
            f"{cheap:,.0f} to {dear:,.0f} for all {plan['devices']} GPUs at "
            f"{run['price_per_gpu_hour']:g} a GPU and hour"
        )
    return cost


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _duration(hours: float) -> str:
    seconds = hours * 3600
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if hours < 2 else f"{hours:,.3g} h"
