"""Formats a plan as text that fits on one screen of 80 columns and 40 lines."""

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxtrain import formats
from jaxtrain.cost.step_time import ERROR, Range, seconds
from jaxtrain.data.contract import MOST_PREPARATION_S
from jaxtrain.data.input_rate import CORES_PER_GPU, KINDS
from jaxtrain.formats import GIB
from jaxtrain.planning import prediction
from jaxtrain.planning.fit import Tried
from jaxtrain.planning.prediction import HOUR_S
from jaxtrain.planning.spot import REPLACE_S, Spot
from jaxtrain.xla.gpu_memory import MEMORY_FRACTION

if TYPE_CHECKING:
    from jaxtrain.planning.planner import Plan

_WIDTH = 80
_TEMPORARIES = 3
_COLLECTIVES = 2
_PURPOSES = {
    "parameters": "float32, this device's shards, and model state",
    "optimizer": "float32, this device's shards",
    "batch": "this device's examples, and counters",
    "temporaries": "activations, gathered params, gradients ({gradients:.3f})",
    "outputs": "metrics",
    "second state": "of a step that loop.replay_every computes twice",
    "program": "what the compiler counts; the rest is CUDA's",
    "cuDNN workspaces": "assumed; chosen on the GPU",
}
_ALWAYS = ("parameters", "optimizer", "temporaries")


def text(plan: "Plan") -> str:
    """Formats a complete plan, in sections."""
    return "\n\n".join([_heading(plan), memory(plan), _step(plan), _input(plan), _run(plan)])


def on_spot(plan: "Plan", spot: Spot | None) -> str:
    """Formats what a run costs on spot machines, beside what it costs on others."""
    if spot is None:
        return "on spot machines: unknown, as the hours are"
    cheap, dear = spot.money
    cost = "it makes no progress"
    if math.isfinite(dear):
        cost = f"{formats.hours(*spot.hours)}; cost {_span(cheap, dear)} at {spot.price:g}"
        cost += f"; with loop.leave_notice {formats.hours(*spot.noticed)}"
    if math.isfinite(dear) and plan.run.money is not None and plan.run.money[1]:
        cost += f"; {dear / plan.run.money[1]:.0%} of the cost above"
    restart = formats.hours(spot.restart_s / HOUR_S, spot.restart_s / HOUR_S)
    minutes = max(1, round(spot.every_s / 60))
    lines = [
        f"on spot machines, expected with {spot.preemptions:g} preemptions a day of any of them:",
        f"  {cost}",
        f"  --checkpoint.every {minutes}m (about {spot.every_steps:,} steps; Daly's optimum): a "
        f"save costs {spot.save_s:.2g} s, a restart {restart}, "
        f"of which {REPLACE_S / 60:g} min for another machine (assumed)",
    ]
    return "\n".join(map(_wrapped, lines))


def fit_sentence(plan: "Plan") -> str:
    """States whether the run fits, and by how much."""
    spare = plan.memory.spare / GIB
    if spare < 0:
        return f"does not fit: needs {-spare:.1f} GiB more on each device"
    return f"fits with {spare:.1f} GiB to spare on each device"


def ranking(tried: Sequence[Tried]) -> str:
    """Formats candidates, one per line: results and the overrides to paste."""
    lines = ["  GiB / device  GiB to spare   s/step, at best   overrides"]
    for each in tried:
        spare = f"{each.spare / GIB:.1f}"
        changes = " ".join(each.overrides) or "(unchanged)"
        lines.append(f"  {each.needed / GIB:12.1f}  {spare:>12}  {each.best:16.4g}   {changes}")
    return "\n".join(lines)


def _heading(plan: "Plan") -> str:
    step = plan.step
    nodes = "1 node" if plan.nodes == 1 else f"{plan.nodes} nodes"
    parameters = f"{step.elements:,} parameters"
    if step.frozen:
        parameters += f", of which {step.frozen:,} are frozen"
    if step.file_weights:
        parameters += f", and {step.file_weights:,} weights of a teacher or of LPIPS"
    lines = [
        f"{plan.config} on {step.cost.devices} x {plan.card.name} ({nodes}), jax {step.jax}",
        _wrapped(
            "; ".join(
                [
                    fit_sentence(plan),
                    f"bound by {plan.bound}",
                    *_hours_and_cost(plan.run.hours, plan),
                ]
            )
        ),
        _wrapped(f"{parameters}; {step.batch_of}"),
    ]
    if step.unsharded:
        (name, shape), *others = step.unsharded.items()
        more = f" and {len(others)} more" if others else ""
        lines.append(
            _wrapped(f"not sharded: {name} {tuple(shape)}{more}: mesh.fsdp divides no dimension")
        )
    return "\n".join(lines)


def memory(plan: "Plan") -> str:
    """Lists what each device needs and has, and the largest temporaries."""
    memory = plan.memory
    lines = ["memory per device, GiB"]
    for name, size in memory.rows.items():
        if size >= 0.0005 * GIB or name in _ALWAYS:
            purpose = _PURPOSES[name].format(gradients=plan.step.gradients / GIB)
            lines.append(f"  {name:<18}{size / GIB:9.3f}   {purpose}")
        if name == "temporaries":
            lines += [
                f"    {slot.size / GIB:.3f} {slot.shape} {(*slot.made_by, 'the compiler')[0]}"
                for slot in plan.step.largest[:_TEMPORARIES]
            ]
    reserved = ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory.outside.items())
    return "\n".join(
        [
            *lines,
            f"  {'needed':<18}{memory.needed / GIB:9.3f}   of {memory.capacity / GIB:.3f} available"
            f": {MEMORY_FRACTION:.0%} of {memory.total / GIB:.1f} at most",
            f"    XLA_CLIENT_MEM_FRACTION; reserved: {reserved} (assumed)",
        ]
    )


def _step(plan: "Plan") -> str:
    cost, time = plan.step.cost, plan.time
    flops, needed = (n / cost.devices / 1e12 for n in (cost.flops, cost.model_flops))
    lines = [
        "a step on each device, predicted, at the peaks of the GPU",
        f"  arithmetic    {1000 * plan.arithmetic_s:9.2f} ms   {flops:.3f} TFLOP; the model needs "
        f"{needed:.3f}",
    ]
    kernels = cost.kernels or {}
    lines.append(
        f"  memory        {1000 * time.memory:9.2f} ms   {cost.moved_bytes / 1e9:.2f} GB read and "
        "written"
    )
    lines += _traffic(plan)
    calls = kernels.get("attention_forward", 0), kernels.get("attention_backward", 0)
    if any(calls):
        lines.append(f"  cuDNN attention: {calls[0]} forward calls, {calls[1]} backward calls")
    if slow := kernels.get("other_convolutions"):
        lines.append(f"  {slow} convolutions without cuDNN: the step may be much slower")
    (low, high), measured = time.efficiency, time.measured
    efficiency = f"{high:.0%} to {low:.0%} (assumed)"
    if measured is not None:
        efficiency = f"{measured:.0%} (measured) +- {ERROR:.0%}"
    spent = f"{_range(time.best, time.worst)} s, at {efficiency}"
    return "\n".join([*lines, f"  serial bound  {1000 * time.serial:9.2f} ms   {spent}"])


def _traffic(plan: "Plan") -> list[str]:
    cost, time = plan.step.cost, plan.time
    if cost.devices == 1:
        return []
    rows = cost.traffic or ()
    hidden = time.hidden / time.communication if time.communication else 0.0
    link = plan.card.link.split("; ")[0 if plan.nodes == 1 else -1]
    return [
        f"  communication {1000 * time.communication:9.2f} ms   {cost.sent_bytes / 1e6:.2f} MB "
        f"sent, {hidden:.0%} overlapped",
        *(
            f"{row.count:5} x {row.kind:<14} {row.dtype:<4} {row.axis:<9} "
            f"{'between nodes' if row.crosses_nodes else 'within a node':<13} "
            f"{row.wire_bytes / 1e6:8.1f} MB {1000 * seconds(row, plan.card):7.2f} ms"
            for row in rows[:_COLLECTIVES]
        ),
        f"    {link}",
    ]


def _input(plan: "Plan") -> str:
    host, time = plan.input, plan.time
    clips = KINDS[host.kind].unit == "clips" and not host.measured
    unit = "clips/s" if clips else "examples/s"
    assumed = f" ({CORES_PER_GPU} per GPU, assumed)" if host.assumed else ""
    rows = plan.batch_size / plan.nodes
    waits = {"yes": "the GPUs wait", "maybe": "the GPUs may wait", "no": "the GPUs do not wait"}
    needs = f"{_range(rows / time.worst, rows / time.best)} {unit} needed: {waits[host.waits]}"
    lines = [
        _wrapped(f"input per host, predicted: {needs}"),
        f"  {_range(*host.rate)} {unit} by {host.workers} workers on {host.cores} cores{assumed}",
        _wrapped(f"  {_range(*host.per_core)} {unit} per core: {host.what}"),
    ]
    if host.advice:
        lines.append(_wrapped(f"  to wait less: {'; '.join(host.advice)}"))
    for estimate in plan.preparation:
        hours, size = estimate.core_s / HOUR_S, formats.size(estimate.bytes)
        first = "before the first step"
        if estimate.core_s > MOST_PREPARATION_S * host.cores * plan.nodes:
            first = "before the run, with prepare clips"
        lines.append(
            _wrapped(
                f"  {first}: cutting {estimate.what}: {hours:.2g} core hours, {size} of pieces"
            )
        )
    return "\n".join(lines)


def _run(plan: "Plan") -> str:
    run = plan.run
    fast, slow = run.steps_per_second
    rate = f"{_range(slow, fast)} steps/s"
    if run.seconds is None:
        return (
            f"the run, predicted: {rate}\n"
            "  hours unknown: loop.epochs depends on the data;\n"
            "  set --loop.epochs None --loop.steps N"
        )
    items = [
        f"{name} {formats.hours(*(s / HOUR_S for s in span))}"
        for name, span in run.seconds.items()
        if span[1] >= 1
    ]
    gates = [
        f"  up to the gate {gate}: {'; '.join(_hours_and_cost(hours, plan))}"
        for gate, hours in run.gates.items()
    ]
    lines = [f"the run, predicted: {run.steps:,} steps at {rate}", f"  {'; '.join(items)}", *gates]
    return "\n".join(map(_wrapped, lines))


def _hours_and_cost(hours: Range | None, plan: "Plan") -> list[str]:
    if hours is None:
        return []
    texts, price = [formats.hours(*hours)], plan.run.price
    cost = prediction.money(hours, plan.step.cost.devices, price)
    if cost is not None:
        texts.append(f"cost {_span(*cost)} at {price:g} per GPU-hour")
    return texts


def _span(cheap: float, dear: float) -> str:
    return f"{cheap:,.0f} to {dear:,.0f}" if dear >= 10 else f"{cheap:,.2g} to {dear:,.2g}"


def _wrapped(line: str) -> str:
    return textwrap.fill(line, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _range(low: float, high: float) -> str:
    return _rate(low) if low == high else f"{_rate(low)} to {_rate(high)}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
