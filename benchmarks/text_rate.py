"""Measures training tokens per second and core from the text pipeline, with a complete cache.

    python benchmarks/text_rate.py --texts DIR [--seconds N] [--section.field value ...]

Runs in one process, like one worker, without batches or devices: masked sequences as for
`bert_base_h200_8`, and plain ones as for `gpt_h200_1`. Rates are per second of CPU time, so other
work on the machine has little effect, except through caches and shared parts of a core.
"""

import argparse
import os
import time
from pathlib import Path

import common_start  # noqa: F401  before jax
import results

from jaxtrain import config
from jaxtrain.data import sampler
from jaxtrain.data.quarantine import Quarantine

CONFIGS = ("bert_base_h200_8", "gpt_h200_1")
_AT_ONCE = 64


def main() -> None:
    """Measures and prints both rates; appends rows to the results file if requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results.add_flags(parser)
    parser.add_argument("--texts", required=True, help="folder of texts")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="seconds per measurement (default: 10)"
    )
    flags, overrides = parser.parse_known_args()
    for name in CONFIGS:
        run = config.load(name, ["--data.path", flags.texts, *overrides])
        source = run.data.open(run.model, seed=run.seed, say=print).train
        quarantine = Quarantine(Path(os.devnull))
        rows = sampler.TrainingRows(
            source, sampler.order_of(source, 0), 0, 1, 0, 1, 2**40, quarantine
        )
        length = run.model.sequence_length
        rate = _examples_per_second(rows, flags.seconds) * length
        text = f"{rate / 1e6:.2f} million tokens/s per core"
        print(f"{name}, sequences of {length}: {text}", flush=True)
        if flags.results:
            command = "python benchmarks/text_rate.py --texts DIR"
            results.append_row(flags.results, "cpu", f"text of `{name}`, {length}", text, command)


def _examples_per_second(rows: sampler.TrainingRows, seconds: float) -> float:
    """Returns examples per second of CPU time, in the order of a run."""
    rows.load(range(_AT_ONCE))
    done, began, since = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        done += len(rows.load(range(done, done + _AT_ONCE)))
    return done / (time.process_time() - since)


if __name__ == "__main__":
    main()
