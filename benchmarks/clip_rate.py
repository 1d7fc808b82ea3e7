"""Measures random training clips per second and core: from raw videos, and after `prepare clips`.

    python benchmarks/clip_rate.py --videos DIR [--seconds N] [--section.field value ...]

Runs in one process, like one worker, without batches or devices. Sizes are those of `h100_8`
(12x480x720) unless overridden. Raw videos are read one clip at a time and in groups, alternately.
Rates are per second of CPU time, so other work on the machine has little effect, except through
caches and shared parts of a core.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import common_start
import results

from jaxtrain import config
from jaxtrain.data import engine, sampler
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.data.video import pieces, prepare_clips


def main() -> None:
    """Measures and prints all rates; appends rows to the results file if requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results.add_flags(parser)
    parser.add_argument("--videos", required=True, help="folder of long videos")
    parser.add_argument(
        "--seconds", type=float, default=20.0, help="seconds per measurement (default: 20)"
    )
    flags, overrides = parser.parse_known_args()
    output = common_start.CHECKOUT / "output"
    output.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output) as folder:
        cut = Path(folder) / "clips"
        apart, grouped = "--data.clips_per_group=1", "--data.clips_per_video=6"
        single = _rows(flags.videos, [grouped, apart, *overrides])
        groups = _rows(flags.videos, [grouped, *overrides])
        found = dict(
            zip(
                ("raw videos, one by one", f"raw videos, groups of {_size(groups)}"),
                _clips_per_second([single, groups], flags.seconds),
                strict=True,
            )
        )
        model = config.load("h100_8", overrides).model
        settings = pieces.Settings(height=model.height, width=model.width)
        prepare_clips.run(flags.videos, cut, settings, engine=engine.Local(1), say=print)
        rows = _rows(str(cut), overrides)
        found["after prepare clips"] = _clips_per_second([rows], flags.seconds)[0]
        shape = f"{model.frames}x{model.height}x{model.width}"
        for what, rate in found.items():
            text = f"{rate:.1f} clips/s per core"
            print(f"{shape}, {what}: {text}", flush=True)
            if flags.results:
                command = "python benchmarks/clip_rate.py --videos DIR"
                results.append_row(flags.results, "cpu", f"clips {shape}, {what}", text, command)


def _rows(path: str, overrides: list[str]) -> sampler.TrainingRows:
    """Returns the training split in order; files are not verified on first use."""
    more = ["--data.path", path, "--data.verify", "never", *overrides]
    run = config.load("h100_8", more)
    source = run.data.open(run.model, seed=run.seed, say=print).train
    quarantine = Quarantine(Path(os.devnull))
    return sampler.TrainingRows(source, sampler.order_of(source, 0), 0, 1, 0, 1, 2**40, quarantine)


def _size(rows: sampler.TrainingRows) -> int:
    return rows.order.group if isinstance(rows.order, sampler.GroupedOrder) else 1


def _clips_per_second(ways: list[sampler.TrainingRows], seconds: float) -> list[float]:
    """Returns clips per second of CPU time for each way, measured alternately."""
    made, took = [0] * len(ways), [0.0] * len(ways)
    for rows in ways:
        rows.load([0])
    turn, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for way, rows in enumerate(ways):
            size = _size(rows)
            spread = rows.order.spread if isinstance(rows.order, sampler.GroupedOrder) else 1
            block, slot = divmod(turn, spread)
            first = block * size * spread + slot
            since = time.process_time()
            made[way] += len(rows.load([first + number * spread for number in range(size)]))
            took[way] += time.process_time() - since
        turn += 1
    return [count / spent for count, spent in zip(made, took, strict=True)]


if __name__ == "__main__":
    main()
