"""Tests the chunked loss against the plain one, and bits per byte."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.cost import flops
from jaxtrain.ops import chunked_loss

CAP = 15.0
ROWS, LENGTH, WIDTH, WORDS = 3, 12, 8, 29


def normal(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def inputs() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    targets = rng.integers(0, WORDS, (ROWS, LENGTH))
    targets[0, :4] = targets[2, -1] = chunked_loss.IGNORED
    weight = jnp.asarray(rng.uniform(0.5, 2, (ROWS, LENGTH)), jnp.float32)
    x, words = normal((ROWS, LENGTH, WIDTH)), 3 * normal((WORDS, WIDTH), 1)
    return x, words, jnp.asarray(targets, jnp.int32), weight


def plainly(x: jax.Array, words: jax.Array, targets: jax.Array, weight: jax.Array) -> jax.Array:
    logits = CAP * jnp.tanh(jnp.einsum("bsd,vd->bsv", x, words) / CAP)
    chances = jax.nn.log_softmax(logits)
    cost = -jnp.take_along_axis(chances, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    return jnp.where(targets < 0, 0.0, cost * weight).sum()


@pytest.fixture(params=[1, 4, 5, 100])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tokens of each sequence in a chunk, at most; 5 do not divide a sequence."""
    size: int = request.param
    monkeypatch.setattr(chunked_loss, "CHUNK_TOKENS", ROWS * size)
    return size


@pytest.fixture
def four_per_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_loss, "CHUNK_TOKENS", ROWS * 4)


@pytest.mark.usefixtures("chunk")
def test_chunks_give_the_plain_loss_and_its_gradients() -> None:
    x, words, targets, weight = inputs()

    def in_pieces(x: jax.Array, words: jax.Array) -> jax.Array:
        # Not the sum itself: the gradient must include the function applied to it.
        found = chunked_loss.predict(x, words, targets, weight, cap=CAP)
        return 0.25 * found.total + jnp.square(found.total) / 1000

    def plain(x: jax.Array, words: jax.Array) -> jax.Array:
        total = plainly(x, words, targets, weight)
        return 0.25 * total + jnp.square(total) / 1000

    found, want = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(x, words) for f in (in_pieces, plain)
    )
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        scale = float(np.linalg.norm(theirs))
        assert np.linalg.norm(ours - theirs) < 1e-6 * scale
    without_gradient = chunked_loss.predict(x, words, targets, weight, cap=CAP)
    np.testing.assert_allclose(
        without_gradient.total, plainly(x, words, targets, weight), rtol=1e-6
    )


@pytest.mark.usefixtures("chunk")
def test_costs_and_hits_are_computed_per_position() -> None:
    x, words, targets, weight = inputs()
    found = chunked_loss.predict(x, words, targets, weight, cap=None)
    logits = np.asarray(jnp.einsum("bsd,vd->bsv", x, words), np.float64)
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    for row, at in np.ndindex(ROWS, LENGTH):
        target = int(targets[row, at])
        if target == chunked_loss.IGNORED:
            assert found.cost[row, at] == 0
            assert not found.right[row, at]
        else:
            want = -math.log(chances[row, at, target])
            assert float(found.cost[row, at]) == pytest.approx(want, abs=1e-4)
            assert bool(found.right[row, at]) == (chances[row, at].argmax() == target)


def shapes(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """Returns the shapes of all arrays in a jaxpr and those nested in it."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for variable in equation.outvars:
            yield variable.aval.shape
        for value in equation.params.values():
            for one in value if isinstance(value, list | tuple) else (value,):
                if hasattr(getattr(one, "jaxpr", one), "eqns"):
                    yield from shapes(one)


@pytest.mark.usefixtures("four_per_chunk")
def test_the_full_logits_never_exist() -> None:
    """Neither forward nor backward; and no matmul of the logits is computed twice."""
    x, words, targets, weight = inputs()

    def loss(x: jax.Array, words: jax.Array) -> jax.Array:
        return chunked_loss.predict(x, words, targets, weight, cap=CAP).total

    program = jax.make_jaxpr(jax.value_and_grad(loss, argnums=(0, 1)))(x, words)
    found = set(shapes(program))
    assert max(math.prod(shape) for shape in found) == ROWS * 4 * WORDS
    assert flops.product_flops(program) == 3 * 2 * ROWS * LENGTH * WIDTH * WORDS


def test_bits_per_byte_skips_tokens_without_text() -> None:
    cost = jnp.asarray([[1.0, 2.0, 4.0, 8.0]])
    found = chunked_loss.Predictions(cost.sum(), cost, jnp.asarray([[True, False, True, False]]))
    batch = {
        "target_bytes": jnp.asarray([[3, 0, 5, 2]], jnp.int32),
        "weight": jnp.asarray([2.0]),
    }
    weight = jnp.asarray([[2.0, 2.0, 2.0, 0.0]])  # the last one is ignored
    measured = chunked_loss.sums(found, batch, weight)
    bits, length = measured["bits_per_byte"]
    assert float(bits) == pytest.approx(2 * (1 + 4) / math.log(2))
    assert float(length) == 2 * (3 + 5)
    assert [float(part) for part in measured["accuracy"]] == [4, 6]
