"""Tests whether a token of a packed sequence sees the sequence's other documents."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.models import mlm

LENGTH = 12
#                   [CLS] a a a [SEP] b b [SEP] c [SEP] pad pad
SEGMENTS = np.array([[1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 0, 0]], np.int32)
CONFIG = dataclasses.replace(
    mlm.Config.tiny(), sequence_length=LENGTH, layers=2, dropout=0.0, attend="document"
)


def influence(config: mlm.Config) -> np.ndarray:
    """Returns [seen, seeing]: whether one position's input affects another's output, by gradient.

    Each position adds its own row of the position table, so the gradient of an output with respect
    to that row is nonzero exactly if the output sees the position.
    """
    graph, params = nnx.split(config.build(nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: leaf + jnp.asarray(0.3 * rng.standard_normal(leaf.shape), jnp.float32), params
    )
    tokens = jnp.asarray(rng.integers(5, 50, (1, LENGTH)), jnp.int32)
    tokens = jnp.where(SEGMENTS == 0, 0, tokens)
    weights = jnp.asarray(rng.standard_normal(config.hidden), jnp.float32)

    def output(params: Any, place: jax.Array) -> jax.Array:
        model = nnx.merge(graph, params)
        segments = jnp.asarray(SEGMENTS) if config.attend == "document" else None
        return jnp.take(model.hidden_states(tokens, None, segments)[0], place, axis=0) @ weights

    gradient = jax.jit(jax.grad(output))
    seen = [gradient(params, place)["embeddings"]["position"][...] for place in range(LENGTH)]
    return np.abs(np.stack(seen, 1)).max(-1) > 0


def test_no_token_sees_another_document() -> None:
    seen = influence(CONFIG)
    same = SEGMENTS[0][:, None] == SEGMENTS[0][None, :]
    np.testing.assert_array_equal(seen, same)


def test_attention_across_documents_is_the_default() -> None:
    assert mlm.Config.tiny().attend == "sequence"
    seen = influence(dataclasses.replace(CONFIG, attend="sequence"))
    used = SEGMENTS[0] > 0
    assert seen[np.ix_(used, used)].all()
    assert not seen[np.ix_(~used, used)].any()


def test_the_loss_takes_the_documents_from_the_batch() -> None:
    """A document's loss does not depend on the other documents."""
    assert "segments" not in mlm.Config.tiny().batch_spec(1)
    spec = CONFIG.batch_spec(1)
    assert (spec["segments"].shape, spec["segments"].dtype) == ((1, LENGTH), jnp.int32)
    graph, params = nnx.split(CONFIG.build(nnx.Rngs(0)))
    batch = {
        "tokens": jnp.asarray([[2, 9, 4, 8, 3, 7, 7, 3, 6, 3, 0, 0]], jnp.int32),
        "positions": jnp.asarray([[2, 0]], jnp.int32),
        "targets": jnp.asarray([[11, 0]], jnp.int32),
        "target_weights": jnp.asarray([[1.0, 0.0]]),
        "weight": jnp.ones(1),
        "segments": jnp.asarray(SEGMENTS),
    }
    loss = jax.jit(lambda p, b: nnx.merge(graph, p).evaluate(b)["loss"][0])
    other = {**batch, "tokens": batch["tokens"].at[0, 5].set(30)}
    own = {**batch, "tokens": batch["tokens"].at[0, 1].set(30)}
    assert loss(params, batch) == loss(params, other) != loss(params, own)
