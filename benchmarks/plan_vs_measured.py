"""Compares predicted with measured steps.

    python benchmarks/plan_vs_measured.py [--results FILE] [--json FILE] [--seconds S]

On a GPU, each config is planned for that card without using it, and measured on it with all that
`jaxtrain bench` measures. Each step is also predicted from the rates that the other configs were
measured at. On a CPU, rates are measured on four small configs, and the
times of eight others are predicted from them; that tests how times are predicted, not how a GPU is.
"""

import argparse
import concurrent.futures
import json
import shlex
import tempfile
from collections.abc import Iterator
from typing import Any

import common_start  # noqa: F401  # a spawned process imports this module before any other
import numpy as np
import results
import sizes

from jaxtrain.bench.request import PARTS, BenchRequest
from jaxtrain.planning import calibration, cards, prediction
from jaxtrain.planning.calibration import Calibration, MeasuredStep
from jaxtrain.planning.planner import Planner
from jaxtrain.telemetry.hardware import GIB

_TIMEOUT_S = 900.0
Configs = dict[str, tuple[str, ...]]

_ONE = (*sizes.ONE_GPU, "--data.demo", "True")
GPU: Configs = {
    "h100_8, 8 clips": ("h100_8", "--data.batch_size", "8", *_ONE),
    "BERT base": ("mlm_h200_8", *sizes.BERT_BASE, *_ONE),
    "gpt_h200_1": ("gpt_h200_1", "--data.batch_size", "32", *_ONE),
}

CALIBRATED: Configs = {
    "demo": ("demo",),
    "demo, small": (
        *("demo", "--data.batch_size", "2", "--model.encoder_width", "24"),
        *("--model.decoder_widths", "48", "24", "24", "12"),
    ),
    "demo_mlm": ("demo_mlm",),
    "demo_gpt": ("demo_gpt",),
}
PREDICTED: Configs = {
    "demo, 2 clips": ("demo", "--data.batch_size", "2"),
    "demo, 96 x 96": ("demo", "--model.height", "96", "--model.width", "96"),
    "demo, 12 frames": ("demo", "--model.frames", "12", "--data.batch_size", "3"),
    "demo, wide": (
        *("demo", "--model.encoder_width", "32", "--data.batch_size", "2"),
        *("--model.decoder_widths", "96", "48", "32", "32"),
    ),
    "demo_mlm, 128 tokens": ("demo_mlm", "--model.sequence_length", "128"),
    "demo_mlm, wide": ("demo_mlm", "--model.hidden", "256", "--model.heads", "8"),
    "demo_gpt, 6 layers": ("demo_gpt", "--model.depth", "6"),
    "demo_gpt, wide": ("demo_gpt", "--model.width", "256", "--model.sequence_length", "256"),
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
    lines = _on_gpu(kind, count, flags.seconds) if platform == "gpu" else _on_cpu(flags.seconds)
    found = {}
    for name, line in lines:
        print(f"{name}: {line}", flush=True)
        found[name] = line
        if flags.results:
            command = "python benchmarks/plan_vs_measured.py"
            results.append_row(flags.results, kind, f"plan against measured: {name}", line, command)
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=1))


def _measure(
    config: tuple[str, ...], seconds: float, parts: tuple[str, ...] = ("steps", "trace")
) -> dict[str, Any]:
    """Returns what bench finds about a config, in a process of its own."""
    with tempfile.TemporaryDirectory() as compiled:
        found = BenchRequest(
            config=config[0],
            overrides=config[1:],
            simulate_devices=None,
            parts=parts,
            seconds=seconds,
            compiled=compiled,
            timeout_s=_TIMEOUT_S,
        ).findings()
    if "failure" in found or found["notes"]:
        raise SystemExit(f"{shlex.join(config)}: {found.get('failure') or found['notes']}")
    return found


def _on_cpu(seconds: float) -> Iterator[tuple[str, str]]:
    steps = {
        name: calibration.measured_step(name, _measure(config, seconds))
        for name, config in {**CALIBRATED, **PREDICTED}.items()
    }
    rates = Calibration("cpu", [steps[name] for name in CALIBRATED])
    errors = {name: _error(rates, steps[name]) for name in PREDICTED}
    for name, step in steps.items():
        print(f"  {name}: measured {1000 * step.step_s:.0f} ms, {_error(rates, step):+.1%}")
    sizes_of = np.abs(list(errors.values()))
    each = ", ".join(f"{name} {error:+.0%}" for name, error in errors.items())
    yield (
        "rates of four configs, eight others predicted",
        f"median error {np.median(sizes_of):.1%}, worst {sizes_of.max():.1%} ({each})",
    )


def _error(rates: Calibration, step: MeasuredStep) -> float:
    predicted = rates.predict(calibration.total_work(step.samples)).seconds
    return predicted / step.step_s - 1


def _on_gpu(kind: str, count: int, seconds: float) -> Iterator[tuple[str, str]]:
    """Plans and measures each config on all GPUs of this machine."""
    short = next((name for name, card in cards.CARDS.items() if card.name == kind), None)
    if short is None:
        raise SystemExit(f"{kind} is not among the cards of plan: {', '.join(cards.CARDS)}")
    planners = {
        name: Planner(config, typed, short, f"1x{count}", None)
        for name, (config, *typed) in GPU.items()
    }
    steps, plans = {}, {}
    with concurrent.futures.ThreadPoolExecutor() as pool:  # on the CPU, while the GPU measures
        planned = {name: pool.submit(one.compiled, ()) for name, one in planners.items()}
        for name, planner in planners.items():
            found = _measure((GPU[name][0], *planner.settings), seconds, PARTS)
            steps[name] = calibration.measured_step(name, found)
            plans[name] = planned[name].result()
            yield name, "; ".join([_line(plans[name], found), *results.bench_results(found)])
    if count > 1:  # rates are those of one device
        return
    for name, step in steps.items():
        others = Calibration(kind, [one for other, one in steps.items() if other != name])
        found, card = plans[name]["compiled"], cards.CARDS[short]
        time = prediction.time(found, card, count, plans[name]["precision"], others)
        yield (
            f"{name}, from the rates of the others",
            f"{1000 * time.best:.1f} to {1000 * time.worst:.1f} ms predicted, "
            f"{1000 * step.step_s:.1f} measured ({_error(others, step):+.1%} from the middle)",
        )


def _line(plan: dict[str, Any], found: dict[str, Any]) -> str:
    rows, memory, time = found["rows"], plan["memory"], plan["time"]
    planned = memory["needed"] / GIB
    step = rows["synthetic/step"]["median_s"]
    parts = [
        f"step {1000 * time['best']:.1f} to {1000 * time['worst']:.1f} ms planned, "
        f"{1000 * step:.1f} measured",
        f"program {rows['memory/compiled_gib']:.2f} GiB compiled on the card",
        f"temporaries {memory['rows']['temporaries'] / GIB:.2f} GiB planned, "
        f"{rows['memory/compiled_temporaries_gib']:.2f} compiled on the card",
    ]
    peak = rows.get("memory/device_peak_gib")
    if peak is not None:
        parts.insert(
            1,
            f"memory {planned:.2f} GiB planned, {peak:.2f} at the peak ({planned / peak - 1:+.1%})",
        )
    kinds: dict[str, float] = {}
    for one in found["samples"]:
        kinds[one["kind"]] = kinds.get(one["kind"], 0.0) + one["seconds"]
    slowest = sorted(kinds.items(), key=lambda one: -one[1])
    parts.append(", ".join(f"{kind} {1000 * seconds:.2f} ms" for kind, seconds in slowest))
    sent = sum(row["wire_bytes"] for row in plan["compiled"]["traffic"])
    if sent:
        parts.append(f"{sent / 1e6:.1f} MB sent by each GPU")
    return "; ".join(parts)


if __name__ == "__main__":
    main()
