"""Chooses the next token: greedy, or sampled with temperature, top-k, and top-p.

Shapes: B sequences, V vocabulary.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxtrain.errors import InputError

_COLDEST = 1e-6  # below, float32 sampling is the same as greedy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """Chooses the next token.

    Attributes:
        temperature: divides the logits first; 0 is greedy.
        top_k: sample from this many most likely tokens; None is all.
        top_p: of these, sample from the smallest set of most likely tokens with at least this total
            probability (https://arxiv.org/abs/1904.09751); None is all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        cold = 0 < self.temperature < _COLDEST
        if not 0 <= self.temperature < math.inf or cold:
            raise InputError(
                f"temperature {self.temperature:g}: use 0 (always the most likely token) or at "
                f"least {_COLDEST:g}, such as 0.8; 1 keeps the model's probabilities"
            )
        if self.top_k is not None and self.top_k < 1:
            raise InputError(
                f"top_k {self.top_k}: use at least 1, or omit it to sample from all tokens"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(f"top_p {self.top_p:g}: use a probability above 0 and at most 1")

    def __call__(self, logits_BV: jax.Array, keys_B: jax.Array) -> jax.Array:
        """Returns ids, int32 [B].

        Args:
            logits_BV: float32.
            keys_B: one typed key per sequence, the only source of randomness.
        """
        if not self.temperature:
            return jnp.argmax(logits_BV, -1).astype(jnp.int32)
        # The largest becomes 0, so that no temperature makes it infinite.
        logits_BV = logits_BV - logits_BV.max(-1, keepdims=True)
        kept_BV = self.kept(logits_BV / self.temperature)
        return jax.vmap(jax.random.categorical)(keys_B, kept_BV).astype(jnp.int32)

    def kept(self, logits_BV: jax.Array) -> jax.Array:
        """Sets the logits of excluded tokens to -inf. Of equal logits, the first are kept."""
        vocabulary = logits_BV.shape[-1]
        count = vocabulary if self.top_k is None else min(self.top_k, vocabulary)
        top_p = 1.0 if self.top_p is None else self.top_p
        if count == vocabulary and top_p == 1:
            return logits_BV
        best_BK, ids_BK = jax.lax.top_k(logits_BV, count)
        chance_BK = jax.nn.softmax(best_BK, -1)
        # A token stays if those before it do not reach top_p, so the first always stays.
        before_BK = jnp.cumsum(chance_BK, -1) - chance_BK
        stays_BK = (before_BK < top_p) if top_p < 1 else jnp.ones_like(before_BK, bool)
        row_B1 = jnp.arange(logits_BV.shape[0])[:, None]
        # By id, not by rank: equal keys then draw the same even if rounding swaps two ranks.
        excluded_BV = jnp.full_like(logits_BV, -jnp.inf)
        return excluded_BV.at[row_B1, ids_BK].set(jnp.where(stays_BK, best_BK, -jnp.inf))
