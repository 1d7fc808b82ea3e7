"""Random training clips a second and core: from videos as they are, and after `prepare clips`.

    python benchmarks/clip_rate.py --videos DIR [--seconds N] [--section.field value ...]

In one process, without batches or devices: what one worker does. Sizes are those of `h100_8`
(12x480x720) unless overrides say otherwise.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import common_start
import numpy as np
import results

from jaxtrain import config
from jaxtrain.data import pieces, prepare_clips
from jaxtrain.data.source import Sources


def main() -> None:
    """Measures both, prints them, and writes rows where the flags ask for them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results.add_flags(parser)
    parser.add_argument("--videos", required=True, help="a folder of long videos")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement (20)")
    flags, overrides = parser.parse_known_args()
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    output = common_start.CHECKOUT / "output"
    output.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output) as folder:
        cut = Path(folder) / "clips"
        for what, path in (("as they are", flags.videos), ("after prepare clips", str(cut))):
            run = config.load("h100_8", ["--data.path", path, *overrides])
            if path != flags.videos:
                settings = pieces.Settings(height=run.model.height, width=run.model.width)
                prepare_clips.run(flags.videos, cut, settings, workers=1, say=print)
            sources = run.data.open(run.model, seed=run.seed, say=print)
            rate = _clips_per_second(sources, flags.seconds)
            shape = f"{run.model.frames}x{run.model.height}x{run.model.width}"
            found = f"{rate:.1f} clips/s a core"
            print(f"{shape}, {what}: {found}", flush=True)
            if flags.results:
                command = "python benchmarks/clip_rate.py --videos DIR"
                results.append_row(flags.results, "cpu", f"clips {shape}, {what}", found, command)


def _clips_per_second(sources: Sources, seconds: float) -> float:
    """Clips of the training split in random order, after each file has been used once."""
    rng = np.random.default_rng(0)
    for index in range(len(sources.train)):  # the first use reads a whole file
        sources.train.example(index, rng)
    made, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        sources.train.example(int(rng.integers(len(sources.train))), rng)
        made += 1
    return made / (time.perf_counter() - began)


if __name__ == "__main__":
    main()
