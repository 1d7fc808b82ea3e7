"""Writes run directories for tests of the report, in the format of a real run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.telemetry import images

BEGAN = 1_700_000_000.0
CONFIG = {
    "name": "tiny",
    "seed": 1,
    "model": {"class": "jaxtrain.models.mlm.Config", "layers": 2},
    "data": {"path": None, "batch_size": 8},
    "optim": {"peak_lr": 0.01, "schedule": "cosine"},
    "loop": {"steps": 100},
    "checkpoint": {"best_metric": "val/loss"},
}
VERSIONS = {"python": "3.11.7", "jax": "0.10.2"}


def start(time: float, step: int = 0, **more: Any) -> dict[str, Any]:
    """A start event whose process began two seconds before."""
    return {
        "event": "start",
        "time": time,
        "step": step,
        "began": time - 2,
        "from": f"/runs/a/checkpoints/{step}" if step else None,
        "seen": step * 8,
        "total": 100,
        "host": "here",
        "processes": 1,
        "devices": 4,
        "device_kind": "NVIDIA H100 80GB HBM3",
        "platform": "gpu",
        "driver": "570.1",
        "versions": VERSIONS,
        "config": CONFIG,
        "arguments": ["--config", "tiny", "--optim.peak-lr=0.01"],
    } | more


def phase(name: str, time: float, seconds: float, step: int = 0, **more: Any) -> dict[str, Any]:
    """A phase event that ended at ``time``."""
    return {
        "event": "phase",
        "time": time,
        "step": step,
        "name": name,
        "seconds": seconds,
        **more,
    }


def training(
    time: float, seconds: float, first: int, last: int, waited_s: float = 0.0
) -> dict[str, Any]:
    """A training phase with steps ``first`` + 1 to ``last``."""
    return phase("training", time, seconds, last, from_step=first, waited_s=waited_s)


def compiled(time: float, step: int = 0) -> dict[str, Any]:
    """A compilation event."""
    return {
        "event": "compiled",
        "time": time,
        "step": step,
        "planned_gib": 12.5,
        "state_gib": 3.25,
        "params": 1_234_567,
        "flops_per_step": 2e12,
        "planned_step_s": [0.9, 1.1],
        "planned_input_s": [0.1, 0.5],
        "peak_flops": 989e12,
    }


def end(time: float, step: int, code: int = 0, why: str = "done: 100 of 100 steps") -> Any:
    return {"event": "end", "time": time, "step": step, "code": code, "why": why}


def full_history() -> list[dict[str, Any]]:
    """A run that was killed after step 60, resumed from step 40 and completed: 200 s in total."""
    at = BEGAN
    return [
        start(at + 3, began=at),
        phase("start", at + 3, 2),
        phase("data", at + 5, 2),
        phase("compile", at + 15, 10),
        compiled(at + 15),
        training(at + 35, 20, 0, 20, waited_s=2),
        training(at + 55, 20, 20, 40, waited_s=2),
        phase("save", at + 58, 3, 40),
        training(at + 78, 20, 40, 60, waited_s=2),
        start(at + 103, 40, began=at + 100, seen=320, config=_with_rate(0.02)),
        phase("start", at + 103, 2, 40),
        phase("restore", at + 106, 3, 40),
        phase("compile", at + 110, 4, 40),
        compiled(at + 110, 40),
        training(at + 170, 60, 40, 100),
        phase("evaluation", at + 190, 20, 100),
        phase("save", at + 198, 8, 100),
        end(at + 200, 100),
    ]


def _with_rate(rate: float) -> dict[str, Any]:
    return CONFIG | {"optim": {"peak_lr": rate, "schedule": "cosine"}}


def records(steps: Sequence[int], **more: Any) -> list[dict[str, Any]]:
    """Training records, and a validation after each multiple of 50."""
    found: list[dict[str, Any]] = []
    for step in steps:
        time = BEGAN + 15 + 1.5 * step
        found.append(
            {
                "step": step,
                "time": time,
                "train/loss": 4.0 / (1 + step),
                "train/grad_norm": 1.0 + 0.01 * step,
                "train/learning_rate": 0.01,
                "train/samples_per_second": 8.0,
                "train/steps_per_second": 1.0,
                "train/tokens_per_second": 512.0,
                "train/mfu": 0.4,
                "train/data_wait_fraction": 0.05,
                "train/gpu_memory_usage": 11.0,
                **more,
            }
        )
        if step % 50 == 0:
            loss = 5.0 / (1 + step)
            found.append({"step": step, "time": time + 1, "val/loss": loss, "val/loss_std": 0.1})
    return found


def write(
    directory: Path,
    *,
    config: dict[str, Any] | None = CONFIG,
    metrics: Sequence[dict[str, Any]] | None = None,
    history: Sequence[dict[str, Any]] | None = None,
) -> Path:
    """Writes a run directory; None omits a file, except for ``metrics``, which have a default."""
    directory.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    lines(directory / "metrics.jsonl", records(range(10, 101, 10)) if metrics is None else metrics)
    if history is not None:
        lines(directory / "history.jsonl", history)
    return directory


def lines(path: Path, objects: Sequence[dict[str, Any]]) -> None:
    """Writes a file with one JSON object per line."""
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))


def add_samples(directory: Path, steps: Sequence[int]) -> None:
    """Adds an image, a clip and a text for each step."""
    (directory / "samples").mkdir(exist_ok=True)
    noise = np.random.default_rng(0).integers(0, 255, (4, 32, 32, 3), dtype=np.uint8)
    for step in steps:
        image, clip = images.encode(noise[0]), images.encode(noise)
        (directory / "samples" / f"reconstruction_{step}.png").write_bytes(image.file)
        (directory / "samples" / f"clip_{step}.mp4").write_bytes(clip.file)
        (directory / "samples" / f"text_{step}.txt").write_text(f"step {step} <b>bold</b>")
