"""Formats bench findings as JSON and as a table."""

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
    "start": "startup (seconds)",
    "synthetic": "steps on a synthetic batch that stays on the device",
    "pipeline": "steps with the real input pipeline",
    "memory": "memory",
    "save": "save",
    "ceilings": "this device's peaks, measured",
}
_UNITS = (
    ("_fraction", "%"),
    ("share_of_measured_flops", "%"),
    ("machine_drift", "%"),
    ("share_of_measured_copy", "%"),
    ("share_of_datasheet_bandwidth", "%"),
    ("mfu", "%"),
    ("efficiency", "%"),
    ("flops_per_second_per_device", "TFLOP/s"),
    ("_flops", "TFLOP/s"),
    ("bytes_per_second", "GB/s"),
    ("copy_bytes", "GB/s"),
    ("_per_second", "/s"),
    ("gib", "GiB"),
)
_GIT_S = 30.0
_NOT_RESULTS = ":(top,exclude)benchmarks/RESULTS.md"
_FACTORS = {"%": 100.0, "TFLOP/s": 1e-12, "GB/s": 1e-9}
_SHARE = "model FLOPs, of the matmul rate measured before and after"
_DRIFT = "change of that rate in between, due to the machine"
_NOTES = {
    "synthetic/mfu": "model FLOPs, of the datasheet's dense bf16 peak",
    "synthetic/share_of_measured_flops": _SHARE,
    "pipeline/share_of_measured_flops": _SHARE,
    "synthetic/machine_drift": _DRIFT,
    "pipeline/machine_drift": _DRIFT,
    "synthetic/step_at_peaks": "arithmetic or memory traffic at the datasheet's rates",
    "synthetic/efficiency": "that time, of the measured one",
    "synthetic/bytes_per_second": "read and written by the step's instructions",
    "memory/compiled_gib": "planned by the compiler, per device",
    "memory/compiled_temporaries_gib": "of which temporaries",
    "memory/device_peak_gib": "the allocator's peak",
    "memory/host_peak_gib": "of the training process",
    "save/blocks_loop": "until the loop continues",
    "save/complete": "until the checkpoint is on disk",
}


def complete(findings: Findings, arguments: list[str]) -> Findings:
    """Adds the command, time, commit, and versions."""
    return {
        "command": shlex.join(["jaxtrain", "bench", *arguments]),
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions.versions() | _others(),
        **findings,
    }


def _others() -> dict[str, str]:
    """Returns the versions of PyTorch, transformers, and the CUDA plugins, if installed."""
    found = {}
    for name in ("torch", "transformers", "jax-cuda12-plugin", "jax-cuda13-plugin"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str | None:
    """Returns the checkout's commit, with "+" if files differ from it; None without one.

    Changes to the results file do not count, as the commit is recorded there. For a copy without
    git history, $JAXTRAIN_COMMIT names the commit.
    """
    try:
        # Installed inside some other repository, this file is not one of that repository's.
        _git("ls-files", "--error-unmatch", "--", Path(__file__).name)
        named = _git("rev-parse", "--short=12", "HEAD")
        changed = _git(
            "status", "--porcelain", "--untracked-files=no", "--", ":(top)", _NOT_RESULTS
        )
    except (OSError, subprocess.SubprocessError):  # a copy without its history, or a slow disk
        return os.environ.get("JAXTRAIN_COMMIT")
    return named + ("+" if changed else "")


def _git(*arguments: str) -> str:
    """Returns what git prints about the folder of this file."""
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_S)
    return done.stdout.strip()


def write(findings: Findings, path: Path) -> None:
    """Writes the JSON file atomically."""
    atomic.write_whole(path, json.dumps(findings, indent=1).encode() + b"\n")


def heading(findings: Findings) -> str:
    """Formats the devices, the commit, and the versions in one line."""
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
    """Formats all rows by group, parts that were skipped or failed, and the slowest operations."""
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
    for part, note in findings["notes"].items():
        verdict = "failed" if part in findings["failed"] else "skipped"
        lines += ["", f"{part}: {verdict}: {note}"]
    if findings["operations"]:
        lines += ["", "slowest operations (ms per step, fraction of all operations)"]
        lines += [
            f"  {one['ms_per_step']:9.2f}  {one['share']:5.1%}  {one['count']:4} x "
            f"{one['kind'] or '?':<14} {_shortened(one['name'])}"
            for one in findings["operations"]
        ]
    return "\n".join(lines)


def curve(name: str, values: dict[str, float | str], unit: str) -> str:
    """Draws a bar for each point; a text in place of a number is printed as it is."""
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


def sweep_point(findings: Findings) -> tuple[float | str, float | str]:
    """Returns examples per second, and GiB per device (the allocator's peak, else as planned)."""
    if "failure" in findings:
        return findings["failure"], findings["failure"]
    rows = findings["rows"]
    if "synthetic/examples_per_second" not in rows:
        notes = findings["notes"]
        return (notes.get("steps") or notes["worker"],) * 2
    memory = rows.get("memory/device_peak_gib", rows["memory/compiled_gib"])
    return rows["synthetic/examples_per_second"], memory


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
