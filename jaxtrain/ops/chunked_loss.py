"""Computes the loss of causal language models in chunks, never all logits of a batch at a time.

:func:`batch_spec` describes their batches.

Shapes: B sequences, S tokens, D hidden width, V vocabulary, P tokens of a sequence per chunk.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.ops import per_device
from jaxtrain.ops.layers import cross_entropy, einsum_float32

Batch = dict[str, jax.Array]
Sums = dict[str, tuple[jax.Array, ...]]
"""Metric -> (sum, weight), float32 scalars; of a validation also (sum, weight, of examples), with
float32 [2, B]: each example's sum and weight."""

IGNORED = -1
"""The target of a position that is not predicted."""

CHUNK_TOKENS = 16_384
"""Tokens per device whose logits are in memory at the same time, at most.

The gradient of the output layer is read and written once per chunk, in float32. In the step of a
GPT with 768 hidden units on 32 sequences of 2,048 tokens (jax 0.10.2, for an H100), chunks of 4,096
tokens move 247.7 GB and these 238.1 GB, with 24.5 and 27.5 GiB of temporaries.
"""


def batch_spec(batch_size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays of a batch of causal language models.

    `tokens` and `targets`, the token after each, int32 [B, S]; a target of -1 is not predicted.
    `target_bytes` int32 [B, S]: bytes of text that each target stands for, 0 for a special token.
    `weight` float32 [B].
    """
    tokens = jax.ShapeDtypeStruct((batch_size, length), jnp.int32)
    return {
        **dict.fromkeys(("tokens", "targets", "target_bytes"), tokens),
        "weight": jax.ShapeDtypeStruct((batch_size,), jnp.float32),
    }


class Predictions(NamedTuple):
    """The result of :func:`predict`.

    Attributes:
        total: sum of the weighted costs, float32 []; the only differentiable part.
        cost: nats per target, float32 [B, S]; 0 without a target.
        right: whether the target is the most likely token, bool [B, S].
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
) -> Predictions:
    """Computes the cross-entropy of the next tokens, some positions of each sequence at a time.

    The gradient is computed with the loss, chunk by chunk, and stored in place of the logits. So
    logits are computed once, and never all of them exist. Chunks are cut along S, not along B,
    which is split over the devices: each then computes its own part of every chunk.

    With a gradient, logits are rounded to the dtype of `x_BSD`, as PyTorch's autocast does: they
    are read and written four times, and the larger part of what the loss moves. Without one, they
    are float32.

    Args:
        unembedding_VD: the output layer, in the dtype of `x_BSD`.
        targets_BS: int32; :data:`IGNORED` is not predicted.
        weight_BS: float32, weight of each cost in the total.
        cap: replaces logits z by `cap tanh(z / cap)`; None does not.
    """
    rows, length, _ = x_BSD.shape
    longest = max(1, CHUNK_TOKENS // per_device.rows_per_device(rows))
    count = math.ceil(length / longest)
    size = math.ceil(length / count)
    if missing := count * size - length:
        x_BSD = jnp.pad(x_BSD, ((0, 0), (0, missing), (0, 0)))
        targets_BS = jnp.pad(targets_BS, ((0, 0), (0, missing)), constant_values=IGNORED)
        weight_BS = jnp.pad(weight_BS, ((0, 0), (0, missing)))
    total, cost, right = _predict(cap, size, x_BSD, unembedding_VD, targets_BS, weight_BS)
    return Predictions(total, lax.stop_gradient(cost[:, :length]), right[:, :length])


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
        chunk = _chunk(number, size, x_BSD, targets_BS, weight_BS)
        predictions = _of_chunk(cap, einsum_float32, chunk[0], unembedding_VD, *chunk[1:])
        return total + predictions.total, (predictions.cost, predictions.right)

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

        def total_of(x: jax.Array, unembedding: jax.Array) -> tuple[jax.Array, Predictions]:
            predictions = _of_chunk(cap, jnp.einsum, x, unembedding, targets_BP, weight_BP)
            return predictions.total, predictions

        _, pull, predictions = jax.vjp(total_of, x_BPD, unembedding_VD, has_aux=True)
        of_x, of_unembedding = pull(jnp.ones(()))
        total, grad_unembedding = carry
        carry = total + predictions.total, grad_unembedding + of_unembedding.astype(jnp.float32)
        return carry, (of_x, predictions.cost, predictions.right)

    numbers = jnp.arange(x_BSD.shape[1] // size)
    zeros = jnp.zeros(()), jnp.zeros(unembedding_VD.shape, jnp.float32)
    (total, grad_unembedding), (grad_x, cost, right) = lax.scan(body, zeros, numbers)
    predictions = Predictions(total, _joined(cost), _joined(right))
    return predictions, (_joined(grad_x), grad_unembedding.astype(unembedding_VD.dtype))


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
    product: Callable[..., jax.Array],
    x_BPD: jax.Array,
    unembedding_VD: jax.Array,
    targets_BP: jax.Array,
    weight_BP: jax.Array,
) -> Predictions:
    logits_BPV = product("bpd,vd->bpv", x_BPD, unembedding_VD)
    cost_BP, right_BP = cross_entropy(logits_BPV, targets_BP, cap)
    counted_BP = targets_BP != IGNORED
    cost_BP = jnp.where(counted_BP, cost_BP, 0.0)
    return Predictions((cost_BP * weight_BP).sum(), cost_BP, right_BP & counted_BP)


def target_weights(batch: Batch) -> jax.Array:
    """Returns each target's weight, float32 [B, S]: its example's weight, or 0 without a target."""
    return (batch["targets"] != IGNORED) * batch["weight"][:, None]


def loss_sums(predictions: Predictions, batch: Batch) -> tuple[jax.Array, jax.Array, Sums]:
    """Returns the result of a model's `loss`: nats over targets, and `accuracy`."""
    weight_BS = target_weights(batch)
    accuracy = sums(predictions, batch, weight_BS)["accuracy"]
    return predictions.total, weight_BS.sum(), {"accuracy": accuracy}


def evaluation_sums(predictions: Predictions, batch: Batch) -> Sums:
    """Returns the result of a model's `evaluate`: `loss`, and the metrics of :func:`sums`."""
    weight_BS = target_weights(batch)
    return {"loss": (predictions.total, weight_BS.sum())} | sums(predictions, batch, weight_BS)


def sums(predictions: Predictions, batch: Batch, weight_BS: jax.Array) -> Sums:
    """Returns `accuracy` over targets, and `bits_per_byte` over the text that they stand for.

    Bits per byte does not depend on the tokenizer: it is the cost of all targets that stand for
    text, divided by the bytes of that text. Special tokens stand for none and are excluded.

    Args:
        batch: has `target_bytes` int32 [B, S] and `weight` float32 [B].
        weight_BS: weight of each target, 0 without a target.
    """
    weight = weight_BS.sum()
    bytes_BS = jnp.maximum(batch["target_bytes"], 0)
    nats = jnp.where(bytes_BS > 0, predictions.cost * weight_BS, 0.0).sum()
    length = (bytes_BS.astype(jnp.float32) * weight_BS).sum()
    return {
        "accuracy": ((predictions.right * weight_BS).sum(), weight),
        "bits_per_byte": (nats / math.log(2), length),
    }
