"""Formats bench findings as JSON and as a table."""

import datetime
import json
import shlex
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
# End of a row's name -> its unit, and what it is. The first match wins; others are seconds.
_ROWS = {
    "_fraction": ("%", ""),
    "/mfu": ("%", "model FLOPs, of the datasheet's dense bf16 peak"),
    "/share_of_measured_flops": ("%", "model FLOPs, of the measured matmul rate"),
    "/share_of_measured_copy": ("%", ""),
    "/share_of_datasheet_bandwidth": ("%", ""),
    "/step_at_peaks": ("s", "arithmetic or memory traffic at the datasheet's rates"),
    "/serial_bound": ("s", "each instruction by the slower of both, at measured rates"),
    "/of_serial_bound": ("%", "that time, of the measured one"),
    "/flops_per_second_per_device": ("TFLOP/s", ""),
    "_flops": ("TFLOP/s", ""),
    "/bytes_per_second": ("GB/s", "read and written by the step's instructions"),
    "/copy_bytes": ("GB/s", ""),
    "_per_second": ("/s", ""),
    "/compiled_gib": ("GiB", "planned by the compiler, per device"),
    "/compiled_temporaries_gib": ("GiB", "of which temporaries"),
    "/device_peak_gib": ("GiB", "the allocator's peak"),
    "/host_peak_gib": ("GiB", "of the training process"),
    "gib": ("GiB", ""),
    "/blocks_loop": ("s", "until the loop continues"),
    "/complete": ("s", "until the checkpoint is on disk"),
    "": ("s", ""),
}
_FACTORS = {"%": 100.0, "TFLOP/s": 1e-12, "GB/s": 1e-9}


def complete(findings: Findings, arguments: list[str]) -> Findings:
    """Adds the command, time, and versions."""
    return {
        "command": shlex.join(["jaxtrain", "bench", *arguments]),
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions.versions(),
        **findings,
    }


def write(findings: Findings, path: Path) -> None:
    """Writes the JSON file atomically."""
    atomic.write_whole(path, json.dumps(findings, indent=1).encode() + b"\n")


def heading(findings: Findings) -> str:
    """Formats the devices and the versions in one line."""
    device = findings["device"]
    driver = f", driver {device['driver']}" if device["driver"] else ""
    return (
        f"{device['count']} x {device['kind']} ({device['platform_version']}"
        f"{driver}), "
        + ", ".join(
            f"{name} {findings['versions'][name]}" for name in ("python", "jax", "jaxtrain")
        )
    )


def table(findings: Findings) -> str:
    """Formats rows by group, measurements that were skipped or failed, and slow operations."""
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
    for name, note in findings["notes"].items():
        outcome = "failed" if name in findings["failed"] else "skipped"
        lines += ["", f"{name}: {outcome}: {note}"]
    if findings["operations"]:
        lines += ["", "slowest operations (ms per step, fraction of all operations)"]
        lines += [
            f"  {row['ms_per_step']:9.2f}  {row['share']:5.1%}  {row['count']:4} x "
            f"{row['kind'] or '?':<14} {_shortened(row['name'])}"
            for row in findings["operations"]
        ]
    return "\n".join(lines)


def _line(full: str, name: str, value: Any) -> str:
    label = name.replace("_", " ")
    if isinstance(value, dict):
        text = (
            f"{1000 * value['median_s']:10.2f} ms      p95 {1000 * value['p95_s']:.2f} ms, "
            f"spread {value['spread']:.1%} of {value['count']}"
        )
        return f"  {label:<28}{text}"
    unit, note = next(row for end, row in _ROWS.items() if full.endswith(end))
    return f"  {label:<28}{value * _FACTORS.get(unit, 1.0):10.4g} {unit:<8}{note}".rstrip()


def _shortened(name: str, width: int = 70) -> str:
    return name if len(name) <= width else name[: width - 3] + "..."
