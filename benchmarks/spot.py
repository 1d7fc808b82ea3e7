"""Kills a run at random times until it ends; compares its time with that of `plan --spot`.

    python benchmarks/spot.py --folder DIR [--mean 15] [--steps 6000] [--field value ...]

A small masked language model trains twice: undisturbed, and with SIGKILL at exponential times, as
tests/chaos kills, but started again at once. The formula gets the costs of the undisturbed run: the
time between two checkpoints, saves included, and that of a start until its first step. The times
between kills are quantiles of the exponential distribution, shuffled, so that their mean is exact.
"""

import argparse
import itertools
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import common_start

sys.path.append(str(common_start.CHECKOUT / "tests"))

from program import TINY_MLM, losses, started, write_corpus

from jaxtrain.planning import spot

_LOG_EVERY = 10


def main() -> None:
    """Prints both times and the prediction."""
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

    def train(name: str, steps: int, lives: Iterator[float]) -> tuple[float, list[float]]:
        """Returns the seconds of a run, and those from each start to its first record."""
        began, starts = time.time(), list[float]()
        for life in lives:
            launched = time.time()
            words = [*fixed, "--loop.steps", steps, "--output-dir", name]
            process = started(flags.folder, *words, PYTHONWARNINGS="ignore")
            try:
                output, _ = process.communicate(timeout=life)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
            else:
                if process.returncode:
                    raise SystemExit(output)
            records = _records(flags.folder / name)
            starts += [when - launched for _, when in records if when > launched][:1]
            if process.returncode == 0:
                assert sorted(losses(flags.folder / name))[-1] == steps
                return time.time() - began, starts
        raise AssertionError

    train("warm-up", 2 * _LOG_EVERY, itertools.repeat(1e6))  # compiles
    undisturbed_s, _ = train("undisturbed", flags.steps, itertools.repeat(1e6))
    records = dict(_records(flags.folder / "undisturbed"))
    training_s = records[flags.steps] - records[flags.every]
    segment_s = training_s / (flags.steps / flags.every - 1)
    total_s, starts = train("killed", flags.steps, _lives(flags.mean, flags.seed))
    # A start's first record is that of its tenth step.
    restart_s = sum(starts) / len(starts) - segment_s * _LOG_EVERY / flags.every
    segments = flags.steps / flags.every
    expected_s = spot.expected_s(segments * segment_s, segment_s, 0.0, restart_s, flags.mean)
    once_s = undisturbed_s - segments * segment_s  # the first start, and the end
    predicted_s = once_s + expected_s
    print(
        f"undisturbed {undisturbed_s:.1f} s, of which {once_s:.1f} s for its start and end; killed "
        f"every {flags.mean:g} s on average, {len(starts)} starts of {restart_s:.2f} s, and saved "
        f"every {segment_s:.2f} s: {total_s:.1f} s, predicted {predicted_s:.1f} s "
        f"({predicted_s / total_s - 1:+.1%})"
    )


def _records(run: Path) -> list[tuple[int, float]]:
    """Returns step and time of each record."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(line["step"], line["time"]) for line in map(json.loads, lines) if "train/loss" in line]


def _lives(mean_s: float, seed: int, number: int = 64) -> Iterator[float]:
    shuffle = random.Random(seed).shuffle
    while True:
        shares = [(n + 0.5) / number for n in range(number)]
        shuffle(shares)
        for share in shares:
            yield -mean_s * math.log(share)


if __name__ == "__main__":
    main()
