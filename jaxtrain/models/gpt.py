"""A GPT whose size follows from its depth: nanochat's model of October 2025.

Rotary positions, normalized queries and keys, RMS norms without parameters (after the embedding,
before attention, before the feed-forward layer, at the end), squared ReLU, an untied output layer,
logits capped at 15, no biases. `depth` sets the number of layers and, unless they are set, width
and heads. Source: https://github.com/karpathy/nanochat at c75fe54 (2025-10-25).

Shapes: B sequences, S tokens, D hidden width, N query heads, H heads of keys and values, K head
width, V vocabulary, I half of K.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain import config
from jaxtrain.config import bounds
from jaxtrain.errors import InputError
from jaxtrain.models import causal_weights, gpt_weights
from jaxtrain.models.contract import Model, ModelConfig
from jaxtrain.models.weight_table import WeightTable
from jaxtrain.ops import attention, chunked_loss, generation
from jaxtrain.ops.init import normal_init
from jaxtrain.ops.layers import Remat, capped, embed, remat

_ASPECT = 64  # width / depth
_HEAD = 128  # largest head width
_ROTARY_BASE = 10_000.0
_CAP = 15.0
_FF = 4  # feed-forward width / width
# Optimizer rates are set for this width (depth 12); they scale with (width / 768)^-0.5.
_RATE_WIDTH = 768


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """The GPT."""

    vocab_size: bounds.Words
    """Vocabulary size, including special tokens (rows of the embedding)."""
    sequence_length: bounds.Tokens
    """Tokens per sequence."""
    depth: bounds.Layers
    """Number of layers; width and heads follow from it."""
    width: bounds.Width | None = None
    """Hidden width. None uses 64 x depth."""
    heads: bounds.Heads | None = None
    """Query heads; must divide the width. None uses width / 128, rounded up to a divisor."""
    kv_heads: bounds.Heads | None = None
    """Key and value heads; must divide the query heads. None uses as many as query heads."""
    remat: Remat = "none"
    """Activation checkpointing. block: keep each layer's input and recompute the layer in the
    backward pass; none: keep everything."""
    norm_eps: bounds.Epsilon = float(jnp.finfo(jnp.float32).eps)
    """Epsilon that is added to the mean square in each norm."""
    loss_piece: bounds.Tokens = 128
    """Tokens per sequence whose logits are in memory at the same time; fewer use less memory."""
    init_from: str | None = None
    """Initial parameters of a new run: a checkpoint, a run directory, a weights file, a
    transformers folder (NanoChatForCausalLM), or ``hf:ORG/MODEL[@REVISION]`` on the Hugging Face
    Hub."""

    task = "generate"
    model_type = "nanochat"  # in transformers' config.json
    usage = 'generate {run} "Once upon a time"'
    in_weights = ("depth", "vocab_size")
    not_in_weights = (("heads", "query_heads"), ("norm_eps", "norm_eps"))

    def check(self) -> None:
        """Checks that heads and chunks divide widths and sequences."""
        d, n, h = self.hidden, self.query_heads, self.shared_heads
        if d % (2 * n):
            fits = [m for m in range(1, d + 1) if d % (2 * m) == 0 and d // m <= _HEAD]
            near = f"use {min(fits, key=lambda m: abs(m - n))}" if fits else "no number fits"
            raise InputError(
                f"model.heads={n} must divide model.width={d} into an even head width: {near}",
                about=("model.heads", "model.width"),
            )
        chunked_loss.check_chunk(self.loss_piece, self.sequence_length)
        if n % h:
            raise InputError(
                f"model.kv_heads={h} must divide the {n} query heads (model.heads): use "
                f"{max(m for m in range(1, min(h, n) + 1) if n % m == 0)}",
                about=("model.kv_heads", "model.heads"),
            )

    @property
    def hidden(self) -> int:
        """Returns the hidden width."""
        return _ASPECT * self.depth if self.width is None else self.width

    @property
    def query_heads(self) -> int:
        """Returns the number of query heads."""
        return attention.fewest_heads(self.hidden, _HEAD) if self.heads is None else self.heads

    @property
    def shared_heads(self) -> int:
        """Returns the number of key and value heads."""
        return self.query_heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        """Returns the head width."""
        return self.hidden // self.query_heads

    @property
    def rate_scale(self) -> float:
        """Returns the factor of the embedding's and output layer's rates: (width / 768)^-0.5."""
        return float((self.hidden / _RATE_WIDTH) ** -0.5)

    def formulas(self) -> list[str]:
        """Lists the numbers that follow from `depth`, with their formulas."""

        def origin(given: int | None, formula: str) -> str:
            return formula if given is None else "as set"

        d, n, h, v = self.hidden, self.query_heads, self.shared_heads, self.vocab_size
        layer = 2 * d * (d + h * self.head_width) + 2 * _FF * d * d
        return [
            f"depth {self.depth}: width {d} ({origin(self.width, f'{_ASPECT} x depth')}), "
            f"{n} query heads ({origin(self.heads, f'width / {_HEAD}, up to a divisor')}) of width "
            f"{self.head_width}, {h} key-value heads ({origin(self.kv_heads, 'query heads')})",
            f"parameters {2 * v * d + self.depth * layer:,} (2 x {v} tokens x {d} + {self.depth} "
            f"layers x {layer:,})",
            f"with optim.muon: rates of embedding and output layer x {self.rate_scale:.4g} "
            f"((width / {_RATE_WIDTH})^-0.5)",
        ]

    def build(self, rngs: nnx.Rngs) -> "GPT":
        """Builds the module, with new float32 parameters."""
        return GPT(self, rngs)

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
        """Returns the role of each parameter for `optim.muon`."""
        return {
            "matrices": config.Role(prefix="blocks.", role="matrix"),
            "wte": config.Role(prefix="wte.", role="embedding", scale=self.rate_scale),
            "lm_head": config.Role(prefix="lm_head.", role="unembedding", scale=self.rate_scale),
        }

    def weight_tables(self) -> tuple[WeightTable, ...]:
        """Returns the names of nanochat, and of `NanoChatForCausalLM`."""
        return gpt_weights.NANOCHAT, gpt_weights.TRANSFORMERS

    @classmethod
    def guess(cls, tensors: Mapping[str, np.ndarray], source: str) -> "Config":
        """Infers the config from weights; assumes that the heads follow from the depth.

        Raises:
            InputError: the weights are not of this model.
        """
        sizes = gpt_weights.sizes(tensors, source, _HEAD)
        try:
            return cls(**sizes)
        except InputError as error:
            raise InputError(f"{source} does not have weights of this model: {error}") from error

    def to_settings(self) -> dict[str, Any]:
        """Returns the `config.json` of transformers."""
        shape = causal_weights.Shape(
            vocab_size=self.vocab_size,
            sequence_length=self.sequence_length,
            hidden=self.hidden,
            layers=self.depth,
            heads=self.query_heads,
            kv_heads=self.shared_heads,
            ff=_FF * self.hidden,
            norm_eps=self.norm_eps,
            rotary_base=_ROTARY_BASE,
        )
        return gpt_weights.settings(shape, _CAP)

    @classmethod
    def from_settings(cls, content: Mapping[str, Any], source: str) -> "Config":
        """Reads a `config.json` of transformers; a field that follows from the depth is None.

        Raises:
            InputError: it describes another network.
        """
        fields = gpt_weights.fields(
            content, source, cap=_CAP, ff_factor=_FF, rotary_base=_ROTARY_BASE
        )
        width, heads = fields["width"], fields["heads"]
        default = {
            "width": _ASPECT * fields["depth"],
            "heads": attention.fewest_heads(width, _HEAD),
            "kv_heads": heads,
        }
        fields |= {name: None for name in default if fields[name] == default[name]}
        chunk = chunked_loss.fitting_chunk(cls.loss_piece, fields["sequence_length"])
        try:
            return cls(loss_piece=chunk, **fields)
        except InputError as error:
            raise InputError(f"{source}: {error}") from error

    @classmethod
    def tiny(cls) -> "Config":
        """Returns two layers of width 16 with two heads, 16 tokens per sequence, vocabulary 50."""
        return cls(vocab_size=50, sequence_length=16, depth=2, width=16, heads=2, loss_piece=4)


class Embedding(nnx.Module):
    """Token embedding, drawn from N(0, 1)."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.table = normal_init(rngs, (config.vocab_size, config.hidden), 1.0)
        self.norm_eps = config.norm_eps

    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        """Maps ids to normalized vectors [B, S, D]."""
        return attention.rms_norm(embed(self.table[...], tokens_BS), self.norm_eps)


class Block(nnx.Module):
    """Attention and feed-forward layer, each with a residual connection.

    Kernels are [in, out]. Input kernels are normal with standard deviation
    `min(1, (out / in)^0.5) / in^0.5`; kernels that write to the residual stream start as zeros.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        d, shared = config.hidden, config.shared_heads * config.head_width
        self.q = _reading(rngs, d, d)
        self.k = _reading(rngs, d, shared)
        self.v = _reading(rngs, d, shared)
        self.out = nnx.Param(jnp.zeros((d, d)))
        self.up = _reading(rngs, d, _FF * d)
        self.down = nnx.Param(jnp.zeros((_FF * d, d)))
        self.heads = config.query_heads
        self.shared_heads = config.shared_heads
        self.norm_eps = config.norm_eps

    def __call__(self, x_BSD: jax.Array, cos_SI: jax.Array, sin_SI: jax.Array) -> jax.Array:
        """Maps [B, S, D] to the same shape; a position attends to itself and those before it."""
        heads = self._heads(self._norm(x_BSD), cos_SI, sin_SI)
        return self._onward(x_BSD, attention.attend(*heads))

    def decode_step(
        self,
        x_BSD: jax.Array,
        cos_SI: jax.Array,
        sin_SI: jax.Array,
        cache: attention.Cache,
        start: int | jax.Array,
    ) -> tuple[jax.Array, attention.Cache]:
        """Does the same for positions from `start`, which also attend to the cache."""
        heads = self._heads(self._norm(x_BSD), cos_SI, sin_SI)
        seen_BSNK, cache = attention.attend_cached(*heads, cache, start)
        return self._onward(x_BSD, seen_BSNK), cache

    def _onward(self, x_BSD: jax.Array, seen_BSNK: jax.Array) -> jax.Array:
        x_BSD = x_BSD + seen_BSNK.reshape(x_BSD.shape) @ self.out[...]
        h_BSF = jnp.square(jax.nn.relu(self._norm(x_BSD) @ self.up[...]))
        return x_BSD + h_BSF @ self.down[...]

    def _heads(
        self, x_BSD: jax.Array, cos_SI: jax.Array, sin_SI: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries [B, S, N, K], keys and values [B, S, H, K]."""
        b, s, _ = x_BSD.shape
        q_BSNK = (x_BSD @ self.q[...]).reshape(b, s, self.heads, -1)
        k_BSHK = (x_BSD @ self.k[...]).reshape(b, s, self.shared_heads, -1)
        v_BSHK = (x_BSD @ self.v[...]).reshape(b, s, self.shared_heads, -1)
        q_BSNK, k_BSHK = (
            self._norm(attention.rotate(x, cos_SI, sin_SI)).astype(x.dtype)
            for x in (q_BSNK, k_BSHK)
        )
        return q_BSNK, k_BSHK, v_BSHK

    def _norm(self, x: jax.Array) -> jax.Array:
        return attention.rms_norm(x, self.norm_eps)


class Head(nnx.Module):
    """The output layer; starts as zeros, so that all tokens are equally likely."""

    def __init__(self, config: Config) -> None:
        self.words = nnx.Param(jnp.zeros((config.vocab_size, config.hidden)))
        self.chunk = config.loss_piece
        self.norm_eps = config.norm_eps

    def __call__(
        self, x_BSD: jax.Array, targets_BS: jax.Array, weight_BS: jax.Array
    ) -> chunked_loss.Predictions:
        """Computes the cost of the targets; see :func:`jaxtrain.ops.chunked_loss.predict`."""
        x_BSD, words = attention.rms_norm(x_BSD, self.norm_eps), self.words[...]
        return chunked_loss.predict(x_BSD, words, targets_BS, weight_BS, cap=_CAP, chunk=self.chunk)

    def logits(self, x_BSD: jax.Array) -> jax.Array:
        """Returns all logits, float32 [B, S, V]."""
        x_BSD = attention.rms_norm(x_BSD, self.norm_eps)
        logits_BSV = attention.einsum_float32("bsd,vd->bsv", x_BSD, self.words[...])
        return capped(logits_BSV, _CAP)


class GPT(Model):
    """Embedding, blocks, and output layer."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.wte = Embedding(config, rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.depth)])
        self.lm_head = Head(config)
        self.shared_heads = config.shared_heads
        self.head_width = config.head_width
        self.remat = config.remat

    def encode(self, tokens_BS: jax.Array) -> jax.Array:
        """Maps ids to vectors [B, S, D] before the last norm."""
        cos_SI, sin_SI = attention.rotary(tokens_BS.shape[1], self.head_width, _ROTARY_BASE)
        x_BSD = remat(Embedding.__call__, self.remat)(self.wte, tokens_BS)
        block_of = remat(Block.__call__, self.remat)
        for block in self.blocks:
            x_BSD = block_of(block, x_BSD, cos_SI, sin_SI)
        return x_BSD

    def logits(self, tokens_BS: jax.Array) -> jax.Array:
        """Returns float32 logits [B, S, V] of each next token; for short sequences."""
        return remat(Head.logits, self.remat)(self.lm_head, self.encode(tokens_BS))

    def cache(self, rows: int, length: int) -> list[attention.Cache]:
        """Allocates `length` positions of `rows` sequences, for :meth:`decode_step`."""
        shape = rows, length, self.shared_heads, self.head_width
        dtype = self.lm_head.words[...].dtype
        return [attention.empty_cache(*shape, dtype) for _ in self.blocks]

    def decode_step(
        self,
        tokens_BS: jax.Array,
        count: int | jax.Array,
        cache: list[attention.Cache],
        start: int | jax.Array,
    ) -> tuple[jax.Array, list[attention.Cache]]:
        """Returns the logits after the first `count` tokens; see :mod:`jaxtrain.models`."""
        length = tokens_BS.shape[1]
        cos_SI, sin_SI = attention.rotary(length, self.head_width, _ROTARY_BASE, start)
        angles = cos_SI, sin_SI
        last_B1D, kept = attention.onward(
            self.blocks, self.wte(tokens_BS), count, angles, cache, start
        )
        return self.lm_head.logits(last_B1D)[:, 0], kept

    def samples(self, batch: attention.Batch) -> dict[str, jax.Array]:
        """Completes the beginnings of the first examples."""
        return {"text": generation.samples(self, batch)}

    def loss(
        self, batch: attention.Batch, keys_B: jax.Array
    ) -> tuple[jax.Array, jax.Array, attention.Sums]:
        """Computes the cross-entropy over targets, in nats, and `accuracy`. Uses no randomness."""
        del keys_B
        return chunked_loss.loss_sums(self._predict(batch), batch)

    def evaluate(self, batch: attention.Batch) -> attention.Sums:
        """Computes `loss` and `accuracy` over targets, and `bits_per_byte` of their text."""
        return chunked_loss.evaluation_sums(self._predict(batch), batch)

    def _predict(self, batch: attention.Batch) -> chunked_loss.Predictions:
        x_BSD = self.encode(batch["tokens"])
        # Without remat, which would recompute the loss and gather its parameter again: the loss
        # keeps only its gradient, and no gathered parameter.
        return self.lm_head(x_BSD, batch["targets"], chunked_loss.target_weights(batch))


def _reading(rngs: nnx.Rngs, inputs: int, outputs: int) -> nnx.Param[jax.Array]:
    deviation = min(1.0, math.sqrt(outputs / inputs)) / math.sqrt(inputs)
    return normal_init(rngs, (inputs, outputs), deviation)
