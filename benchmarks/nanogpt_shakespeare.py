"""nanoGPT's network and optimizer in this program, at its Shakespeare setting for CPUs.

The check that a comparison with nanoGPT is one of recipes: the data, the loop, and the validation
are those of the config `shakespeare`; the network, its initial values, AdamW, and the schedule are
those of https://github.com/karpathy/nanoGPT at 3adf61e: `config/train_shakespeare_char.py` with the
README's overrides for CPUs. There, a batch has windows at random places, and the vocabulary has the
65 characters of the text; here it has 265 tokens, which adds 25,600 parameters.

    jaxtrain train benchmarks/nanogpt_shakespeare.py --data.path shakespeare

Shapes: B sequences, S tokens, D width, N heads, K head width, V vocabulary.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain import config
from jaxtrain.config import bounds
from jaxtrain.models import masked
from jaxtrain.models.contract import Batch, Model, ModelConfig, Sums
from jaxtrain.ops import attention, chunked_loss
from jaxtrain.ops.init import normal_init
from jaxtrain.ops.layers import add_shared, dropout, embed, gelu, split_keys

_STD = 0.02
_EPS = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """nanoGPT's GPT without biases."""

    vocab_size: bounds.Words
    """Vocabulary size."""
    sequence_length: bounds.Tokens
    """Tokens per sequence."""
    layers: bounds.Layers = 4
    """Number of layers."""
    width: bounds.Width = 128
    """Hidden width."""
    heads: bounds.Heads = 4
    """Attention heads; must divide the width."""
    dropout: bounds.Fraction = 0.0
    """Dropout rate of embeddings, attention probabilities, and layer outputs."""
    init_from: str | None = None
    """Initial parameters: a checkpoint or a run directory."""

    def build(self, rngs: nnx.Rngs) -> "GPT":
        """Builds the module, with new float32 parameters."""
        return GPT(self, rngs)

    def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of tokens, targets, and weights."""
        return chunked_loss.batch_spec(batch_size, self.sequence_length)

    def index_limits(self) -> dict[str, int]:
        """Returns exclusive upper limits for the integers of a batch."""
        return {"tokens": self.vocab_size, "targets": self.vocab_size}

    def tokens_per_example(self) -> int:
        """Returns the number of tokens per sequence."""
        return self.sequence_length

    @classmethod
    def tiny(cls) -> "Config":
        """Returns a config that is small enough for a test on a CPU."""
        return cls(vocab_size=50, sequence_length=16, layers=2, width=16, heads=2)


class Block(nnx.Module):
    """Attention and feed-forward layer, each after a norm and with a residual connection."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        width, heads = config.width, config.heads
        writing = _STD / math.sqrt(2 * config.layers)
        self.ln_1, self.ln_2 = (masked.LayerNorm(width, _EPS, bias=False) for _ in range(2))
        self.c_attn = normal_init(rngs, (width, 3 * width), _STD)
        self.c_proj = normal_init(rngs, (width, width), writing)
        self.c_fc = normal_init(rngs, (width, 4 * width), _STD)
        self.c_out = normal_init(rngs, (4 * width, width), writing)
        self.heads, self.dropout = heads, config.dropout

    def __call__(self, x_BSD: jax.Array, keys_B: jax.Array | None) -> jax.Array:
        """Maps [B, S, D] to the same shape; without keys, without dropout."""
        b, s, _ = x_BSD.shape
        of_attention, of_output, of_ff = split_keys(keys_B, 3)
        qkv_BS3NK = (self.ln_1(x_BSD) @ self.c_attn[...]).reshape(b, s, 3, self.heads, -1)
        visible_BQS = None if keys_B is None else jnp.tril(jnp.ones((b, s, s), bool))
        seen_BSNK = attention.attend(
            *(qkv_BS3NK[:, :, i] for i in range(3)),
            visible_BQS,
            rate=self.dropout,
            keys_B=of_attention,
        )
        h_BSD = seen_BSNK.reshape(x_BSD.shape) @ self.c_proj[...]
        x_BSD = x_BSD + dropout(h_BSD, self.dropout, of_output)
        h_BSD = gelu(self.ln_2(x_BSD) @ self.c_fc[...]) @ self.c_out[...]
        return x_BSD + dropout(h_BSD, self.dropout, of_ff)


class GPT(Model):
    """Embeddings of tokens and positions, blocks, a norm, and the embedding as output layer."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.wte = normal_init(rngs, (config.vocab_size, config.width), _STD)
        self.wpe = normal_init(rngs, (config.sequence_length, config.width), _STD)
        self.h = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.ln_f = masked.LayerNorm(config.width, _EPS, bias=False)
        self.dropout = config.dropout

    def loss(self, batch: Batch, keys_B: jax.Array) -> tuple[jax.Array, jax.Array, Sums]:
        """Computes the cross-entropy over targets, in nats, and `accuracy`."""
        keys = keys_B if self.dropout else None
        return chunked_loss.loss_sums(self._predict(batch, keys), batch)

    def evaluate(self, batch: Batch) -> Sums:
        """Computes `loss`, `accuracy`, and `bits_per_byte`."""
        return chunked_loss.evaluation_sums(self._predict(batch), batch)

    def _predict(self, batch: Batch, keys_B: jax.Array | None = None) -> chunked_loss.Predictions:
        of_embedding, *of_blocks = split_keys(keys_B, 1 + len(self.h))
        x_BSD = add_shared(embed(self.wte[...], batch["tokens"]), self.wpe[...])
        x_BSD = dropout(x_BSD, self.dropout, of_embedding)
        for block, keys in zip(self.h, of_blocks, strict=True):
            x_BSD = block(x_BSD, keys)
        weight_BS = chunked_loss.target_weights(batch)
        return chunked_loss.predict(
            self.ln_f(x_BSD), self.wte[...], batch["targets"], weight_BS, cap=None
        )


base = config.named("shakespeare")
run = dataclasses.replace(
    base,
    name="nanogpt_shakespeare",
    model=Config(vocab_size=base.model.vocab_size, sequence_length=base.model.sequence_length),
    optim=config.Optim(
        peak_lr=1e-3,
        schedule="cosine",
        warmup_steps=100,
        warmdown_to=0.1,
        b1=0.9,
        b2=0.99,
        weight_decay=0.1,
        max_grad_norm=1.0,
    ),
)
