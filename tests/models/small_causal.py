"""Batches for small causal language models, and results of transformers and nanochat."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from training import toy

from jaxtrain.models import gpt
from jaxtrain.training import state


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


def stirred(model: Any) -> tuple[Any, Any]:
    """Returns graph and parameters, random even where training starts from zeros."""
    graph, params = nnx.split(model.build(nnx.Rngs(0)))
    return graph, toy.stirred(toy.stirred(params))


def normal(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns random numbers; weights of references are not stored: the name gives the seed."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(shape)


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns a parameter for transformers; its shape gives the scale."""
    noise = normal(name, shape)
    if len(shape) == 1:  # a norm's
        return (1 + 0.2 * noise).astype(np.float32)
    return (noise * (0.3 if "embed" in name else 0.9 / shape[1] ** 0.5)).astype(np.float32)


class Stored:
    """Stored results of transformers; ``tests/interop/transformers_causal.py`` writes the file.

    Attributes:
        arrays: `tokens`, `logits`, `loss`, `grad/NAME`.
    """

    def __init__(self, path: Path) -> None:
        with np.load(path) as stored:
            self.arrays = dict(stored)
        self.settings = json.loads(str(self.arrays["settings"]))
        shapes = json.loads(str(self.arrays["params"]))
        self.weights = {name: drawn(name, tuple(shape)) for name, shape in shapes.items()}


class Nanochat:
    """Weights, a batch, and stored results of nanochat."""

    def __init__(
        self,
        path: Path,
        config: Callable[..., gpt.Config],
        draw: Callable[[str, tuple[int, ...]], np.ndarray],
    ) -> None:
        with np.load(path) as stored:
            self.arrays = dict(stored)
        sizes = json.loads(str(self.arrays["config"]))
        self.model = config(
            vocab_size=sizes["vocab_size"],
            sequence_length=sizes["sequence_len"],
            depth=sizes["n_layer"],
            width=sizes["n_embd"],
            heads=sizes["n_head"],
            kv_heads=sizes["n_kv_head"],
            window_pattern=sizes.get("window_pattern"),
        )
        shapes = json.loads(str(self.arrays["params"]))
        self.weights = {n: draw(n, tuple(shape)).astype(np.float32) for n, shape in shapes.items()}
        self.params = self.model.from_weights(self.weights, "the reference")
        tokens = jnp.asarray(self.arrays["tokens"], jnp.int32)
        self.batch = {
            "tokens": tokens,
            "targets": jnp.asarray(self.arrays["targets"], jnp.int32),
            "target_bytes": jnp.ones(tokens.shape, jnp.int32),
            "weight": jnp.ones(len(tokens)),
        }
        self.definition = state.ModelDefinition(self.model.build)
        self.gradient = jax.jit(jax.value_and_grad(self._loss))

    def _loss(self, params: Any) -> jax.Array:
        keys = jax.random.split(jax.random.key(7), len(self.batch["tokens"]))
        total, weight, _ = self.definition.module(params, {}).loss(self.batch, keys)
        return total / weight

    def loss_and_gradients(self) -> tuple[float, dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Returns the loss, and gradients under nanochat's names: ours, and those it stored."""
        loss, grads = self.gradient(self.params)
        stored = {
            name.removeprefix("grad/"): array
            for name, array in self.arrays.items()
            if name.startswith("grad/")
        }
        return float(loss), self.model.to_weights(jax.device_get(grads)), stored
