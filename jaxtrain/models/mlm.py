"""A masked language model: a BERT encoder with its prediction head.

The network is BERT's (https://arxiv.org/abs/1810.04805): learned positions, a layer norm after each
residual sum, exact GELU, and a head (dense, GELU, layer norm) whose output layer is the token
embedding with a bias. Parameters map one to one to transformers' `BertForMaskedLM`, whose token
types are zeros here (they are a constant, which the positions include already).

Shapes: B sequences, S tokens, M predicted positions, D hidden width, N heads, K head width,
V vocabulary, Q either S or 1 (the same for every query).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config import bounds
from jaxtrain.models import bert_weights, masked
from jaxtrain.models.weight_table import WeightTable
from jaxtrain.ops import attention
from jaxtrain.ops.init import normal_init
from jaxtrain.ops.layers import add_shared, dropout, gelu, remat, split_keys
from jaxtrain.ops.per_device import Copies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(masked.MaskedConfig):
    """The masked language model."""

    model_type = "bert"  # in transformers' config.json
    in_weights = ("vocab_size", "sequence_length", "hidden", "layers", "ff")

    attend: Literal["sequence", "document"] = "sequence"
    """What a token attends to: the complete sequence, or only its own document. A sequence is a
    window of documents in a row, so it may have several."""
    ff: bounds.Width | None = None
    """Width of the feed-forward layers. None uses 4 times `hidden`."""
    dropout: bounds.Fraction = 0.1
    """Dropout rate of embeddings and layer outputs, 0 to 1."""
    attention_dropout: bounds.Fraction = 0.0
    """Dropout rate of attention probabilities, 0 to 1. BERT uses 0.1. Above 0, GPUs cannot use
    fused attention, and all attention scores are stored."""
    init_from: str | None = None
    """Initial parameters of a new run: a checkpoint, a run directory, a transformers folder
    (BertForMaskedLM), or ``hf:ORG/MODEL[@REVISION]`` on the Hugging Face Hub."""

    @property
    def ff_width(self) -> int:
        """Returns the width of the feed-forward layers."""
        return 4 * self.hidden if self.ff is None else self.ff

    def build(self, rngs: nnx.Rngs) -> "MaskedLanguageModel":
        """Builds the module, with new float32 parameters."""
        return MaskedLanguageModel(self, rngs)

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
        """Converts back; what token type 1 adds is in the result if it is not zeros."""
        arrays, types = bert_weights.without_types(tensors, self.sequence_length)
        return bert_weights.add_types(super().from_weights(arrays, source), types, source)

    def to_settings(self) -> dict[str, Any]:
        """Returns the `config.json` of transformers."""
        return bert_weights.settings(self)

    @classmethod
    def fields_of(cls, content: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Returns the fields that correspond to a `config.json`; see the base class."""
        return bert_weights.fields(content, source)

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


class Embeddings(masked.WordEmbedding):
    """Token and position vectors, summed and normalized."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        super().__init__(config, bert_weights.INIT_STD, rngs)
        self.position = _normal(rngs, (config.sequence_length, config.hidden))
        self.norm = _norm(config)
        self.dropout = config.dropout

    def __call__(
        self, word_copies: Copies | None, tokens_BS: jax.Array, keys_B: jax.Array | None
    ) -> jax.Array:
        """Maps ids to [B, S, D]."""
        x_BSD = self.vectors(word_copies, tokens_BS)
        x_BSD = add_shared(x_BSD, self.position[...][: tokens_BS.shape[1]])
        return dropout(self.norm(x_BSD), self.dropout, keys_B)


class Layer(nnx.Module):
    """Self-attention and feed-forward layer, each followed by a residual sum and a norm."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        hidden = config.hidden
        self.qkv = Dense(hidden, 3 * hidden, rngs=rngs)  # queries, keys, values, side by side
        self.attention_out = Dense(hidden, hidden, rngs=rngs)
        self.attention_norm = _norm(config)
        self.ff_in = Dense(hidden, config.ff_width, rngs=rngs)
        self.ff_out = Dense(config.ff_width, hidden, rngs=rngs)
        self.ff_norm = _norm(config)
        self.heads = config.heads
        self.dropout = config.dropout
        self.attention_dropout = config.attention_dropout

    def __call__(
        self, x_BSD: jax.Array, attended_BQS: jax.Array, keys_B: jax.Array | None
    ) -> jax.Array:
        """Maps [B, S, D] to the same shape; queries attend where `attended_BQS` is true."""
        weights_keys, attention_keys, ff_keys = split_keys(keys_B, 3)
        b, s, d = x_BSD.shape
        qkv_BS3NK = self.qkv(x_BSD).reshape(b, s, 3, self.heads, d // self.heads)
        q_BSNK, k_BSNK, v_BSNK = (qkv_BS3NK[:, :, i] for i in range(3))
        seen_BSNK = attention.attend(
            q_BSNK,
            k_BSNK,
            v_BSNK,
            attended_BQS,
            rate=self.attention_dropout,
            keys_B=weights_keys,
        )
        h_BSD = self.attention_out(seen_BSNK.reshape(b, s, d))
        x_BSD = self.attention_norm(x_BSD + dropout(h_BSD, self.dropout, attention_keys))
        h_BSD = self.ff_out(gelu(self.ff_in(x_BSD)))
        return self.ff_norm(x_BSD + dropout(h_BSD, self.dropout, ff_keys))


class MaskedLanguageModel(masked.MaskedModel):
    """Embeddings, layers, and head."""

    embeddings: Embeddings

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        super().__init__(config)
        self.embeddings = Embeddings(config, rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.layers)])
        dense = Dense(config.hidden, config.hidden, rngs=rngs)
        self.head = masked.Head(dense, _norm(config), config.vocab_size)

    def hidden_states(
        self,
        tokens_BS: jax.Array,
        keys_B: jax.Array | None = None,
        segments_BS: jax.Array | None = None,
        word_copies: Copies | None = None,
    ) -> jax.Array:
        """Maps ids to the last layer's vectors [B, S, D]; see the base class.

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
        x_BSD = run_embeddings(self.embeddings, word_copies, tokens_BS, embedding_keys)
        run_layer = remat(Layer.__call__, self.remat)
        if segments_BS is None:
            attended_BQS = (tokens_BS != self.pad_id)[:, None, :]
        else:
            attended_BQS = segments_BS[:, :, None] == segments_BS[:, None, :]
        for layer, keys in zip(self.layers, layer_keys, strict=True):
            x_BSD = run_layer(layer, x_BSD, attended_BQS, keys)
        return x_BSD


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...]) -> nnx.Param[jax.Array]:
    return normal_init(rngs, shape, bert_weights.INIT_STD)


def _norm(config: Config) -> masked.LayerNorm:
    return masked.LayerNorm(config.hidden, bert_weights.NORM_EPS)
