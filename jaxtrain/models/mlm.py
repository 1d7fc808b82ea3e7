"""A masked language model: a BERT encoder with its prediction head.

The network is BERT's (https://arxiv.org/abs/1810.04805): learned positions, a layer norm after each
residual sum, exact GELU, and a head (dense, GELU, layer norm) whose output layer is the token
embedding with a bias. Parameters map one to one to transformers' `BertForMaskedLM`, whose token
types are zeros here (they are a constant, which the positions include already).

Shapes: B sequences, S tokens, M predicted positions, D hidden width, N heads, K head width,
V vocabulary, Q either S or 1 (the same for every query).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config import bounds
from jaxtrain.errors import InputError
from jaxtrain.models import bert_weights
from jaxtrain.models.contract import Batch, Model, ModelConfig, Sums
from jaxtrain.models.weight_table import WeightTable
from jaxtrain.ops import attention, token_frequencies
from jaxtrain.ops.init import normal_init
from jaxtrain.ops.layers import (
    Gathered,
    Remat,
    add_shared,
    cross_entropy,
    dropout,
    einsum_float32,
    embed,
    gelu,
    layer_norm,
    remat,
    split_keys,
    take_positions,
)
from jaxtrain.ops.per_device import Copies, copies

PAD = 0
# All pairs of positions are scored: 32,768 positions take 4 GiB per head.
_Tokens = Annotated[int, bounds.Bounds(least=1, most=2**15)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The masked language model."""

    task = "fill"
    model_type = "bert"  # in transformers' config.json
    usage = 'fill {run} "Paris is the [MASK] of France."'
    in_weights = ("vocab_size", "sequence_length", "hidden", "layers", "ff")
    not_in_weights = (("heads", "heads"),)

    vocab_size: bounds.Words
    """Vocabulary size, including the five special tokens (rows of the embedding)."""
    sequence_length: _Tokens
    """Tokens per sequence."""
    hidden: bounds.Width
    """Hidden width."""
    layers: bounds.Layers
    """Number of layers."""
    heads: bounds.Heads
    """Attention heads; must divide `hidden`."""
    ff: bounds.Width | None = None
    """Width of the feed-forward layers. None uses 4 times `hidden`."""
    dropout: bounds.Fraction = 0.1
    """Dropout rate of embeddings and layer outputs, 0 to 1."""
    attention_dropout: bounds.Fraction = 0.0
    """Dropout rate of attention probabilities, 0 to 1. BERT uses 0.1. Above 0, GPUs cannot use
    fused attention, and all attention scores are stored."""
    mask_fraction: Annotated[float, bounds.Bounds(above=0, most=1)] = 0.15
    """Fraction of the tokens of a sequence that the model must predict."""
    attend: Literal["sequence", "document"] = "sequence"
    """What a token attends to: the complete sequence, or only its own document. A packed sequence
    holds several short documents."""
    pad_id: Annotated[int, bounds.Bounds(least=0, most=bounds.WORDS.most)] = PAD
    """The tokenizer's id of the padding token."""
    remat: Remat = "none"
    """Activation checkpointing. block: keep each layer's input and recompute the layer in the
    backward pass; none: keep everything."""
    init_from: str | None = None
    """Initial parameters of a new run: a checkpoint, a run directory, a transformers folder
    (BertForMaskedLM), or ``hf:ORG/MODEL[@REVISION]`` on the Hugging Face Hub."""

    def check(self) -> None:
        """Checks that heads divide the width, and that a sequence has a token to predict."""
        if self.hidden % self.heads:
            near = [n for n in range(1, self.hidden + 1) if self.hidden % n == 0]
            raise InputError(
                f"model.hidden={self.hidden} must be a multiple of model.heads={self.heads}: "
                f"use {min(near, key=lambda n: abs(n - self.heads))} heads",
                about=("model.hidden", "model.heads"),
            )
        if self.predicted < 1:
            raise InputError(
                f"model.mask_fraction={self.mask_fraction} of "
                f"model.sequence_length={self.sequence_length} is less than one token: raise one",
                about=("model.mask_fraction", "model.sequence_length"),
            )

    @property
    def ff_width(self) -> int:
        """Returns the width of the feed-forward layers."""
        return 4 * self.hidden if self.ff is None else self.ff

    @property
    def predicted(self) -> int:
        """Returns the number of slots for predictions: rounded to nearest, halves up."""
        return math.floor(self.mask_fraction * self.sequence_length + 0.5)

    def build(self, rngs: nnx.Rngs) -> "MaskedLanguageModel":
        """Builds the module, with new float32 parameters."""
        return MaskedLanguageModel(self, rngs)

    def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of a batch.

        `tokens` int32 [B, S], masked. `positions` and `targets` int32 [B, M], `target_weights`
        float32 [B, M]; weight 0 marks an unused slot. `weight` float32 [B]. With
        `attend="document"` also `segments` int32 [B, S]: the number of each token's document in its
        sequence, from 1, and 0 for padding.
        """
        tokens, slots = (batch_size, self.sequence_length), (batch_size, self.predicted)
        segments = {"segments": jax.ShapeDtypeStruct(tokens, jnp.int32)}
        return (segments if self.attend == "document" else {}) | {
            "tokens": jax.ShapeDtypeStruct(tokens, jnp.int32),
            "positions": jax.ShapeDtypeStruct(slots, jnp.int32),
            "targets": jax.ShapeDtypeStruct(slots, jnp.int32),
            "target_weights": jax.ShapeDtypeStruct(slots, jnp.float32),
            "weight": jax.ShapeDtypeStruct((batch_size,), jnp.float32),
        }

    def index_limits(self) -> dict[str, int]:
        """Returns the number of valid values of each array of indices in a batch."""
        words = self.vocab_size
        limits = {"tokens": words, "targets": words, "positions": self.sequence_length}
        return limits | ({"segments": 2} if self.attend == "document" else {})

    def tokens_per_example(self) -> int:
        """Returns the number of tokens per sequence."""
        return self.sequence_length

    def weight_tables(self) -> tuple[WeightTable, ...]:
        """Returns the names of `BertForMaskedLM`."""
        return (bert_weights.TABLE,)

    def to_weights(self, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Converts parameters to the state dict of `BertForMaskedLM`, token types included."""
        return bert_weights.with_types(super().to_weights(params), params)

    def to_transformers(self, params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Does the same as :meth:`to_weights`."""
        return self.to_weights(params)

    def from_weights(self, tensors: Mapping[str, np.ndarray], source: str) -> dict[str, np.ndarray]:
        """Converts back; what token type 1 adds is in the result if it is not zeros.

        Raises:
            InputError: lists the arrays that are missing, extra or misshapen; or there are more
                than two token types.
        """
        arrays, types = bert_weights.without_types(tensors, self.sequence_length)
        return bert_weights.add_types(super().from_weights(arrays, source), types, source)

    def to_settings(self) -> dict[str, Any]:
        """Returns the `config.json` of transformers."""
        return bert_weights.settings(self)

    @classmethod
    def from_settings(cls, content: Mapping[str, Any], source: str) -> "Config":
        """Reads a `config.json` of transformers.

        Raises:
            InputError: it describes another network.
        """
        fields = bert_weights.fields(content, source)
        try:
            return cls(**fields)
        except InputError as error:
            raise InputError(f"{source}: {error}") from error

    @classmethod
    def tiny(cls) -> "Config":
        """Returns two layers of width 16, 16 tokens per sequence, vocabulary 50."""
        return cls(vocab_size=50, sequence_length=16, hidden=16, layers=2, heads=2)


class Dense(nnx.Module):
    """Linear layer: kernel [in, out], drawn from N(0, 0.02^2), and a bias of zeros."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs) -> None:
        self.kernel = _normal(rngs, (inputs, outputs))
        self.bias = nnx.Param(jnp.zeros((outputs,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [B, any, in] to [B, any, out]."""
        return add_shared(x @ self.kernel[...], self.bias[...])


class LayerNorm(nnx.Module):
    """Layer norm with eps 1e-12; statistics in float32."""

    def __init__(self, width: int) -> None:
        self.scale = nnx.Param(jnp.ones((width,)))
        self.bias = nnx.Param(jnp.zeros((width,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [B, any, width] to the same shape and dtype."""
        return layer_norm(x, _row(self.scale), _row(self.bias), bert_weights.NORM_EPS)


class Embeddings(nnx.Module):
    """Token and position vectors, summed and normalized."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.word = _normal(rngs, (config.vocab_size, config.hidden))
        self.position = _normal(rngs, (config.sequence_length, config.hidden))
        self.norm = LayerNorm(config.hidden)
        self.dropout = config.dropout

    def words(self, rows: int) -> Copies | None:
        """Returns the token vectors for their two uses, the embedding and the output layer.

        A copy on each device sums the gradients of both uses there, so that their sum over the
        devices is communicated once. None if each use reads the parameter itself.
        """
        return None if isinstance(self.word, Gathered) else copies(self.word[...], rows)

    def __call__(
        self, words: Copies | None, tokens_BS: jax.Array, keys_B: jax.Array | None
    ) -> jax.Array:
        """Maps ids to [B, S, D]."""
        length = tokens_BS.shape[1]
        x_BSD = embed(self.word[...], tokens_BS) if words is None else words.use(embed, tokens_BS)
        x_BSD = add_shared(x_BSD, self.position[...][:length])
        return dropout(self.norm(x_BSD), self.dropout, keys_B)


class Layer(nnx.Module):
    """Self-attention and feed-forward layer, each followed by a residual sum and a norm."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        hidden = config.hidden
        self.qkv = Dense(hidden, 3 * hidden, rngs=rngs)  # queries, keys, values, side by side
        self.attention_out = Dense(hidden, hidden, rngs=rngs)
        self.attention_norm = LayerNorm(hidden)
        self.ff_in = Dense(hidden, config.ff_width, rngs=rngs)
        self.ff_out = Dense(config.ff_width, hidden, rngs=rngs)
        self.ff_norm = LayerNorm(hidden)
        self.heads = config.heads
        self.dropout = config.dropout
        self.attention_dropout = config.attention_dropout

    def __call__(
        self, x_BSD: jax.Array, attended_BQS: jax.Array, keys_B: jax.Array | None
    ) -> jax.Array:
        """Maps [B, S, D] to the same shape; queries attend where `attended_BQS` is true."""
        weights_keys, attention_keys, ff_keys = split_keys(keys_B, 3)
        h_BSD = self.attention_out(self._attend(x_BSD, attended_BQS, weights_keys))
        x_BSD = self.attention_norm(x_BSD + dropout(h_BSD, self.dropout, attention_keys))
        h_BSD = self.ff_out(gelu(self.ff_in(x_BSD)))
        return self.ff_norm(x_BSD + dropout(h_BSD, self.dropout, ff_keys))

    def _attend(
        self, x_BSD: jax.Array, attended_BQS: jax.Array, keys_B: jax.Array | None
    ) -> jax.Array:
        b, s, d = x_BSD.shape
        qkv_BS3NK = self.qkv(x_BSD).reshape(b, s, 3, self.heads, d // self.heads)
        q_BSNK, k_BSNK, v_BSNK = (qkv_BS3NK[:, :, i] for i in range(3))
        rate = self.attention_dropout
        seen_BSNK = attention.attend(q_BSNK, k_BSNK, v_BSNK, attended_BQS, rate=rate, keys_B=keys_B)
        return seen_BSNK.reshape(b, s, d)


class Head(nnx.Module):
    """Maps vectors to logits."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.dense = Dense(config.hidden, config.hidden, rngs=rngs)
        self.norm = LayerNorm(config.hidden)
        self.bias = nnx.Param(jnp.zeros((config.vocab_size,)))

    def __call__(self, embeddings: Embeddings, words: Copies | None, x_BMD: jax.Array) -> jax.Array:
        """Maps [B, M, D] to float32 logits [B, M, V]; the output layer is the token embedding."""
        h_BMD = self.norm(gelu(self.dense(x_BMD)))

        def score(word_VD: jax.Array, h_BMD: jax.Array) -> jax.Array:
            return einsum_float32("bmd,vd->bmv", h_BMD, word_VD)

        word = embeddings.word
        logits_BMV = score(word[...], h_BMD) if words is None else words.use(score, h_BMD)
        return logits_BMV + _row(self.bias).astype(jnp.float32)


class MaskedLanguageModel(Model):
    """Embeddings, layers, and head."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.embeddings = Embeddings(config, rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.layers)])
        self.head = Head(config, rngs)
        self.vocab_size = config.vocab_size
        self.sequence_length = config.sequence_length
        self.remat = config.remat
        self.attend = config.attend
        self.pad_id = config.pad_id

    def hidden_states(
        self,
        tokens_BS: jax.Array,
        keys_B: jax.Array | None = None,
        segments_BS: jax.Array | None = None,
        words: Copies | None = None,
    ) -> jax.Array:
        """Maps ids to the last layer's vectors [B, S, D]; without keys, without dropout.

        Without segments, all tokens except padding attend to each other; with segments, those with
        the same number.

        Raises:
            ValueError: the sequence is longer than the model's `sequence_length`.
        """
        if tokens_BS.shape[1] > self.sequence_length:
            raise ValueError(
                f"a sequence of {tokens_BS.shape[1]} tokens is longer than the model's "
                f"sequence_length={self.sequence_length}: shorten it"
            )
        embedding_keys, *layer_keys = split_keys(keys_B, 1 + len(self.layers))
        run_embeddings = remat(Embeddings.__call__, self.remat)
        x_BSD = run_embeddings(self.embeddings, words, tokens_BS, embedding_keys)
        run_layer = remat(Layer.__call__, self.remat)
        if segments_BS is None:
            attended_BQS = (tokens_BS != self.pad_id)[:, None, :]
        else:
            attended_BQS = segments_BS[:, :, None] == segments_BS[:, None, :]
        for layer, keys in zip(self.layers, layer_keys, strict=True):
            x_BSD = run_layer(layer, x_BSD, attended_BQS, keys)
        return x_BSD

    def logits_at(
        self,
        tokens_BS: jax.Array,
        positions_BM: jax.Array,
        keys_B: jax.Array | None = None,
        segments_BS: jax.Array | None = None,
    ) -> jax.Array:
        """Returns float32 logits [B, M, V] at these positions only."""
        words = self.embeddings.words(tokens_BS.shape[0])
        x_BSD = self.hidden_states(tokens_BS, keys_B, segments_BS, words)
        x_BMD = take_positions(x_BSD, positions_BM)
        return remat(Head.__call__, self.remat)(self.head, self.embeddings, words, x_BMD)

    def loss(self, batch: Batch, keys_B: jax.Array) -> tuple[jax.Array, jax.Array, Sums]:
        """Computes the cross-entropy over predicted positions, in nats, and `accuracy`."""
        return self._loss(batch, keys_B)

    def evaluate(self, batch: Batch) -> Sums:
        """Computes `loss` and `accuracy` over predicted positions, without dropout."""
        total, weight, metrics = self._loss(batch, None)
        return {"loss": (total, weight), **metrics}

    def constant_sums(self, batch: Batch) -> dict[str, jax.Array]:
        """Counts the targets."""
        weight_BM = batch["target_weights"] * batch["weight"][:, None]
        return token_frequencies.counts(batch["targets"], weight_BM, self.vocab_size)

    @staticmethod
    def constant(sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns the `loss` of the tokens' frequencies."""
        return {"loss": token_frequencies.loss_of_frequencies(sums["counts"])}

    @staticmethod
    def derived(means: Mapping[str, float]) -> dict[str, float]:
        """Computes `pseudo_perplexity`, exp of the mean loss over the masked positions."""
        with np.errstate(over="ignore"):
            return {"pseudo_perplexity": float(np.exp(np.float64(means["loss"])))}

    def _loss(self, batch: Batch, keys_B: jax.Array | None) -> tuple[jax.Array, jax.Array, Sums]:
        logits_BMV = self.logits_at(
            batch["tokens"],
            batch["positions"],
            keys_B,
            batch["segments"] if self.attend == "document" else None,
        )
        cost_BM, right_BM = cross_entropy(logits_BMV, batch["targets"])
        weight_BM = batch["target_weights"] * batch["weight"][:, None]
        weight = weight_BM.sum()
        return (
            (cost_BM * weight_BM).sum(),
            weight,
            {"accuracy": ((right_BM * weight_BM).sum(), weight)},
        )


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...]) -> nnx.Param[jax.Array]:
    return normal_init(rngs, shape, bert_weights.INIT_STD)


def _row(vector: nnx.Param[jax.Array]) -> jax.Array:
    """Reshapes a vector to [1, 1, width], to add it to [B, any, width]."""
    return vector[...].reshape(1, 1, -1)
