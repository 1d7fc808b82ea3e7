"""The network of causal language models, of which GPT and Llama are two kinds.

RMS norms before attention, before the feed-forward layer and at the end, rotary positions,
grouped-query attention, and no biases. :class:`Kind` is what else differs, and :class:`Extras` is
what a network may add.

Dropout is applied to the embedding, inside the feed-forward layer, and to the outputs of attention
and feed-forward layer. It is not applied to attention probabilities: no fused kernel supports that
with a mask per example, so the scores would be stored (8 GiB per layer for 32 sequences of 2048
tokens with 16 heads). So training, too, uses :func:`jaxtrain.ops.attention.attend`.

Shapes: B sequences, S tokens, D hidden width, N query heads, H heads of keys and values, K head
width, F feed-forward width, V vocabulary, I half of K, C channels that a gate reads.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.errors import InputError
from jaxtrain.models.causal_settings import Sizes
from jaxtrain.models.contract import Batch, Model, ModelConfig, Sums
from jaxtrain.ops import attention, chunked_loss, generation, token_frequencies
from jaxtrain.ops.init import normal_init, uniform_init
from jaxtrain.ops.layers import (
    Remat,
    capped,
    dropout,
    embed,
    remat,
    rms_norm,
    split_keys,
    squared_relu,
)

Kernel = Callable[[nnx.Rngs, int, int], nnx.Param[jax.Array]]
"""Draws an initial kernel [in, out]."""

VALUE_CHANNELS, SMEAR_CHANNELS = 12, 24  # that the gates read, at most
_VALUE_GATE = 3.0  # upper bound
_GATE_INIT = 0.02  # upper bound


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """What is the same in a kind of network at any size.

    Attributes:
        qk_scale: factor on normalized queries and keys.
        swiglu: whether the feed-forward layer is SwiGLU, and not a squared ReLU.
        cap: of the logits, by tanh; None for none.
        clockwise: the direction in which positions rotate.
        reading: kernels of attention that read the residual stream.
        feeding: kernels of the feed-forward layer that read it.
        writing: kernels that write to it.
    """

    norm_scales: bool
    qk_norm: bool
    qk_scale: float = 1.0
    swiglu: bool
    tied: bool
    cap: float | None
    clockwise: bool
    embedding_std: float
    head_std: float = 0.0
    reading: Kernel
    feeding: Kernel
    writing: Kernel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extras:
    """What a network may add to its kind; each part works without the others.

    Attributes:
        windows: for each block, how many tokens before itself a token sees; None is all of them.
            () is None for each block.
        value_embeddings: whether the values of every second block, the last included, get an
            embedding of their token of their own, with a gate per head (ResFormer,
            https://arxiv.org/abs/2410.17897).
        residual_scalars: whether each block reads `a x + b x0` of the residual stream and the
            embedding, with trained scalars.
        backout: whether a trained part of the residual stream after the middle block is subtracted
            after the last one.
    """

    windows: tuple[int | None, ...] = ()
    value_embeddings: bool = False
    residual_scalars: bool = False
    smear: bool = False
    backout: bool = False

    def window(self, block: int) -> int | None:
        """Returns the window of a block."""
        return self.windows[block] if self.windows else None

    def has_values(self, block: int, blocks: int) -> bool:
        """Returns whether a block has a value embedding."""
        return self.value_embeddings and block % 2 == (blocks - 1) % 2


class CausalConfig(ModelConfig):
    """What the configs of all kinds have in common."""

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
    dropout: float = 0.0

    @property
    def kind(self) -> Kind:
        """Returns the kind of network."""
        raise NotImplementedError

    @property
    def extras(self) -> Extras:
        """Returns what the network adds to its kind."""
        return Extras()

    @property
    def sizes(self) -> Sizes:
        """Returns the sizes of the network."""
        raise NotImplementedError

    @property
    def head_width(self) -> int:
        """Returns the head width."""
        return self.sizes.head_width

    def check(self) -> None:
        """Checks that heads divide widths, and key heads query heads."""
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
        if n % h:
            raise InputError(
                f"model.kv_heads={h} must divide the {n} query heads (model.heads): use "
                f"{max(m for m in range(1, min(h, n) + 1) if n % m == 0)}",
                about=("model.kv_heads", "model.heads"),
            )

    def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """See :func:`jaxtrain.ops.chunked_loss.batch_spec`."""
        return chunked_loss.batch_spec(batch_size, self.sequence_length)

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
        """Returns the config of a network with these sizes."""
        raise NotImplementedError

    @classmethod
    def from_settings(cls, content: Mapping[str, Any], source: str) -> Self:
        """Reads a `config.json` of transformers; it has no dropout of this kind."""
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
            x_BSD = rms_norm(x_BSD, self.norm_eps)
        return dropout(x_BSD, self.dropout, keys_B)


class ValueEmbedding(nnx.Module):
    """An embedding that is added to the values of a block."""

    def __init__(self, config: CausalConfig, rngs: nnx.Rngs) -> None:
        sizes = config.sizes
        self.heads = sizes.kv_heads
        shape = (sizes.vocab_size, sizes.kv_heads * sizes.head_width)
        self.table = uniform_init(rngs, shape, (3 / sizes.hidden) ** 0.5)  # as kernels of values

    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        """Maps ids to [B, S, H, K]."""
        return embed(self.table[...], tokens_BS).reshape(*tokens_BS.shape, self.heads, -1)


class Smear(nnx.Module):
    """Adds a part of each embedding to the next: `x_t += scale sigmoid(gate x_t) x_(t-1)`."""

    def __init__(self, config: CausalConfig, rngs: nnx.Rngs) -> None:
        self.gate = _gate(rngs, min(SMEAR_CHANNELS, config.sizes.hidden), 1)
        self.scale = nnx.Param(jnp.zeros((1,)))

    def __call__(self, x_BSD: jax.Array, before_B1D: jax.Array | None = None) -> jax.Array:
        """Maps [B, S, D] to the same shape; None is for sequences that begin here."""
        if before_B1D is None:
            before_B1D = jnp.zeros_like(x_BSD[:, :1])
        before_BSD = jnp.concatenate([before_B1D, x_BSD[:, :-1]], axis=1)
        gate_BS1 = jax.nn.sigmoid(_gated(x_BSD, self.gate[...]))
        scale_111 = self.scale[...].astype(jnp.float32).reshape(1, 1, 1)
        return _mixed(x_BSD, 1.0, before_BSD, scale_111 * gate_BS1)


class Skip(NamedTuple):
    """What a block with residual scalars reads: `scale x + x0_scale x0`.

    Attributes:
        scale, x0_scale: [1].
    """

    scale: jax.Array
    x0_scale: jax.Array
    x0_BSD: jax.Array


class Block(nnx.Module):
    """Attention and feed-forward layer, each with a residual connection; kernels are [in, out]."""

    def __init__(self, config: CausalConfig, rngs: nnx.Rngs, number: int) -> None:
        sizes, kind = config.sizes, config.kind
        d, ff = sizes.hidden, sizes.ff
        shared = sizes.kv_heads * sizes.head_width
        self.attention_norm = _scale(d, kind)
        self.q = kind.reading(rngs, d, d)
        self.k = kind.reading(rngs, d, shared)
        self.v = kind.reading(rngs, d, shared)
        self.out = kind.writing(rngs, d, d)
        self.ff_norm = _scale(d, kind)
        self.gate = kind.feeding(rngs, d, ff) if kind.swiglu else None
        self.up = kind.feeding(rngs, d, ff)
        self.down = kind.writing(rngs, ff, d)
        gated = config.extras.has_values(number, sizes.layers)
        self.value_gate = _gate(rngs, min(VALUE_CHANNELS, d), sizes.kv_heads) if gated else None
        self.window = config.extras.window(number)
        self.sizes, self.kind, self.dropout = sizes, kind, config.dropout

    def __call__(
        self,
        x_BSD: jax.Array,
        cos_SI: jax.Array,
        sin_SI: jax.Array,
        keys_B: jax.Array | None = None,
        skip: Skip | None = None,
        values: ValueEmbedding | None = None,
        tokens_BS: jax.Array | None = None,
    ) -> jax.Array:
        """Maps [B, S, D] to the same shape; a position attends to itself and those before it.

        Args:
            values: with a value embedding, which is read here, so that a sharded table is gathered
                for this block only.
        """
        x_BSD = _skipped(x_BSD, skip)
        heads = self._heads(x_BSD, cos_SI, sin_SI, values, tokens_BS)
        return self._onward(x_BSD, attention.attend(*heads, window=self.window), keys_B)

    def decode_step(
        self,
        x_BSD: jax.Array,
        cos_SI: jax.Array,
        sin_SI: jax.Array,
        cache: attention.Cache,
        start: int | jax.Array,
        skip: Skip | None = None,
        values: ValueEmbedding | None = None,
        tokens_BS: jax.Array | None = None,
    ) -> tuple[jax.Array, attention.Cache]:
        """Does the same for positions from `start`, which also attend to the cache."""
        x_BSD = _skipped(x_BSD, skip)
        heads = self._heads(x_BSD, cos_SI, sin_SI, values, tokens_BS)
        seen_BSNK, cache = attention.attend_cached(*heads, cache, start, window=self.window)
        return self._onward(x_BSD, seen_BSNK, None), cache

    def _onward(
        self, x_BSD: jax.Array, seen_BSNK: jax.Array, keys_B: jax.Array | None
    ) -> jax.Array:
        of_attention, of_ff, of_output = split_keys(keys_B, 3)
        h_BSD = seen_BSNK.reshape(x_BSD.shape) @ self.out[...]
        x_BSD = x_BSD + dropout(h_BSD, self.dropout, of_attention)
        h_BSD = self._norm(x_BSD, self.ff_norm)
        if self.gate is None:
            h_BSF = squared_relu(h_BSD @ self.up[...])
        else:
            h_BSF = jax.nn.silu(h_BSD @ self.gate[...]) * (h_BSD @ self.up[...])
        h_BSD = dropout(h_BSF, self.dropout, of_ff) @ self.down[...]
        return x_BSD + dropout(h_BSD, self.dropout, of_output)

    def _heads(
        self,
        x_BSD: jax.Array,
        cos_SI: jax.Array,
        sin_SI: jax.Array,
        values: ValueEmbedding | None,
        tokens_BS: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        b, s, _ = x_BSD.shape
        x_BSD = self._norm(x_BSD, self.attention_norm)
        q_BSNK = (x_BSD @ self.q[...]).reshape(b, s, self.sizes.heads, -1)
        k_BSHK = (x_BSD @ self.k[...]).reshape(b, s, self.sizes.kv_heads, -1)
        v_BSHK = (x_BSD @ self.v[...]).reshape(b, s, self.sizes.kv_heads, -1)
        if values is not None:
            assert self.value_gate is not None, "the block has a value embedding"
            assert tokens_BS is not None, "the caller passes both"
            gate_BSH = _VALUE_GATE * jax.nn.sigmoid(_gated(x_BSD, self.value_gate[...]))
            v_BSHK = _mixed(v_BSHK, 1.0, values(tokens_BS), gate_BSH[..., None])
        q_BSNK, k_BSHK = (self._rotated(x, cos_SI, sin_SI) for x in (q_BSNK, k_BSHK))
        return q_BSNK, k_BSHK, v_BSHK

    def _rotated(self, x_BSNK: jax.Array, cos_SI: jax.Array, sin_SI: jax.Array) -> jax.Array:
        if not self.kind.qk_norm:
            return attention.rotate(x_BSNK, cos_SI, sin_SI)
        eps, scale = self.sizes.norm_eps, self.kind.qk_scale
        return attention.rotate_normalized(x_BSNK, cos_SI, sin_SI, eps, scale)

    def _norm(self, x: jax.Array, scale: nnx.Param[jax.Array] | None) -> jax.Array:
        return rms_norm(x, self.sizes.norm_eps, None if scale is None else scale[...])


class Head(nnx.Module):
    """The last norm and the output layer.

    An output layer of its own starts as zeros or close to it, so that all tokens are equally
    likely.
    """

    def __init__(self, config: CausalConfig, rngs: nnx.Rngs) -> None:
        sizes, self.kind = config.sizes, config.kind
        self.norm = _scale(sizes.hidden, self.kind)
        shape = (sizes.vocab_size, sizes.hidden)
        if self.kind.tied:
            self.words = None
        elif self.kind.head_std:
            self.words = normal_init(rngs, shape, self.kind.head_std)
        else:
            self.words = nnx.Param(jnp.zeros(shape))
        self.norm_eps = sizes.norm_eps

    def __call__(
        self, embedding: Embedding, x_BSD: jax.Array, targets_BS: jax.Array, weight_BS: jax.Array
    ) -> chunked_loss.Predictions:
        """Computes the cost of the targets; see :func:`jaxtrain.ops.chunked_loss.predict`."""
        x_BSD, unembedding = self._normalized(x_BSD), self._unembedding(embedding)
        return chunked_loss.predict(x_BSD, unembedding, targets_BS, weight_BS, cap=self.kind.cap)

    def logits(self, embedding: Embedding, x_BSD: jax.Array) -> jax.Array:
        """Returns all logits, float32 [B, S, V]."""
        x_BSD = self._normalized(x_BSD)
        logits_BSV = attention.einsum_float32("bsd,vd->bsv", x_BSD, self._unembedding(embedding))
        return logits_BSV if self.kind.cap is None else capped(logits_BSV, self.kind.cap)

    def _normalized(self, x_BSD: jax.Array) -> jax.Array:
        scale = None if self.norm is None else self.norm[...]
        return rms_norm(x_BSD, self.norm_eps, scale)

    def _unembedding(self, embedding: Embedding) -> jax.Array:
        return (embedding.table if self.words is None else self.words)[...]


class Cache(NamedTuple):
    """What later positions need from earlier ones."""

    blocks: list[attention.Cache]
    before_B1D: jax.Array | None


class CausalModel(Model):
    """A causal language model; each kind stores its parts under names of its own.

    The names of what :class:`Extras` adds are nanochat's.
    """

    def __init__(self, config: CausalConfig, rngs: nnx.Rngs) -> None:
        self.sizes, self.kind = config.sizes, config.kind
        self.remat, self.dropout = config.remat, config.dropout
        extras, layers = config.extras, config.sizes.layers
        self.value_embeds = nnx.Dict(
            {
                str(number): ValueEmbedding(config, rngs)
                for number in range(layers)
                if extras.has_values(number, layers)
            }
        )
        # Early blocks amplify the stream, and late ones see little of the embedding.
        depth_L = jnp.arange(layers) / max(layers - 1, 1)
        scaled = extras.residual_scalars
        self.resid_lambdas = nnx.Param(1.15 - 0.10 * depth_L) if scaled else None
        self.x0_lambdas = nnx.Param(0.20 - 0.15 * depth_L) if scaled else None
        self.smear = Smear(config, rngs) if extras.smear else None
        self.backout_lambda = nnx.Param(jnp.full((1,), 0.2)) if extras.backout else None

    def components(self) -> tuple[Embedding, Sequence[Block], Head]:
        """Returns embedding, blocks, and head."""
        raise NotImplementedError

    def angles(self, length: int, start: int | jax.Array = 0) -> tuple[jax.Array, jax.Array]:
        """Returns cosines and sines for :func:`jaxtrain.ops.attention.rotate`, float32 [S, I]."""
        sizes = self.sizes
        cos_SI, sin_SI = attention.rotary(length, sizes.head_width, sizes.rotary_base, start)
        return cos_SI, sin_SI if self.kind.clockwise else -sin_SI

    def hidden_states(self, tokens_BS: jax.Array, keys_B: jax.Array | None = None) -> jax.Array:
        """Maps ids to vectors [B, S, D] before the last norm; without keys, without dropout."""
        embedding, blocks, _ = self.components()
        embedding_keys, *block_keys = split_keys(keys_B, 1 + len(blocks))
        angles = self.angles(tokens_BS.shape[1])
        x_BSD = remat(Embedding.__call__, self.remat)(embedding, tokens_BS, embedding_keys)
        if self.smear is not None:
            x_BSD = self.smear(x_BSD)
        run_block = remat(Block.__call__, self.remat)

        def apply(number: int, x_BSD: jax.Array, *added: Any) -> jax.Array:
            return run_block(blocks[number], x_BSD, *angles, block_keys[number], *added)

        return self._through(apply, x_BSD, tokens_BS)

    def _through(
        self, apply: Callable[..., jax.Array], x0_BSD: jax.Array, tokens_BS: jax.Array
    ) -> jax.Array:
        """Applies all blocks, with what the extras add to and around them.

        Args:
            apply: block number, residual stream [B, S, D], and the block's last three arguments ->
                the next residual stream.
        """
        x_BSD = middle_BSD = x0_BSD
        layers = self.sizes.layers
        for number in range(layers):
            skip = None
            if self.resid_lambdas is not None and self.x0_lambdas is not None:
                scale, x0_scale = (
                    scalars[...][number : number + 1]
                    for scalars in (self.resid_lambdas, self.x0_lambdas)
                )
                skip = Skip(scale, x0_scale, x0_BSD)
            values = self.value_embeds.get(str(number))
            x_BSD = apply(number, x_BSD, skip, values, None if values is None else tokens_BS)
            if number == layers // 2:
                middle_BSD = x_BSD
        if self.backout_lambda is not None:
            x_BSD = _mixed(x_BSD, 1.0, middle_BSD, -self.backout_lambda[...])
        return x_BSD

    def logits(self, tokens_BS: jax.Array) -> jax.Array:
        """Returns float32 logits [B, S, V] of each next token; for short sequences."""
        embedding, _, head = self.components()
        return remat(Head.logits, self.remat)(head, embedding, self.hidden_states(tokens_BS))

    def cache(self, rows: int, length: int) -> Cache:
        """Allocates `length` positions of `rows` sequences, for :meth:`decode_step`."""
        embedding, blocks, _ = self.components()
        shape = rows, length, self.sizes.kv_heads, self.sizes.head_width
        dtype = embedding.table[...].dtype
        # A sequence begins after a vector of zeros, of which smear adds nothing.
        before = None if self.smear is None else jnp.zeros((rows, 1, self.sizes.hidden), dtype)
        return Cache([attention.empty_cache(*shape, dtype) for _ in blocks], before)

    def decode_step(
        self, tokens_BS: jax.Array, count: int | jax.Array, cache: Cache, start: int | jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Returns the logits after the first `count` tokens; see the base class."""
        embedding, blocks, head = self.components()
        angles = self.angles(tokens_BS.shape[1], start)
        x_BSD, before_B1D = embedding(tokens_BS, None), cache.before_B1D
        if self.smear is not None:
            smeared_BSD = self.smear(x_BSD, before_B1D)
            x_BSD, before_B1D = smeared_BSD, _last(x_BSD, count)
        kept = []

        def apply(number: int, x_BSD: jax.Array, *added: Any) -> jax.Array:
            before = cache.blocks[number]
            x_BSD, after = blocks[number].decode_step(x_BSD, *angles, before, start, *added)
            kept.append(after)
            return x_BSD

        last_B1D = _last(self._through(apply, x_BSD, tokens_BS), count)
        return head.logits(embedding, last_B1D)[:, 0], Cache(kept, before_B1D)

    def samples(self, batch: Batch) -> dict[str, jax.Array]:
        """Completes the beginnings of the first examples."""
        return {"text": generation.samples(self, batch)}

    def loss(self, batch: Batch, keys_B: jax.Array) -> tuple[jax.Array, jax.Array, Sums]:
        """Computes the cross-entropy over targets, in nats, and `accuracy`."""
        keys = keys_B if self.dropout else None
        return chunked_loss.loss_sums(self.predict(batch, keys), batch)

    def evaluate(self, batch: Batch) -> Sums:
        """Computes `loss` and `accuracy` over targets, and `bits_per_byte` of their text."""
        return chunked_loss.evaluation_sums(self.predict(batch), batch)

    def baseline_sums(self, batch: Batch) -> dict[str, jax.Array]:
        """Counts the targets."""
        size = self.components()[0].table.shape[0]
        return token_frequencies.counts(batch["targets"], chunked_loss.target_weights(batch), size)

    @staticmethod
    def baseline(sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns the `loss` of the tokens' frequencies."""
        return {"loss": token_frequencies.loss_of_frequencies(sums["counts"])}

    def predict(self, batch: Batch, keys_B: jax.Array | None = None) -> chunked_loss.Predictions:
        """Computes the cost of each target; without keys, without dropout."""
        embedding, _, head = self.components()
        x_BSD = self.hidden_states(batch["tokens"], keys_B)
        # Without remat, which would recompute the loss and gather its parameter again: the loss
        # keeps only its gradient, and no gathered parameter.
        weight_BS = chunked_loss.target_weights(batch)
        return head(embedding, x_BSD, batch["targets"], weight_BS)


def _scale(width: int, kind: Kind) -> nnx.Param[jax.Array] | None:
    return nnx.Param(jnp.ones((width,))) if kind.norm_scales else None


def _gate(rngs: nnx.Rngs, inputs: int, outputs: int) -> nnx.Param[jax.Array]:
    """Draws the kernel of a gate, uniform in (0, `_GATE_INIT`): slightly open."""
    half = _GATE_INIT / 2
    return nnx.Param(half + uniform_init(rngs, (inputs, outputs), half)[...])


def _gated(x_BSD: jax.Array, gate_CO: jax.Array) -> jax.Array:
    """Applies the kernel of a gate to the first C channels; float32 [B, S, outputs]."""
    return (x_BSD[..., : gate_CO.shape[0]] @ gate_CO).astype(jnp.float32)


def _mixed(x: jax.Array, scale: Any, other: jax.Array, other_scale: Any) -> jax.Array:
    """Returns `scale x + other_scale other`; in float32, so that the gradients are summed in it.

    Args:
        x, other: arrays of one shape.
        scale, other_scale: numbers, or arrays that broadcast to it, with leading dimensions added.
    """

    def wide(factor: Any) -> Any:
        if not isinstance(factor, jax.Array):
            return factor
        return factor.astype(jnp.float32).reshape((1,) * (x.ndim - factor.ndim) + factor.shape)

    mixed = wide(scale) * x.astype(jnp.float32) + wide(other_scale) * other.astype(jnp.float32)
    return mixed.astype(x.dtype)


def _skipped(x_BSD: jax.Array, skip: Skip | None) -> jax.Array:
    return x_BSD if skip is None else _mixed(x_BSD, skip.scale, skip.x0_BSD, skip.x0_scale)


def _last(x_BSD: jax.Array, count: int | jax.Array) -> jax.Array:
    """Returns the vector of token `count - 1`, [B, 1, D]."""
    return jax.lax.dynamic_slice_in_dim(x_BSD, count - 1, 1, axis=1)
