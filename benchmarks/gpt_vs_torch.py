"""Compares the training step of a GPT of depth 12 with the same network in PyTorch.

    python benchmarks/gpt_vs_torch.py [--rounds N] [--section.field value ...]

Both sides use the same weights, the same batches, and AdamW, because Muon would compare optimizers
instead of networks. On a GPU, PyTorch runs in bfloat16 with SDPA and torch.compile on 32 x 2048
tokens; on a CPU, both sides run in float32 on 256 tokens.
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
import torch_gpt
import torch_training
import word_batches

from jaxtrain import config

ADAMW = ("--optim.muon", "None", "--optim.peak_lr", "3e-4")
ON_GPU = ("gpt_h200_1", *ADAMW, "--data.batch_size", "32")
ON_CPU = (
    *("gpt_h200_1", *ADAMW, "--precision", "float32"),
    *("--data.batch_size", "1", "--model.sequence_length", "256"),
)
CURVE_STEPS = 8


def main() -> None:
    """Runs the comparison, prints it, and records it if requested."""
    flags, overrides = results.arguments(__doc__)
    if results.repeated(flags):
        return
    device = results.device()
    name, *chosen = ON_GPU if device == "cuda" else ON_CPU
    single = ["--mesh.data", "1", "--mesh.fsdp", "1", "--optim.accumulate", "1"]
    run = ours.on_one_device(config.load(name, [*chosen, *single, *overrides]))
    batches = word_batches.following(run.model, run.data.batch_size, CURVE_STEPS)

    model = run.model
    torch_training.compare(
        flags,
        f"gpt of depth {model.depth}, V {model.vocab_size}, batch {run.data.batch_size} x "
        f"{model.sequence_length}, {run.precision}, against PyTorch {torch.__version__}",
        run,
        _Theirs,
        batches[0],
        curve_run=run,
        curve=batches,
        device=device,
        examples=run.data.batch_size * model.sequence_length,
        unit="tokens/s",
    )


class _Theirs:
    def __init__(self, run: config.Run, device: str) -> None:
        model = run.model
        self.module = torch_gpt.GPT(
            model.vocab_size,
            model.sequence_length,
            model.depth,
            model.hidden,
            model.query_heads,
            model.shared_heads,
        ).to(device)
        called: Any = torch.compile(self.module) if device == "cuda" else self.module
        self._training = torch_training.Training(
            self.module,
            lambda batch: called(batch["tokens"], batch["targets"]),
            run.optim,
            autocast=device == "cuda",
        )
        self._device = device

    def load(self, params: Mapping[str, np.ndarray]) -> None:
        """Copies jaxtrain's parameters."""
        self.module.load(params)

    def place(self, batch: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Returns tokens and targets as int64 tensors."""
        wide = {name: batch[name].astype(np.int64) for name in ("tokens", "targets")}
        return torch_training.to_torch(wide, self._device)

    def step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return self._training.step(batch)


if __name__ == "__main__":
    main()
