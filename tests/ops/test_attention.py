"""Tests rotary positions and causal attention."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.ops import attention, per_device

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


def test_rotation_keeps_lengths_and_the_first_position() -> None:
    cos, sin = attention.rotary(LENGTH, WIDTH, 10_000.0)
    x = normal((2, LENGTH, 3, WIDTH))
    turned = attention.rotate(x, cos, sin)
    norm = functools.partial(np.linalg.norm, axis=-1)
    np.testing.assert_allclose(norm(turned), norm(x), rtol=1e-5)
    np.testing.assert_array_equal(turned[:, 0], x[:, 0])


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


def test_gpus_use_fused_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = jnp.zeros(())
    monkeypatch.setattr(attention, "_attend_by_cudnn", lambda q, k, v: fused)

    def attend(q: jax.Array) -> jax.Array:
        return attention.attend(q, q, q)

    q = jnp.zeros((1, 8, 2, 64), jnp.bfloat16)
    assert attend(q) is not fused
    with per_device.tracing(platform="cuda"):
        assert attend(q) is fused
        wide = jnp.zeros((1, 8, 2, 136), jnp.bfloat16)
        for other, named in (
            (q.astype(jnp.float32), "float32"),
            (q[..., :60], "60"),
            (wide, "136"),
        ):
            with pytest.warns(UserWarning, match=rf"{named}\b.* is not fused"):
                assert attend(other) is not fused
    assert attend(q) is not fused
