"""The loss of causal language models, in chunks: the logits of a whole batch are never there.

Shapes: B sequences, S tokens, D hidden width, V words, P tokens of a chunk of the sequence.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.errors import InputError
from jaxtrain.ops.attention import IGNORED, Batch, Sums
from jaxtrain.ops.layers import cross_entropy, einsum_float32


def check_chunk(chunk: int, length: int) -> None:
    """Holds that chunks of the loss divide a sequence.

    Raises:
        InputError: names the largest one that does.
    """
    if length % min(chunk, length):
        raise InputError(
            f"model.loss_piece={chunk} must divide model.sequence_length={length}: use "
            f"{fitting_chunk(chunk, length)}",
            about=("model.loss_piece", "model.sequence_length"),
        )


def fitting_chunk(most: int, length: int) -> int:
    """`most`, or where it does not divide a sequence the largest chunk below that does (tokens)."""
    fits = (n for n in range(min(most, length), 0, -1) if length % n == 0)
    return most if length % min(most, length) == 0 else next(fits)


class Predictions(NamedTuple):
    """What :func:`predict` finds.

    Attributes:
        total: sum of the weighted costs, float32 []; the only differentiable part.
        cost: nats of each target, float32 [B, S]; 0 where there is none.
        right: whether the target is the likeliest word, bool [B, S].
    """

    total: jax.Array
    cost: jax.Array
    right: jax.Array


def predict(
    x_BSD: jax.Array,
    unembedding_VD: jax.Array,
    targets_BS: jax.Array,
    weight_BS: jax.Array,
    *,
    cap: float | None,
    chunk: int,
) -> Predictions:
    """Cross-entropy of the next words; the logits of `chunk` positions exist at a time.

    The gradient is computed with the loss, chunk by chunk, and kept in place of the logits: so
    they are computed once, and never all of them are there. Chunks are cut along S, never along B:
    rows may lie on many devices, and each then works on its own.

    Args:
        x_BSD: vectors after the last norm.
        unembedding_VD: the output layer, of the dtype of `x_BSD`.
        targets_BS: int32; :data:`IGNORED` where nothing is to be predicted.
        weight_BS: float32, of each cost in the total.
        cap: logits z become `cap tanh(z / cap)`; None leaves them.
        chunk: of the divisors of S the largest one up to here is taken.
    """
    length = x_BSD.shape[1]
    size = min(fitting_chunk(chunk, length), length)
    found = _predict(cap, size, x_BSD, unembedding_VD, targets_BS, weight_BS)
    return Predictions(found.total, lax.stop_gradient(found.cost), found.right)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _predict(
    cap: float | None,
    size: int,
    x_BSD: jax.Array,
    unembedding_VD: jax.Array,
    targets_BS: jax.Array,
    weight_BS: jax.Array,
) -> Predictions:
    def body(total: jax.Array, number: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        part = _chunk(number, size, x_BSD, targets_BS, weight_BS)
        found = _of_chunk(cap, part[0], unembedding_VD, *part[1:])
        return total + found.total, (found.cost, found.right)

    numbers = jnp.arange(x_BSD.shape[1] // size)
    total, (cost, right) = lax.scan(body, jnp.zeros(()), numbers)
    return Predictions(total, _joined(cost), _joined(right))


def _predict_forward(
    cap: float | None,
    size: int,
    x_BSD: jax.Array,
    unembedding_VD: jax.Array,
    targets_BS: jax.Array,
    weight_BS: jax.Array,
) -> tuple[Predictions, tuple[jax.Array, jax.Array]]:
    def body(
        carry: tuple[jax.Array, jax.Array], number: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
        x_BPD, targets_BP, weight_BP = _chunk(number, size, x_BSD, targets_BS, weight_BS)

        def total_of(x: jax.Array, words: jax.Array) -> tuple[jax.Array, Predictions]:
            found = _of_chunk(cap, x, words, targets_BP, weight_BP)
            return found.total, found

        _, pull, found = jax.vjp(total_of, x_BPD, unembedding_VD, has_aux=True)
        of_x, of_words = pull(jnp.ones(()))
        total, grad_unembedding = carry
        carry = total + found.total, grad_unembedding + of_words.astype(jnp.float32)
        return carry, (of_x, found.cost, found.right)

    numbers = jnp.arange(x_BSD.shape[1] // size)
    zeros = jnp.zeros(()), jnp.zeros(unembedding_VD.shape, jnp.float32)
    (total, grad_unembedding), (grad_x, cost, right) = lax.scan(body, zeros, numbers)
    found = Predictions(total, _joined(cost), _joined(right))
    return found, (_joined(grad_x), grad_unembedding.astype(unembedding_VD.dtype))


def _predict_backward(
    cap: float | None, size: int, kept: tuple[jax.Array, jax.Array], grads: Predictions
) -> tuple[Any, ...]:
    del cap, size
    wide = (grad.astype(jnp.float32) * grads.total for grad in kept)
    return (*(grad.astype(kept[0].dtype) for grad in wide), None, None)


_predict.defvjp(_predict_forward, _predict_backward)


def _chunk(number: jax.Array, size: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(lax.dynamic_slice_in_dim(array, number * size, size, 1) for array in arrays)


def _joined(chunks: jax.Array) -> jax.Array:
    """[S / P, B, P, ...] -> [B, S, ...]."""
    turned = jnp.moveaxis(chunks, 0, 1)
    return turned.reshape(turned.shape[0], -1, *turned.shape[3:])


def _of_chunk(
    cap: float | None,
    x_BPD: jax.Array,
    unembedding_VD: jax.Array,
    targets_BP: jax.Array,
    weight_BP: jax.Array,
) -> Predictions:
    logits_BPV = capped(einsum_float32("bpd,vd->bpv", x_BPD, unembedding_VD), cap)
    cost_BP, right_BP = cross_entropy(logits_BPV, targets_BP)
    there = targets_BP != IGNORED
    cost_BP = jnp.where(there, cost_BP, 0.0)
    return Predictions((cost_BP * weight_BP).sum(), cost_BP, right_BP & there)


def capped(logits: jax.Array, cap: float | None) -> jax.Array:
    """`cap tanh(z / cap)`, as Gemma 2 has it (https://arxiv.org/abs/2408.00118); None is z."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def target_weights(batch: Batch) -> jax.Array:
    """What each target counts, float32 [B, S]: its row's weight, or 0 where there is none."""
    return (batch["targets"] != IGNORED) * batch["weight"][:, None]


def loss_sums(found: Predictions, batch: Batch) -> tuple[jax.Array, jax.Array, Sums]:
    """What a model's `loss` returns: nats over targets, and `accuracy` beside them."""
    weight_BS = target_weights(batch)
    accuracy = sums(found, batch, weight_BS)["accuracy"]
    return found.total, weight_BS.sum(), {"accuracy": accuracy}


def evaluation_sums(found: Predictions, batch: Batch) -> Sums:
    """What a model's `evaluate` returns: `loss`, and what :func:`sums` gives."""
    weight_BS = target_weights(batch)
    return {"loss": (found.total, weight_BS.sum())} | sums(found, batch, weight_BS)


def sums(found: Predictions, batch: Batch, weight_BS: jax.Array) -> Sums:
    """`accuracy` over targets and `bits_per_byte` over the text that they stand for.

    Bits per byte does not depend on the tokenizer: the cost of all targets that stand for text,
    divided by the bytes of that text. A special token stands for none, and its cost is left out.

    Args:
        found: of the batch.
        batch: with `target_bytes` int32 [B, S] and `weight` float32 [B].
        weight_BS: of each target, 0 where there is none.
    """
    weight = weight_BS.sum()
    bytes_BS = jnp.maximum(batch["target_bytes"], 0)
    nats = jnp.where(bytes_BS > 0, found.cost * weight_BS, 0.0).sum()
    length = (bytes_BS.astype(jnp.float32) * weight_BS).sum()
    return {
        "accuracy": ((found.right * weight_BS).sum(), weight),
        "bits_per_byte": (nats / math.log(2), length),
    }
