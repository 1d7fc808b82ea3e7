"""A Llama-style language model.

RMS norms with a weight before attention, before the feed-forward layer and at the end, rotary
positions, grouped-query attention, SwiGLU, and the embedding as output layer; no biases. Parameters
map one to one to transformers' `LlamaForCausalLM`.

Dropout is applied to the embedding, inside SwiGLU, and to the outputs of attention and feed-forward
layer. It is not applied to attention probabilities: no fused kernel supports that with a mask per
example, so the scores would be stored (8 GiB per layer for 32 sequences of 2048 tokens with 16
heads). So training, too, uses :func:`jaxtrain.ops.attention.attend`.

Shapes: B sequences, S tokens, D hidden width, N query heads, H heads of keys and values, K head
width, F feed-forward width, V vocabulary, I half of K.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain import config
from jaxtrain.config import bounds
from jaxtrain.errors import InputError
from jaxtrain.models import causal_weights, llama_weights
from jaxtrain.models.contract import Model, ModelConfig
from jaxtrain.models.weight_table import WeightTable
from jaxtrain.ops import attention, chunked_loss, generation
from jaxtrain.ops.init import normal_init
from jaxtrain.ops.layers import Remat, dropout, embed, remat, split_keys

_INIT_STD = 0.02


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The Llama-style language model."""

    vocab_size: bounds.Words
    """Vocabulary size, including special tokens (rows of the embedding)."""
    sequence_length: bounds.Tokens
    """Tokens per sequence."""
    hidden: bounds.Width
    """Hidden width."""
    layers: bounds.Layers
    """Number of layers."""
    heads: bounds.Heads
    """Query heads; must divide `hidden`."""
    kv_heads: bounds.Heads
    """Key and value heads; must divide `heads`."""
    ff: bounds.Width
    """Width of the feed-forward layers."""
    dropout: bounds.Fraction = 0.1
    """Dropout rate of embeddings, SwiGLU activations, and layer outputs, 0 to 1."""
    norm_eps: bounds.Epsilon = 1e-6
    """Epsilon that is added to the mean square in each norm."""
    rotary_base: bounds.RotaryBase = 10_000.0
    """Base of the rotary angles position / rotary_base^(2 i / K) of pair i, with head width K."""
    remat: Remat = "none"
    """Activation checkpointing. block: keep each layer's input and recompute the layer in the
    backward pass; none: keep everything."""
    loss_piece: bounds.Tokens = 128
    """Tokens per sequence whose logits are in memory at the same time; fewer use less memory."""
    init_from: str | None = None
    """Initial parameters of a new run: a checkpoint, a run directory, a transformers folder
    (LlamaForCausalLM), or ``hf:ORG/MODEL[@REVISION]`` on the Hugging Face Hub."""

    task = "generate"
    model_type = "llama"  # in transformers' config.json
    usage = 'generate {run} "Once upon a time"'
    in_weights = ("vocab_size", "hidden", "layers", "heads", "kv_heads", "ff")
    not_in_weights = tuple((name, name) for name in ("heads", "norm_eps", "rotary_base"))

    def check(self) -> None:
        """Checks that heads and chunks divide widths and sequences."""
        if self.hidden % (2 * self.heads):
            fits = [m for m in range(1, self.hidden + 1) if self.hidden % (2 * m) == 0]
            near = (
                f"use {min(fits, key=lambda m: abs(m - self.heads))}" if fits else "no number fits"
            )
            raise InputError(
                f"model.heads={self.heads} must divide model.hidden={self.hidden} into an even "
                f"head width: {near}",
                about=("model.heads", "model.hidden"),
            )
        if self.heads % self.kv_heads:
            fits = [m for m in range(1, self.kv_heads) if self.heads % m == 0]
            raise InputError(
                f"model.kv_heads={self.kv_heads} must divide model.heads={self.heads}: use "
                f"{max(fits)}",
                about=("model.kv_heads", "model.heads"),
            )
        chunked_loss.check_chunk(self.loss_piece, self.sequence_length)

    @property
    def head_width(self) -> int:
        """Returns the head width."""
        return self.hidden // self.heads

    def build(self, rngs: nnx.Rngs) -> "Llama":
        """Builds the module, with new float32 parameters."""
        return Llama(self, rngs)

    def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """See :func:`jaxtrain.ops.attention.batch_spec`."""
        return attention.batch_spec(batch_size, self.sequence_length)

    def index_limits(self) -> dict[str, int]:
        """Returns the number of valid values of each array of indices in a batch."""
        return {"tokens": self.vocab_size, "targets": self.vocab_size}

    def tokens_per_example(self) -> int:
        """Returns the number of tokens per sequence."""
        return self.sequence_length

    def optimizer_groups(self) -> Mapping[str, config.Group | config.Role]:
        """Returns the role of each parameter for `optim.muon`.

        The table is both embedding and output layer. It gets the output layer's rate, because an
        embedding's, 50 times as large, would make the logits unstable.
        """
        return {
            "matrices": config.Role(prefix="layers.", role="matrix"),
            "embedding": config.Role(prefix="embedding.", role="unembedding"),
        }

    def weight_tables(self) -> tuple[WeightTable, ...]:
        """Returns the names of `LlamaForCausalLM`."""
        return (llama_weights.TABLE,)

    def to_settings(self) -> dict[str, Any]:
        """Returns the `config.json` of transformers."""
        shape = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(causal_weights.Shape)
        }
        return llama_weights.settings(causal_weights.Shape(**shape))

    @classmethod
    def from_settings(cls, content: Mapping[str, Any], source: str) -> "Config":
        """Reads a `config.json` of transformers; it has no dropout of this kind.

        Raises:
            InputError: it describes another network.
        """
        shape = dataclasses.asdict(llama_weights.shape(content, source))
        chunk = chunked_loss.fitting_chunk(cls.loss_piece, shape["sequence_length"])
        try:
            return cls(dropout=0.0, loss_piece=chunk, **shape)
        except InputError as error:
            raise InputError(f"{source}: {error}") from error

    @classmethod
    def tiny(cls) -> "Config":
        """Returns two layers of width 16, four heads in two groups, 16 tokens, vocabulary 50."""
        return cls(
            vocab_size=50,
            sequence_length=16,
            hidden=16,
            layers=2,
            heads=4,
            kv_heads=2,
            ff=24,
            loss_piece=4,
        )


class Embedding(nnx.Module):
    """Token embedding, which is also the output layer."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.table = _normal(rngs, config.vocab_size, config.hidden)
        self.dropout = config.dropout

    def __call__(self, tokens_BS: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        """Maps ids to [B, S, D]."""
        return dropout(embed(self.table[...], tokens_BS), self.dropout, keys_B)


class Layer(nnx.Module):
    """Attention and feed-forward layer, each with a residual connection; kernels are [in, out]."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        d, shared, ff = config.hidden, config.kv_heads * config.head_width, config.ff
        self.attention_norm = nnx.Param(jnp.ones((d,)))
        self.q = _normal(rngs, d, d)
        self.k = _normal(rngs, d, shared)
        self.v = _normal(rngs, d, shared)
        self.out = _normal(rngs, d, d)
        self.ff_norm = nnx.Param(jnp.ones((d,)))
        self.gate = _normal(rngs, d, ff)
        self.up = _normal(rngs, d, ff)
        self.down = _normal(rngs, ff, d)
        self.heads = config.heads
        self.kv_heads = config.kv_heads
        self.norm_eps = config.norm_eps
        self.dropout = config.dropout

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
        of_attention, of_gate, of_ff = split_keys(keys_B, 3)
        h_BSD = seen_BSNK.reshape(x_BSD.shape) @ self.out[...]
        x_BSD = x_BSD + dropout(h_BSD, self.dropout, of_attention)
        h_BSD = attention.rms_norm(x_BSD, self.norm_eps, self.ff_norm[...])
        h_BSF = jax.nn.silu(h_BSD @ self.gate[...]) * (h_BSD @ self.up[...])
        h_BSD = dropout(h_BSF, self.dropout, of_gate) @ self.down[...]
        return x_BSD + dropout(h_BSD, self.dropout, of_ff)

    def _heads(
        self, x_BSD: jax.Array, cos_SI: jax.Array, sin_SI: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries [B, S, N, K], keys and values [B, S, H, K]."""
        b, s, _ = x_BSD.shape
        x_BSD = attention.rms_norm(x_BSD, self.norm_eps, self.attention_norm[...])
        q_BSNK = (x_BSD @ self.q[...]).reshape(b, s, self.heads, -1)
        k_BSHK = (x_BSD @ self.k[...]).reshape(b, s, self.kv_heads, -1)
        v_BSHK = (x_BSD @ self.v[...]).reshape(b, s, self.kv_heads, -1)
        q_BSNK, k_BSHK = (
            attention.rotate(x, cos_SI, sin_SI).astype(x.dtype) for x in (q_BSNK, k_BSHK)
        )
        return q_BSNK, k_BSHK, v_BSHK


class Head(nnx.Module):
    """The last norm, and the output layer, which is the embedding."""

    def __init__(self, config: Config) -> None:
        self.norm = nnx.Param(jnp.ones((config.hidden,)))
        self.norm_eps = config.norm_eps
        self.chunk = config.loss_piece

    def __call__(
        self,
        embedding: Embedding,
        x_BSD: jax.Array,
        targets_BS: jax.Array,
        weight_BS: jax.Array,
    ) -> chunked_loss.Predictions:
        """Computes the cost of the targets; see :func:`jaxtrain.ops.chunked_loss.predict`."""
        x_BSD, words = self._normalized(x_BSD), embedding.table[...]
        return chunked_loss.predict(x_BSD, words, targets_BS, weight_BS, cap=None, chunk=self.chunk)

    def logits(self, embedding: Embedding, x_BSD: jax.Array) -> jax.Array:
        """Returns all logits, float32 [B, S, V]."""
        return attention.einsum_float32(
            "bsd,vd->bsv", self._normalized(x_BSD), embedding.table[...]
        )

    def _normalized(self, x_BSD: jax.Array) -> jax.Array:
        return attention.rms_norm(x_BSD, self.norm_eps, self.norm[...])


class Llama(Model):
    """Embedding, layers, and head."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.embedding = Embedding(config, rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.layers)])
        self.head = Head(config)
        self.head_width = config.head_width
        self.kv_heads = config.kv_heads
        self.rotary_base = config.rotary_base
        self.remat = config.remat

    def angles(self, length: int, start: int | jax.Array = 0) -> tuple[jax.Array, jax.Array]:
        """Returns cosines and sines for :func:`jaxtrain.ops.attention.rotate`, float32 [S, I].

        Llama rotates in the opposite direction to nanochat, hence the sign.
        """
        cos_SI, sin_SI = attention.rotary(length, self.head_width, self.rotary_base, start)
        return cos_SI, -sin_SI

    def encode(self, tokens_BS: jax.Array, keys_B: jax.Array | None = None) -> jax.Array:
        """Maps ids to vectors [B, S, D] before the last norm; without keys, without dropout."""
        of_embedding, *of_layers = split_keys(keys_B, 1 + len(self.layers))
        cos_SI, sin_SI = self.angles(tokens_BS.shape[1])
        x_BSD = remat(Embedding.__call__, self.remat)(self.embedding, tokens_BS, of_embedding)
        layer_of = remat(Layer.__call__, self.remat)
        for layer, of_layer in zip(self.layers, of_layers, strict=True):
            x_BSD = layer_of(layer, x_BSD, cos_SI, sin_SI, of_layer)
        return x_BSD

    def logits(self, tokens_BS: jax.Array) -> jax.Array:
        """Returns float32 logits [B, S, V] of each next token; for short sequences."""
        return self.head.logits(self.embedding, self.encode(tokens_BS))

    def cache(self, rows: int, length: int) -> list[attention.Cache]:
        """Allocates `length` positions of `rows` sequences, for :meth:`decode_step`."""
        shape = rows, length, self.kv_heads, self.head_width
        dtype = self.embedding.table[...].dtype
        return [attention.empty_cache(*shape, dtype) for _ in self.layers]

    def decode_step(
        self,
        tokens_BS: jax.Array,
        count: int | jax.Array,
        cache: list[attention.Cache],
        start: int | jax.Array,
    ) -> tuple[jax.Array, list[attention.Cache]]:
        """Returns the logits after the first `count` tokens; see :mod:`jaxtrain.models`."""
        x_BSD, angles = self.embedding(tokens_BS, None), self.angles(tokens_BS.shape[1], start)
        last_B1D, kept = attention.onward(self.layers, x_BSD, count, angles, cache, start)
        return self.head.logits(self.embedding, last_B1D)[:, 0], kept

    def samples(self, batch: attention.Batch) -> dict[str, jax.Array]:
        """Completes the beginnings of the first examples."""
        return {"text": generation.samples(self, batch)}

    def loss(
        self, batch: attention.Batch, keys_B: jax.Array
    ) -> tuple[jax.Array, jax.Array, attention.Sums]:
        """Computes the cross-entropy over targets, in nats, and `accuracy`."""
        return chunked_loss.loss_sums(self._predict(batch, keys_B), batch)

    def evaluate(self, batch: attention.Batch) -> attention.Sums:
        """Computes `loss`, `accuracy` and `bits_per_byte`, as the GPT does, without dropout."""
        return chunked_loss.evaluation_sums(self._predict(batch, None), batch)

    def _predict(
        self, batch: attention.Batch, keys_B: jax.Array | None
    ) -> chunked_loss.Predictions:
        x_BSD = self.encode(batch["tokens"], keys_B)
        # Without remat, which would recompute the loss: it keeps only its gradient.
        return self.head(
            self.embedding, x_BSD, batch["targets"], chunked_loss.target_weights(batch)
        )


def _normal(rngs: nnx.Rngs, rows: int, columns: int) -> nnx.Param[jax.Array]:
    return normal_init(rngs, (rows, columns), _INIT_STD)
