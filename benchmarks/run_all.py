"""Runs all measurements that this machine supports within a time limit, the most valuable first.

    python benchmarks/run_all.py [--minutes N] [--only WORD] [--videos DIR]

Each runs in a separate process, and its results are appended to benchmarks/RESULTS.md immediately,
so that nothing is lost when the time is over. Works from a checkout. Measurements whose packages
are missing are reported as skipped.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import common_start
import results
import sizes

_HERE = Path(__file__).parent
_LEAST_S = 45  # start no measurement with less time left


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A measurement in one process.

    Attributes:
        name: for the console.
        arguments: after ``python``.
        needs: required packages.
        at_most_s: seconds after which it is stopped.
    """

    name: str
    arguments: tuple[str, ...]
    needs: tuple[str, ...] = ()
    at_most_s: float = 600.0


def on_gpu(videos: str | None) -> list[Measurement]:
    """Returns the measurements for one GPU, the most valuable first."""
    clips = ("--data.path", videos) if videos else ("--data.demo", "True")
    video = ("--config", "h100_8", *sizes.TWELVE, *sizes.ONE_GPU, "--data.batch_size", "8", *clips)
    text = ("--config", "mlm_h200_8", *sizes.ONE_GPU, *sizes.BERT_BASE, "--data.demo", "True")
    gpt = ("--config", "gpt_h200_1", *sizes.ONE_GPU, "--data.demo", "True")
    depth_20 = ("--model.depth", "20", "--data.batch_size", "16")
    short, once = ("--seconds", "5"), ("--processes", "1")
    return [
        _script("fused_attention.py"),  # first: it says whether the numbers of the others count
        _script("plan_vs_measured.py"),
        _script("gpt_vs_torch.py", "torch", arguments=once),
        _script("mlm_vs_transformers.py", "torch", "transformers", arguments=once),
        _script("video_ae_vs_torch.py", "torch", arguments=once),
        _bench("gpt of depth 20", *gpt, *depth_20, *short),
        _bench("video_ae", *video, *short),
        _script("input_vs_dataloader.py", "torch", "av"),
        _bench("mlm base", *text, *short),
    ]


def on_cpu(videos: str | None) -> list[Measurement]:
    """Returns the measurements for a CPU, with steps of about a second."""
    found = [
        _script("video_ae_vs_torch.py", "torch"),
        _script("mlm_vs_transformers.py", "torch", "transformers"),
        _script("gpt_vs_torch.py", "torch"),
        _bench("demo", "--config", "demo", "--seconds", "10"),
        _bench("demo_mlm", "--config", "demo_mlm", "--seconds", "10"),
        _bench("demo_gpt", "--config", "demo_gpt", "--seconds", "10"),
        _script("input_vs_dataloader.py", "torch", "av"),
    ]
    if videos:
        clip = ("--model.frames", "12", "--model.height", "480", "--model.width", "720")
        data = ("--data.path", videos, "--data.batch_size", "2", *clip)
        found.append(_script("input_vs_dataloader.py", "torch", "av", arguments=data))
    return found


def _bench(name: str, *arguments: str) -> Measurement:
    command = ("bench", *(arguments or (name,)))
    return Measurement(f"bench {name}", ("-m", "jaxtrain.main", *command))


def _script(name: str, *needs: str, arguments: tuple[str, ...] = ()) -> Measurement:
    return Measurement(name.removesuffix(".py"), (str(_HERE / name), *arguments), needs)


def main() -> None:
    """Runs the measurements, and reports those that are skipped."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=20.0,
        help="time limit for all measurements, minutes (default: 20)",
    )
    parser.add_argument("--only", help="run only measurements whose name contains this")
    parser.add_argument("--videos", help="folder of videos for the input comparison")
    parser.add_argument("--results", type=Path, default=results.RESULTS, help="table to append to")
    parser.add_argument("--output", type=Path, default=Path("output/benchmarks"), help="JSON files")
    flags = parser.parse_args()
    flags.output.mkdir(parents=True, exist_ok=True)
    backend, kind, _ = results.devices()
    print(f"=== on {kind} ({backend})", flush=True)
    ends = time.monotonic() + 60 * flags.minutes
    chosen = on_gpu(flags.videos) if backend == "gpu" else on_cpu(flags.videos)
    for number, one in enumerate(chosen):
        if flags.only and flags.only not in one.name:
            continue
        missing = [name for name in one.needs if importlib.util.find_spec(name) is None]
        left_s = min(ends - time.monotonic(), one.at_most_s)
        if missing:
            print(f"=== {one.name}: skipped, not installed: {', '.join(missing)}", flush=True)
        elif left_s < _LEAST_S:
            print(f"=== {one.name}: skipped, only {max(left_s, 0):.0f} s left", flush=True)
        else:
            run(one, flags.output / f"{number:02}.json", flags.results, left_s, kind)


def run(one: Measurement, findings: Path, table: Path, timeout_s: float, kind: str) -> None:
    """Runs one measurement in a separate process; keeps its results even if it is stopped."""
    findings.unlink(missing_ok=True)
    of_bench = one.arguments[0] == "-m"
    options = ["--json", str(findings.absolute())]
    if not of_bench:
        options += ["--results", str(table.absolute())]
    print(f"=== {one.name}", flush=True)
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *one.arguments, *options],
        cwd=common_start.CHECKOUT,
        start_new_session=True,
    )
    try:
        ended = f"exit code {process.wait(timeout_s)}"
    except subprocess.TimeoutExpired:
        ended = "stopped at the time limit"
    finally:
        end(process)
    if of_bench and findings.exists():
        command = shlex.join(["jaxtrain", *results.shown(list(one.arguments[2:]))])
        for result in results.bench_results(json.loads(findings.read_text())):
            results.append_row(table, kind, one.name, result, command)
    print(f"=== {one.name}: {ended}, {time.monotonic() - began:.0f} s", flush=True)


def end(process: subprocess.Popen[Any]) -> None:
    """Ends a process that leads a session, and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        time.sleep(1)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    main()
