"""What every language model promises to the step: batches, weights, precision, recomputation."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import small_causal, small_masked
from models.small_causal import rows_of, stirred

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


class Made:
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


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest) -> Made:
    return Made(MODELS[request.param])


def assert_same(left: Any, right: Any) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), left, right)


def test_a_batch_matches_its_spec(made: Made) -> None:
    assert {name: (a.shape, a.dtype) for name, a in made.batch.items()} == {
        name: (a.shape, a.dtype) for name, a in made.model.batch_spec(4).items()
    }


def test_weighted_sums_of_parts_add_up(made: Made) -> None:
    """Examples of weight zero do not count."""
    whole = {**made.batch, "weight": jnp.array([1.0, 2, 0.5, 1])}
    first, second = (rows_of(whole, part) for part in (slice(2), slice(2, 4)))
    parts = made.evaluate(first), made.evaluate(second)
    assert_same(made.evaluate(whole), jax.tree.map(jnp.add, *parts))
    assert_same(made.evaluate({**whole, "weight": jnp.array([1.0, 2, 0, 0])}), parts[0])


def test_bfloat16_parameters_give_a_float32_loss(made: Made) -> None:
    low = jax.tree.map(lambda a: a.astype(jnp.bfloat16), made.params)

    def dtypes(function: Any) -> set[Any]:
        return {leaf.dtype for leaf in jax.tree.leaves(jax.eval_shape(function, low))}

    assert dtypes(made.loss) == {jnp.dtype("float32")}
    assert dtypes(jax.grad(lambda p: made.loss(p)[0])) == {jnp.dtype("bfloat16")}
    assert dtypes(lambda p: nnx.merge(made.graph, p).hidden_states(made.batch["tokens"])) == {
        jnp.dtype("bfloat16")
    }
    rounded = jax.jit(lambda p, b: nnx.merge(made.graph, p).evaluate(b))(low, made.batch)
    exact = made.evaluate(made.batch)
    assert float(rounded["loss"][0]) == pytest.approx(float(exact["loss"][0]), rel=0.03)


@pytest.mark.slow
def test_remat_changes_no_number(made: Made) -> None:
    """Including dropout: the key draws the same mask again."""
    results = []
    for mode in ("none", "block"):
        graph = nnx.graphdef(dataclasses.replace(made.model, remat=mode).build(nnx.Rngs(0)))
        loss = jax.value_and_grad(
            lambda p, graph=graph: nnx.merge(graph, p).loss(made.batch, KEYS)[0]
        )
        results.append(jax.tree.leaves(jax.jit(loss)(made.params)))
    for none, block in zip(*results, strict=True):
        assert np.linalg.norm(none - block) < 1e-5 * np.linalg.norm(none)
