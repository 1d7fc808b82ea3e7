"""What every language model promises to the step: batches, weights, precision, recomputation."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import small_causal, small_masked
from models.small_causal import rows_of, stirred
from models.small_params import assert_same

from jaxtrain.models import gpt, llama, mlm, modern_bert

MODELS: dict[str, Any] = {
    "gpt": dataclasses.replace(gpt.Config.tiny(), kv_heads=1),
    "llama": llama.Config.tiny(),
    "mlm": mlm.Config.tiny(),
    "modern_bert": dataclasses.replace(
        modern_bert.Config.tiny(), mask_fraction=mlm.Config.tiny().mask_fraction
    ),
}
KEYS = jax.random.split(jax.random.key(7), 4)  # one per example


class SmallModel:
    """A model with perturbed parameters, a batch, and its evaluation."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.graph, self.params = stirred(model)
        masked = isinstance(model, mlm.Config | modern_bert.Config)
        self.batch = small_masked.batch(model=model) if masked else small_causal.batch(model)
        evaluate = jax.jit(lambda p, b: nnx.merge(self.graph, p).evaluate(b))
        self.evaluate = lambda batch: evaluate(self.params, batch)

    def loss(self, params: Any) -> Any:
        return nnx.merge(self.graph, params).loss(self.batch, KEYS)

    @functools.cached_property
    def compiled_loss(self) -> Any:
        """A function of the batch and its keys."""
        compiled = jax.jit(lambda p, b, k: nnx.merge(self.graph, p).loss(b, k))
        return lambda batch, keys: compiled(self.params, batch, keys)


@pytest.fixture(scope="module", params=MODELS)
def small(request: pytest.FixtureRequest) -> SmallModel:
    return SmallModel(MODELS[request.param])


def test_a_batch_matches_its_spec(small: SmallModel) -> None:
    assert {name: (a.shape, a.dtype) for name, a in small.batch.items()} == {
        name: (a.shape, a.dtype) for name, a in small.model.batch_spec(4).items()
    }


def test_weighted_sums_of_parts_add_up(small: SmallModel) -> None:
    """Examples of weight zero do not count."""
    whole = {**small.batch, "weight": jnp.array([1.0, 2, 0.5, 1])}
    first, second = (rows_of(whole, part) for part in (slice(2), slice(2, 4)))
    parts = small.evaluate(first), small.evaluate(second)
    assert_same(small.evaluate(whole), jax.tree.map(jnp.add, *parts))
    assert_same(small.evaluate({**whole, "weight": jnp.array([1.0, 2, 0, 0])}), parts[0])


def test_bfloat16_parameters_give_a_float32_loss(small: SmallModel) -> None:
    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), small.params)

    def dtypes(function: Any) -> set[Any]:
        return {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(function, low))}

    assert dtypes(small.loss) == {jnp.dtype("float32")}
    assert dtypes(jax.grad(lambda p: small.loss(p)[0])) == {jnp.dtype("bfloat16")}
    assert dtypes(lambda p: nnx.merge(small.graph, p).hidden_states(small.batch["tokens"])) == {
        jnp.dtype("bfloat16")
    }
    rounded = jax.jit(lambda p, b: nnx.merge(small.graph, p).evaluate(b))(low, small.batch)
    exact = small.evaluate(small.batch)
    assert float(rounded["loss"][0]) == pytest.approx(float(exact["loss"][0]), rel=0.03)


@pytest.mark.parametrize("small", ["llama", "mlm"], indirect=True)
def test_each_example_has_dropout_of_its_own_key(small: SmallModel) -> None:
    first, again, other = (small.compiled_loss(small.batch, k)[0] for k in (KEYS, KEYS, KEYS[::-1]))
    assert first == again != other
    halves = [
        small.compiled_loss(rows_of(small.batch, part), KEYS[part])
        for part in (slice(2), slice(2, 4))
    ]
    assert_same(small.compiled_loss(small.batch, KEYS), jax.tree.map(jnp.add, *halves))
    assert first != small.evaluate(small.batch)["loss"][0]


def test_without_dropout_training_and_validation_agree(small: SmallModel) -> None:
    plain = small
    if hasattr(small.model, "dropout"):
        plain = SmallModel(dataclasses.replace(small.model, dropout=0.0))
    total, weight, metrics = plain.compiled_loss(small.batch, KEYS)
    found = small.evaluate(small.batch)
    assert_same({"loss": (total, weight), **metrics}, {n: found[n] for n in ("loss", *metrics)})


@pytest.mark.slow
def test_remat_changes_no_number(small: SmallModel) -> None:
    """Including dropout: the key draws the same mask again."""
    results = []
    for mode in ("none", "block"):
        graph = nnx.graphdef(dataclasses.replace(small.model, remat=mode).build(nnx.Rngs(0)))
        loss = jax.value_and_grad(
            lambda p, graph=graph: nnx.merge(graph, p).loss(small.batch, KEYS)[0]
        )
        results.append(jax.tree.leaves(jax.jit(loss)(small.params)))
    for none, block in zip(*results, strict=True):
        assert np.linalg.norm(none - block) < 1e-5 * np.linalg.norm(none)
