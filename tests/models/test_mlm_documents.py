"""Tests whether a token of a sequence of several documents sees the sequence's other documents."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models.small_masked import stirred

from jaxtrain.errors import InputError
from jaxtrain.models import from_file, mlm, modern_bert

LENGTH = 12
#                   [CLS] a a a [SEP] b b [SEP] c [SEP] pad pad
SEGMENTS = np.array([[1, 1, 1, 1, 1, 2, 2, 2, 3, 3, 0, 0]], np.int32)
CONFIG = dataclasses.replace(
    mlm.Config.tiny(), sequence_length=LENGTH, layers=2, dropout=0.0, attend="document"
)
MODERN = dataclasses.replace(modern_bert.Config.tiny(), sequence_length=LENGTH)


def influence(config: Any) -> np.ndarray:
    """Returns [seen, seeing]: whether the token of one position affects the vector of another."""
    graph, params = stirred(config)
    rng = np.random.default_rng(1)
    tokens = np.where(SEGMENTS == 0, 0, rng.integers(5, 49, (1, LENGTH))).astype(np.int32)
    changed = np.where(np.eye(LENGTH, dtype=bool), np.where(tokens == 0, 0, tokens + 1), tokens)
    segments = np.repeat(SEGMENTS, 1 + LENGTH, 0) if config.attend == "document" else None

    @jax.jit
    def vectors(params: Any) -> jax.Array:
        model = nnx.merge(graph, params)
        return model.hidden_states(jnp.concatenate([tokens, changed]), None, segments)

    found = np.asarray(vectors(params))
    return np.abs(found[1:] - found[:1]).max(-1) > 0


@pytest.mark.parametrize("config", [CONFIG, MODERN], ids=["bert", "modern_bert"])
def test_no_token_sees_another_document(config: Any) -> None:
    seen = influence(config)
    same = SEGMENTS[0][:, None] == SEGMENTS[0][None, :]
    used = SEGMENTS[0] > 0
    np.testing.assert_array_equal(seen[used], same[used])


def test_attention_across_documents_is_the_default_of_bert() -> None:
    assert mlm.Config.tiny().attend == "sequence"
    seen = influence(dataclasses.replace(CONFIG, attend="sequence"))
    used = SEGMENTS[0] > 0
    assert seen[np.ix_(used, used)].all()


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


def test_the_outputs_of_attention_are_dropped_only_in_training() -> None:
    """Attention writes to the residual stream here only: the feed-forward layers write zeros."""
    model = dataclasses.replace(MODERN, layers=1, attention_out_dropout=0.5)
    graph, params = stirred(model)
    params["layers"][0]["ff_out"][...] *= 0.0
    tokens = jnp.asarray(np.full((2, LENGTH), 7, np.int32))

    @jax.jit
    def written(keys_B: Any) -> jax.Array:
        network = nnx.merge(graph, params)
        network.final_norm = lambda x: x  # the residual stream itself
        return network.hidden_states(tokens, keys_B, None)

    def embedded() -> jax.Array:
        network = nnx.merge(graph, params)
        return network.embeddings(None, tokens)

    kept = np.asarray(written(None) - embedded())
    keys = jax.random.split(jax.random.key(0), 2)
    dropped = np.asarray(written(keys) - embedded())
    fraction = (np.abs(dropped) < 1e-6).mean()
    assert 0.4 < fraction < 0.6
    at = np.abs(dropped) >= 1e-6
    np.testing.assert_allclose(dropped[at], 2 * kept[at], rtol=1e-3, atol=1e-5)
    assert (dropped[0] != dropped[1]).any(), "each example has its own mask"


def test_longer_sequences_continue_from_shorter_ones_with_another_base() -> None:
    short = dataclasses.replace(MODERN, sequence_length=LENGTH, global_base=10_000.0)
    longer = dataclasses.replace(short, sequence_length=2 * LENGTH, global_base=160_000.0)
    from_file.check_not_in_weights(longer, vars(short), "weights")
    with pytest.raises(InputError, match=r"global_base=10000.*set --model.global_base"):
        from_file.check_not_in_weights(
            dataclasses.replace(short, global_base=160_000.0), vars(short), "weights"
        )
