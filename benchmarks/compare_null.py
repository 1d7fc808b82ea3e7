"""Measures how often `compare` finds a difference between runs that differ only in their seed.

    python benchmarks/compare_null.py demo --runs 40 --folder output/null --loop.steps 40

Trains the runs (those that exist are kept), then draws random pairs of them, with random sides,
1,000 times, and looks after each pair, as `compare` does. Prints one JSON object. At most 5% of the
drawings may end with a verdict.
"""

import argparse
import json
import math
import os
from pathlib import Path

import numpy as np

from jaxtrain.comparison import identities, runs, sequential
from jaxtrain.comparison.side import Side


def main() -> None:
    """Trains, draws, prints."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("config")
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--drawings", type=int, default=1000)
    parser.add_argument("--folder", type=Path, required=True)
    arguments, fields = parser.parse_known_args()
    side = Side(arguments.config, tuple(fields), arguments.config)
    folder, results = arguments.folder.absolute(), []
    known = str(folder / identities.FOLDER)
    with runs.Trainer(os.environ, None, print) as trainer:
        facts = trainer.examine(side, "a", metric=None, flops=None, fit_s=None, known=known)
        for seed in range(facts.seed, facts.seed + arguments.runs):
            directory = runs.folder_of(facts, seed, folder)
            if not runs.has_ended(directory):
                trainer.train(side, facts, seed, directory, None, "a")
            results.append(runs.read(directory, facts.metric))
            assert results[-1].value is not None, f"{directory}: {results[-1].diverged}"
            print(f"seed {seed}: {facts.metric} {results[-1].value:.4f}", flush=True)

    values = np.asarray([result.value for result in results])
    rng = np.random.default_rng(0)
    drawn = np.stack([rng.permutation(values) for _ in range(arguments.drawings)])
    differences = drawn[:, 0::2] - drawn[:, 1::2][:, : drawn[:, 0::2].shape[1]]
    largest = sequential.log_wealth(differences).max(axis=-1)
    verdicts = int((largest >= -math.log(sequential.LEVEL)).sum())
    answer = {
        "config": [arguments.config, *fields],
        "metric": facts.metric,
        "mean": values.mean(),
        "deviation": values.std(ddof=1),
        "runs": len(values),
        "drawings": arguments.drawings,
        "verdicts": verdicts,
        "seconds": sum(result.seconds for result in results),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
