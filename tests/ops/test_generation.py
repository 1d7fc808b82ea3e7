"""Tests that generation with a cache matches the full sequence, also when sharded."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from training import toy

from jaxtrain import config
from jaxtrain.models import gpt, llama
from jaxtrain.ops import generation
from jaxtrain.ops.sampling import Choice
from jaxtrain.sharding import ShardingRule, batch_sharding
from jaxtrain.training.state import ModelDefinition
from jaxtrain.training.step import build_eval_step

MODELS = {
    "gpt": dataclasses.replace(gpt.Config.tiny(), heads=4, kv_heads=2),
    "llama": llama.Config.tiny(),
}
LENGTH, ROWS, WORDS = 16, 3, 50


class Small:
    """A model with perturbed parameters, and its compiled methods."""

    def __init__(self, config: Any) -> None:
        self.graph, params = nnx.split(config.build(nnx.Rngs(0)))
        self.params = toy.stirred(toy.stirred(params))
        self.logits = self.jit(lambda model, tokens: model.logits(tokens))
        self.decode_step = self.jit(lambda model, *rest: model.decode_step(*rest))

    def jit(self, call: Callable[..., Any]) -> Callable[..., Any]:
        compiled = jax.jit(lambda params, *rest: call(nnx.merge(self.graph, params), *rest))
        return lambda *rest: compiled(self.params, *rest)

    def cache(self, rows: int, length: int) -> Any:
        return nnx.merge(self.graph, self.params).cache(rows, length)


@pytest.fixture(scope="module", params=MODELS)
def small(request: pytest.FixtureRequest) -> Small:
    return Small(MODELS[request.param])


@pytest.fixture(scope="module")
def tokens() -> jax.Array:
    ids = np.random.default_rng(0).integers(0, WORDS, (ROWS, LENGTH))
    return jnp.asarray(ids, jnp.int32)


def test_logits_match_those_without_a_cache_at_every_position(
    small: Small, tokens: jax.Array
) -> None:
    """Adds one token at a time after a prompt, in a cache with unused room."""
    whole, given = np.asarray(small.logits(tokens)), 7
    assert np.abs(np.diff(whole, axis=1)).max() > 0.1  # positions differ
    found, cache = small.decode_step(tokens[:, :given], given, small.cache(ROWS, 20), 0)
    np.testing.assert_allclose(found, whole[:, given - 1], atol=1e-5)
    for start in range(given, LENGTH):
        found, cache = small.decode_step(tokens[:, start : start + 1], 1, cache, start)
        np.testing.assert_allclose(found, whole[:, start], atol=1e-5)


def test_padding_of_a_prompt_changes_nothing(small: Small, tokens: jax.Array) -> None:
    whole = np.asarray(small.logits(tokens))
    for count in range(1, LENGTH + 1):
        filled = tokens.at[:, count:].set(49)
        found, cache = small.decode_step(filled, count, small.cache(ROWS, LENGTH), 0)
        np.testing.assert_allclose(found, whole[:, count - 1], atol=1e-5)
        if count < LENGTH:
            found, _ = small.decode_step(tokens[:, count : count + 1], 1, cache, count)
            np.testing.assert_allclose(found, whole[:, count], atol=1e-5)


def test_a_cache_has_the_dtype_of_the_parameters(small: Small, tokens: jax.Array) -> None:
    low = jax.tree.map(lambda array: array.astype(jnp.bfloat16), small.params)

    def run(params: Any) -> Any:
        model = nnx.merge(small.graph, params)
        return model.decode_step(tokens, 5, model.cache(ROWS, LENGTH), 0)

    logits, cache = jax.eval_shape(run, low)
    assert logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(cache)} == {jnp.dtype(jnp.bfloat16)}


def by_hand(small: Small, prompt: Any, count: int, choice: Choice, keys: Any) -> np.ndarray:
    """Generates without a cache: computes the full sequence again for each token."""
    padded = jnp.zeros((len(prompt), LENGTH), jnp.int32).at[:, : prompt.shape[1]].set(prompt)
    next_of = small.jit(
        lambda model, tokens, end, number: generation.choose(
            choice, model.logits(tokens)[:, end - 1], keys, number
        )
    )
    for number in range(count):
        end = prompt.shape[1] + number
        padded = padded.at[:, end].set(next_of(padded, end, number))
    return np.asarray(padded[:, prompt.shape[1] : prompt.shape[1] + count])


CHOICES = (Choice(temperature=0.0), Choice(temperature=0.9, top_k=20, top_p=0.9))


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_texts_match_those_without_a_cache(small: Small, tokens: jax.Array, choice: Choice) -> None:
    keys, prompt = generation.keys_of_rows(5, ROWS), tokens[:, :5]
    write = small.jit(
        lambda model, prompt: generation.continuation(model, prompt, 11, choice, keys)
    )
    found = np.asarray(write(prompt))
    np.testing.assert_array_equal(found, by_hand(small, prompt, 11, choice, keys))
    assert len({tuple(row) for row in found.tolist()}) == ROWS


def test_samples_begin_like_the_examples(small: Small) -> None:
    rng = np.random.default_rng(2)
    batch = {
        "tokens": jnp.asarray(rng.integers(0, WORDS, (4, LENGTH)), jnp.int32),
        "weight": jnp.array([1.0, 0, 1, 1]),
    }
    found = np.asarray(small.jit(lambda model, batch: model.samples(batch))(batch)["text"])
    assert found.dtype == np.int32
    assert found.shape == (2, 8 + 1 + 8)
    np.testing.assert_array_equal(found[0, :8], batch["tokens"][0, :8])
    assert found[0, 8] == generation.BOUNDARY
    assert (found[0, 9:] >= 0).all()
    assert (found[1] == generation.BOUNDARY).all()  # not an example
    page = generation.page(found, lambda ids: f"<{len(ids)}>")
    assert page == "===== prompt 1\n<8>\n===== completion 1\n<8>\n"


@pytest.mark.slow
def test_sharding_does_not_change_samples() -> None:
    model = dataclasses.replace(gpt.Config.tiny(), sequence_length=32)
    definition = ModelDefinition(model.build)
    rng = np.random.default_rng(0)
    params = {
        name: jnp.asarray(rng.normal(0, 0.3, leaf.shape), jnp.float32)
        for name, leaf in definition.params.items()
    }
    batch = {
        "tokens": rng.integers(0, WORDS, (8, 32)).astype(np.int32),
        "weight": np.ones(8, np.float32),
    }
    found = []
    for data, fsdp in ((1, 1), (2, 4)):
        settings = config.Mesh(data=data, fsdp=fsdp, shard="params", min_shard_elements=16)
        rule = ShardingRule(toy.mesh_of(data, fsdp), settings)
        step = build_eval_step(definition, rule, precision="float32", method="samples")
        placed = {name: jax.device_put(array, rule(array)) for name, array in params.items()}
        rows = jax.device_put(batch, batch_sharding(rule.mesh))
        found.append(np.asarray(jax.jit(step)(placed, {}, rows)["text"]))
    np.testing.assert_array_equal(*found)
