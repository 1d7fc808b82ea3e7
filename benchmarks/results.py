"""Provides the flags, device detection and results tables of all benchmarks."""

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import common_start
import numpy as np
import side_by_side

from jaxtrain.telemetry import hardware

TABLE_HEAD = "| date | commit | machine | what | result | command |\n|---|---|---|---|---|---|\n"
_PROBE = (
    "import jax; print(jax.default_backend(), jax.local_devices()[0].device_kind, "
    "jax.local_device_count(), sep='|')"
)
RESULTS = common_start.CHECKOUT / "benchmarks" / "RESULTS.md"


def arguments(text: str | None) -> tuple[argparse.Namespace, list[str]]:
    """Parses the flags of a comparison and its config overrides."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_flags(parser)
    parser.add_argument("--rounds", type=int, default=5, help="measurements per side (default: 5)")
    parser.add_argument(
        "--processes",
        type=int,
        default=2,
        help="number of processes to repeat the comparison in (default: 2)",
    )
    return parser.parse_known_args()


def repeated(flags: argparse.Namespace) -> bool:
    """Runs this script in several processes and records one result; returns False for one process.

    Memory addresses and the cores of threads make processes differ by more than rounds in one
    process.
    """
    if flags.processes < 2:
        return False
    found: list[dict[str, Any]] = []
    for _ in range(flags.processes):
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "found.json"
            again = [*_without_results(sys.argv), "--processes", "1", "--json", str(output)]
            subprocess.run([sys.executable, *again], check=True, stdout=subprocess.DEVNULL)
            found.append(json.loads(output.read_text()))
    for label, sides in found[0]["times"].items():
        for side in sides:
            sides[side] = [time for one in found for time in one["times"][label][side]]
    _record(flags, found[0])
    return True


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for results files."""
    parser.add_argument(
        "--results", type=Path, help="append rows to this table, such as RESULTS.md"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this JSON file")


def device() -> str:
    """Returns ``"cuda"`` if both jax and PyTorch see a GPU, else ``"cpu"``.

    Raises:
        SystemExit: only one of them sees it, so the comparison would be unfair.
    """
    import jax
    import torch

    seen = (jax.default_backend() == "gpu", torch.cuda.is_available())
    if seen[0] != seen[1]:
        raise SystemExit(
            f"jax runs on {jax.default_backend()}, but torch.cuda.is_available() is {seen[1]}: "
            "install both for the same device"
        )
    return "cuda" if seen[0] else "cpu"


def devices() -> tuple[str, str, int]:
    """Returns jax's platform, device kind and number of devices on this machine.

    They come from a process that then releases the devices.

    Raises:
        SystemExit: the machine has a GPU that jax does not use.
    """
    asked = subprocess.run(
        [sys.executable, "-c", _PROBE], capture_output=True, text=True, check=True
    )
    backend, kind, count = asked.stdout.strip().splitlines()[-1].split("|")
    if backend != "gpu" and hardware.driver().version is not None:
        raise SystemExit(
            f"this machine has an NVIDIA GPU, but jax runs on {backend}: {asked.stderr}"
        )
    return backend, kind, int(count)


def machine(device_kind: str) -> str:
    """Returns the device kind, or for a CPU the number of cores and the model name."""
    if device_kind != "cpu":
        return device_kind
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")), "CPU"
    )
    return f"{len(os.sched_getaffinity(0))} cores {model}"


def commit() -> str:
    """Returns the checkout's commit, with "+" if files other than the results differ from it.

    For a copy without git history, $JAXTRAIN_COMMIT names it.
    """
    git = ("git", "-C", str(common_start.CHECKOUT))
    head = subprocess.run(
        [*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    if head.returncode:
        return os.environ.get("JAXTRAIN_COMMIT", "unknown")
    changed = ("diff", "--quiet", "HEAD", "--", ":(top,exclude)benchmarks/RESULTS.md")
    return head.stdout.strip() + ("+" if subprocess.run([*git, *changed]).returncode else "")


def append_row(path: Path, device_kind: str, what: str, result: str, command: str) -> None:
    """Appends a dated row to the last table of a results file; creates a missing table."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    python, jax = platform.python_version(), importlib.metadata.version("jax")
    driver = hardware.driver().version
    where = f"{machine(device_kind)}, Python {python}, jax {jax}"
    cells = (
        today,
        commit(),
        where + (f", driver {driver}" if driver else ""),
        what,
        result,
        f"`{command}`",
    )
    row = "| " + " | ".join(" ".join(cell.replace("|", "/").split()) for cell in cells) + " |\n"
    new = not path.exists() or not path.read_text().strip()
    with path.open("a") as file:
        file.write((TABLE_HEAD if new else "") + row)


def record_comparison(
    flags: argparse.Namespace,
    what: str,
    compared: Mapping[str, side_by_side.Comparison],
    *,
    examples: float,
    unit: str,
    same_work: str,
) -> None:
    """Prints a comparison; writes a row and a JSON file if the flags request them.

    Args:
        flags: from the command line.
        what: describes the comparison, for the table.
        compared: setting -> times of both sides; the key is "" if there is only one setting.
        examples: number of examples per step.
        unit: of the rate, such as clips/s.
        same_work: evidence that both sides did the same work.
    """
    _record(
        flags,
        {
            "what": what,
            "times": {
                label: {"ours_s": one.ours, "theirs_s": one.theirs}
                for label, one in compared.items()
            },
            "examples": examples,
            "unit": unit,
            "same_work": same_work,
        },
    )


def of_losses(ours: list[float], theirs: list[float]) -> str:
    """Describes the difference between two loss curves."""
    difference = side_by_side.largest_difference(ours, theirs)
    return (
        f"over {len(ours)} steps the losses differ by at most {difference:.1e} "
        f"({ours[0]:.4f} -> {ours[-1]:.4f})"
    )


def _record(flags: argparse.Namespace, found: dict[str, Any]) -> None:
    """Prints a comparison; writes a row and a JSON file if the flags request them."""
    import jax

    ratios = "; ".join(
        (f"{label}: " if label else "")
        + _ratio(
            side_by_side.Comparison(tuple(sides["ours_s"]), tuple(sides["theirs_s"])),
            found["examples"],
            found["unit"],
            flags.processes,
        )
        for label, sides in found["times"].items()
    )
    result = f"{ratios}; {found['same_work']}"
    print(f"{found['what']}\n  {result}", flush=True)
    typed = _without_results(sys.argv[1:])
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *shown(typed)])
    if flags.json:
        flags.json.write_text(json.dumps(found | {"result": result}, indent=1))
    if flags.results:
        kind = jax.local_devices()[0].device_kind
        append_row(flags.results, kind, found["what"], result, command)


def _ratio(compared: side_by_side.Comparison, examples: float, unit: str, processes: int) -> str:
    ours, theirs = (examples / float(np.median(s)) for s in (compared.ours, compared.theirs))
    low, high = compared.range
    return (
        f"ours {ours:.3g}, theirs {theirs:.3g} {unit}: {compared.ratio:.2f} times as fast "
        f"({low:.2f} to {high:.2f} in {len(compared.ours)} rounds of {processes} processes)"
    )


def _without_results(typed: list[str]) -> list[str]:
    """Returns the arguments without the flags for results files and processes."""
    kept: list[str] = []
    rest = iter(typed)
    for argument in rest:
        if argument in ("--results", "--json", "--processes"):
            next(rest, None)
        else:
            kept.append(argument)
    return kept


def shown(typed: list[str]) -> list[str]:
    """Returns the arguments with DIR in place of local data paths, for the table."""
    hidden = {place + 1 for place, argument in enumerate(typed) if argument == "--data.path"}
    return ["DIR" if place in hidden else argument for place, argument in enumerate(typed)]


def bench_results(found: dict[str, Any]) -> list[str]:
    """Returns a line each for the startup, steps, and pipeline of ``jaxtrain bench``."""
    if "failure" in found:
        return [f"failed: {found['failure']} {found['detail']}"]
    rows = found["rows"]
    lines = [
        f"{part} {'failed' if part in found['failed'] else 'skipped'}: {note}"
        for part, note in found["notes"].items()
    ]
    warm = rows.get("start/warm_total")
    lines.append(
        f"first step after {rows['start/total']:.1f} s cold (compile {rows['start/compile']:.1f})"
        + ("" if warm is None else f", {warm:.1f} s warm")
    )
    if "save/blocks_loop" in rows:
        lines.append(
            f"a save blocks {1000 * rows['save/blocks_loop']:.0f} ms, complete in "
            f"{rows['save/complete']:.2f} s ({rows['save/gib']:.3g} GiB)"
        )
    for prefix in ("synthetic", "pipeline"):
        if f"{prefix}/step" in rows:
            lines.append(_steps(rows, prefix))
    return lines


def _steps(rows: dict[str, Any], prefix: str) -> str:
    step = rows[f"{prefix}/step"]
    parts = [
        f"{prefix}: step {1000 * step['median_s']:.1f} ms (p95 {1000 * step['p95_s']:.1f}, spread "
        f"{step['spread']:.1%} of {step['count']})",
        f"{rows[f'{prefix}/examples_per_second']:.4g} examples/s",
    ]
    for name, words in (
        ("tokens_per_second", "tokens/s"),
        ("mfu", "MFU"),
        ("of_serial_bound", "of the serial bound"),
        ("share_of_measured_flops", "of the measured matmul rate"),
        ("share_of_measured_copy", "of the measured copy rate"),
        ("data_wait_fraction", "waiting for data"),
    ):
        value = rows.get(f"{prefix}/{name}")
        if value is not None:
            parts.append(f"{value:.4g} {words}" if "tokens" in name else f"{value:.1%} {words}")
    if prefix == "synthetic":
        memory = rows.get("memory/device_peak_gib")
        planned = f"{rows['memory/compiled_gib']:.3g} GiB planned"
        parts.append(planned if memory is None else f"peak memory {memory:.3g} GiB, {planned}")
    return ", ".join(parts)
