"""Compares prepared latents of fixed windows with random clips and a teacher inside the step.

    python benchmarks/teacher_windows.py [--pairs N] [--steps N] [--base-steps N]

Needs PyTorch and diffusers (`pip install -e '.[interop]'`). The videos are those of `demo`. The
teacher has the architecture of Wan 2.2's autoencoder, but is narrow, and trained here for a few
minutes on the training videos: it is worse than published ones. All runs start with the parameters
of one run without a teacher. The two runs of a pair have the same seed; both are validated on all
consecutive clips of the validation videos, against the teacher's latents (`val/encoder_loss`: 1 is
the variance of its latents over the training videos).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av
import common_start
import diffusers
import numpy as np
import results
import torch
from scipy import stats

from jaxtrain.data import cache, splits
from jaxtrain.data.video import demo_videos

FRAMES, SIDE = 12, 64
WIDTH, CHANNELS = 8, 16
TRAINED_ON = 32  # side of the teacher's training crops, pixels
SPLIT = 0.8  # as in demo
STUDENT = f"""\
from jaxtrain import config

run = config.named("demo").override(
    {{
        "model.frames": {FRAMES},
        "model.height": {SIDE},
        "model.width": {SIDE},
        "model.patch_size": 2,
        "model.latent_channels": {CHANNELS},
    }}
)
"""
RUN = (
    *("--config", "student.py", "--data.path", "train", "--data.val_path", "val"),
    *("--data.cache_dir", "cache"),  # so that it has one teacher
    *("--data.workers", "0", "--loop.eval_examples", "64", "--checkpoint.keep", "1"),
)
TAUGHT = (
    *("--model.init_from", "base", "--optim.peak_lr", "5e-4"),
    *("--model.teacher.encoder_weight", "1", "--model.teacher.decode", "True"),
)
KINDS: dict[str, tuple[str, ...]] = {
    "fixed": ("--data.windows", "fixed"),
    "random": (
        *("--model.teacher.network", "wan2.2", "--model.teacher.width", str(WIDTH)),
        *("--model.teacher.weights", "teacher"),
    ),
}
METRICS = ("val/encoder_loss", "val/psnr")


def main() -> None:
    """Trains the teacher, the common start and the pairs; prints the differences."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    results.add_flags(parser)
    parser.add_argument("--pairs", type=int, default=3, help="pairs of runs (default: 3)")
    parser.add_argument("--steps", type=int, default=120, help="steps per run (default: 120)")
    parser.add_argument(
        "--base-steps", type=int, default=60, help="steps of the common start (default: 60)"
    )
    parser.add_argument(
        "--teacher-steps", type=int, default=150, help="steps of the teacher (default: 150)"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("output/teacher_windows"), help="folder for the runs"
    )
    flags = parser.parse_args()
    flags.output.mkdir(parents=True, exist_ok=True)
    (flags.output / "student.py").write_text(STUDENT)
    train = _write_videos(flags.output)
    about = _teach(flags.output, train, flags.teacher_steps)
    print(about, flush=True)
    _train(flags.output, "base", flags.base_steps)
    _jaxtrain(flags.output, "prepare", "latents", *RUN, "--teacher", "teacher")
    found: dict[str, list[dict[str, dict[int, float]]]] = {kind: [] for kind in KINDS}
    for seed in range(1, flags.pairs + 1):
        for kind in KINDS:
            name = f"{kind}-{seed}"
            more = (*TAUGHT, *KINDS[kind], "--seed", str(seed))
            _train(flags.output, name, flags.steps, *more)
            found[kind].append(_curves(flags.output / name))
            print(f"{name}: {found[kind][-1]}", flush=True)
    text = "; ".join(_difference(found, metric) for metric in METRICS)
    print(text)
    if flags.json:
        flags.json.write_text(json.dumps({"about": about, "found": found}, indent=1))
    if flags.results:
        what = (
            f"a narrow Wan 2.2 teacher ({about}), random clips with the teacher inside the step "
            f"against fixed windows, {flags.pairs} pairs of {flags.steps} steps from a common "
            f"start of {flags.base_steps}"
        )
        results.append_row(flags.results, "cpu", what, text, "python benchmarks/teacher_windows.py")


def _write_videos(folder: Path) -> np.ndarray:
    """Writes the training videos, and the validation videos in clips; returns the former.

    The training videos are uint8 [N, T, H, W, 3].
    """
    source = demo_videos.prepare(cache.root(None), print)
    paths = sorted(source.glob("*.mp4"))
    kept = []
    for path, trains in zip(
        paths, splits.by_hash([one.name for one in paths], [1] * len(paths), SPLIT), strict=True
    ):
        if trains:
            (folder / "train").mkdir(exist_ok=True)
            shutil.copy(path, folder / "train")
        with av.open(str(path)) as container:
            video = np.stack([one.to_ndarray(format="rgb24") for one in container.decode(video=0)])
        if trains:
            kept.append(video)
            continue
        (folder / "val").mkdir(exist_ok=True)
        for number in range(len(video) // FRAMES):
            clip = video[number * FRAMES :][:FRAMES]
            demo_videos.encode(
                folder / "val" / f"{path.stem}-{number}.mp4", iter(clip), demo_videos.FPS
            )
    return np.stack(kept)


def _teach(folder: Path, videos: np.ndarray, steps: int) -> str:
    """Trains a narrow AutoencoderKLWan to reconstruct crops, saves it, and describes it.

    A repeated command uses the same teacher.
    """
    about = folder / "teacher.txt"
    if about.exists():
        return about.read_text()
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model = diffusers.AutoencoderKLWan(
        base_dim=WIDTH,
        decoder_base_dim=WIDTH,
        z_dim=CHANNELS,
        is_residual=True,
        patch_size=2,
        in_channels=12,
        out_channels=12,
        scale_factor_spatial=16,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

    def crops(count: int, frames: int, side: int) -> torch.Tensor:
        n, t, h, w, _ = videos.shape
        found = []
        for _ in range(count):
            top, left = rng.integers(h - side + 1), rng.integers(w - side + 1)
            clip = videos[rng.integers(n), rng.integers(t - frames + 1) :][:frames]
            found.append(clip[:, top : top + side, left : left + side])
        return torch.from_numpy(np.stack(found)).permute(0, 4, 1, 2, 3) / 127.5 - 1

    for step in range(steps):
        video = crops(8, 5, TRAINED_ON)
        # The mode, which is what a student learns; nothing needs the variances.
        error = (model.decode(model.encode(video).latent_dist.mode()).sample - video).square()
        optimizer.zero_grad()
        error.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 25 == 24:
            print(f"teacher: step {step + 1}, loss {float(error.detach().mean()):.4f}", flush=True)
    with torch.no_grad():
        video = crops(32, 9, SIDE)
        latents = model.encode(video).latent_dist.mode()
        squared = ((model.decode(latents).sample - video) / 2).square().mean((1, 2, 3, 4))
    model.register_to_config(
        latents_mean=latents.mean((0, 2, 3, 4)).tolist(),
        latents_std=latents.std((0, 2, 3, 4)).tolist(),
    )
    model.save_pretrained(folder / "teacher")
    about.write_text(
        f"{WIDTH} channels in its first layer, {CHANNELS} in latents, {steps} steps, "
        f"{float(-10 * squared.log10().mean()):.1f} dB"
    )
    return about.read_text()


def _train(folder: Path, name: str, steps: int, *more: str) -> None:
    """Trains a run, unless a command before this one has done it."""
    if steps in _curves(folder / name)["val/psnr"]:
        return
    every = ("--loop.eval_every", str(max(1, steps // 3)), "--checkpoint.every", str(steps))
    length = ("--loop.steps", str(steps), *every, "--output-dir", name, "--resume", "latest")
    _jaxtrain(folder, *RUN, *more, *length)


def _curves(directory: Path) -> dict[str, dict[int, float]]:
    """Returns metric -> step -> value of a run's validations."""
    file = directory / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return {
        metric: {one["step"]: one[metric] for one in records if metric in one} for metric in METRICS
    }


def _difference(found: dict[str, list[dict[str, dict[int, float]]]], metric: str) -> str:
    """Describes random minus fixed at the end, with its 95% interval over the pairs."""
    last = {kind: [_last(one[metric]) for one in runs] for kind, runs in found.items()}
    apart = np.subtract(last["random"], last["fixed"])
    spread = 0.0
    if len(apart) > 1:
        spread = stats.t.ppf(0.975, len(apart) - 1) * stats.sem(apart)
    sides = ", ".join(f"{kind} {_listed(values)}" for kind, values in last.items())
    return f"{metric}: {sides}; random minus fixed {apart.mean():+.4f} +- {spread:.4f}"


def _last(values: dict[int, float]) -> float:
    return values[max(values)]


def _listed(values: Sequence[float]) -> str:
    return " ".join(f"{value:.4g}" for value in values)


def _jaxtrain(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "jaxtrain.main", *arguments]
    environment = os.environ | {"PYTHONPATH": str(common_start.CHECKOUT)}
    subprocess.run(command, cwd=folder, check=True, stdout=sys.stderr, env=environment)


if __name__ == "__main__":
    main()
