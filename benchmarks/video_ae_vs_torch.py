"""Compares the video autoencoder's training step with the same network in PyTorch.

    python benchmarks/video_ae_vs_torch.py [--rounds N] [--section.field value ...]

Both sides use the same weights, batches and optimizer. PyTorch runs eagerly on a CPU; on a GPU, in
bfloat16 with channels last and torch.compile. Our step also computes PSNR.
"""

import os
from collections.abc import Mapping
from typing import Any

import common_start

os.environ.update(common_start.SHARED_GPU)

import numpy as np
import ours
import results
import torch
import torch_training
import torch_video_ae

from jaxtrain import config

# The training size for one H200 (12x480x720), and a size with CPU steps of a second. Four clips,
# because the activations of both sides are in memory together.
ON_GPU = ("h100_8", "--model.frames", "12", "--data.batch_size", "4", "--model.remat", "none")
ON_CPU = (
    "h100_8",
    "--precision",
    "float32",
    "--data.batch_size",
    "2",
    "--model.remat",
    "none",
    "--model.frames",
    "12",
    "--model.height",
    "64",
    "--model.width",
    "64",
)
CURVE_STEPS = 20


def main() -> None:
    """Runs the comparison, prints it, and records it if requested."""
    flags, overrides = results.arguments(__doc__)
    if results.repeated(flags):
        return
    device = results.device()
    name, *sizes = ON_GPU if device == "cuda" else ON_CPU
    single = ["--mesh.data", "1", "--mesh.fsdp", "1", "--optim.accumulate", "1"]
    run = ours.on_one_device(config.load(name, [*sizes, *single, *overrides]))
    batches = _batches(run, CURVE_STEPS)

    model = run.model
    torch_training.compare(
        flags,
        f"video_ae {model.frames}x{model.height}x{model.width}, batch {run.data.batch_size}, "
        f"{run.precision}, against PyTorch {torch.__version__}",
        run,
        _Theirs,
        batches[0],
        curve_run=run,
        curve=batches,
        device=device,
        examples=run.data.batch_size,
        unit="clips/s",
    )


class _Theirs:
    def __init__(self, run: config.Run, device: str) -> None:
        model = run.model
        self.module = torch_video_ae.VideoAutoencoder(
            model.encoder_width,
            model.decoder_widths,
            model.latent_channels,
            model.reconstruction_weight,
        )
        self.module.to(device, memory_format=torch.channels_last)
        called: Any = torch.compile(self.module) if device == "cuda" else self.module
        self._training = torch_training.Training(
            self.module,
            lambda batch: called(batch["video"]),
            run.optim,
            autocast=device == "cuda",
        )
        self._device = device

    def load(self, params: Mapping[str, np.ndarray]) -> None:
        """Copies jaxtrain's parameters."""
        torch_video_ae.load(self.module, params)

    def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Returns only the clips, as tensors."""
        return torch_training.to_torch({"video": batch["video"]}, self._device)

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._training.step(batch)


def _batches(run: config.Run, count: int) -> list[dict[str, np.ndarray]]:
    """Generates smooth random clips (white noise cannot be learned)."""
    rng = np.random.default_rng(0)
    spec = run.model.batch_spec(run.data.batch_size)
    b, t, h, w, c = spec["video"].shape

    def clips() -> np.ndarray:
        coarse = rng.uniform(0, 255, (b, t, h // 16 + 1, w // 16 + 1, c))
        return coarse.astype(np.uint8).repeat(16, 2).repeat(16, 3)[:, :, :h, :w]

    weight = np.ones(b, np.float32)
    return [{"video": clips(), "weight": weight} for _ in range(count)]


if __name__ == "__main__":
    main()
