"""Batches for a small causal language model, and arrays computed by transformers."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def batch(model: Any, rows: int = 4, seed: int = 0) -> dict[str, jax.Array]:
    """Returns random tokens; the first three targets of each sequence are ignored."""
    rng = np.random.default_rng(seed)
    shape = (rows, model.sequence_length)
    targets = rng.integers(0, model.vocab_size, shape)
    targets[:, :3] = -1
    found = {
        "tokens": rng.integers(0, model.vocab_size, shape),
        "targets": targets,
        "target_bytes": rng.integers(0, 5, shape),
    }
    return {n: jnp.asarray(a, jnp.int32) for n, a in found.items()} | {"weight": jnp.ones(rows)}


def rows_of(whole: dict[str, jax.Array], rows: slice) -> dict[str, jax.Array]:
    return {name: array[rows] for name, array in whole.items()}


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a parameter for transformers; its name gives the seed, its shape the scale."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    noise = np.random.Generator(np.random.PCG64(seed)).standard_normal(shape)
    if len(shape) == 1:  # a norm's
        return (1 + 0.2 * noise).astype(np.float32)
    return (noise * (0.3 if "embed" in name else 0.9 / shape[1] ** 0.5)).astype(np.float32)


class Stored:
    """Stored results of transformers; ``tests/interop/transformers_causal.py`` writes the file.

    Attributes:
        settings: its config.json.
        weights: its state dict.
        arrays: `tokens`, `logits`, `loss`, `grad/NAME`.
    """

    def __init__(self, path: Path) -> None:
        with np.load(path) as stored:
            self.arrays = dict(stored)
        self.settings = json.loads(str(self.arrays["settings"]))
        shapes = json.loads(str(self.arrays["params"]))
        self.weights = {name: drawn(name, tuple(shape)) for name, shape in shapes.items()}
