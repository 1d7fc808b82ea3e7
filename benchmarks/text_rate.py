"""Training tokens a second and core: what one worker of the text pipeline makes, cache built.

    python benchmarks/text_rate.py --texts DIR [--seconds N] [--section.field value ...]

In one process, without batches or devices. Masked sequences as `bert_base_h200_8` takes them, whole
ones as `gpt_h200_1` does. Seconds are of the process's own time, so that other work on the machine
counts little; it still takes caches and the shared parts of a core.
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
    """Measures both, prints them, and writes rows where the flags ask for them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results.add_flags(parser)
    parser.add_argument("--texts", required=True, help="a folder of texts")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement (10)")
    flags, overrides = parser.parse_known_args()
    for name in CONFIGS:
        run = config.load(name, ["--data.path", flags.texts, *overrides])
        source = run.data.open(run.model, seed=run.seed, say=print).train
        quarantine = Quarantine(Path(os.devnull))
        rows = sampler.TrainingRows(source, sampler.of(source, 0), 0, 1, 0, 1, 2**40, quarantine)
        length = run.model.sequence_length
        rate = _examples_per_second(rows, flags.seconds) * length
        text = f"{rate / 1e6:.2f} million tokens/s a core"
        print(f"{name}, sequences of {length}: {text}", flush=True)
        if flags.results:
            command = "python benchmarks/text_rate.py --texts DIR"
            results.append_row(flags.results, "cpu", f"text of `{name}`, {length}", text, command)


def _examples_per_second(rows: sampler.TrainingRows, seconds: float) -> float:
    """Examples a second of processor time, in the order of a run."""
    rows.load(range(_AT_ONCE))
    done, began, since = 0, time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds:
        done += len(rows.load(range(done, done + _AT_ONCE)))
    return done / (time.process_time() - since)


if __name__ == "__main__":
    main()
