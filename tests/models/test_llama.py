"""Tests the Llama-style model: its size, attention mask, dropout and optimizers."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint.small_state import found_momentum
from flax import nnx
from models.small_causal import batch

from jaxtrain import config
from jaxtrain.errors import InputError
from jaxtrain.models import llama
from jaxtrain.optim import build
from jaxtrain.training import state, state_size

TINY = llama.Config.tiny()
BATCH = batch(TINY)
KEYS = jax.random.split(jax.random.key(7), 4)


@pytest.fixture(scope="module")
def fresh() -> tuple[Any, Any]:
    """Returns graph and initial parameters."""
    graph, params = nnx.split(TINY.build(nnx.Rngs(0)))
    return graph, params


def test_the_parameter_count_of_the_medium_model() -> None:
    params = state.ModelDefinition(config.load("a6000_medium").model.build).params
    # Table; per layer queries, outputs, keys, values, feed-forward and two norms; the last norm.
    layer = 2 * 512 * 512 + 2 * 512 * 128 + 3 * 512 * 1536 + 2 * 512
    assert state_size.parameter_count(params) == 20_000 * 512 + 16 * layer + 512 == 58_491_392


# ---- dropout ------------------------------------------------------------------------------------


def test_dropout_applies_in_four_places() -> None:
    """The embedding; per layer, attention's output, inside SwiGLU, and SwiGLU's output."""
    module = dataclasses.replace(TINY, dropout=0.5).build(nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 16, 16)), jnp.float32)
    cos, sin = module.angles(16)
    graph, kernels = nnx.split(module.layers[0])

    @jax.jit
    def zeros_of_layer(out: jax.Array, down: jax.Array) -> jax.Array:
        layer = nnx.merge(graph, kernels)
        layer.out, layer.down = nnx.Param(out), nnx.Param(down)
        return (layer(x, cos, sin, KEYS) - x == 0).mean()

    silent = jnp.zeros((16, 16)), jnp.zeros((TINY.ff, 16))
    half, three_quarters = (pytest.approx(share, abs=0.06) for share in (0.5, 0.75))
    assert float((module.embedding(BATCH["tokens"], KEYS) == 0).mean()) == half
    assert float(zeros_of_layer(*silent)) == 1
    assert float(zeros_of_layer(jnp.eye(16), silent[1])) == half
    assert float(zeros_of_layer(silent[0], jnp.ones((TINY.ff, 16)))) == half
    # Outputs of the feed-forward layer, with dropout inside it and again on its output.
    assert float(zeros_of_layer(silent[0], jnp.eye(TINY.ff, 16))) == three_quarters


# ---- the optimizer ------------------------------------------------------------------------------


def test_initial_values(fresh: tuple[Any, Any]) -> None:
    matrices = []
    for path, leaf in nnx.to_flat_state(fresh[1]):
        if "norm" in str(path[-1]):
            np.testing.assert_array_equal(leaf.get_value(), 1.0)
        else:
            matrices.append(np.ravel(leaf.get_value()))
            assert np.std(matrices[-1]) == pytest.approx(0.02, rel=0.2), path
    assert np.std(np.concatenate(matrices)) == pytest.approx(0.02, rel=0.05)


def test_norms_and_the_embedding_do_not_decay_and_matrices_use_muon() -> None:
    params = state.ModelDefinition(TINY.build).params
    groups = TINY.optimizer_groups()
    kept = {name for name, array in params.items() if not build.decays(name, array, groups)}
    assert {name.rpartition(".")[2] for name in kept} == {
        *("attention_norm", "ff_norm", "norm", "table"),
    }
    settings = dataclasses.replace(config.load("a6000_medium").optim, muon=config.Muon())
    optimizer = build.make_optimizer(settings, params, TINY.optimizer_groups())
    arrays = {name: jnp.ones(array.shape) for name, array in params.items()}
    matrices = {
        name for name in params if name.startswith("layers.") and len(params[name].shape) == 2
    }
    assert len(matrices) == 7 * TINY.layers
    assert set(found_momentum(optimizer.init(arrays))) == matrices
    misnamed = {"matrices": config.Role(prefix="nowhere.", role="matrix")}
    with pytest.raises(
        ValueError, match=r"group matrices has no parameters: none begins with .nowhere\.."
    ):
        build.make_optimizer(settings, params, misnamed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 3}, r"model.heads=3 must divide model.hidden=16 .*: use 2"),
        ({"kv_heads": 3}, r"model.kv_heads=3 must divide the 4 query heads .*: use 2"),
        ({"dropout": 1.0}, r"model.dropout=1.0: use a number of at least 0"),
    ],
)
def test_values_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dataclasses.replace(TINY, **changes)
