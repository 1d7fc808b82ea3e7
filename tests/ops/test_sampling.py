"""Tests sampling the next token: properties of each setting, over random logits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.errors import InputError
from jaxtrain.ops.sampling import Choice

ROWS, TOKENS = 64, 23


def logits(seed: int = 0) -> np.ndarray:
    """Returns logits: some rows flat, some with one high peak, others with many equal values."""
    rng = np.random.default_rng(seed)
    found = rng.normal(0, 3, (ROWS, TOKENS)).astype(np.float32)
    found[:8] = 0.0
    found[8:16, 5] = 1e4
    found[16:32] = np.round(found[16:32])
    return found


def drawn(choice: Choice, of: np.ndarray, draws: int = 40, seed: int = 0) -> np.ndarray:
    """Draws tokens, int32 [draws, ROWS]."""
    keys = jax.random.split(jax.random.key(seed), (draws, len(of)))
    return np.asarray(jax.jit(jax.vmap(choice, (None, 0)))(jnp.asarray(of), keys))


def kept_of(choice: Choice, of: np.ndarray) -> np.ndarray:
    """Returns which tokens can be drawn, bool [rows, tokens]."""
    return np.isfinite(np.asarray(jax.jit(choice.kept)(jnp.asarray(of))))


def chances(of: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    scaled = of.astype(np.float64) / temperature
    weights = np.exp(scaled - scaled.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


@pytest.mark.parametrize("top_k", [1, 2, 5, TOKENS, 100])
def test_top_k_draws_only_from_the_k_most_likely(top_k: int) -> None:
    kept = kept_of(Choice(top_k=top_k), logits())
    assert (kept.sum(-1) == min(top_k, TOKENS)).all()  # exactly, also with equal logits
    lowest_kept = np.where(kept, logits(), np.inf).min(-1)
    highest_left = np.where(kept, -np.inf, logits()).max(-1)
    assert (lowest_kept >= highest_left).all()
    ids = drawn(Choice(top_k=top_k), logits())
    assert np.take_along_axis(kept, ids.T, -1).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, temperature: float) -> None:
    choice = Choice(temperature=temperature, top_p=top_p)
    kept = kept_of(choice, (logits() - logits().max(-1, keepdims=True)) / temperature)
    share = chances(logits(), temperature)
    inside = np.where(kept, share, 0.0)
    assert (inside.sum(-1) >= top_p - 1e-6).all()
    least = np.where(kept, share, np.inf).min(-1)
    assert (inside.sum(-1) - least < top_p + 1e-6).all()  # the smallest such set
    assert (least >= np.where(kept, 0.0, share).max(-1) - 1e-12).all()
    assert np.take_along_axis(kept, drawn(choice, logits()).T, -1).all()


def test_top_p_is_a_fraction_of_the_top_k() -> None:
    row = np.log(np.array([[0.4, 0.3, 0.2, 0.1]], np.float32))
    kept = [
        kept_of(Choice(**how), row).sum()
        for how in ({"top_p": 0.5}, {"top_p": 0.5, "top_k": 2}, {"top_p": 0.8}, {"top_k": 3})
    ]
    assert kept == [2, 1, 3, 3]


def test_temperature_zero_is_greedy() -> None:
    ids = drawn(Choice(temperature=0.0), logits(), draws=3)
    assert (ids == logits().argmax(-1)[None]).all()
    cold = drawn(Choice(temperature=1e-6), logits()[8:16])
    assert (cold == 5).all()
    for how in ({"top_k": 1}, {"top_p": 1e-9}):
        np.testing.assert_array_equal(drawn(Choice(**how), logits(), draws=1), ids[:1])  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_tokens_are_drawn_with_the_models_probabilities(temperature: float) -> None:
    row = np.random.default_rng(1).normal(0, 1, (1, 6)).astype(np.float32)
    ids = drawn(Choice(temperature=temperature), row, draws=20_000)
    found = np.bincount(ids[:, 0], minlength=6) / len(ids)
    np.testing.assert_allclose(found, chances(row, temperature)[0], atol=0.015)


def test_seeds_repeat_and_rows_are_independent() -> None:
    choice = Choice(temperature=1.0, top_k=9, top_p=0.9)
    first = drawn(choice, logits(), seed=3)
    np.testing.assert_array_equal(drawn(choice, logits(), seed=3), first)
    assert (drawn(choice, logits(), seed=4) != first).any()
    keys = jax.random.split(jax.random.key(0), ROWS)
    together = jax.jit(choice)(jnp.asarray(logits()), keys)
    alone = jax.jit(choice)(jnp.asarray(logits()[40:41]), keys[40:41])
    assert together[40] == alone[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, r"temperature -1: use 0 \(always the most likely"),
        ({"temperature": float("nan")}, r"temperature nan"),
        ({"temperature": float("inf")}, r"temperature inf"),
        ({"temperature": 1e-30}, r"temperature 1e-30: use 0"),
        ({"top_k": 0}, r"top_k 0: use at least 1"),
        ({"top_p": 0.0}, r"top_p 0: use a probability"),
        ({"top_p": 1.5}, r"top_p 1.5: use a probability"),
    ],
)
def test_meaningless_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Choice(**settings)
