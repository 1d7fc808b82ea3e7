"""Attention, and the rotary positions of its queries and keys.

Shapes: B sequences, S tokens, D hidden width, N query heads, H heads of keys and values (H divides
N), K width of a head, T keys, Q either S or 1 (the same for every query).
"""

import contextlib
import contextvars
import functools
import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.ops.layers import dropout, einsum_float32
from jaxtrain.ops.per_device import platform

# Head widths that cuDNN's attention supports on every GPU since A100.
_LARGEST_HEAD = 128
_HEAD_UNIT = 8
# Queries of a block of local attention, as a multiple of its reach. Each block has a copy of its
# keys and values: with 1, local layers move 1.6 times as many bytes (benchmarks/LOG.md).
_BLOCK = 4


_counts = contextvars.ContextVar("counts", default=False)


def fewest_heads(width: int, largest: int) -> int:
    """Returns the smallest number of heads, each at most `largest` wide, that divides a width.

    Prefers head widths that are multiples of eight, which fused attention requires, then even
    widths, which rotary positions require.
    """
    fewest = math.ceil(width / largest)
    counts = [n for step in (8, 2) for n in range(fewest, 2 * fewest) if width % (step * n) == 0]
    return counts[0] if counts else fewest


def rotary(
    length: int, width: int, base: float, start: int | jax.Array = 0
) -> tuple[jax.Array, jax.Array]:
    """Returns cosines and sines of `position / base^(2 i / width)`, float32 [S, K / 2] each.

    Rotary positions (https://arxiv.org/abs/2104.09864), with one angle per pair of a head.

    Args:
        start: the first position, int32 [].
    """
    exponent_I = jnp.arange(0, width, 2, dtype=jnp.float32) / width
    position_S = jnp.asarray(start, jnp.float32) + jnp.arange(length, dtype=jnp.float32)
    angles_SI = jnp.outer(position_S, base**-exponent_I)
    return jnp.cos(angles_SI), jnp.sin(angles_SI)


@jax.custom_vjp
def rotate(x_BSNK: jax.Array, cos_SI: jax.Array, sin_SI: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + K / 2) of each head by the position's angles.

    As in nanochat, `y1 = x1 cos + x2 sin` and `y2 = x2 cos - x1 sin`: the product of a rotated
    query and a rotated key depends only on the difference of their positions. The angles get no
    gradient.

    Returns:
        [B, S, N, K] in the dtype of `x_BSNK`; float32 inside.
    """
    return _rotated(x_BSNK, cos_SI, sin_SI).astype(x_BSNK.dtype)


Angles = tuple[jax.Array, jax.Array]


def _rotate_forward(
    x_BSNK: jax.Array, cos_SI: jax.Array, sin_SI: jax.Array
) -> tuple[jax.Array, Angles]:
    return rotate(x_BSNK, cos_SI, sin_SI), (cos_SI, sin_SI)


def _rotate_backward(angles: Angles, grad_BSNK: jax.Array) -> tuple[jax.Array, None, None]:
    cos_SI, sin_SI = angles
    grad_BSNK = _written(grad_BSNK)
    return _rotated(grad_BSNK, cos_SI, -sin_SI).astype(grad_BSNK.dtype), None, None


rotate.defvjp(_rotate_forward, _rotate_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def rotate_normalized(
    x_BSNK: jax.Array, cos_SI: jax.Array, sin_SI: jax.Array, eps: float, scale: float
) -> jax.Array:
    """Rotates as :func:`rotate` does, and divides each head by the root of its mean square.

    A rotation changes no mean square. So the inverse root is that of the input, and the gradient
    needs only it and the result, in the dtype of `x_BSNK`. With the gradients of the separate
    operations, XLA keeps float32 halves of all heads: 17 of the 238 GB that the step of a GPT moves
    (12 layers, 32 sequences of 2,048 tokens, jax 0.10.2, for an H100).
    """
    return _normalized_forward(x_BSNK, cos_SI, sin_SI, eps, scale)[0]


def _normalized_forward(
    x_BSNK: jax.Array, cos_SI: jax.Array, sin_SI: jax.Array, eps: float, scale: float
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, Angles]]:
    square_BSN1 = jnp.square(x_BSNK.astype(jnp.float32)).mean(-1, keepdims=True)
    inverse_BSN1 = _written(scale * lax.rsqrt(square_BSN1 + eps))
    y_BSNK = (_rotated(x_BSNK, cos_SI, sin_SI) * inverse_BSN1).astype(x_BSNK.dtype)
    return y_BSNK, (y_BSNK, inverse_BSN1, (cos_SI, sin_SI))


def _normalized_backward(
    eps: float, scale: float, kept: tuple[jax.Array, jax.Array, Angles], grad_BSNK: jax.Array
) -> tuple[jax.Array, None, None]:
    """Rotates `inverse (grad - y mean(grad y))` back, with y of root mean square 1."""
    del eps
    y_BSNK, inverse_BSN1, (cos_SI, sin_SI) = kept
    y_BSNK, grad_BSNK = _written(y_BSNK), _written(grad_BSNK)
    product_BSNK = grad_BSNK.astype(jnp.float32) * y_BSNK.astype(jnp.float32)
    along_BSN1 = _written(product_BSNK.mean(-1, keepdims=True) / scale**2)
    grad_x_BSNK = _rotated(grad_BSNK, cos_SI, -sin_SI) - along_BSN1 * _rotated(
        y_BSNK, cos_SI, -sin_SI
    )
    return (inverse_BSN1 * grad_x_BSNK).astype(grad_BSNK.dtype), None, None


rotate_normalized.defvjp(_normalized_forward, _normalized_backward)


def _rotated(x_BSNK: jax.Array, cos_SI: jax.Array, sin_SI: jax.Array) -> jax.Array:
    first, second = jnp.split(x_BSNK.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_SI[None, :, None], sin_SI[None, :, None]
    return jnp.concatenate([first * cos + second * sin, second * cos - first * sin], axis=-1)


def _written(x: jax.Array) -> jax.Array:
    """Has a GPU write an array that it would otherwise keep in float32, or compute again."""
    written: jax.Array = x if platform() == "cpu" else lax.optimization_barrier(x)
    return written


def attend(
    q_BSNK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    visible_BQS: jax.Array | None = None,
    *,
    rate: float = 0.0,
    keys_B: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    """Computes attention with scale `1 / sqrt(K)`; query head n uses head `n // (N / H)`.

    NVIDIA GPUs use cuDNN's fused attention for 16-bit arrays whose K is a multiple of 8 up to 128,
    without dropout, and otherwise warn. The fallback, and other platforms, use matmuls and a
    float32 softmax.

    Args:
        visible_BQS: bool, the keys that a query sees; None is causal attention. Q is 1 if all
            queries see the same keys; these must come first, as in a sequence that ends in padding.
            A query that sees no key gets some finite result. Requires H to be N.
        rate: dropout rate of the probabilities, with `visible_BQS`.
        keys_B: each example's random key for dropout; without keys, nothing is dropped.
        window: with causal attention, how many tokens before itself a query sees; None is all.

    Returns:
        [B, S, N, K], in the dtype of the queries.
    """
    if window is not None and window >= q_BSNK.shape[1] - 1:
        window = None  # nothing is hidden
    if _counts.get() and window is not None:
        return _causal_attention(q_BSNK, k_BSHK[:, : window + 1], v_BSHK[:, : window + 1])
    rate = 0.0 if keys_B is None else rate
    if platform() in ("gpu", "cuda"):
        obstacle = _obstacle(q_BSNK, visible_BQS, rate)
        if obstacle is None:
            return _attend_by_cudnn(q_BSNK, k_BSHK, v_BSHK, visible_BQS, window)
        warnings.warn(
            f"attention with {obstacle} is not fused and stores all its scores", stacklevel=1
        )
    if visible_BQS is None:
        return _causal_attention(q_BSNK, k_BSHK, v_BSHK, window=window)
    return _visible_attention(q_BSNK, k_BSHK, v_BSHK, visible_BQS, rate, keys_B)


@contextlib.contextmanager
def counted() -> Iterator[None]:
    """Within it, attention to nearby keys is traced with as many keys as a query sees.

    Its results are wrong. It is for counting the operations that a model needs: programs also
    compute scores of keys that they hide, in blocks, or without fused attention all of them.
    """
    token = _counts.set(True)
    try:
        yield
    finally:
        _counts.reset(token)


def near_blocks(segments_BS: jax.Array, reach: int) -> jax.Array:
    """Returns the keys that each query of a block sees, for :func:`attend_near`.

    They are those of the query's segment that are at most `reach` positions away.

    Args:
        segments_BS: the number of each token's segment, such as its document, at least 0.
        reach: at least 1.

    Returns:
        bool [B, C, L, T]: C blocks of L queries, at most `_BLOCK` times `reach`, and the T keys of
        each block and of `reach` positions on each side.
    """
    length = segments_BS.shape[1]
    length = max(reach, min(_BLOCK * reach, length + length % 2))
    query_BCL, key_BCT = (
        _blocks(segments_BS, length, 0, -1),
        _blocks(segments_BS, length, reach, -1),
    )
    query_L1, key_1T = jnp.arange(length)[:, None], jnp.arange(-reach, length + reach)[None]
    near_LT = jnp.abs(query_L1 - key_1T) <= reach
    return (query_BCL[..., None] == key_BCT[:, :, None]) & near_LT[None, None]


def attend_near(
    q_BSNK: jax.Array, k_BSNK: jax.Array, v_BSNK: jax.Array, visible_BCLT: jax.Array
) -> jax.Array:
    """Computes attention to the keys nearby, with scores [B, C, N, L, T]: linear in S.

    cuDNN's attention has a window to both sides only with a causal mask, and a mask [S, S] would
    compute all scores.

    Returns:
        [B, S, N, K], in the dtype of the queries.
    """
    (b, s, *heads), (_, _, length, keys) = q_BSNK.shape, visible_BCLT.shape
    if _counts.get():
        near = keys - length + 1
        return _causal_attention(q_BSNK, k_BSNK[:, :near], v_BSNK[:, :near])
    q_BCLNK = _blocks(q_BSNK, length, 0)
    k_BCTNK, v_BCTNK = (_blocks(x, length, (keys - length) // 2) for x in (k_BSNK, v_BSNK))
    # Each block becomes an example, and stays on the device of its sequence.
    blocks = (x.reshape(-1, *x.shape[2:]) for x in (q_BCLNK, k_BCTNK, v_BCTNK, visible_BCLT))
    return attend(*blocks).reshape(b, -1, *heads)[:, :s]


def _blocks(x_BS: jax.Array, length: int, reach: int, fill: int = 0) -> jax.Array:
    """Divides sequences [B, S, ...] into blocks, with the ends of their neighbors.

    Args:
        length: of a block.
        reach: positions of the blocks before and after it to add, at most `length`.
        fill: what is beyond the ends of a sequence.

    Returns:
        [B, C, reach + length + reach, ...].
    """
    b, s, *rest_shape = x_BS.shape
    pads = ((0, 0), (0, -s % length)) + ((0, 0),) * len(rest_shape)
    x_BCL = jnp.pad(x_BS, pads, constant_values=fill).reshape(b, -1, length, *rest_shape)
    if not reach:
        return x_BCL
    end_BCR = jnp.full((b, 1, reach, *rest_shape), fill, x_BS.dtype)
    before_BCR = jnp.concatenate([end_BCR, x_BCL[:, :-1, length - reach :]], axis=1)
    after_BCR = jnp.concatenate([x_BCL[:, 1:, :reach], end_BCR], axis=1)
    return jnp.concatenate([before_BCR, x_BCL, after_BCR], axis=2)


def _obstacle(q_BSNK: jax.Array, visible_BQS: jax.Array | None, rate: float) -> str | None:
    """Returns why cuDNN's attention cannot be used; None if it can."""
    length, _, width = q_BSNK.shape[1:]
    dtype = q_BSNK.dtype
    if dtype not in (jnp.bfloat16, jnp.float16) or width % _HEAD_UNIT or width > _LARGEST_HEAD:
        return (
            f"heads of width {width} in {dtype} (cuDNN needs bfloat16 and head widths that are "
            f"multiples of {_HEAD_UNIT} up to {_LARGEST_HEAD})"
        )
    if rate:
        return f"dropout {rate} of its probabilities (set model.attention_dropout to 0)"
    if visible_BQS is not None and visible_BQS.shape[1] > 1 and length % 2:
        return f"a mask of {length} x {length} (cuDNN needs an even length)"
    return None


def _attend_by_cudnn(
    q_BSNK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    visible_BQS: jax.Array | None,
    window: int | None = None,
) -> jax.Array:
    """Computes attention without storing an array [B, N, S, S].

    If all queries see the same keys, cuDNN gets their number, and otherwise a mask [B, 1, S, S] in
    the dtype of the queries. It also takes the offsets of packed documents, but only on Hopper and
    later.
    """
    call = functools.partial(
        jax.nn.dot_product_attention, q_BSNK, k_BSHK, v_BSHK, implementation="cudnn"
    )
    if visible_BQS is None:
        sides = None if window is None else (window, 0)  # jax adds the query itself
        return call(is_causal=True, local_window_size=sides)
    if visible_BQS.shape[1] > 1:
        return call(mask=visible_BQS[:, None])
    # At least 1: the softmax over no keys, in a sequence of only padding, would be NaN.
    seen_B = jnp.maximum(visible_BQS[:, 0].sum(-1, dtype=jnp.int32), 1)
    # All queries count, so that the result for padding is defined. Computed from an array of the
    # batch, and not a constant, which each device would have for the batch of all devices.
    queries_B = jnp.where(seen_B > 0, q_BSNK.shape[1], 0).astype(jnp.int32)
    return call(query_seq_lengths=queries_B, key_value_seq_lengths=seen_B)


@contextlib.contextmanager
def reproducible_gradients() -> Iterator[None]:
    """Within it, cuDNN's attention is lowered with gradients that are summed in a fixed order.

    XLA's option for that, `xla_gpu_deterministic_ops`, marks only the first of several equal layers
    and then finds no kernel for the others: with jax 0.11.2 on an H100, the first step of every
    model ended with `raw_hash_map<>::at` (https://github.com/openxla/xla/pull/46500). If jax marks
    all of them, XLA has nothing to mark.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused  # no public function sets it

    name = "create_dot_product_attention_backend_config_base"
    of_jax = getattr(fused, name)

    def marked(*arguments: Any, **named: Any) -> dict[str, Any]:
        config: dict[str, Any] = of_jax(*arguments, **named)
        config["cudnn_fmha_backend_config"]["force_deterministic"] = True
        return config

    setattr(fused, name, marked)
    try:
        yield
    finally:
        setattr(fused, name, of_jax)


def _causal_attention(
    q_BSNK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHK: jax.Array,
    start: int | jax.Array = 0,
    window: int | None = None,
) -> jax.Array:
    """Computes causal attention with the first query at position `start` of the keys."""
    b, s, n, k = q_BSNK.shape
    length, heads = k_BTHK.shape[1:3]
    q_BSHGK = q_BSNK.reshape(b, s, heads, n // heads, k)
    scores_BHGST = einsum_float32("bshgk,bthk->bhgst", q_BSHGK, k_BTHK) / math.sqrt(k)
    query_S1, key_1T = start + jnp.arange(s)[:, None], jnp.arange(length)[None]
    past_ST = key_1T <= query_S1
    if window is not None:
        past_ST &= key_1T >= query_S1 - window
    scores_BHGST = jnp.where(past_ST[None, None, None], scores_BHGST, jnp.finfo(jnp.float32).min)
    probs_BHGST = jax.nn.softmax(scores_BHGST, -1).astype(v_BTHK.dtype)
    return jnp.einsum("bhgst,bthk->bshgk", probs_BHGST, v_BTHK).reshape(b, s, n, k)


def _visible_attention(
    q_BSNK: jax.Array,
    k_BSNK: jax.Array,
    v_BSNK: jax.Array,
    visible_BQS: jax.Array,
    rate: float,
    keys_B: jax.Array | None,
) -> jax.Array:
    """Computes attention to visible keys with matmuls and a float32 softmax."""
    scores_BNST = einsum_float32("bsnk,btnk->bnst", q_BSNK, k_BSNK)
    scores_BNST = scores_BNST / math.sqrt(q_BSNK.shape[-1])
    # Not -inf: a row that is all padding would become NaN.
    lowest = jnp.finfo(jnp.float32).min
    scores_BNST = jnp.where(visible_BQS[:, None], scores_BNST, lowest)
    probs_BNST = jax.nn.softmax(scores_BNST, -1).astype(q_BSNK.dtype)
    probs_BNST = dropout(probs_BNST, rate, keys_B)
    return jnp.einsum("bnst,btnk->bsnk", probs_BNST, v_BSNK)


class Cache(NamedTuple):
    """The keys and values of one layer so far.

    Attributes:
        key: [B, T, H, K], with rotary positions and norm applied.
        value: [B, T, H, K].
    """

    key: jax.Array
    value: jax.Array


def empty_cache(rows: int, length: int, heads: int, width: int, dtype: Any) -> Cache:
    """Allocates a cache for `length` positions of `rows` sequences."""
    blank_BTHK = jnp.zeros((rows, length, heads, width), dtype)
    return Cache(blank_BTHK, blank_BTHK)


def attend_cached(
    q_BSNK: jax.Array,
    k_BSHK: jax.Array,
    v_BSHK: jax.Array,
    cache: Cache,
    start: int | jax.Array,
    *,
    window: int | None = None,
) -> tuple[jax.Array, Cache]:
    """Computes causal attention of new positions to the cache and to themselves.

    Cache entries from `start` are overwritten or ignored. So a sequence may end in filler: no
    earlier position attends to it, and the tokens that follow replace it.

    Args:
        q_BSNK: queries of the positions `start .. start + S - 1`, which must fit into the cache.
        start: int32 [].
        window: how many tokens before itself a query sees; None is all. Older ones stay cached.

    Returns:
        [B, S, N, K], in the dtype of the queries, and the cache with the new positions.
    """
    at = (0, start, 0, 0)
    cache = Cache(
        lax.dynamic_update_slice(cache.key, k_BSHK, at),
        lax.dynamic_update_slice(cache.value, v_BSHK, at),
    )
    return _causal_attention(q_BSNK, cache.key, cache.value, start, window), cache
