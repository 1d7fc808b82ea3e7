"""What causal language models share: batches, norm, positions and attention.

Shapes: B sequences, S tokens, D hidden width, N query heads, H heads of keys and values (H divides
N), K width of a head.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtrain.ops.layers import einsum_float32
from jaxtrain.ops.per_device import platform

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
    multiple of 8 up to 128; where it cannot, a warning says so. All others take plain products and
    a float32 softmax.

    Returns:
        [B, S, N, K], of the dtype of the queries.
    """
    if platform() not in ("gpu", "cuda"):
        return _xla_attention(q_BSNK, k_BSHK, v_BSHK)
    width, dtype = q_BSNK.shape[-1], q_BSNK.dtype
    if dtype in (jnp.bfloat16, jnp.float16) and width % _HEAD_UNIT == 0 and width <= _LARGEST_HEAD:
        return _attend_by_cudnn(q_BSNK, k_BSHK, v_BSHK)
    warnings.warn(
        f"attention by heads {width} wide in {dtype} is not fused, and keeps all its scores: "
        f"cuDNN's takes bfloat16 and multiples of {_HEAD_UNIT} up to {_LARGEST_HEAD}",
        stacklevel=1,
    )
    return _xla_attention(q_BSNK, k_BSHK, v_BSHK)


def _attend_by_cudnn(q_BSNK: jax.Array, k_BSHK: jax.Array, v_BSHK: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(
        q_BSNK, k_BSHK, v_BSHK, is_causal=True, implementation="cudnn"
    )


def _xla_attention(
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
    return _xla_attention(q_BSNK, cache.key, cache.value, start), cache


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
        blocks: each with ``decode_step(x_BSD, cos_SI, sin_SI, cache, start)``.
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
        x_BSD, after = block.decode_step(x_BSD, *angles, before, start)
        kept.append(after)
    return lax.dynamic_slice_in_dim(x_BSD, count - 1, 1, axis=1), kept
