"""Kills a run at random times until it ends; compares its time with that of `plan --spot`.

    python benchmarks/spot.py --folder DIR [--mean 15] [--steps 6000] [--field value ...]

A small masked language model trains under SIGKILL at exponential times, and is started again at
once. The formula gets the costs that this run shows: the time from one checkpoint to the next, and
from a start to its first step. The times between kills are quantiles of the exponential
distribution, shuffled, so that their mean is exact.
"""

import argparse
import json
import math
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import common_start

sys.path.append(str(common_start.CHECKOUT / "tests"))

from program import TINY_MLM, started, write_corpus

from jaxtrain.planning import spot

_LOG_EVERY = 10


def main() -> None:
    """Prints the time of the run, and the predicted one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder")
    parser.add_argument("--mean", type=float, default=15.0, help="seconds between kills (15)")
    parser.add_argument("--steps", type=int, default=6000, help="steps of the run (6000)")
    parser.add_argument("--every", type=int, default=100, help="steps between saves (100)")
    parser.add_argument("--seed", type=int, default=0, help="of the times between kills (0)")
    flags, overrides = parser.parse_known_args()
    flags.folder.mkdir(parents=True, exist_ok=True)
    write_corpus(flags.folder)
    fixed = [*TINY_MLM, "--data.path", "corpus", "--resume", "latest", *overrides]
    fixed += ["--loop.log_every", _LOG_EVERY, "--checkpoint.every", flags.every]

    def train(name: str, steps: int, lives: Iterable[float]) -> list[_Start]:
        """Starts a run, for each of the given seconds, until it ends."""
        starts = list[_Start]()
        words = [*fixed, "--loop.steps", steps, "--output-dir", name]
        for life in lives:
            launched = time.time()
            process = started(flags.folder, *words, PYTHONWARNINGS="ignore")
            try:
                output, _ = process.communicate(timeout=life)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
            records = [
                (step, when) for step, when in _records(flags.folder / name) if when > launched
            ]
            starts.append(_Start(launched, records, time.time()))
            if process.returncode == 0:
                return starts
            if process.returncode != -signal.SIGKILL:
                raise SystemExit(output)
        raise AssertionError

    train("warm-up", 2 * _LOG_EVERY, [1e6])  # compiles
    starts = train("killed", flags.steps, _lives(flags.mean, flags.seed))
    total_s = starts[-1].ended - starts[0].launched
    records = [dict(start.records) for start in starts]
    segment_s = statistics.mean(
        of_start[step] - of_start[step - flags.every]
        for of_start in records
        for step in of_start
        if step % flags.every == 0 and step - flags.every in of_start
    )
    # The first record of a resumed run is that of its tenth step.
    lead_s = segment_s * _LOG_EVERY / flags.every
    began = [start.records[0][1] - start.launched - lead_s for start in starts[1:] if start.records]
    restart_s, end_s = statistics.mean(began), starts[-1].ended - starts[-1].records[-1][1]
    training_s = segment_s * flags.steps / flags.every
    expected_s = spot.expected_s(training_s, segment_s, 0.0, restart_s, flags.mean)
    predicted_s = restart_s + expected_s + end_s
    print(
        f"{len(starts) - 1} kills, every {flags.mean:g} s on average; {flags.every} steps with a "
        f"save took {segment_s:.2f} s, a start {restart_s:.2f} s, training {training_s:.0f} s: "
        f"{total_s:.0f} s, predicted {predicted_s:.0f} s ({predicted_s / total_s - 1:+.1%})"
    )


class _Start(NamedTuple):
    """A start of the run: when it began and ended, and step and time of its records."""

    launched: float
    records: list[tuple[int, float]]
    ended: float


def _records(run: Path) -> list[tuple[int, float]]:
    """Returns step and time of each record."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(line["step"], line["time"]) for line in map(json.loads, lines) if "train/loss" in line]


def _lives(mean_s: float, seed: int, number: int = 16) -> Iterator[float]:
    shuffle = random.Random(seed).shuffle
    while True:
        shares = [(n + 0.5) / number for n in range(number)]
        shuffle(shares)
        for share in shares:
            yield -mean_s * math.log(share)


if __name__ == "__main__":
    main()
