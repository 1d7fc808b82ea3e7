"""Trains a video autoencoder to its end on one GPU: killed, resumed, exported and evaluated.

    python benchmarks/gpu/a_run_to_its_end.py --data CLIPS [--minutes 6] [--tiny]

Measures how many steps fit, trains as many of `taehv_h100_1` with its complete schedule, kills the
run with SIGKILL after the half, resumes it, exports and evaluates it. With `--deterministic`, so
the steps that were computed twice must have equal losses. The page of the run and its newest image
are copied beside the rows.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import chapter

from jaxtrain.data.video import demo_videos
from jaxtrain.storage import cache

NAME = "taehv_h100_1"
# The config's 2,000 steps of warm-up are one in a hundred of its own length.
WARMUP = ("--optim.warmup_steps", "None", "--optim.warmup_fraction", "0.02")
REAL = ("--deterministic", "True", *WARMUP)
TINY = (
    *("--deterministic", "True", "--precision", "float32", *WARMUP),
    *("--model.frames", "8", "--model.height", "32", "--model.width", "32"),
    *("--model.encoder_width", "8", "--model.decoder_widths", "16", "8", "8", "8"),
    *("--model.init", "random", "--model.adversary", "None", "--optim.muon", "None"),
    *("--data.crop", "None", "--data.crops_per_clip", "1", "--data.max_frame_delta", "1"),
    *("--data.max_crop_scale", "1"),
    *("--data.batch_size", "1", "--data.workers", "0", "--data.train_split", "0.8"),
    *("--loop.eval_examples", "2"),
)
CLIPS = ("--frames", "13", "--height", "480", "--width", "720")  # as it validates
TINY_CLIPS = ("--frames", "8", "--height", "32", "--width", "32")
PARTS = 10  # of a run: each ends with a validation and a checkpoint
KILLED_AFTER = 5.4
# Seconds, assumed: the second start, the end of the run, what follows it, and ten validations of
# 4.5 s each, by the plan.
_REST_S = 150.0
_SLOWER = 1.2  # checkpoints, and what the kill repeats


def main() -> None:
    """Runs the chapter."""
    parser = chapter.flags(__doc__)
    parser.add_argument("--data", help="prepared clips (jaxtrain prepare clips), at most 60 MiB")
    flags = parser.parse_args()
    if not flags.tiny and flags.data is None:
        parser.error("--data CLIPS is missing: jaxtrain prepare clips VIDEOS output/gpu/clips")
    one = chapter.Chapter(flags)
    clips = demo_videos.prepare(cache.root(None), print) if flags.tiny else Path(flags.data)
    data = str(clips.absolute())
    typed = [*(TINY if flags.tiny else REAL), "--data.path", data]
    rows = one.steps(f"a step of {NAME}", NAME, typed, parts=("steps", "pipeline"))
    if not rows:
        raise SystemExit("the step was not measured")
    per_second = rows.get("pipeline/examples_per_second", rows["synthetic/examples_per_second"])
    batch = 1 if flags.tiny else 16
    steps = 2 * PARTS if flags.tiny else that_fit(one.left_s, per_second / batch)
    run = one.work / "run"
    shutil.rmtree(run, ignore_errors=True)
    every = steps // PARTS
    length = ("--loop.steps", str(steps), "--loop.eval_every", str(every))
    saves = ("--checkpoint.every", str(every), "--loop.log_every", str(max(1, every // 10)))
    train = ("train", NAME, *typed, *length, *saves, "--output-dir", str(run))
    shown = f"jaxtrain train {NAME} --data.path CLIPS --deterministic True {' '.join(length)}"
    if not one.begins("the run until it is killed"):
        return
    before, took_s, output = until(one, train, run, round(KILLED_AFTER * every))
    reached = max(before, default=0)
    if not reached:
        one.row(f"{NAME}, killed", f"failed: {chapter.last(output)}", shown)
        return
    one.row(f"{NAME}, killed", f"SIGKILL after step {reached} of {steps}, {took_s:.0f} s", shown)
    if not one.begins("the resumed run"):
        return
    began = time.monotonic()
    output = one.command(*train, "--resume", "latest", at_most_s=one.left_s - 15)
    after = chapter.records(run)
    one.row(
        f"{NAME}, resumed to its end",
        f"{max(after, default=0)} of {steps} steps, {time.monotonic() - began:.0f} s, "
        f"{computed_twice(before, after)}; {curve(after)}" + ended(output),
        f"{shown} --resume latest",
    )
    keep_pages(run, one.folder)
    if one.begins("export"):
        target = one.work / "taehv.safetensors"
        target.unlink(missing_ok=True)
        output = one.command("export", str(run), str(target))
        size = f"{target.stat().st_size / 2**20:.1f} MiB" if target.exists() else "failed"
        one.row("export", size + ended(output), "jaxtrain export RUN taehv.safetensors")
    if one.begins("evaluation"):
        found, size = one.work / "evaluation.json", TINY_CLIPS if flags.tiny else CLIPS
        found.unlink(missing_ok=True)
        output = one.command("evaluate", str(run), "--data", data, *size, "--json", str(found))
        result = means(found) if found.exists() else f"failed: {chapter.last(output)}"
        one.row("evaluation", result, " ".join(("jaxtrain evaluate RUN --data CLIPS", *size)))


def that_fit(left_s: float, steps_per_second: float) -> int:
    """Returns the number of steps of a run that fits, a multiple of that of its parts."""
    steps = (left_s - _REST_S) * steps_per_second / _SLOWER
    return max(PARTS, int(steps) // PARTS * PARTS)


def until(
    one: chapter.Chapter, train: tuple[str, ...], run: Path, step: int
) -> tuple[dict[int, dict[str, Any]], float, str]:
    """Runs until a step is logged, then kills the run; returns its records, seconds, and output."""
    log = one.work / "train.log"
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxtrain.main", *train],
            cwd=chapter.common_start.CHECKOUT,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None and one.left_s > 0:
                if max(chapter.records(run), default=0) >= step:
                    break
                time.sleep(0.05)
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.killpg(process.pid, signal.SIGKILL)
        finally:
            chapter.run_all.end(process)
    return chapter.records(run), time.monotonic() - began, log.read_text()


def computed_twice(before: dict[int, dict[str, Any]], after: dict[int, dict[str, Any]]) -> str:
    """Compares the losses of the steps that were logged before the kill and after the resume."""
    pairs = [
        (before[step]["train/loss"], after[step]["train/loss"])
        for step in before.keys() & after.keys()
        if "train/loss" in before[step] and before[step]["time"] != after[step]["time"]
    ]
    differing = sum(first != second for first, second in pairs)
    return f"of {len(pairs)} losses that were computed twice, {differing} differ"


def curve(found: dict[int, dict[str, Any]]) -> str:
    """Describes the validations."""
    values = {step: record["val/psnr"] for step, record in found.items() if "val/psnr" in record}
    return "val/psnr " + ", ".join(f"{psnr:.2f} ({step})" for step, psnr in sorted(values.items()))


def keep_pages(run: Path, folder: Path) -> None:
    """Copies the page of the run and its newest image, if they are there."""
    images = sorted(run.rglob("*.png"), key=lambda path: path.stat().st_mtime)
    for path in (run / "report.html", *images[-1:]):
        if path.is_file():
            shutil.copy(path, folder / f"a_{path.name}")


def ended(output: str) -> str:
    """Describes how a command failed; "" if it did not."""
    return f"; {chapter.last(output)}" if "exit code" in chapter.last(output) else ""


def means(path: Path) -> str:
    """Describes what ``jaxtrain evaluate`` measured."""
    found = json.loads(path.read_text())
    estimates = {name: metric["estimates"][0] for name, metric in found["metrics"].items()}
    listed = (f"{name} {estimate['mean']:.4g}" for name, estimate in estimates.items())
    return f"{', '.join(listed)} ({len(found['clips'])} clips)"


if __name__ == "__main__":
    main()
