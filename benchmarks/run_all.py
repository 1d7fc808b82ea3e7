"""All measurements that this machine allows, the most valuable first, within a time.

    python benchmarks/run_all.py [--minutes N] [--only WORD] [--videos DIR]

Each runs in a process of its own; what it finds is appended to benchmarks/RESULTS.md at once, so
that nothing is lost when the time ends. Works from a checkout; a measurement whose packages are
missing is left out, and said.
"""

import argparse
import dataclasses
import importlib.util
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

import common_start
import results

from jaxtrain import devices

_HERE = Path(__file__).parent
_LEAST_S = 45  # less is not worth starting
_ONE_GPU = (
    "--mesh.data",
    "1",
    "--mesh.fsdp",
    "1",
    "--mesh.shard",
    "none",
    "--optim.accumulate",
    "1",
)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One process.

    Attributes:
        name: for the console.
        arguments: after ``python``.
        needs: packages.
    """

    name: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...] = ()


def on_gpu() -> list[Measurement]:
    """On one GPU."""
    video = ("--config", "h100_8", *_ONE_GPU, "--data.batch_size", "8")
    base = (
        "--model.hidden",
        "768",
        "--model.layers",
        "12",
        "--model.heads",
        "12",
        "--model.sequence_length",
        "512",
        "--data.batch_size",
        "64",
    )
    mlm = ("--config", "mlm_h200_8", *_ONE_GPU, *base)
    return [
        _bench("video_ae", *video, "--sweep", "remat"),
        _script("video_ae_vs_torch.py", "torch"),
        _script("mlm_vs_transformers.py", "torch", "transformers"),
        _bench("mlm base", *mlm, "--sweep", "remat"),
        _bench("video_ae, batches", *video, "--sweep", "batch"),
        _bench("ceilings"),
        _script("input_vs_dataloader.py", "torch", "av"),
        _bench("mlm base, batches", *mlm, "--sweep", "batch"),
    ]


def on_cpu(videos: str | None) -> list[Measurement]:
    """On a CPU, at sizes that step in a second or so."""
    found = [
        _bench("ceilings"),
        _bench("demo", "--config", "demo", "--sweep", "batch"),
        _bench("demo_mlm", "--config", "demo_mlm", "--sweep", "remat"),
        _script("video_ae_vs_torch.py", "torch"),
        _script("mlm_vs_transformers.py", "torch", "transformers"),
        _script("input_vs_dataloader.py", "torch", "av"),
    ]
    if videos:
        sizes = ("--model.frames", "12", "--model.height", "480", "--model.width", "720")
        data = ("--data.path", videos, "--data.batch_size", "2", *sizes)
        found.append(_script("input_vs_dataloader.py", "torch", "av", arguments=data))
    return found


def _bench(name: str, *arguments: str) -> Measurement:
    command = ("bench", *(arguments or (name,)))
    return Measurement(f"bench {name}", ("-m", "jaxtrain.main", *command))


def _script(name: str, *needs: str, arguments: tuple[str, ...] = ()) -> Measurement:
    return Measurement(name.removesuffix(".py"), (str(_HERE / name), *arguments), needs)


def main() -> None:
    """Runs what fits, and says what did not."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0, help="time for all (20)")
    parser.add_argument("--only", help="those whose name holds this word")
    parser.add_argument("--videos", help="a folder of videos for the input comparison")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="table to append to")
    parser.add_argument("--output", type=Path, default=Path("output/benchmarks"), help="JSON files")
    flags = parser.parse_args()
    flags.output.mkdir(parents=True, exist_ok=True)
    gpu = devices.driver_version() is not None
    ends = time.monotonic() + 60 * flags.minutes
    for number, one in enumerate(on_gpu() if gpu else on_cpu(flags.videos)):
        if flags.only and flags.only not in one.name:
            continue
        missing = [name for name in one.needs if importlib.util.find_spec(name) is None]
        left_s = ends - time.monotonic()
        if missing:
            print(f"=== {one.name}: left out, not installed: {', '.join(missing)}", flush=True)
        elif left_s < _LEAST_S:
            print(f"=== {one.name}: left out, {max(left_s, 0):.0f} s are left", flush=True)
        else:
            _run(one, flags.output / f"{number:02}.json", flags.results, left_s)


def _run(one: Measurement, findings: Path, table: Path, timeout_s: float) -> None:
    findings.unlink(missing_ok=True)
    of_bench = one.arguments[0] == "-m"
    options = ["--json", str(findings.absolute())]
    if not of_bench:
        options += ["--results", str(table.absolute())]
    command = [sys.executable, *one.arguments, *options]
    print(f"=== {one.name}", flush=True)
    began = time.monotonic()
    try:
        code = subprocess.run(
            command, cwd=common_start.CHECKOUT, timeout=timeout_s, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        print(f"=== {one.name}: ended after {timeout_s:.0f} s, the time is over", flush=True)
        code = None
    if of_bench and findings.exists():
        _write_rows(one, json.loads(findings.read_text()), table)
    print(f"=== {one.name}: exit code {code}, {time.monotonic() - began:.0f} s", flush=True)


def _write_rows(one: Measurement, found: dict, table: Path) -> None:  # type: ignore[type-arg]
    command = shlex.join(["jaxtrain", *one.arguments[2:]])
    kind = found.get("device", {}).get("kind", "unknown")
    for result in results.bench_results(found):
        results.append_row(table, kind, one.name, result, command)


if __name__ == "__main__":
    main()
