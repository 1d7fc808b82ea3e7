"""Measures the effect of each loss of the video autoencoder, and of bfloat16, on held-out files.

    python benchmarks/video_losses.py --videos DIR [--steps N] [--only WORD] [--section.field value]

Each variant is a separate run of `jaxtrain` with the same number of steps, the same initial
parameters, and the same clips in the same order. The teacher is a run of the same network with
another seed; its latents are computed once. Sizes are those of `demo` with 12 frames unless
overridden.
"""

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
from pathlib import Path

import common_start
import results

CONFIG = "demo"
SIZES = (
    *("--model.frames", "12", "--data.windows", "fixed", "--loop.eval_examples", "64"),
    *("--optim.peak_lr", "1e-3"),
)
# A teacher trained for 200 steps has small latents: with the default weight of 0.1, their distance
# is 1/30 of the loss, too small to have an effect.
ENCODER = ("--model.teacher.encoder_weight", "5")
ADVERSARY = ("--model.adversary.replay", "64")
BFLOAT16 = ("--precision", "bfloat16")
VARIANTS: dict[str, tuple[str, ...]] = {
    "reconstruction": (),
    "reconstruction, bfloat16": BFLOAT16,
    "with encoder loss": ENCODER,
    "with adversary": ADVERSARY,
    "with both": (*ENCODER, *ADVERSARY),
}
METRICS = ("val/psnr", "val/ssim", "val/encoder_loss")


def main() -> None:
    """Trains and prints each variant; appends rows to the results file if requested."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results.add_flags(parser)
    parser.add_argument("--videos", required=True, help="folder of videos, split by file")
    parser.add_argument("--steps", type=int, default=200, help="steps per run (default: 200)")
    parser.add_argument("--only", help="run only variants whose name contains this")
    parser.add_argument(
        "--output", type=Path, default=Path("output/losses"), help="folder for the runs"
    )
    flags, overrides = parser.parse_known_args()
    run = _Runs(flags, overrides)
    found: dict[str, dict[int, dict[str, float]]] = {}
    for name, variant in VARIANTS.items():
        if flags.only and flags.only not in name:
            continue
        if ENCODER[0] in variant:
            run.teach()
        found[name] = run.train(name, *variant)
        print(f"{name}\n  {_curve(found[name])}", flush=True)
        if flags.results:
            command = shlex.join(
                ["python", "benchmarks/video_losses.py", "--videos", "DIR", *overrides]
            )
            what = f"video_ae, {flags.steps} steps, held-out files: {name}"
            results.append_row(flags.results, "cpu", what, _curve(found[name]), command)
    if flags.json:
        flags.json.write_text(json.dumps(found, indent=1))


class _Runs:
    """Starts `jaxtrain` with the arguments shared by all runs."""

    def __init__(self, flags: argparse.Namespace, overrides: list[str]) -> None:
        self._output: Path = flags.output
        self._data = ("--data.path", flags.videos)
        every = str(max(1, flags.steps // 8))
        length = ("--loop.steps", str(flags.steps), "--loop.eval_every", every)
        self._sizes = (*SIZES, *length, "--checkpoint.every", str(flags.steps), *overrides)

    def teach(self) -> None:
        """Trains the teacher, unless already done, and prepares its latents."""
        teacher = self._output / "teacher"
        if not teacher.exists():
            self.train("teacher", "--seed", "1")
        prepared = ("prepare", "latents", "--config", CONFIG, "--teacher", str(teacher))
        _jaxtrain(*prepared, *self._data, *self._sizes)

    def train(self, name: str, *variant: str) -> dict[int, dict[str, float]]:
        """Trains a variant; returns step -> metrics of each validation."""
        directory = self._output / name.replace(", ", "-").replace(" ", "-")
        arguments = ("--config", CONFIG, "--output-dir", str(directory), *self._data, *self._sizes)
        _jaxtrain(*arguments, *variant, "--resume", "latest")
        with contextlib.closing((directory / "metrics.jsonl").open()) as lines:
            records = [json.loads(line) for line in lines]
        return {
            one["step"]: {metric: one[metric] for metric in METRICS if metric in one}
            for one in records
            if "val/psnr" in one
        }


def _curve(found: dict[int, dict[str, float]]) -> str:
    """Formats the metrics of all validations."""
    curves = []
    for metric in METRICS:
        values = {step: one[metric] for step, one in found.items() if metric in one}
        if values:
            curves.append(
                f"{metric} " + ", ".join(f"{value:.4g} ({step})" for step, value in values.items())
            )
    return "; ".join(curves)


def _jaxtrain(*arguments: str) -> None:
    command = [sys.executable, "-m", "jaxtrain.main", *arguments]
    subprocess.run(command, cwd=common_start.CHECKOUT, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    main()
