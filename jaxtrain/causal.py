"""What causal language models share: batches, norm, positions, attention, and the loss in pieces.

Shapes: B sequences, S tokens, D hidden width, N query heads, H heads of keys and values (H divides
N), K width of a head, V words, P tokens of a piece of the sequence.
"""

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.errors import InputError
from jaxtrain.layers import cross_entropy, einsum_float32, platform

IGNORED = -1
"""The target of a position that is not to be predicted."""

# Heads that cuDNN's attention takes on every GPU since A100.
_LARGEST_HEAD = 128
_HEAD_UNIT = 8


Batch = dict[str, jax.Array]
Sums = dict[str, tuple[jax.Array, ...]]


def batch_spec(batch_size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """`tokens`, and the `targets` that follow each, int32 [B, S]; -1 is not predicted.

    `target_bytes` int32 [B, S]: bytes of text that each target stands for, 0 for a special token.
    `weight` float32 [B].
    """
    tokens = jax.ShapeDtypeStruct((batch_size, length), jnp.int32)
    return {
        **dict.fromkeys(("tokens", "targets", "target_bytes"), tokens),
        "weight": jax.ShapeDtypeStruct((batch_size,), jnp.float32),
    }


def fewest_heads(width: int, most: int) -> int:
    """The fewest heads, each up to `most` wide, that share a width evenly.

    Multiples of eight first, which fused attention wants; even widths, which rotation wants, next.
    """
    least = math.ceil(width / most)
    of = [n for step in (8, 2) for n in range(least, 2 * least) if width % (step * n) == 0]
    return of[0] if of else least


def check_piece(piece: int, length: int) -> None:
    """Holds that pieces of the loss divide a sequence.

    Raises:
        InputError: names the largest one that does.
    """
    if length % min(piece, length):
        raise InputError(
            f"model.loss_piece={piece} must divide model.sequence_length={length}: use "
            f"{fitting_piece(piece, length)}"
        )


def fitting_piece(most: int, length: int) -> int:
    """`most`, or where it does not divide a sequence the largest piece below that does (tokens)."""
    fits = (n for n in range(min(most, length), 0, -1) if length % n == 0)
    return most if length % min(most, length) == 0 else next(fits)


def rms_norm(x: jax.Array, eps: float, scale: jax.Array | None = None) -> jax.Array:
    """Divides by the root of the mean square over the last dimension; float32 inside.

    Args:
        x: [..., D].
        eps: added to the mean square.
        scale: [D], what the result is multiplied by; None is ones.
    """
    wide = x.astype(jnp.float32)
    normal = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + eps)
    if scale is not None:
        normal = normal * scale.reshape((1,) * (x.ndim - 1) + (-1,))
    return normal.astype(x.dtype)


def rotary(
    length: int, width: int, base: float, start: int | jax.Array = 0
) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of the angles `position / base^(2 i / width)`, float32 [S, K / 2] each.

    Rotary positions (https://arxiv.org/abs/2104.09864), one angle for each pair of a head.

    Args:
        length: positions.
        width: of a head.
        base: above.
        start: the first position, int32 [].
    """
    exponent_I = jnp.arange(0, width, 2, dtype=jnp.float32) / width
    position_S = jnp.asarray(start, jnp.float32) + jnp.arange(length, dtype=jnp.float32)
    angles_SI = jnp.outer(position_S, base**-exponent_I)
    return jnp.cos(angles_SI), jnp.sin(angles_SI)


def rotate(x_BSNK: jax.Array, cos_SI: jax.Array, sin_SI: jax.Array) -> jax.Array:
    """Turns the pairs (i, i + K / 2) of each head by the position's angles; float32.

    As in nanochat, `y1 = x1 cos + x2 sin` and `y2 = x2 cos - x1 sin`: the product of a turned query
    and a turned key depends on the difference of their positions alone.
    """
    first, second = jnp.split(x_BSNK.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_SI[None, :, None], sin_SI[None, :, None]
    return jnp.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1)


def attend(q_BSNK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array) -> jax.Array:
    """Causal attention, scale `1 / sqrt(K)`: query head n looks at head `n // (N / H)`.

    Programs for NVIDIA GPUs take cuDNN's fused attention where it can be had: 16-bit arrays, K a
    multiple of 8 up to 128. All others take plain products and a float32 softmax.

    Returns:
        [B, S, N, K], of the dtype of the queries.
    """
    attend_here = _attend_by_cudnn if _cudnn_takes(q_BSNK) else _attend_plainly
    return attend_here(q_BSNK, k_BSHK, v_BSHK)


def _cudnn_takes(q_BSNK: jax.Array) -> bool:
    width = q_BSNK.shape[-1]
    short = q_BSNK.dtype in (jnp.bfloat16, jnp.float16)
    fits = width % _HEAD_UNIT == 0 and width <= _LARGEST_HEAD
    return short and fits and platform() in ("gpu", "cuda")


def _attend_by_cudnn(q_BSNK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(
        q_BSNK, k_BSHK, v_BSHK, is_causal=True, implementation="cudnn"
    )


def _attend_plainly(
    q_BSNK: jax.Array, k_BTHK: jax.Array, v_BTHK: jax.Array, start: int | jax.Array = 0
) -> jax.Array:
    """The first query is at position `start` of the keys."""
    b, s, n, k = q_BSNK.shape
    length, heads = k_BTHK.shape[1:3]
    q_BSHGK = q_BSNK.reshape(b, s, heads, n // heads, k)
    scores_BHGST = einsum_float32("bshgk,bthk->bhgst", q_BSHGK, k_BTHK) / math.sqrt(k)
    past_ST = jnp.arange(length)[None] <= start + jnp.arange(s)[:, None]
    scores_BHGST = jnp.where(past_ST[None, None, None], scores_BHGST, jnp.finfo(jnp.float32).min)
    share_BHGST = jax.nn.softmax(scores_BHGST, -1).astype(v_BTHK.dtype)
    return jnp.einsum("bhgst,bthk->bshgk", share_BHGST, v_BTHK).reshape(b, s, n, k)


class Cache(NamedTuple):
    """Keys and values that one layer has computed so far.

    Attributes:
        key: [B, T, H, K], as attention takes them: with positions, normalised.
        value: [B, T, H, K].
    """

    key: jax.Array
    value: jax.Array


def empty_cache(rows: int, length: int, heads: int, width: int, dtype: Any) -> Cache:
    """Room for `length` positions of `rows` sequences."""
    blank_BTHK = jnp.zeros((rows, length, heads, width), dtype)
    return Cache(blank_BTHK, blank_BTHK)


def attend_cached(
    q_BSNK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array, cache: Cache, start: int | jax.Array
) -> tuple[jax.Array, Cache]:
    """Causal attention of new positions to those in the cache and to themselves.

    What the cache holds from `start` on is overwritten or not looked at. So a sequence may be
    filled up at its end: nothing looks at what fills it, and the tokens that follow replace it.

    Args:
        q_BSNK: of the positions `start .. start + S - 1`, all of which the cache has room for.
        k_BSHK: likewise.
        v_BSHK: likewise.
        cache: of the positions before.
        start: int32 [].

    Returns:
        [B, S, N, K], of the dtype of the queries, and the cache with the new positions.
    """
    at = (0, start, 0, 0)
    cache = Cache(
        lax.dynamic_update_slice(cache.key, k_BSHK, at),
        lax.dynamic_update_slice(cache.value, v_BSHK, at),
    )
    return _attend_plainly(q_BSNK, cache.key, cache.value, start), cache


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


def onward(
    blocks: Iterable[Any],
    x_BSD: jax.Array,
    count: int | jax.Array,
    angles: tuple[jax.Array, jax.Array],
    caches: Sequence[Cache],
    start: int | jax.Array,
) -> tuple[jax.Array, list[Cache]]:
    """Through blocks that see what is in their caches, and add to it.

    Args:
        blocks: each with ``continued(x_BSD, cos_SI, sin_SI, cache, start)``.
        x_BSD: embedded tokens at the positions from `start` on; those from `count` on are filling.
        count: S at most.
        angles: of these positions, as :func:`rotary` gives them.
        caches: one for each block.
        start: how many positions the caches hold.

    Returns:
        The vector at position `count - 1`, [B, 1, D], and the caches with the new positions.
    """
    kept = []
    for block, before in zip(blocks, caches, strict=True):
        x_BSD, after = block.continued(x_BSD, *angles, before, start)
        kept.append(after)
    return lax.dynamic_slice_in_dim(x_BSD, count - 1, 1, axis=1), kept


def predict(
    x_BSD: jax.Array,
    words_VD: jax.Array,
    targets_BS: jax.Array,
    weight_BS: jax.Array,
    *,
    cap: float | None,
    piece: int,
) -> Predictions:
    """Cross-entropy of the next words; the logits of `piece` positions exist at a time.

    The gradient is computed with the loss, piece by piece, and kept in place of the logits: so
    they are computed once, and never all of them are there. Pieces are cut along S, never along B:
    rows may lie on many devices, and each then works on its own.

    Args:
        x_BSD: vectors after the last norm.
        words_VD: the output layer, of the dtype of `x_BSD`.
        targets_BS: int32; :data:`IGNORED` where nothing is to be predicted.
        weight_BS: float32, of each cost in the total.
        cap: logits z become `cap tanh(z / cap)`; None leaves them.
        piece: of the divisors of S the largest one up to here is taken.
    """
    length = x_BSD.shape[1]
    size = min(fitting_piece(piece, length), length)
    found = _predict(cap, size, x_BSD, words_VD, targets_BS, weight_BS)
    return Predictions(found.total, lax.stop_gradient(found.cost), found.right)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _predict(
    cap: float | None,
    size: int,
    x_BSD: jax.Array,
    words_VD: jax.Array,
    targets_BS: jax.Array,
    weight_BS: jax.Array,
) -> Predictions:
    def body(total: jax.Array, number: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        part = _piece(number, size, x_BSD, targets_BS, weight_BS)
        found = _of_piece(cap, part[0], words_VD, *part[1:])
        return total + found.total, (found.cost, found.right)

    numbers = jnp.arange(x_BSD.shape[1] // size)
    total, (cost, right) = lax.scan(body, jnp.zeros(()), numbers)
    return Predictions(total, _joined(cost), _joined(right))


def _predict_forward(
    cap: float | None,
    size: int,
    x_BSD: jax.Array,
    words_VD: jax.Array,
    targets_BS: jax.Array,
    weight_BS: jax.Array,
) -> tuple[Predictions, tuple[jax.Array, jax.Array]]:
    def body(
        carry: tuple[jax.Array, jax.Array], number: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
        x_BPD, targets_BP, weight_BP = _piece(number, size, x_BSD, targets_BS, weight_BS)

        def total_of(x: jax.Array, words: jax.Array) -> tuple[jax.Array, Predictions]:
            found = _of_piece(cap, x, words, targets_BP, weight_BP)
            return found.total, found

        _, pull, found = jax.vjp(total_of, x_BPD, words_VD, has_aux=True)
        of_x, of_words = pull(jnp.ones(()))
        total, grad_words = carry
        carry = total + found.total, grad_words + of_words.astype(jnp.float32)
        return carry, (of_x, found.cost, found.right)

    numbers = jnp.arange(x_BSD.shape[1] // size)
    zeros = jnp.zeros(()), jnp.zeros(words_VD.shape, jnp.float32)
    (total, grad_words), (grad_x, cost, right) = lax.scan(body, zeros, numbers)
    found = Predictions(total, _joined(cost), _joined(right))
    return found, (_joined(grad_x), grad_words.astype(words_VD.dtype))


def _predict_backward(
    cap: float | None, size: int, kept: tuple[jax.Array, jax.Array], grads: Predictions
) -> tuple[Any, ...]:
    del cap, size
    wide = (grad.astype(jnp.float32) * grads.total for grad in kept)
    return (*(grad.astype(kept[0].dtype) for grad in wide), None, None)


_predict.defvjp(_predict_forward, _predict_backward)


def _piece(number: jax.Array, size: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(lax.dynamic_slice_in_dim(array, number * size, size, 1) for array in arrays)


def _joined(pieces: jax.Array) -> jax.Array:
    """[S / P, B, P, ...] -> [B, S, ...]."""
    turned = jnp.moveaxis(pieces, 0, 1)
    return turned.reshape(turned.shape[0], -1, *turned.shape[3:])


def _of_piece(
    cap: float | None,
    x_BPD: jax.Array,
    words_VD: jax.Array,
    targets_BP: jax.Array,
    weight_BP: jax.Array,
) -> Predictions:
    logits_BPV = capped(einsum_float32("bpd,vd->bpv", x_BPD, words_VD), cap)
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
