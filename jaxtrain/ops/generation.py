"""Generates text with a causal language model, token by token, with a cache.

All functions are pure, and use only ``cache`` and ``decode_step`` of a model (the contract in
:mod:`jaxtrain.models`).

Shapes: B sequences, P prompt tokens, C generated tokens, S tokens per example, R texts, T tokens
per text, V vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.ops.sampling import Choice

BOUNDARY = -1
"""Separates the prompt from the generated tokens."""

# Samples during validation: few and short, because each token is a pass through the model.
_TEXTS, _PROMPT, _WRITTEN = 2, 32, 64
_CHOICE = Choice(temperature=0.8, top_k=50)
_SEED = 0


def keys_of_rows(seed: int, rows: int) -> jax.Array:
    """Returns a key for each of B texts; a text's key does not depend on the number of texts."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(rows))


def choose(
    choice: Choice, logits_BV: jax.Array, keys_B: jax.Array, number: int | jax.Array
) -> jax.Array:
    """Returns generated token `number`, counted from 0, as ids int32 [B]."""
    return choice(logits_BV, jax.vmap(jax.random.fold_in, (0, None))(keys_B, number))


def continuation(
    model: Any, prompt_BP: jax.Array, count: int, choice: Choice, keys_B: jax.Array
) -> jax.Array:
    """Generates `count` tokens, int32 [B, C], in one compiled function.

    Args:
        prompt_BP: ids, int32.
        keys_B: typed keys, one per sequence.
    """
    rows, prompt_length = prompt_BP.shape
    cache = model.cache(rows, prompt_length + count)
    logits_BV, cache = model.decode_step(prompt_BP, prompt_length, cache, 0)

    def body(carry: tuple[jax.Array, Any], number: jax.Array) -> tuple[Any, jax.Array]:
        logits_BV, cache = carry
        ids_B = choose(choice, logits_BV, keys_B, number)
        return model.decode_step(ids_B[:, None], 1, cache, prompt_length + number), ids_B

    _, ids_CB = jax.lax.scan(body, (logits_BV, cache), jnp.arange(count))
    return ids_CB.T


def samples(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """Completes the beginnings of a batch's first examples, with the same keys every time.

    Args:
        batch: has `tokens` int32 [B, S] and `weight` [B]; a row of weight 0 is not an example.

    Returns:
        int32 [R, T]: tokens of the example, -1, tokens of the model. A row without an example is
        all -1.
    """
    tokens_RS, weight_R = batch["tokens"][:_TEXTS], batch["weight"][:_TEXTS]
    rows, length = tokens_RS.shape
    prompt_length = min(_PROMPT, max(1, length // 2))
    prompt_RP = tokens_RS[:, :prompt_length]
    count = min(_WRITTEN, length - prompt_length)
    written_RC = continuation(model, prompt_RP, count, _CHOICE, keys_of_rows(_SEED, rows))
    boundary_R1 = jnp.full((rows, 1), BOUNDARY, jnp.int32)
    ids_RT = jnp.concatenate([prompt_RP, boundary_R1, written_RC], axis=1)
    return jnp.where(weight_R[:, None] > 0, ids_RT, BOUNDARY)


def page(ids_RT: np.ndarray, decode: Callable[[Sequence[int]], str]) -> str:
    """Formats the texts of :func:`samples` for reading.

    Args:
        ids_RT: int32.
        decode: ids -> text.
    """
    lines = []
    for number, ids_T in enumerate(ids_RT.tolist(), 1):
        end = ids_T.index(BOUNDARY)
        prompt, written = ids_T[:end], ids_T[end + 1 :]
        if prompt:
            lines += [f"===== prompt {number}", decode(prompt)]
            lines += [f"===== completion {number}", decode(written)]
    return "".join(f"{line}\n" for line in lines)
