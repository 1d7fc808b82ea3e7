"""What a bench found, as JSON and as a table."""

import contextlib
import datetime
import importlib.metadata
import json
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

from jaxtrain import versions
from jaxtrain.storage import atomic

Findings = dict[str, Any]

_GROUPS = {
    "start": "start (seconds)",
    "synthetic": "steps on a batch that stays on the device",
    "pipeline": "steps on the real pipeline",
    "memory": "memory",
    "save": "save",
    "ceilings": "this device's ceilings, measured",
}
_UNITS = (
    ("_fraction", "%"),
    ("share_of_measured_flops", "%"),
    ("machine_drift", "%"),
    ("share_of_measured_copy", "%"),
    ("share_of_datasheet_bandwidth", "%"),
    ("mfu", "%"),
    ("flops_per_second_per_device", "TFLOP/s"),
    ("_flops", "TFLOP/s"),
    ("bytes_per_second", "GB/s"),
    ("copy_bytes", "GB/s"),
    ("_per_second", "/s"),
    ("gib", "GiB"),
)
_NOT_RESULTS = ":(top,exclude)benchmarks/RESULTS.md"
_FACTORS = {"%": 100.0, "TFLOP/s": 1e-12, "GB/s": 1e-9}
_SHARE = "work by the model's formula; of the product rate just before and after"
_DRIFT = "change of that rate meanwhile: such is the machine, not the program"
_NOTES = {
    "synthetic/mfu": "of the datasheet's dense bf16 rate; work by the model's formula",
    "synthetic/share_of_measured_flops": _SHARE,
    "pipeline/share_of_measured_flops": _SHARE,
    "synthetic/machine_drift": _DRIFT,
    "pipeline/machine_drift": _DRIFT,
    "synthetic/bytes_per_second": "what its instructions read and write",
    "memory/compiled_gib": "planned by the compiler, a device",
    "memory/compiled_temporaries_gib": "of which temporaries",
    "memory/device_peak_gib": "the allocator's own peak",
    "memory/host_peak_gib": "of the training process",
    "save/blocks_loop": "until the loop goes on",
    "save/complete": "until it is on the disk",
}


def complete(findings: Findings, arguments: list[str]) -> Findings:
    """Adds when, how and on what it was measured."""
    return {
        "command": shlex.join(["jaxtrain", "bench", *arguments]),
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions.versions() | _others(),
        **findings,
    }


def _others() -> dict[str, str]:
    """Versions of what is compared with, or runs the device; what is not there is left out."""
    found = {}
    for name in ("torch", "transformers", "jax-cuda12-plugin", "jax-cuda13-plugin"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str | None:
    """The checkout's commit, with "+" where files differ from it; None without one.

    The table of results may differ: it is where this goes. A copy of the files without their
    history is named by $JAXTRAIN_COMMIT.
    """
    here = ["git", "-C", str(Path(__file__).parent)]
    try:
        named = subprocess.run(
            [*here, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True
        )
        changed = subprocess.run(
            [*here, "status", "--porcelain", "--untracked-files=no", "--", ":(top)", _NOT_RESULTS],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):  # a copy without its history
        return os.environ.get("JAXTRAIN_COMMIT")
    return named.stdout.strip() + ("+" if changed.stdout.strip() else "")


def write(findings: Findings, path: Path) -> None:
    """Writes the JSON file, whole or not at all."""
    atomic.write_whole(path, json.dumps(findings, indent=1).encode() + b"\n")


def heading(findings: Findings) -> str:
    """One line: on what."""
    device = findings["device"]
    driver = f", driver {device['driver']}" if device["driver"] else ""
    return (
        f"{device['count']} x {device['kind']} ({device['platform_version']}"
        f"{driver}), commit {findings['commit'] or 'unknown'}, "
        + ", ".join(
            f"{name} {findings['versions'][name]}" for name in ("python", "jax", "jaxtrain")
        )
    )


def table(findings: Findings) -> str:
    """All rows, grouped, a line each; then operations, and what was left out."""
    if "failure" in findings:
        return f"failed: {findings['failure']} ({findings['detail']})"
    lines = []
    for group, title in _GROUPS.items():
        rows = {
            name.partition("/")[2]: value
            for name, value in findings["rows"].items()
            if name.startswith(f"{group}/")
        }
        if rows:
            lines += ["", title]
            lines += [_line(f"{group}/{name}", name, value) for name, value in rows.items()]
    lines += [
        line
        for part, note in findings["notes"].items()
        for line in ("", f"{part}: left out: {note}")
    ]
    if findings["operations"]:
        lines += ["", "what takes longest (ms a step, share of all operations)"]
        lines += [
            f"  {one['ms_per_step']:9.2f}  {one['share']:5.1%}  {one['count']:4} x "
            f"{one['kind'] or '?':<14} {_shortened(one['name'])}"
            for one in findings["operations"]
        ]
    return "\n".join(lines)


def curve(name: str, values: dict[str, float | str], unit: str) -> str:
    """A bar for each point; a word in place of a number says why there is none."""
    numbers = [value for value in values.values() if isinstance(value, float)]
    largest = max(numbers, default=1.0)
    width = max(map(len, values), default=0)
    lines = [f"{name} ({unit})"]
    for point, value in values.items():
        if isinstance(value, float):
            lines.append(f"  {point:>{width}}  {'#' * round(40 * value / largest):<40} {value:.4g}")
        else:
            lines.append(f"  {point:>{width}}  {value}")
    return "\n".join(lines)


def _line(full: str, name: str, value: Any) -> str:
    label = name.replace("_", " ")
    if isinstance(value, dict):
        text = (
            f"{1000 * value['median_s']:10.2f} ms      p95 {1000 * value['p95_s']:.2f} ms, "
            f"spread {value['spread']:.1%} of {value['count']}"
        )
        return f"  {label:<28}{text}"
    unit = next((unit for end, unit in _UNITS if full.endswith(end)), "s")
    note = _NOTES.get(full, "")
    return f"  {label:<28}{value * _FACTORS.get(unit, 1.0):10.4g} {unit:<8}{note}".rstrip()


def _shortened(name: str, width: int = 70) -> str:
    return name if len(name) <= width else name[: width - 3] + "..."
