"""Which word comes next: the likeliest, or one drawn from the likeliest.

Shapes: B sequences, V words.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxtrain.errors import InputError

_COLDEST = 1e-6  # below, float32 tells the draw from the likeliest word no more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """How the next word is chosen.

    Attributes:
        temperature: logits are divided by it before anything else; 0 takes the likeliest word.
        top_k: only so many of the likeliest words are drawn from; None is all.
        top_p: of these only the likeliest ones that together have this probability, the smallest
            such set (https://arxiv.org/abs/1904.09751); None is all.

    Raises:
        InputError: a value that means nothing.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        cold = 0 < self.temperature < _COLDEST
        if not 0 <= self.temperature < math.inf or cold:
            raise InputError(
                f"--temperature {self.temperature:g}: use 0 for the likeliest word each time, or "
                f"at least {_COLDEST:g}, as 0.8; 1 leaves the model's own probabilities"
            )
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"--top-k {self.top_k}: use at least 1, or leave it out for all words")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise InputError(
                f"--top-p {self.top_p:g}: it is a share of the probability, above 0 and up to 1"
            )

    def __call__(self, logits_BV: jax.Array, keys_B: jax.Array) -> jax.Array:
        """Ids int32 [B].

        Args:
            logits_BV: float32.
            keys_B: a typed key for each row, the only source of chance.
        """
        if not self.temperature:
            return jnp.argmax(logits_BV, -1).astype(jnp.int32)
        # The largest is 0 first, so that no temperature makes an infinity of it.
        logits_BV = logits_BV - logits_BV.max(-1, keepdims=True)
        kept_BV = self.kept(logits_BV / self.temperature)
        return jax.vmap(jax.random.categorical)(keys_B, kept_BV).astype(jnp.int32)

    def kept(self, logits_BV: jax.Array) -> jax.Array:
        """The logits that are drawn from; the others are -inf. Of equal ones the first are kept."""
        words = logits_BV.shape[-1]
        count = words if self.top_k is None else min(self.top_k, words)
        share = 1.0 if self.top_p is None else self.top_p
        if count == words and share == 1:
            return logits_BV
        best_BK, ids_BK = jax.lax.top_k(logits_BV, count)
        chance_BK = jax.nn.softmax(best_BK, -1)
        # A word stays while those before it do not reach the share: so the first always does.
        before_BK = jnp.cumsum(chance_BK, -1) - chance_BK
        stays_BK = (before_BK < share) if share < 1 else jnp.ones_like(before_BK, bool)
        row_B1 = jnp.arange(logits_BV.shape[0])[:, None]
        # By word, not by rank: equal keys then draw alike also where rounding swaps two ranks.
        least_BV = jnp.full_like(logits_BV, -jnp.inf)
        return least_BV.at[row_B1, ids_BK].set(jnp.where(stays_BK, best_BK, -jnp.inf))
