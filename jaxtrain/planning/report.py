"""Formats a plan as text."""

import textwrap
from collections.abc import Sequence
from typing import Any

from jaxtrain import versions
from jaxtrain.planning.fit import Tried
from jaxtrain.planning.input_rate import CORES_PER_GPU, KINDS
from jaxtrain.planning.plan import Plan
from jaxtrain.planning.prediction import ERROR
from jaxtrain.telemetry.hardware import GIB
from jaxtrain.xla.gpu_memory import MEMORY_FRACTION

HOUR_S = 3600.0
_SOURCES = {
    "start": " (assumed)",
    "compilation": " (measured here; choosing kernels on the GPU is not included)",
    "replayed steps": " (loop.replay_every; 1.1 steps each, measured on a CPU)",
    "validation": " (assumed: a third of a step's time per example; and encoding samples)",
    "saves": " (assumed: 1 GB/s)",
}
_WIDTH = 80  # columns of a terminal
_COUNTS = {
    "parameters": "float32, this device's shards, and model state",
    "optimizer": "float32, this device's shards",
    "batch": "this device's examples, and counters",
    "temporaries": "peak of activations, gradients, gathered params",
    "outputs": "metrics",
    "second state": "of a step that loop.replay_every computes twice",
    "program": "what the compiler counts; the rest is CUDA's",
    "cuDNN workspaces": "assumed; chosen on the GPU",
}


def text(plan: Plan) -> str:
    """Formats a complete plan, in sections."""
    parts = [_heading(plan), memory(plan), _largest(plan), _work(plan), _traffic(plan)]
    parts += [_input(plan), _run(plan)]
    return "\n\n".join(part for part in parts if part)


def fits(plan: Plan) -> bool | None:
    """Whether the run fits; None if an estimate leaves that open."""
    if not plan["compiled"]["estimate"]:
        return bool(plan["memory"]["spare"] >= 0)
    return None if _certain(plan) <= plan["memory"]["capacity"] else False


def verdict(plan: Plan) -> str:
    """States whether the run fits, and by how much."""
    memory = plan["memory"]
    spare, capacity = memory["spare"] / GIB, memory["capacity"] / GIB
    if not plan["compiled"]["estimate"]:
        if spare < 0:
            return f"does not fit: needs {-spare:.1f} GiB more on each device"
        return f"fits with {spare:.1f} GiB to spare on each device"
    second = " second state," if "second state" in memory["rows"] else ""
    certain = (
        f"parameters, optimizer,{second} and batch take {_certain(plan) / GIB:.1f} of "
        f"{capacity:.1f} GiB"
    )
    if fits(plan) is False:
        return f"does not fit: {certain} on each device, without any temporaries"
    temporaries = memory["rows"]["temporaries"] / GIB
    return (
        f"unknown whether it fits: {certain} on each device; temporaries take "
        f"{temporaries:.1f} GiB on a CPU, but only the GPU compiler can measure them on a GPU"
    )


def _certain(plan: Plan) -> float:
    """Bytes that each device needs, whatever the compiler does."""
    memory = plan["memory"]
    return float(memory["needed"] - memory["rows"]["temporaries"])


def ranking(tried: Sequence[Tried]) -> str:
    """Formats candidates, one per line: results and the overrides to paste."""
    lines = ["  GiB / device  GiB to spare   s/step, at best   overrides"]
    for one in tried:
        lines.append(
            f"  {one.needed / GIB:12.1f}  {_spare(one):>12}  {one.best:16.4g}   "
            + (" ".join(one.overrides) or "(unchanged)")
        )
    return "\n".join(lines)


def _spare(one: Tried) -> str:
    return "unknown" if one.fits is None else f"{one.spare / GIB:.1f}"


def _heading(plan: Plan) -> str:
    compiled = plan["compiled"]
    used = compiled["versions"]
    nodes = "1 node" if plan["nodes"] == 1 else f"{plan['nodes']} nodes"
    lines = [
        f"{plan['config']} on {plan['devices']} x {plan['card']['name']} ({nodes}), compiled in "
        f"{compiled['compile_s']:.0f} s by jax {used['jax']}",
        textwrap.fill(
            "; ".join([verdict(plan), *_cost(plan)]),
            _WIDTH,
            subsequent_indent="  ",
            break_on_hyphens=False,
        ),
        f"{compiled['elements']:,} parameters; {compiled['batch_of']}",
        *_constants(compiled.get("constants", 0)),
        *_frozen(compiled.get("frozen")),
        *(
            f"not sharded: {name} {tuple(shape)}: mesh.fsdp divides none of its dimensions"
            for name, shape in compiled["unsharded"].items()
        ),
    ]
    if compiled["estimate"]:
        lines.insert(
            0,
            "ESTIMATE: the GPU compiler is not installed. Install it (no GPU required):\n"
            f"  {versions.install('cuda12')}\n"
            "Parameters, optimizer, batch, and arithmetic are exact. Temporaries are those of\n"
            "the CPU program (for h100_16, 3.7 times those of the GPU program). Memory\n"
            "bandwidth and communication are omitted.\n",
        )
    return "\n".join(lines)


def _constants(count: int) -> list[str]:
    return [f"{count:,} weights of a teacher or of LPIPS, not trained"] if count else []


def _frozen(frozen: dict[str, Any] | None) -> list[str]:
    """Describes what ``model.freeze`` saves."""
    if not frozen:
        return []
    return [
        f"frozen: {frozen['elements']:,} parameters ({' '.join(frozen['paths'])}): saves "
        f"{frozen['optimizer_bytes'] / GIB:.3f} GiB of optimizer state and\n"
        f"  {frozen['sent_bytes'] / GIB:.3f} GiB sent per step, on each device"
    ]


def memory(plan: Plan) -> str:
    """Lists what each device needs and has, one item per line."""
    memory, compiled = plan["memory"], plan["compiled"]
    estimated = " (estimate)" if compiled["estimate"] else ""
    lines = ["memory per device, GiB" + ("" if estimated else ", compiled")]
    for name, size in memory["rows"].items():
        if size or name in ("parameters", "optimizer", "temporaries", "program"):
            lines.append(f"  {name:<18}{size / GIB:9.3f}   {_COUNTS[name]}")
        if name == "temporaries":
            lines.append(
                f"    {'of which gradients':<18}{compiled['gradients'] / GIB:7.3f}   float32, "
                "shards (twice with microbatches)"
            )
    lines += [
        f"  {'needed':<18}{memory['needed'] / GIB:9.3f}{estimated}",
        f"  {'available':<18}{memory['capacity'] / GIB:9.3f}   of {memory['total'] / GIB:.1f}, "
        f"at most {MEMORY_FRACTION:.0%} (XLA_CLIENT_MEM_FRACTION)",
        f"{'':32}reserved: {_kept(memory['outside'])} (assumed)",
    ]
    return "\n".join(lines)


def _kept(outside: dict[str, float]) -> str:
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in outside.items() if size)


def _largest(plan: Plan) -> str:
    found = plan["compiled"]["largest"]
    if found is None:
        return ""
    if not found:
        return "largest temporaries: unknown, as the compiler wrote no dump"
    lines = ["largest temporaries, GiB, and the source lines that create them"]
    for one in found:
        made_by = ", ".join(one["made_by"][:2]) or "the compiler"
        more = f" and {len(one['made_by']) - 2} more" if len(one["made_by"]) > 2 else ""
        lines.append(f"  {one['size'] / GIB:9.3f}   {one['shape']:<28} {made_by}{more}")
    return "\n".join(lines)


def _work(plan: Plan) -> str:
    compiled, devices = plan["compiled"], plan["devices"]
    again = compiled["flops"] / compiled["model_flops"] - 1
    lines = [
        "work per step and device, predicted",
        f"  {compiled['model_flops'] / devices / 1e12:9.3f} TFLOP that the model needs",
        f"  {compiled['flops'] / devices / 1e12:9.3f} TFLOP in the compiled step ({again:+.0%}: "
        "rematerialization, skipped work)",
        f"  {1000 * plan['arithmetic_s']:9.2f} ms at the GPU's matmul peak",
    ]
    if not compiled["estimate"]:
        lines += [
            f"  {compiled['moved_bytes'] / 1e9:9.2f} GB read and written, if each operation "
            "does so once",
            f"  {1000 * plan['time']['memory']:9.2f} ms at the GPU's memory-bandwidth peak",
        ]
        calls = compiled["attention"]
        if any(calls.values()):
            lines.append(
                f"  cuDNN attention: {calls['forward']} forward calls, "
                f"{calls['backward']} backward calls"
            )
        if slow := compiled["kernels"]["other_convolutions"]:
            lines.append(f"  {slow} convolutions without cuDNN: the step may be much slower")
    return "\n".join(lines)


def _traffic(plan: Plan) -> str:
    compiled = plan["compiled"]
    if plan["devices"] == 1 or compiled["estimate"]:
        return ""
    lines = ["communication per step and device, predicted"]
    rows: list[dict[str, Any]] = compiled["traffic"]
    for row in rows:
        where = "between nodes" if row["crosses_nodes"] else "within a node"
        lines.append(
            f"{row['count']:4} x {row['kind']:<14} {row['dtype']:<5} {row['axis']:<9} "
            f"{where:<13} {row['wire_bytes'] / 1e6:8.1f} MB {1000 * row['seconds']:7.2f} ms, "
            f"{row['overlapped']:.0%} overlapped"
        )
    sent = sum(row["wire_bytes"] for row in rows)
    formula = compiled["formula_bytes"]
    frozen = " and of frozen weights" if compiled.get("constants") else ""
    lines.append(
        f"  {sent / 1e6:.2f} MB sent, {sent / formula:.2f} times the formula's "
        f"{formula / 1e6:.2f} MB\n  (all-gather of parameters{frozen}, reduce-scatter of "
        "gradients,\n  in bfloat16)"
    )
    lines.append("  links ([D] datasheet, [A] assumed):")
    lines += [f"    {link}" for link in plan["card"]["link"].split("; ")]
    return "\n".join(lines)


def _run(plan: Plan) -> str:
    run, time = plan["run"], plan["time"]
    if time is None:
        return (
            "time and cost need the GPU compiler (no GPU required):\n"
            f"  {versions.install('cuda12')}"
        )
    fast, slow = run["steps_per_second"]
    lines = [
        "the run, predicted",
        f"  {_both(slow, fast)} steps/s ({1 / slow:.3g} to {1 / fast:.3g} s per step), bound by "
        f"{time['bound']}",
        f"  {time['worst']:.3g} to {time['best']:.3g} s per step without waiting for input:",
        *_rates(plan),
    ]
    if run["hours"] is None:
        lines.append(
            "  hours unknown: loop.epochs depends on the data;\n"
            "    set --loop.epochs None --loop.steps N"
        )
        return "\n".join(lines)
    lines.append(f"  {run['steps']:,} steps: {'; '.join(_cost(plan))}")
    lines += [
        f"    {name + ':':<20} {_span(*(s / HOUR_S for s in seconds))}{_SOURCES.get(name, '')}"
        for name, seconds in run["seconds"].items()
        if seconds[1] >= 1
    ]
    return "\n".join(lines)


def _rates(plan: Plan) -> list[str]:
    """Says which fraction of the peaks the time of a step rests on."""
    (least, most), measured = plan["time"]["efficiency"], plan["time"]["measured"]
    if measured is None:
        return [
            f"    from {least:.0%} of the GPU's peaks, no communication hidden,",
            f"    to {most:.0%}, all overlapped communication hidden",
        ]
    return [
        f"    at {measured:.0%} of the GPU's peaks, as measured, plus or minus {ERROR:.0%},",
        "    with and without hidden communication",
    ]


def _input(plan: Plan) -> str:
    """Formats what a host can load, whether that suffices, and what to do otherwise."""
    found = plan["input"]
    unit = KINDS[found["kind"]].unit if not found["measured"] else "examples"
    examples = "clips" if unit == "clips" else "examples"
    rate = _both(*found["rate"])
    how = "measured per core" if found["measured"] else "from rates measured on other machines"
    cores = f"{found['cores']} cores"
    if found["assumed"]:
        cores += f" (assumed: {CORES_PER_GPU} per GPU; set --cores)"
    lines = [
        f"input per host, predicted, {how}",
        f"  {found['what']}:",
        f"    {_both(*found['per_core'])} {examples}/s per core",
        f"  {rate} {examples}/s by {found['workers']} workers on {cores}",
    ]
    if plan["time"] is None:
        lines.append(
            f"  enough for {_both(*reversed(plan['run']['input_steps_per_second']))} steps/s"
        )
        return "\n".join(lines)
    rows, time = plan["examples_per_host"], plan["time"]
    verdict = {"yes": "the GPUs wait", "maybe": "the GPUs may wait", "no": "the GPUs do not wait"}
    lines.append(
        f"  {_both(rows / time['worst'], rows / time['best'])} {examples}/s needed by the steps: "
        f"{verdict[found['waits']]}"
    )
    if found["advice"]:
        lines.append("  to wait less:")
        lines += [
            textwrap.fill(
                one,
                _WIDTH,
                initial_indent="    - ",
                subsequent_indent="      ",
                break_on_hyphens=False,
            )
            for one in found["advice"]
        ]
    return "\n".join(lines)


def _both(least: float, most: float) -> str:
    return _rate(least) if least == most else f"{_rate(least)} to {_rate(most)}"


def _span(least: float, most: float) -> str:
    shortest, longest = _duration(least), _duration(most)
    return shortest if shortest == longest else f"{shortest} to {longest}"


def _cost(plan: Plan) -> list[str]:
    """Formats hours, and cost if a price was given; empty if the hours are unknown."""
    run = plan["run"]
    if run["hours"] is None:
        return []
    least, most = run["hours"]
    cost = [_span(least, most)]
    if run["money"] is not None:
        cheap, dear = run["money"]
        span = f"{cheap:,.0f} to {dear:,.0f}" if dear >= 10 else f"{cheap:,.2g} to {dear:,.2g}"
        cost.append(
            f"cost {span} for {plan['devices']} GPUs at {run['price_per_gpu_hour']:g} per GPU-hour"
        )
    return cost


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _duration(hours: float) -> str:
    seconds = hours * 3600
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if hours < 2 else f"{hours:,.3g} h"
