"""The loss of predicting each token by its frequency, which a language model must beat."""

import math

import jax
import jax.numpy as jnp
import numpy as np

_ADDED = (0.01, 0.03, 0.1, 0.3, 1.0)


def counts(targets: jax.Array, weights: jax.Array, size: int) -> dict[str, jax.Array]:
    """Returns how often each id is a target, as `counts` float32 [V].

    Args:
        targets: ids; of any shape.
        weights: 1 for a target, 0 for none; of the same shape.
    """
    result = jnp.bincount(jnp.maximum(targets, 0).ravel(), weights.ravel(), length=size)
    return {"counts": result}


def loss_of_frequencies(counts_V: np.ndarray) -> float:
    """Returns the cross-entropy in nats of the tokens' frequencies, for the same tokens.

    Each token is predicted from the frequencies of all others, or rare ones would predict
    themselves. What is added to each count is the best of five values.

    Returns:
        NaN for fewer than two tokens, such as those of a validation whose examples are all broken.
    """
    counted = np.asarray(counts_V, np.float64)
    total = counted.sum()
    if total < 2:
        return math.nan
    kept = counted[counted > 0]
    return min(
        float(-(kept * np.log((kept - 1 + added) / (total - 1 + added * counted.size))).sum())
        for added in _ADDED
    ) / float(total)
