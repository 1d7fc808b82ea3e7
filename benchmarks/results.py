"""What all benchmarks share: their flags, the device, and rows of RESULTS.md."""

import argparse
import datetime
import json
import os
from pathlib import Path
from typing import Any

import common_start
import numpy as np
import side_by_side

RESULTS = common_start.CHECKOUT / "benchmarks" / "RESULTS.md"


def arguments(text: str | None) -> tuple[argparse.Namespace, list[str]]:
    """Flags of a comparison, and the overrides of its config."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_flags(parser)
    parser.add_argument("--rounds", type=int, default=8, help="measurements of each side (8)")
    return parser.parse_known_args()


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Where results go."""
    parser.add_argument("--results", type=Path, help="append rows to this table (RESULTS.md)")
    parser.add_argument("--json", type=Path, help="write the findings there too")


def device() -> str:
    """``"cuda"`` where both jax and PyTorch see a GPU, else ``"cpu"``.

    Raises:
        SystemExit: only one of them sees it; the comparison would be unfair.
    """
    import jax
    import torch

    seen = (jax.default_backend() == "gpu", torch.cuda.is_available())
    if seen[0] != seen[1]:
        raise SystemExit(f"jax runs on {jax.default_backend()}, PyTorch's CUDA is {seen[1]}")
    return "cuda" if seen[0] else "cpu"


def machine() -> str:
    """What a row says of the machine."""
    import jax

    first = jax.local_devices()[0]
    if first.platform != "cpu":
        return str(first.device_kind)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")), "CPU"
    )
    return f"{len(os.sched_getaffinity(0))} cores {model}"


def append_row(path: Path, what: str, result: str, command: str) -> None:
    """Adds a dated row to the last table of a results file."""
    import jax

    from jaxtrain.bench import report

    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    cells = (today, report.commit() or "", f"{machine()}, jax {jax.__version__}", what, result)
    row = "| " + " | ".join((*cells, f"`{command}`")) + " |\n"
    text = path.read_text()
    path.write_text(text + ("" if text.endswith("\n") else "\n") + row)


def record_comparison(
    flags: argparse.Namespace,
    what: str,
    compared: side_by_side.Comparison,
    curve: list[float],
    other: list[float],
    *,
    examples: float,
    unit: str,
) -> None:
    """Prints what was found; writes a row and a JSON file where the flags ask for them."""
    rates = [examples / float(np.median(side)) for side in (compared.ours, compared.theirs)]
    low, high = compared.range
    difference = side_by_side.largest_difference(curve, other)
    result = (
        f"ours {rates[0]:.3g}, theirs {rates[1]:.3g} {unit}: {compared.ratio:.2f} times as fast "
        f"(quartiles {low:.2f} to {high:.2f}, {len(compared.ours)} rounds); over {len(curve)} "
        f"steps the losses differ by at most {difference:.1e} ({curve[0]:.4f} -> {curve[-1]:.4f})"
    )
    record(
        flags,
        what,
        result,
        {
            "ours_s": compared.ours,
            "theirs_s": compared.theirs,
            "our_losses": curve,
            "their_losses": other,
        },
    )


def record(flags: argparse.Namespace, what: str, result: str, found: dict[str, Any]) -> None:
    """Prints a result; writes a row and a JSON file where the flags ask for them."""
    import shlex
    import sys

    print(f"{what}\n  {result}", flush=True)
    shown = [a for a in sys.argv[1:] if not a.startswith(("--results", "--json"))]
    script = Path(sys.argv[0]).name
    command = shlex.join(["python", f"benchmarks/{script}", *shown])
    if flags.json:
        flags.json.write_text(json.dumps({"what": what, "result": result, **found}, indent=1))
    if flags.results:
        append_row(flags.results, what, result, command)
