"""Compares training on clips decoded in groups of six with clips decoded one by one.

    python benchmarks/clip_groups.py [--pairs N] [--base N] [--steps N]

Renders 36 scenes of 250 frames with one keyframe each, and trains `demo` (8x64x64, four clips per
step) at a constant learning rate of 1e-4, with an average of the parameters over about 20 steps
(EMA). All runs start from one state, trained on clips one by one. The runs of a pair differ only in
`data.clips_per_group`, pairs in the seed of the order. Prints the validation PSNR of each run over
24 clips of other scenes, and the mean difference with its 95% interval.
"""

import argparse
import math
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import common_start  # noqa: F401
import jax
import ours
from scipy import stats

from jaxtrain import config
from jaxtrain.data import pipeline
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.data.video import demo_videos
from jaxtrain.sharding import make_mesh
from jaxtrain.training import setup

_VIDEOS, _HELD_OUT, _FRAMES, _RATE = 36, 24, 250, 1e-4


class Never:
    """Never stops a validation."""

    def wanted(self) -> bool:
        """Returns False."""
        return False

    def agreed(self) -> bool:
        """Returns False."""
        return False


def main() -> None:
    """Trains all runs and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=5, help="number of pairs (default: 5)")
    parser.add_argument("--base", type=int, default=160, help="steps of the start (default: 160)")
    parser.add_argument("--steps", type=int, default=80, help="steps of each run (default: 80)")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        top = Path(folder)
        for number in range(_VIDEOS + _HELD_OUT):
            _render(top / ("train" if number < _VIDEOS else "val"), number)
        runs = Runs(top)
        start = runs.trained(None, group=1, seed=0, steps=flags.base)
        print(f"start, after {flags.base} steps: {runs.psnr(start):.3f} dB", flush=True)
        differences = []
        for seed in range(1, flags.pairs + 1):
            alone, grouped = (
                runs.psnr(runs.trained(start, group=group, seed=seed, steps=flags.steps))
                for group in (1, 6)
            )
            differences.append(grouped - alone)
            print(
                f"seed {seed}, {flags.steps} steps: one by one {alone:.3f} dB, in groups of six "
                f"{grouped:.3f} dB, {differences[-1]:+.3f}",
                flush=True,
            )
        mean = statistics.mean(differences)
        if len(differences) > 1:
            error = statistics.stdev(differences) / math.sqrt(len(differences))
            half = stats.t.ppf(0.975, len(differences) - 1) * error
            print(f"mean {mean:+.3f} dB, 95% interval {mean - half:+.3f} to {mean + half:+.3f}")


class Runs:
    """Trains the same compiled step on other data, from any state."""

    def __init__(self, top: Path) -> None:
        self._top = top
        self._quarantine = Quarantine(Path(os.devnull))
        run = ours.on_one_device(self._run(1))
        mesh = make_mesh(run.mesh, jax.devices()[:1])
        self._built = setup.build(run, mesh, 1, lambda line: None)
        self._step = self._built.compile_step(donate=False)
        evaluator = setup._evaluator(self._built, self._sources(1), self._quarantine, threads=1)
        assert evaluator is not None, "demo validates"
        self._evaluator = evaluator

    def trained(self, start: Any, *, group: int, seed: int, steps: int) -> Any:
        """Returns the state after some steps; ``start`` None is a new one."""
        state = self._built.fresh_state() if start is None else start
        batches = pipeline.TrainingBatches(
            self._sources(group).train,
            self._built.rule.mesh,
            self._built.spec,
            start=0,
            seed=seed,
            workers=0,
            prefetch=1,
            quarantine=self._quarantine,
        )
        for _ in range(steps):
            state, _ = self._step(state, next(batches))
        batches.close()
        return state

    def psnr(self, state: Any) -> float:
        """Returns the validation PSNR of a state, in dB."""
        found = self._evaluator(state, Never())
        assert found is not None, "nothing stops it"
        return found.values["val/psnr"]

    def _run(self, group: int) -> config.Run:
        data = ("--data.path", str(self._top / "train"), "--data.val_path", str(self._top / "val"))
        clips = ("--data.clips_per_video", "6", "--data.clips_per_group", str(group))
        more = ("--optim.peak_lr", str(_RATE), "--loop.eval_examples", "24")
        ema = ("--optim.average.rule", "ema", "--optim.average.decay", "0.95")
        cache = ("--data.cache_dir", str(self._top / "cache"))
        return config.load("demo", [*data, *clips, *more, *ema, *cache])

    def _sources(self, group: int) -> Any:
        run = self._run(group)
        return run.data.open(run.model, seed=run.seed, say=lambda line: None)


def _render(folder: Path, number: int) -> None:
    folder.mkdir(exist_ok=True)
    kinds = list(demo_videos._KINDS.items())
    name, make = kinds[number % len(kinds)]
    demo_videos.FRAMES = _FRAMES
    images = (demo_videos.to_uint8(image) for image in demo_videos.render(make, 100 + number))
    demo_videos.encode(folder / f"{name}-{number}.mp4", images, demo_videos.FPS, keyframes=_FRAMES)


if __name__ == "__main__":
    main()
