"""Tests rotary positions and attention."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.ops import attention, layers, per_device

LENGTH, WIDTH = 12, 8


def normal(shape: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


# ---- rotary positions -------------------------------------------------------------------------


def test_products_depend_only_on_the_difference_of_positions() -> None:
    cos, sin = attention.rotary(LENGTH, WIDTH, 10_000.0)
    q, k = (jnp.broadcast_to(normal((1, 1, 1, WIDTH), s), (1, LENGTH, 1, WIDTH)) for s in (1, 2))
    turned = (attention.rotate(x, cos, sin)[0, :, 0] for x in (q, k))
    scores = np.einsum("sk,tk->st", *turned)
    for offset in range(-LENGTH + 1, LENGTH):
        along = np.diagonal(scores, offset)
        np.testing.assert_allclose(along, along[0], atol=1e-5)
    assert np.ptp(scores[0]) > 0.1, "positions play no part"


@pytest.mark.parametrize(("eps", "scale"), [(1e-6, 1.0), (0.5, 1.2)])
def test_rotation_and_norm_have_the_gradient_of_their_formula(eps: float, scale: float) -> None:
    x, grad = normal((2, LENGTH, 3, WIDTH)), normal((2, LENGTH, 3, WIDTH), 1)
    cos, sin = attention.rotary(LENGTH, WIDTH, 10_000.0)

    def by_formula(x: jax.Array) -> jax.Array:
        first, second = jnp.split(x, 2, axis=-1)
        c, s = cos[None, :, None], sin[None, :, None]
        turned = jnp.concatenate([first * c + second * s, second * c - first * s], axis=-1)
        return scale * layers.rms_norm(turned, eps)

    def ours(x: jax.Array) -> jax.Array:
        return attention.rotate_normalized(x, cos, sin, eps, scale)

    for y, want in zip(of_both(ours, x, grad), of_both(by_formula, x, grad), strict=True):
        np.testing.assert_allclose(y, want, rtol=0, atol=2e-6)


def test_the_gradient_of_a_rotation_is_the_rotation_back() -> None:
    x, grad = normal((2, LENGTH, 3, WIDTH)), normal((2, LENGTH, 3, WIDTH), 1)
    cos, sin = attention.rotary(LENGTH, WIDTH, 10_000.0)
    y, of_x = of_both(lambda x: attention.rotate(x, cos, sin), x, grad)
    # A rotation is linear and keeps products.
    assert float((y * grad).sum()) == pytest.approx(float((x * of_x).sum()), rel=1e-5)
    np.testing.assert_allclose(attention.rotate(of_x, cos, sin), grad, rtol=0, atol=2e-6)


def of_both(
    function: Callable[[jax.Array], jax.Array], x: jax.Array, grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns a function's value, and the gradient of its product with `grad`."""

    @jax.jit
    def value_and_gradient(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, pull = jax.vjp(function, x)
        return y, *pull(grad)

    both: tuple[jax.Array, jax.Array] = value_and_gradient(x)
    return both


# ---- attention --------------------------------------------------------------------------------


def attention_by_hand(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Computes attention of [S, N, K] queries with as many key and value heads, in float64."""
    found = np.zeros_like(q, np.float64)
    for head in range(q.shape[1]):
        for at in range(q.shape[0]):
            past = slice(0, at + 1)
            scores = k[past, head] @ q[at, head] / math.sqrt(q.shape[-1])
            share = np.exp(scores - scores.max())
            found[at, head] = share @ v[past, head] / share.sum()
    return found


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_shared_heads_match_repeated_heads(heads: int) -> None:
    q = normal((2, LENGTH, 4, WIDTH))
    k, v = (normal((2, LENGTH, heads, WIDTH), seed) for seed in (1, 2))
    found = attention.attend(q, k, v)
    wide = [np.repeat(np.asarray(x, np.float64), 4 // heads, axis=2) for x in (k, v)]
    for row in range(2):
        want = attention_by_hand(np.asarray(q[row], np.float64), wide[0][row], wide[1][row])
        np.testing.assert_allclose(found[row], want, atol=1e-5)


def visible(kind: str) -> np.ndarray:
    """Returns which keys the queries of two sequences see, bool [2, Q, LENGTH]."""
    if kind == "padding":
        lengths = np.array([LENGTH - 3, LENGTH])
        return (np.arange(LENGTH) < lengths[:, None])[:, None]
    segments = np.array([[1] * 5 + [2] * 4 + [0] * 3, [1] * LENGTH])
    return segments[:, :, None] == segments[:, None]


def hidden_by_hand(q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Computes attention of [S, N, K] queries to the keys that they see, in float64."""
    scores = np.einsum("snk,tnk->nst", q, k) / math.sqrt(q.shape[-1])
    share = np.exp(np.where(seen, scores, -np.inf))
    return np.einsum("nst,tnk->snk", share / share.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("kind", ["padding", "documents"])
def test_queries_see_only_visible_keys(kind: str) -> None:
    q, k, v = (normal((2, LENGTH, 4, WIDTH), seed) for seed in (0, 1, 2))
    found = attention.attend(q, k, v, jnp.asarray(visible(kind)))
    wide = [np.asarray(x, np.float64) for x in (q, k, v)]
    for row, seen in enumerate(visible(kind)):
        want = hidden_by_hand(*(x[row] for x in wide), seen=seen)
        np.testing.assert_allclose(found[row], want, atol=1e-5)


def test_dropout_of_probabilities_depends_on_the_example_alone() -> None:
    q = normal((2, LENGTH, 4, WIDTH))
    keys, seen = jax.random.split(jax.random.key(0), 2), jnp.asarray(visible("padding"))
    plain = attention.attend(q, q, q, seen)
    dropped = attention.attend(q, q, q, seen, rate=0.5, keys_B=keys)
    second = (array[1:] for array in (q, q, q, seen))
    alone = attention.attend(*second, rate=0.5, keys_B=keys[1:])
    np.testing.assert_allclose(dropped[1:], alone, rtol=1e-5, atol=1e-6)
    assert np.abs(dropped - plain).max() > 0.1
    np.testing.assert_array_equal(attention.attend(q, q, q, seen, rate=0.5), plain)


@pytest.mark.parametrize("kind", ["causal", "window", "padding", "documents"])
def test_the_call_of_fused_attention_has_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """With jax's own implementation in place of cuDNN, which benchmarks/fused_attention.py runs."""
    call = jax.nn.dot_product_attention

    def by_xla(*arrays: jax.Array, implementation: str, **options: Any) -> jax.Array:
        assert implementation == "cudnn"
        return call(*arrays, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    q, k, v = (normal((2, LENGTH, 4, WIDTH), seed) for seed in (0, 1, 2))
    seen = None if kind in ("causal", "window") else jnp.asarray(visible(kind))
    window = 3 if kind == "window" else None

    def loss(attend: Any, *arrays: jax.Array) -> jax.Array:
        return (attend(*arrays, seen, window=window) * normal((2, LENGTH, 4, WIDTH), 3)).sum()

    pairs = [
        jax.value_and_grad(functools.partial(loss, attend), argnums=(0, 1, 2))(q, k, v)
        for attend in (attention.attend, attention._attend_by_cudnn)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), *pairs)


def test_gpus_use_fused_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = jnp.zeros(())
    monkeypatch.setattr(attention, "_attend_by_cudnn", lambda q, k, v, visible, window: fused)

    def attend(q: jax.Array, **options: Any) -> jax.Array:
        return attention.attend(q, q, q, **options)

    q = jnp.zeros((1, 8, 2, 64), jnp.bfloat16)
    keys = jax.random.split(jax.random.key(0), 1)
    every, padding = jnp.ones((1, 8, 8), bool), jnp.ones((1, 1, 8), bool)
    assert attend(q) is not fused
    with per_device.tracing(platform="cuda"):
        assert attend(q) is fused
        assert attend(q, visible_BQS=every) is fused
        assert attend(q, visible_BQS=padding, rate=0.5) is fused  # no keys: no dropout
        assert attend(q[:, :7], visible_BQS=padding[..., :7]) is fused
        wide = jnp.zeros((1, 8, 2, 136), jnp.bfloat16)
        for other, options, named in (
            (q.astype(jnp.float32), {}, "float32"),
            (q[..., :60], {}, "60"),
            (wide, {}, "136"),
            (q, {"visible_BQS": padding, "rate": 0.5, "keys_B": keys}, "attention_dropout"),
            (q[:, :7], {"visible_BQS": every[:, :7, :7]}, "7 x 7"),
        ):
            with pytest.warns(UserWarning, match=rf"{named}\b.* is not fused"):
                assert attend(other, **options) is not fused
    assert attend(q) is not fused


@pytest.mark.parametrize("seed", range(6))
def test_attention_to_blocks_is_masked_attention(seed: int) -> None:
    """On random documents; lengths, and so the last block, are arbitrary, and gradients count."""
    rng = np.random.default_rng(seed)
    length, reach = int(rng.integers(1, 300)), int(rng.integers(1, 70))
    segments = np.sort(rng.integers(0, 1 + int(rng.integers(8)), (2, length)), 1)
    q, k, v, weight = (normal((2, length, 2, WIDTH), seed) for seed in range(4))

    def dense(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        position = np.arange(length)
        near = np.abs(position[:, None] - position) <= reach
        return attention.attend(
            q, k, v, jnp.asarray((segments[:, :, None] == segments[:, None]) & near)
        )

    def near(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attention.attend_near(q, k, v, attention.near_blocks(jnp.asarray(segments), reach))

    @jax.jit
    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        def weighted(of: Any, *x: jax.Array) -> tuple[jax.Array, jax.Array]:
            values = of(*x)
            return (values * weight).sum(), values

        return [
            jax.grad(functools.partial(weighted, of), (0, 1, 2), has_aux=True)(q, k, v)
            for of in (near, dense)
        ]

    (ours, values), (theirs, want) = both(q, k, v)
    np.testing.assert_allclose(values, want, rtol=1e-5, atol=1e-6)
    for ours_one, theirs_one in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(ours_one, theirs_one, rtol=1e-4, atol=1e-5)


def test_attention_to_blocks_has_no_array_of_all_pairs() -> None:
    """Forward and backward: the largest array has 24 keys per query, of 512."""
    q = jax.ShapeDtypeStruct((2, 512, 2, WIDTH), jnp.float32)
    segments = jax.ShapeDtypeStruct((2, 512), jnp.int32)

    def total(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        visible = attention.near_blocks(segments, 4)
        return attention.attend_near(q, k, v, visible).sum()

    compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(q, q, q, segments).compile()
    text = compiled.as_text()
    assert text is not None
    sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"\[([\d,]+)\]", text)]
    assert 2 * 2 * 512 * 24 <= max(sizes) < 2 * 512 * 512
