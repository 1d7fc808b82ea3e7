"""Texts that a causal language model writes, token by token, with a cache.

What is here is pure and knows the model by ``cache`` and ``decode_step`` alone (the contract in
:mod:`jaxtrain.models`).

Shapes: B sequences, P tokens of a prompt, C tokens that follow, S tokens of an example, R texts, T
tokens of a text, V words.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.ops.sampling import Choice

BOUNDARY = -1
"""Stands between the tokens that were given and those that a model has written."""

# The samples of a validation: few and short, as each token is a pass through the model.
_TEXTS, _GIVEN, _WRITTEN = 2, 32, 64
_CHOICE = Choice(temperature=0.8, top_k=50)
_SEED = 0


def keys_of_rows(seed: int, rows: int) -> jax.Array:
    """A key for each of B texts; the first ones do not depend on how many there are."""
    return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), jnp.arange(rows))


def choose(
    choice: Choice, logits_BV: jax.Array, keys_B: jax.Array, number: int | jax.Array
) -> jax.Array:
    """The ids int32 [B] of written token `number`, counted from 0."""
    return choice(logits_BV, jax.vmap(jax.random.fold_in, (0, None))(keys_B, number))


def continuation(
    model: Any, prompt_BP: jax.Array, count: int, choice: Choice, keys_B: jax.Array
) -> jax.Array:
    """The `count` tokens that a model goes on with, int32 [B, C], in one program.

    Args:
        model: the module.
        prompt_BP: ids, int32.
        count: C.
        choice: how each token is chosen.
        keys_B: typed keys.
    """
    rows, given = prompt_BP.shape
    cache = model.cache(rows, given + count)
    logits_BV, cache = model.decode_step(prompt_BP, given, cache, 0)

    def body(carry: tuple[jax.Array, Any], number: jax.Array) -> tuple[Any, jax.Array]:
        logits_BV, cache = carry
        ids_B = choose(choice, logits_BV, keys_B, number)
        return model.decode_step(ids_B[:, None], 1, cache, given + number), ids_B

    _, ids_CB = jax.lax.scan(body, (logits_BV, cache), jnp.arange(count))
    return ids_CB.T


def samples(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """How a model goes on with the beginnings of a batch's first examples, drawn alike each time.

    Args:
        model: the module.
        batch: with `tokens` int32 [B, S] and `weight` [B]; a row of weight 0 is no example.

    Returns:
        int32 [R, T]: tokens of the example, -1, tokens of the model. All of a row are -1 where
        there is no example.
    """
    tokens_RS, weight_R = batch["tokens"][:_TEXTS], batch["weight"][:_TEXTS]
    rows, length = tokens_RS.shape
    given = min(_GIVEN, max(1, length // 2))
    prompt_RP = tokens_RS[:, :given]
    count = min(_WRITTEN, length - given)
    written_RC = continuation(model, prompt_RP, count, _CHOICE, keys_of_rows(_SEED, rows))
    boundary_R1 = jnp.full((rows, 1), BOUNDARY, jnp.int32)
    ids_RT = jnp.concatenate([prompt_RP, boundary_R1, written_RC], axis=1)
    return jnp.where(weight_R[:, None] > 0, ids_RT, BOUNDARY)


def page(ids_RT: np.ndarray, decode: Callable[[Sequence[int]], str]) -> str:
    """Texts as :func:`samples` gives them, to be read.

    Args:
        ids_RT: int32.
        decode: ids -> text.
    """
    parts = []
    for number, ids_T in enumerate(ids_RT.tolist(), 1):
        end = ids_T.index(BOUNDARY)
        given, written = ids_T[:end], ids_T[end + 1 :]
        if given:
            parts += [f"===== {number}: the text begins", decode(given)]
            parts += [f"===== {number}: the model goes on", decode(written)]
    return "".join(f"{part}\n" for part in parts)
