"""The output layer of a masked language model, whose vocabulary is padded.

A GPU loads 16 bytes at a time, from multiples of 16 bytes, and rows of 30,522 bfloat16 logits, of
BERT's vocabulary, begin elsewhere. So vectors are multiplied by all token vectors, and by zeros up
to a multiple of 64 tokens.

Shapes: B examples, M predicted positions, D width, V vocabulary, U padded vocabulary.
"""

import functools

import jax
import jax.numpy as jnp

from jaxtrain.ops.layers import add_shared, cross_entropy

_UNIT = 64


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def products(dtype: str, word_VD: jax.Array, h_BMD: jax.Array) -> jax.Array:
    """Returns the logits [B, M, U] without a bias, in `dtype`; those of missing tokens are 0.

    Keeps the token vectors themselves for the backward pass, not the padded ones: these would stay
    in memory where the vectors are gathered from shards (:func:`jaxtrain.ops.layers.remat`).
    """
    return jnp.einsum("bmd,vd->bmv", h_BMD, _padded(word_VD), preferred_element_type=dtype)


def _padded(word_VD: jax.Array) -> jax.Array:
    return jnp.pad(word_VD, ((0, -word_VD.shape[0] % _UNIT), (0, 0)))


def _forward(
    dtype: str, word_VD: jax.Array, h_BMD: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return products(dtype, word_VD, h_BMD), (word_VD, h_BMD)


def _backward(
    dtype: str, kept: tuple[jax.Array, jax.Array], grad_BMU: jax.Array
) -> tuple[jax.Array, jax.Array]:
    del dtype
    word_VD, h_BMD = kept
    low_BMU = grad_BMU.astype(h_BMD.dtype)
    of_word = jnp.einsum("bmv,bmd->vd", low_BMU, h_BMD)[: word_VD.shape[0]]
    return of_word, jnp.einsum("bmv,vd->bmd", low_BMU, _padded(word_VD))


products.defvjp(_forward, _backward)


def logits(products_BMU: jax.Array, bias_V: jax.Array) -> jax.Array:
    """Returns float32 logits [B, M, V]."""
    return add_shared(products_BMU[..., : bias_V.shape[0]].astype(jnp.float32), bias_V)


def costs(
    products_BMU: jax.Array, bias_V: jax.Array, targets_BM: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the result of :func:`jaxtrain.ops.layers.cross_entropy`."""
    missing = products_BMU.shape[-1] - bias_V.shape[0]
    bias_U = jnp.pad(bias_V, (0, missing), constant_values=-jnp.inf)
    return cross_entropy(products_BMU, targets_BM, bias=bias_U)
