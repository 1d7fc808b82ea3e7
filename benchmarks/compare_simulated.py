"""Simulates `compare` on differences whose truth is known: how often is a verdict false?

    python benchmarks/compare_simulated.py --experiments 2000

Each experiment looks after every pair, up to 20, and stops at a verdict of a difference. All
differences have mean 0, or, for `cauchy`, which has no mean, center 0; so each verdict is false.
The symmetric ones may be false in 5%. For the skewed ones, no such promise holds: the last column
is how many of their false verdicts come with the warning that the differences do not look
symmetric. `changes` compares that many equal sides with one baseline: the row is how often *any* of
them gets a verdict. Prints one JSON object per row.
"""

import argparse
import json
import math
from collections.abc import Callable

import numpy as np

from jaxtrain.comparison import sequential

PAIRS = 20
MOST_JUDGED = 100  # false verdicts whose warning is looked at
Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]
SYMMETRIC: dict[str, Draw] = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "cauchy": lambda rng, shape: rng.standard_cauchy(size=shape),
    "ties": lambda rng, shape: rng.integers(-1, 2, size=shape).astype(float),
    "growing scale": lambda rng, shape: (
        rng.normal(size=shape) * np.exp(np.linspace(0, 5, shape[1]))
    ),
}
SKEWED: dict[str, Draw] = {
    "exponential": lambda rng, shape: rng.exponential(size=shape) - 1,
    "lognormal": lambda rng, shape: np.exp(rng.normal(size=shape)) - math.exp(0.5),
    "one in ten runs collapses": lambda rng, shape: (
        np.where(rng.random(shape) < 0.1, -9.0, 1.0) + 0.3 * rng.normal(size=shape)
    ),
}
CHANGES = (2, 5, 10)


def main() -> None:
    """Simulates each row and prints it."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--experiments", type=int, default=2000)
    count = parser.parse_args().experiments
    for number, (name, draw) in enumerate((SYMMETRIC | SKEWED).items()):
        given = draw(np.random.default_rng([72, number]), (count, PAIRS))
        ends = verdicts(given, sequential.LEVEL)
        found = [(given[row, :end]) for row, end in enumerate(ends) if end]
        judged = found[:MOST_JUDGED]
        warned = sum(not sequential.interval(differences).symmetric for differences in judged)
        row = {"differences": name, "false": len(found) / count}
        row["of these with the warning"] = round(warned / max(1, len(judged)), 3)
        print(json.dumps(row), flush=True)
    for changes in CHANGES:
        rng = np.random.default_rng([72, changes])
        runs = rng.normal(size=(count, changes + 1, PAIRS))  # the baseline, then each change
        differences = (runs[:, 1:] - runs[:, :1]).reshape(-1, PAIRS)
        for level, how in (
            (sequential.LEVEL, "each at 5%"),
            (sequential.LEVEL / changes, "divided"),
        ):
            any_false = (verdicts(differences, level).reshape(count, changes) > 0).any(axis=1)
            row = {"changes": changes, "level": how, "any false": any_false.mean()}
            print(json.dumps(row), flush=True)


def verdicts(differences: np.ndarray, level: float) -> np.ndarray:
    """Returns the pair at which each experiment [N, pairs] finds a difference; 0 if none does."""
    found = sequential.log_wealth(differences) >= -math.log(level)
    return np.where(found.any(axis=1), found.argmax(axis=1) + 1, 0)


if __name__ == "__main__":
    main()
