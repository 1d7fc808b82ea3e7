"""Compares predicted with measured steps.

    python benchmarks/plan_vs_measured.py [--results FILE] [--json FILE] [--seconds S]

Each config is planned for the GPUs of this machine without using them, and measured on them with
all that `jaxtrain bench` measures.
"""

import argparse
import concurrent.futures
import json
import shlex
import tempfile
from collections.abc import Iterator
from typing import Any

import common_start  # noqa: F401  # a spawned process imports this module before any other
import results
import sizes

from jaxtrain.bench import request
from jaxtrain.cost import cards
from jaxtrain.formats import GIB
from jaxtrain.planning.planner import Plan, Planner

_TIMEOUT_S = 900.0
Configs = dict[str, tuple[str, ...]]

_ONE = (*sizes.ONE_GPU, "--data.demo", "True")
GPU: Configs = {
    "h100_8, 8 clips": ("h100_8", *sizes.TWELVE, "--data.batch_size", "8", *_ONE),
    "BERT base": ("mlm_h200_8", *sizes.BERT_BASE, *_ONE),
    "gpt_h200_1": ("gpt_h200_1", "--data.batch_size", "32", *_ONE),
}


def main() -> None:
    """Measures, prints a line for each config, and appends rows if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results.add_flags(parser)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each config (default: 5)")
    flags = parser.parse_args()
    platform, kind, count = results.devices()
    if platform != "gpu":
        raise SystemExit("plans are for GPUs, and this machine has none")
    found = {}
    for name, line in _on_gpu(kind, count, flags.seconds):
        print(f"{name}: {line}", flush=True)
        found[name] = line
        if flags.results:
            command = "python benchmarks/plan_vs_measured.py"
            results.append_row(flags.results, kind, f"plan against measured: {name}", line, command)
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=1))


def _measure(config: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """Returns what bench finds about a config, in a process of its own."""
    with tempfile.TemporaryDirectory() as compiled:
        found = request.findings(
            config[0], config[1:], compiled=compiled, seconds=seconds, timeout_s=_TIMEOUT_S
        )
    if "failure" in found or found["notes"]:
        raise SystemExit(f"{shlex.join(config)}: {found.get('failure') or found['notes']}")
    return found


def _on_gpu(kind: str, count: int, seconds: float) -> Iterator[tuple[str, str]]:
    """Plans and measures each config on all GPUs of this machine."""
    short = next((name for name, card in cards.CARDS.items() if card.name == kind), None)
    if short is None:
        raise SystemExit(f"{kind} is not among the cards of plan: {', '.join(cards.CARDS)}")
    planners = {
        name: Planner(config, typed, short, f"1x{count}") for name, (config, *typed) in GPU.items()
    }
    with concurrent.futures.ThreadPoolExecutor() as pool:  # on the CPU, while the GPU measures
        planned = {name: pool.submit(one.plan) for name, one in planners.items()}
        for name, planner in planners.items():
            found = _measure((GPU[name][0], *planner.settings), seconds)
            line = _line(planned[name].result(), found)
            yield name, "; ".join([line, *results.bench_results(found)])


def _line(plan: Plan, found: dict[str, Any]) -> str:
    rows, time, cost = found["rows"], plan.time, plan.step.cost
    assert time is not None, "the GPU compiler is installed"
    planned = plan.memory.needed / GIB
    step = rows["synthetic/step"]["median_s"]
    parts = [
        f"step {1000 * time.best:.1f} to {1000 * time.worst:.1f} ms planned, "
        f"{1000 * step:.1f} measured",
        f"program {rows['memory/compiled_gib']:.2f} GiB compiled on the card",
        f"temporaries {cost.temporaries / GIB:.2f} GiB planned, "
        f"{rows['memory/compiled_temporaries_gib']:.2f} compiled on the card",
    ]
    peak = rows.get("memory/device_peak_gib")
    if peak is not None:
        parts.insert(
            1,
            f"memory {planned:.2f} GiB planned, {peak:.2f} at the peak ({planned / peak - 1:+.1%})",
        )
    if cost.sent_bytes:
        parts.append(f"{cost.sent_bytes / 1e6:.1f} MB sent by each GPU")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
