"""The network of causal language models, of which GPT and Llama are two kinds.

RMS norms before attention, before the feed-forward layer and at the end, rotary positions,
grouped-query attention, and no biases. :class:`Kind` is what else differs.

Dropout is applied to the embedding, inside the feed-forward layer, and to the outputs of attention
and feed-forward layer. It is not applied to attention probabilities: no fused kernel supports that
with a mask per example, so the scores would be stored (8 GiB per layer for 32 sequences of 2048
tokens with 16 heads). So training, too, uses :func:`jaxtrain.ops.attention.attend`.

Shapes: B sequences, S tokens, D hidden width, N query heads, H heads of keys and values, K head
width, F feed-forward width, V vocabulary, I half of K.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.errors import InputError
from jaxtrain.models.causal_settings import Sizes
from jaxtrain.models.contract import Batch, Model, ModelConfig, Sums
from jaxtrain.ops import attention, chunked_loss, generation, token_frequencies
from jaxtrain.ops.init import normal_init
from jaxtrain.ops.layers import Remat, capped, dropout, embed, remat, split_keys

Kernel = Callable[[nnx.Rngs, int, int], nnx.Param[jax.Array]]
"""Draws an initial kernel [in, out]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """What is the same in a kind of network at any size.

    Attributes:
        norm_scales: whether the norms have a weight.
        qk_norm: whether queries, keys and the embedding are normalized.
        swiglu: whether the feed-forward layer is SwiGLU, and not a squared ReLU.
        tied: whether the embedding is the output layer, too.
        cap: of the logits, by tanh; None for none.
        clockwise: the direction in which positions rotate.
        embedding_std: standard deviation of the initial embedding.
        reading: kernels that read the residual stream.
        writing: kernels that write to it.
    """

    norm_scales: bool
    qk_norm: bool
    swiglu: bool
    tied: bool
    cap: float | None
    clockwise: bool
    embedding_std: float
    reading: Kernel
    writing: Kernel


class CausalConfig(ModelConfig):
    """What the configs of all kinds have in common."""

    kind: ClassVar[Kind]
    fixed: ClassVar[Mapping[str, Any]]
    """The kind's properties in the config.json of transformers."""
    theirs = MappingProxyType[str, Any]({})
    """The values of these properties that transformers assumes if a file has none."""
    architecture: ClassVar[str]
    """The name of transformers' class."""
    width_field: ClassVar[str]
    """The field with the hidden width."""
    most_head_width: ClassVar[int]
    """The largest head width to suggest."""
    task = "generate"
    usage = 'generate {run} "Once upon a time"'

    vocab_size: int
    sequence_length: int
    remat: Remat
    loss_piece: int
    dropout: float = 0.0

    @property
    def sizes(self) -> Sizes:
        """Returns the sizes of the network."""
        raise NotImplementedError

    @property
    def head_width(self) -> int:
        """Returns the head width."""
        return self.sizes.head_width

    def check(self) -> None:
        """Checks that heads and chunks divide widths and sequences."""
        sizes, field = self.sizes, f"model.{self.width_field}"
        d, n, h = sizes.hidden, sizes.heads, sizes.kv_heads
        if d % (2 * n):
            fits = [
                m for m in range(1, d + 1) if d % (2 * m) == 0 and d // m <= self.most_head_width
            ]
            near = f"use {min(fits, key=lambda m: abs(m - n))}" if fits else "no number fits"
            raise InputError(
                f"model.heads={n} must divide {field}={d} into an even head width: {near}",
                about=("model.heads", field),
            )
        chunked_loss.check_chunk(self.loss_piece, self.sequence_length)
        if n % h:
            raise InputError(
                f"model.kv_heads={h} must divide the {n} query heads (model.heads): use "
                f"{max(m for m in range(1, min(h, n) + 1) if n % m == 0)}",
                about=("model.kv_heads", "model.heads"),
            )

    def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """See :func:`jaxtrain.ops.attention.batch_spec`."""
        return attention.batch_spec(batch_size, self.sequence_length)

    def index_limits(self) -> dict[str, int]:
        """Returns the number of valid values of each array of indices in a batch."""
        return {"tokens": self.vocab_size, "targets": self.vocab_size}

    def tokens_per_example(self) -> int:
        """Returns the number of tokens per sequence."""
        return self.sequence_length

    def to_settings(self) -> dict[str, Any]:
        """Returns the `config.json` of transformers."""
        assert self.model_type is not None, "each kind has one"
        return self.sizes.to_settings(self.model_type, self.architecture, self.fixed)

    @classmethod
    def from_sizes(cls, sizes: Sizes) -> Self:
        """Returns the config of a network with these sizes.

        Raises:
            InputError: this kind of network has other sizes.
        """
        raise NotImplementedError

    @classmethod
    def from_settings(cls, content: Mapping[str, Any], source: str) -> Self:
        """Reads a `config.json` of transformers; it has no dropout of this kind.

        Raises:
            InputError: it describes another network.
        """
        sizes = Sizes.from_settings({**cls.theirs, **content}, cls.fixed, source)
        try:
            return cls.from_sizes(sizes)
        except InputError as error:
            raise InputError(f"{source}: {error}") from error


class Embedding(nnx.Module):
    """Token embedding."""

    def __init__(self, config: CausalConfig, rngs: nnx.Rngs) -> None:
        sizes, self.kind = config.sizes, config.kind
        shape = (sizes.vocab_size, sizes.hidden)
        self.table = normal_init(rngs, shape, self.kind.embedding_std)
        self.norm_eps = sizes.norm_eps
        self.dropout = config.dropout

    def __call__(self, tokens_BS: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        """Maps ids to [B, S, D]."""
        x_BSD = embed(self.table[...], tokens_BS)
        if self.kind.qk_norm:
            x_BSD = attention.rms_norm(x_BSD, self.norm_eps)
        return dropout(x_BSD, self.dropout, keys_B)


class Block(nnx.Module):
    """Attention and feed-forward layer, each with a residual connection; kernels are [in, out]."""

    def __init__(self, config: CausalConfig, rngs: nnx.Rngs) -> None:
        sizes, kind = config.sizes, config.kind
        d, ff = sizes.hidden, sizes.ff
        shared = sizes.kv_heads * sizes.head_width
        self.attention_norm = _scale(d, kind)
        self.q = kind.reading(rngs, d, d)
        self.k = kind.reading(rngs, d, shared)
        self.v = kind.reading(rngs, d, shared)
        self.out = kind.writing(rngs, d, d)
        self.ff_norm = _scale(d, kind)
        self.gate = kind.reading(rngs, d, ff) if kind.swiglu else None
        self.up = kind.reading(rngs, d, ff)
        self.down = kind.writing(rngs, ff, d)
        self.sizes, self.kind, self.dropout = sizes, kind, config.dropout

    def __call__(
        self,
        x_BSD: jax.Array,
        cos_SI: jax.Array,
        sin_SI: jax.Array,
        keys_B: jax.Array | None = None,
    ) -> jax.Array:
        """Maps [B, S, D] to the same shape; a position attends to itself and those before it."""
        return self._onward(x_BSD, attention.attend(*self._heads(x_BSD, cos_SI, sin_SI)), keys_B)

    def decode_step(
        self,
        x_BSD: jax.Array,
        cos_SI: jax.Array,
        sin_SI: jax.Array,
        cache: attention.Cache,
        start: int | jax.Array,
    ) -> tuple[jax.Array, attention.Cache]:
        """Does the same for positions from `start`, which also attend to the cache."""
        heads = self._heads(x_BSD, cos_SI, sin_SI)
        seen_BSNK, cache = attention.attend_cached(*heads, cache, start)
        return self._onward(x_BSD, seen_BSNK, None), cache

    def _onward(
        self, x_BSD: jax.Array, seen_BSNK: jax.Array, keys_B: jax.Array | None
    ) -> jax.Array:
        of_attention, of_ff, of_output = split_keys(keys_B, 3)
        h_BSD = seen_BSNK.reshape(x_BSD.shape) @ self.out[...]
        x_BSD = x_BSD + dropout(h_BSD, self.dropout, of_attention)
        h_BSD = self._norm(x_BSD, self.ff_norm)
        if self.gate is None:
            h_BSF = jnp.square(jax.nn.relu(h_BSD @ self.up[...]))
        else:
            h_BSF = jax.nn.silu(h_BSD @ self.gate[...]) * (h_BSD @ self.up[...])
        h_BSD = dropout(h_BSF, self.dropout, of_ff) @ self.down[...]
        return x_BSD + dropout(h_BSD, self.dropout, of_output)

    def _heads(
        self, x_BSD: jax.Array, cos_SI: jax.Array, sin_SI: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries [B, S, N, K], keys and values [B, S, H, K]."""
        b, s, _ = x_BSD.shape
        x_BSD = self._norm(x_BSD, self.attention_norm)
        q_BSNK = (x_BSD @ self.q[...]).reshape(b, s, self.sizes.heads, -1)
        k_BSHK = (x_BSD @ self.k[...]).reshape(b, s, self.sizes.kv_heads, -1)
        v_BSHK = (x_BSD @ self.v[...]).reshape(b, s, self.sizes.kv_heads, -1)
        q_BSNK, k_BSHK = (self._rotated(x, cos_SI, sin_SI) for x in (q_BSNK, k_BSHK))
        return q_BSNK, k_BSHK, v_BSHK

    def _rotated(self, x_BSNK: jax.Array, cos_SI: jax.Array, sin_SI: jax.Array) -> jax.Array:
        rotated = attention.rotate(x_BSNK, cos_SI, sin_SI)
        if self.kind.qk_norm:
            rotated = self._norm(rotated, None)
        return rotated.astype(x_BSNK.dtype)

    def _norm(self, x: jax.Array, scale: nnx.Param[jax.Array] | None) -> jax.Array:
        return attention.rms_norm(x, self.sizes.norm_eps, None if scale is None else scale[...])


class Head(nnx.Module):
    """The last norm and the output layer.

    An output layer of its own starts as zeros, so that all tokens are equally likely.
    """

    def __init__(self, config: CausalConfig) -> None:
        sizes, self.kind = config.sizes, config.kind
        self.norm = _scale(sizes.hidden, self.kind)
        shape = (sizes.vocab_size, sizes.hidden)
        self.words = None if self.kind.tied else nnx.Param(jnp.zeros(shape))
        self.norm_eps, self.chunk = sizes.norm_eps, config.loss_piece

    def __call__(
        self,
        embedding: Embedding,
        x_BSD: jax.Array,
        targets_BS: jax.Array,
        weight_BS: jax.Array,
    ) -> chunked_loss.Predictions:
        """Computes the cost of the targets; see :func:`jaxtrain.ops.chunked_loss.predict`."""
        x_BSD, words = self._normalized(x_BSD), self._words(embedding)
        return chunked_loss.predict(
            x_BSD, words, targets_BS, weight_BS, cap=self.kind.cap, chunk=self.chunk
        )

    def logits(self, embedding: Embedding, x_BSD: jax.Array) -> jax.Array:
        """Returns all logits, float32 [B, S, V]."""
        x_BSD = self._normalized(x_BSD)
        logits_BSV = attention.einsum_float32("bsd,vd->bsv", x_BSD, self._words(embedding))
        return logits_BSV if self.kind.cap is None else capped(logits_BSV, self.kind.cap)

    def _normalized(self, x_BSD: jax.Array) -> jax.Array:
        scale = None if self.norm is None else self.norm[...]
        return attention.rms_norm(x_BSD, self.norm_eps, scale)

    def _words(self, embedding: Embedding) -> jax.Array:
        return (embedding.table if self.words is None else self.words)[...]


class CausalModel(Model):
    """A causal language model; each kind stores its parts under names of its own."""

    def __init__(self, config: CausalConfig) -> None:
        self.sizes, self.kind = config.sizes, config.kind
        self.remat, self.dropout = config.remat, config.dropout

    def parts(self) -> tuple[Embedding, Sequence[Block], Head]:
        """Returns embedding, blocks, and head."""
        raise NotImplementedError

    def angles(self, length: int, start: int | jax.Array = 0) -> tuple[jax.Array, jax.Array]:
        """Returns cosines and sines for :func:`jaxtrain.ops.attention.rotate`, float32 [S, I]."""
        sizes = self.sizes
        cos_SI, sin_SI = attention.rotary(length, sizes.head_width, sizes.rotary_base, start)
        return cos_SI, sin_SI if self.kind.clockwise else -sin_SI

    def encode(self, tokens_BS: jax.Array, keys_B: jax.Array | None = None) -> jax.Array:
        """Maps ids to vectors [B, S, D] before the last norm; without keys, without dropout."""
        embedding, blocks, _ = self.parts()
        of_embedding, *of_blocks = split_keys(keys_B, 1 + len(blocks))
        cos_SI, sin_SI = self.angles(tokens_BS.shape[1])
        x_BSD = remat(Embedding.__call__, self.remat)(embedding, tokens_BS, of_embedding)
        block_of = remat(Block.__call__, self.remat)
        for block, of_block in zip(blocks, of_blocks, strict=True):
            x_BSD = block_of(block, x_BSD, cos_SI, sin_SI, of_block)
        return x_BSD

    def logits(self, tokens_BS: jax.Array) -> jax.Array:
        """Returns float32 logits [B, S, V] of each next token; for short sequences."""
        embedding, _, head = self.parts()
        return remat(Head.logits, self.remat)(head, embedding, self.encode(tokens_BS))

    def cache(self, rows: int, length: int) -> list[attention.Cache]:
        """Allocates `length` positions of `rows` sequences, for :meth:`decode_step`."""
        embedding, blocks, _ = self.parts()
        shape = rows, length, self.sizes.kv_heads, self.sizes.head_width
        dtype = embedding.table[...].dtype
        return [attention.empty_cache(*shape, dtype) for _ in blocks]

    def decode_step(
        self,
        tokens_BS: jax.Array,
        count: int | jax.Array,
        cache: list[attention.Cache],
        start: int | jax.Array,
    ) -> tuple[jax.Array, list[attention.Cache]]:
        """Returns the logits after the first `count` tokens; see the base class."""
        embedding, blocks, head = self.parts()
        angles = self.angles(tokens_BS.shape[1], start)
        x_BSD = embedding(tokens_BS, None)
        last_B1D, kept = attention.onward(blocks, x_BSD, count, angles, cache, start)
        return head.logits(embedding, last_B1D)[:, 0], kept

    def samples(self, batch: Batch) -> dict[str, jax.Array]:
        """Completes the beginnings of the first examples."""
        return {"text": generation.samples(self, batch)}

    def loss(self, batch: Batch, keys_B: jax.Array) -> tuple[jax.Array, jax.Array, Sums]:
        """Computes the cross-entropy over targets, in nats, and `accuracy`."""
        keys = keys_B if self.dropout else None
        return chunked_loss.loss_sums(self._predict(batch, keys), batch)

    def evaluate(self, batch: Batch) -> Sums:
        """Computes `loss` and `accuracy` over targets, and `bits_per_byte` of their text."""
        return chunked_loss.evaluation_sums(self._predict(batch, None), batch)

    def constant_sums(self, batch: Batch) -> dict[str, jax.Array]:
        """Counts the targets."""
        size = self.parts()[0].table.shape[0]
        return token_frequencies.counts(batch["targets"], chunked_loss.target_weights(batch), size)

    @staticmethod
    def constant(sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns the `loss` of the tokens' frequencies."""
        return {"loss": token_frequencies.loss_of_frequencies(sums["counts"])}

    def _predict(self, batch: Batch, keys_B: jax.Array | None) -> chunked_loss.Predictions:
        embedding, _, head = self.parts()
        x_BSD = self.encode(batch["tokens"], keys_B)
        # Without remat, which would recompute the loss and gather its parameter again: the loss
        # keeps only its gradient, and no gathered parameter.
        weight_BS = chunked_loss.target_weights(batch)
        return head(embedding, x_BSD, batch["targets"], weight_BS)


def _scale(width: int, kind: Kind) -> nnx.Param[jax.Array] | None:
    return nnx.Param(jnp.ones((width,))) if kind.norm_scales else None
