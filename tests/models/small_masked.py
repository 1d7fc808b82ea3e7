"""Batches and parameters for the smallest masked language models."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.models import mlm

TINY = mlm.Config.tiny()


def batch(rows: int = 4, seed: int = 0, model: Any = None) -> dict[str, jax.Array]:
    """Returns examples with different amounts of padding and one unused slot each.

    With segments of one document, unless the model has no use for them.
    """
    rng = np.random.default_rng(seed)
    length, slots = TINY.sequence_length, TINY.predicted
    tokens = rng.integers(5, TINY.vocab_size, (rows, length))
    positions = np.sort(rng.random((rows, 10)).argsort(1)[:, :slots], 1)
    weights = np.ones((rows, slots))
    weights[:, -1] = 0
    positions[:, -1] = 0
    for row in range(rows):
        tokens[row, length - row :] = 0
    arrays = {
        "segments": jnp.asarray(tokens != 0, jnp.int32),
        "tokens": jnp.asarray(tokens, jnp.int32),
        "positions": jnp.asarray(positions, jnp.int32),
        "targets": jnp.asarray(rng.integers(5, TINY.vocab_size, (rows, slots)), jnp.int32),
        "target_weights": jnp.asarray(weights, jnp.float32),
        "weight": jnp.ones(rows),
    }
    return {name: arrays[name] for name in (arrays if model is None else model.batch_spec(rows))}


def stirred(model: Any) -> tuple[Any, Any]:
    """Returns graph and parameters, random even where training starts from zeros and ones."""
    graph, params = nnx.split(model.build(nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    return graph, jax.tree.map(
        lambda leaf: leaf + jnp.asarray(0.3 * rng.standard_normal(leaf.shape), jnp.float32), params
    )
