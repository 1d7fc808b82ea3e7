"""What masked language models have in common: fields, batches, the output layer, and the loss.

Shapes: B sequences, S tokens, M predicted positions, D hidden width, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config import bounds
from jaxtrain.errors import InputError
from jaxtrain.models.contract import Batch, Model, ModelConfig, Sums
from jaxtrain.ops import output_layer, token_frequencies
from jaxtrain.ops.init import normal_init
from jaxtrain.ops.layers import Gathered, Remat, embed, gelu, layer_norm, remat, take_positions
from jaxtrain.ops.per_device import Copies, copies

PAD = 0
# All pairs of positions are scored: 32,768 positions take 4 GiB per head.
_Tokens = Annotated[int, bounds.Bounds(least=1, most=2**15)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedConfig(ModelConfig):
    """The fields of all masked language models."""

    task = "fill"
    usage = 'fill {run} "Paris is the [MASK] of France."'
    # cuBLAS adds biases and residuals within matmuls. A step of BERT base with 64 sequences of 512
    # tokens moves 81.6 GB with it, and 86.3 GB with XLA's Triton kernels (jax 0.10.2, for an H100).
    gpu_options: ClassVar[Mapping[str, str | bool]] = {"xla_gpu_enable_triton_gemm": False}
    not_in_weights: ClassVar[tuple[tuple[str, str], ...]] = (("heads", "heads"),)

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
    mask_fraction: Annotated[float, bounds.Bounds(above=0, most=1)] = 0.15
    """Fraction of the tokens of a sequence that the model must predict."""
    pad_id: Annotated[int, bounds.Bounds(least=0, most=bounds.WORDS.most)] = PAD
    """The tokenizer's id of the padding token."""
    remat: Remat = "none"
    """Activation checkpointing. block: keep each layer's input and recompute the layer in the
    backward pass; none: keep everything."""

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
    def attend(self) -> Literal["sequence", "document"]:
        """Returns what a token attends to: the complete sequence, or only its own document."""
        return "document"

    @property
    def predicted(self) -> int:
        """Returns the number of slots for predictions: rounded to nearest, halves up."""
        return math.floor(self.mask_fraction * self.sequence_length + 0.5)

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
        segments = {"segments": self.sequence_length + 1}
        return limits | (segments if self.attend == "document" else {})

    def tokens_per_example(self) -> int:
        """Returns the number of tokens per sequence."""
        return self.sequence_length

    @classmethod
    def fields_of(cls, content: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Returns the fields that correspond to a `config.json` of transformers."""
        raise NotImplementedError

    @classmethod
    def from_settings(cls, content: Mapping[str, Any], source: str) -> Self:
        """Reads a `config.json` of transformers."""
        fields = cls.fields_of(content, source)
        try:
            return cls(**fields)
        except InputError as error:
            raise InputError(f"{source}: {error}") from error


class LayerNorm(nnx.Module):
    """Layer norm; statistics in float32."""

    def __init__(self, width: int, eps: float, *, bias: bool = True) -> None:
        self.scale = nnx.Param(jnp.ones((width,)))
        self.bias = nnx.Param(jnp.zeros((width,))) if bias else None
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [B, any, width] to the same shape and dtype."""
        bias = None if self.bias is None else _row(self.bias)
        return layer_norm(x, _row(self.scale), bias, self.eps)


class WordEmbedding(nnx.Module):
    """Token vectors, which are the output layer, too."""

    def __init__(self, config: MaskedConfig, deviation: float, rngs: nnx.Rngs) -> None:
        self.word = normal_init(rngs, (config.vocab_size, config.hidden), deviation)

    def words(self, rows: int) -> Copies | None:
        """Returns the token vectors for their two uses, the embedding and the output layer.

        A copy on each device sums the gradients of both uses there, so that their sum over the
        devices is communicated once. None if each use reads the parameter itself.
        """
        return None if isinstance(self.word, Gathered) else copies(self.word[...], rows)

    def vectors(self, words: Copies | None, tokens_BS: jax.Array) -> jax.Array:
        """Maps ids to [B, S, D]."""
        return embed(self.word[...], tokens_BS) if words is None else words.use(embed, tokens_BS)


class Head(nnx.Module):
    """Scores tokens at vectors; the output layer is the token embedding, with a bias.

    Args:
        dense: the linear layer before GELU and norm, [D] to [D].
    """

    def __init__(self, dense: Any, norm: LayerNorm, vocab_size: int) -> None:
        self.dense, self.norm = dense, norm
        self.bias = nnx.Param(jnp.zeros((vocab_size,)))

    def __call__(
        self, embedding: WordEmbedding, words: Copies | None, x_BMD: jax.Array, dtype: str
    ) -> jax.Array:
        """Maps [B, M, D] to the products of :mod:`jaxtrain.ops.output_layer`, without the bias."""
        h_BMD = self.norm(gelu(self.dense(x_BMD)))
        if words is None:
            return output_layer.products(dtype, embedding.word[...], h_BMD)
        return words.use(functools.partial(output_layer.products, dtype), h_BMD)


class MaskedModel(Model):
    """A masked language model.

    Subclasses set `embeddings` and `head`, and define `hidden_states`.
    """

    embeddings: WordEmbedding
    head: Head

    def __init__(self, config: MaskedConfig) -> None:
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
        """
        raise NotImplementedError

    def logits_at(
        self,
        tokens_BS: jax.Array,
        positions_BM: jax.Array,
        keys_B: jax.Array | None = None,
        segments_BS: jax.Array | None = None,
    ) -> jax.Array:
        """Returns float32 logits [B, M, V] at these positions only."""
        products = self._products_at("float32", tokens_BS, positions_BM, keys_B, segments_BS)
        return output_layer.logits(products, self.head.bias[...])

    def _products_at(
        self, dtype: str, tokens_BS: jax.Array, at_BM: jax.Array, keys_B: Any, segments_BS: Any
    ) -> jax.Array:
        words = self.embeddings.words(tokens_BS.shape[0])
        x_BMD = take_positions(self.hidden_states(tokens_BS, keys_B, segments_BS, words), at_BM)
        products = remat(lambda head, *given: head(*given, dtype), self.remat)
        return products(self.head, self.embeddings, words, x_BMD)

    def loss(self, batch: Batch, keys_B: jax.Array) -> tuple[jax.Array, jax.Array, Sums]:
        """Computes the cross-entropy over predicted positions, in nats, and `accuracy`.

        Logits are rounded to the dtype of the vectors, as those of causal models.
        """
        return self._loss(batch, keys_B, str(self.embeddings.word[...].dtype))

    def evaluate(self, batch: Batch) -> Sums:
        """Computes `loss` and `accuracy` over predicted positions, without dropout, in float32."""
        total, weight, metrics = self._loss(batch, None, "float32")
        return {"loss": (total, weight), **metrics}

    def baseline_sums(self, batch: Batch) -> dict[str, jax.Array]:
        """Counts the targets."""
        weight_BM = batch["target_weights"] * batch["weight"][:, None]
        return token_frequencies.counts(batch["targets"], weight_BM, self.vocab_size)

    @staticmethod
    def baseline(sums: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Returns the `loss` of the tokens' frequencies."""
        return {"loss": token_frequencies.loss_of_frequencies(sums["counts"])}

    @staticmethod
    def derived(means: Mapping[str, float]) -> dict[str, float]:
        """Computes `pseudo_perplexity`, exp of the mean loss over the masked positions."""
        with np.errstate(over="ignore"):
            return {"pseudo_perplexity": float(np.exp(np.float64(means["loss"])))}

    def _loss(
        self, batch: Batch, keys_B: jax.Array | None, dtype: str
    ) -> tuple[jax.Array, jax.Array, Sums]:
        segments_BS = batch["segments"] if self.attend == "document" else None
        products = self._products_at(
            dtype, batch["tokens"], batch["positions"], keys_B, segments_BS
        )
        cost_BM, right_BM = output_layer.costs(products, self.head.bias[...], batch["targets"])
        weight_BM = batch["target_weights"] * batch["weight"][:, None]
        weight = weight_BM.sum()
        accuracy = (right_BM * weight_BM).sum(), weight
        return (cost_BM * weight_BM).sum(), weight, {"accuracy": accuracy}


def _row(vector: nnx.Param[jax.Array]) -> jax.Array:
    """Reshapes a vector to [1, 1, width], to add it to [B, any, width]."""
    return vector[...].reshape(1, 1, -1)
