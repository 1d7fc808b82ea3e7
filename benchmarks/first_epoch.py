"""Compares the loader's rate in the first epoch of prepared clips with that in the second.

    python benchmarks/first_epoch.py CLIPS

CLIPS was written by ``prepare clips``. Each pair opens the data from scratch, with an empty cache.
Rates are by the process's own CPU time, because other work on the machine disturbs the clock's.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import jax

from jaxtrain import config, sharding
from jaxtrain.data.pipeline import TrainingBatches
from jaxtrain.data.quarantine import Quarantine


def rates(path: str, size: tuple[int, int], verify: str) -> tuple[float, float, int]:
    """Returns clips per CPU second in the first and the second epoch, and clips per epoch."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [
            *("--data.path", path, "--data.cache_dir", folder, "--mesh.fsdp", "1"),
            *("--model.height", str(size[0]), "--model.width", str(size[1])),
            *(("--data.verify", verify) if verify else ()),
        ]
        run = config.load("h100_8", flags)
        source = run.data.open(run.model, seed=run.seed, say=lambda line: None).train
        mesh = sharding.make_mesh(run.mesh, jax.devices()[:1])
        batches = TrainingBatches(
            source,
            mesh,
            run.data.sent(run.model.batch_spec(8), run.model),
            start=0,
            seed=0,
            workers=0,
            prefetch=2,
            quarantine=Quarantine(Path(folder) / "quarantine.jsonl"),
        )
        times = []
        for number in range(2 * (len(source) // 8) + 1):
            next(batches)
            if number % (len(source) // 8) == 0:
                times.append(time.process_time())
        batches.close()
        assert not (Path(folder) / "quarantine.jsonl").exists()
    clips = len(source) // 8 * 8
    return clips / (times[1] - times[0]), clips / (times[2] - times[1]), len(source)


def main() -> None:
    """Prints the rates of each pair and the ratio of the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clips")
    parser.add_argument("--height", type=int, default=128)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--verify", default="")
    flags = parser.parse_args()
    first, second = [], []
    for _ in range(flags.pairs):
        one, two, clips = rates(flags.clips, (flags.height, flags.width), flags.verify)
        first.append(one)
        second.append(two)
        print(f"{clips} clips: first epoch {one:.1f} clips/s, second {two:.1f}", flush=True)
    ratio = statistics.median(first) / statistics.median(second)
    print(f"ratio of the medians {ratio:.3f}")


if __name__ == "__main__":
    main()
