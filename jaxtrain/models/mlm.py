"""A masked language model: BERT (Devlin et al. 2018, arXiv:1810.04805), for any size.

Layer for layer what transformers calls ``BertForMaskedLM``: normalisation after each residual sum,
learned positions, exact GELU, a transform before the decoder, and a decoder tied to the word
embedding with a bias of its own. There is one kind of segment; an export writes zeros for the
embeddings of the two that BERT has.

Logits are computed at the masked positions alone, which is all that the loss looks at: the batch
names them in slots of a fixed number, so nothing is dropped.

Shapes: B sequences, S tokens of one, M slots for masked positions, D hidden size, F size of the
feed-forward layer, H heads, K size of a head, V vocabulary.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxtrain import layers
from jaxtrain.errors import InputError

PAD = 0
SPECIALS = 5
"""[PAD], [UNK], [CLS], [SEP], [MASK]: the first ids of every vocabulary."""
_INIT_STD = 0.02
_NORM_EPSILON = 1e-12

Batch = dict[str, jax.Array]
Sums = dict[str, tuple[jax.Array, ...]]
Key = jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The masked language model."""

    vocab_size: int
    """Entries of the vocabulary, the five special ones among them (tokens)."""
    sequence_length: int
    """Length of an example (tokens)."""
    hidden: int
    """Size of a token's vector between layers."""
    layers: int
    """Layers of attention and feed-forward."""
    heads: int
    """Attention heads; they divide hidden."""
    ff: int | None = None
    """Size inside a feed-forward layer; None is 4 x hidden."""
    dropout: float = 0.1
    """Share of values set to zero while training: embeddings, attention weights, layer outputs."""
    mask_fraction: float = 0.15
    """Share of an example's ordinary tokens to predict, 0 to 1."""
    remat: layers.Remat = "none"
    """block: the backward pass computes each layer again and keeps only what goes into it; none: it
    keeps everything."""

    def __post_init__(self) -> None:
        for name in ("sequence_length", "hidden", "layers", "heads"):
            if getattr(self, name) < 1:
                raise InputError(f"model.{name}={getattr(self, name)}: use at least 1")
        if self.vocab_size <= SPECIALS:
            raise InputError(
                f"model.vocab_size={self.vocab_size}: use more than {SPECIALS}, which are special"
            )
        if self.hidden % self.heads:
            nearest = max(1, round(self.hidden / self.heads)) * self.heads
            raise InputError(
                f"model.hidden={self.hidden} must be a multiple of model.heads={self.heads}: the "
                f"nearest is {nearest}"
            )
        if self.ff is not None and self.ff < 1:
            raise InputError(f"model.ff={self.ff}: use at least 1, or None for 4 x hidden")
        if not 0 <= self.dropout < 1:
            raise InputError(f"model.dropout={self.dropout}: use a number from 0 to below 1")
        if not 0 < self.mask_fraction < 1 or self.slots < 1:
            raise InputError(
                f"model.mask_fraction={self.mask_fraction} of "
                f"model.sequence_length={self.sequence_length} tokens masks {self.slots}: use a "
                "number between 0 and 1 that masks at least one"
            )

    @property
    def slots(self) -> int:
        """Most positions that can be masked in one example."""
        return math.floor(self.mask_fraction * self.sequence_length + 0.5)

    def build(self, rngs: nnx.Rngs) -> "MaskedLM":
        """The module, with fresh float32 parameters."""
        return MaskedLM(self, rngs)

    def batch_spec(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """What a batch holds.

        ``tokens`` int32 [B, S], masked already, padded with 0; ``positions`` and ``targets`` int32
        [B, M] and ``target_weights`` float32 [B, M], 0 in slots that are not used; ``weight``.
        """
        tokens, slots = (batch_size, self.sequence_length), (batch_size, self.slots)
        return {
            "tokens": jax.ShapeDtypeStruct(tokens, jnp.int32),
            "positions": jax.ShapeDtypeStruct(slots, jnp.int32),
            "targets": jax.ShapeDtypeStruct(slots, jnp.int32),
            "target_weights": jax.ShapeDtypeStruct(slots, jnp.float32),
            "weight": jax.ShapeDtypeStruct((batch_size,), jnp.float32),
        }

    def flops_per_example(self) -> float:
        """Matrix products, forward and backward (3 x forward), of one sequence.

        Forward: layers x S x (8 D^2 + 4 D F + 4 S D) for projections, feed-forward and attention,
        and M x (2 D^2 + 2 D V) for the transform and the logits, at masked positions alone.
        """
        d, f, s = self.hidden, self.feed_forward, self.sequence_length
        forward = self.layers * s * (8 * d**2 + 4 * d * f + 4 * s * d)
        forward += self.slots * (2 * d**2 + 2 * d * self.vocab_size)
        return 3.0 * forward

    def tokens_per_example(self) -> int:
        """Tokens of a sequence, padding among them."""
        return self.sequence_length

    @property
    def feed_forward(self) -> int:
        """Size inside a feed-forward layer."""
        return 4 * self.hidden if self.ff is None else self.ff

    @classmethod
    def tiny(cls) -> "Config":
        """The same network with two narrow layers, on 16 tokens."""
        return cls(vocab_size=64, sequence_length=16, hidden=16, layers=2, heads=2)


class MaskedLM(nnx.Module):
    """Embeddings, encoder layers, and the head that predicts masked tokens."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.embeddings = Embeddings(config, rngs)
        self.layers = nnx.List([EncoderLayer(config, rngs) for _ in range(config.layers)])
        self.head = Head(config, rngs)
        self.remat = config.remat

    def hidden(self, tokens_BS: jax.Array, key: Key) -> jax.Array:
        """Vectors [B, S, D] after the last layer; ``key`` drops values out, None does not."""
        keys = [None] * (len(self.layers) + 1)
        if key is not None:
            keys = list(jax.random.split(key, len(keys)))
        # Padding is seen by no token; what stands at a padded position itself is never read.
        seen_B11S = (tokens_BS != PAD)[:, None, None, :]
        x_BSD = layers.remat(Embeddings.__call__, "none")(self.embeddings, tokens_BS, keys[0])
        for layer, own in zip(self.layers, keys[1:], strict=True):
            x_BSD = layers.remat(EncoderLayer.__call__, self.remat)(layer, x_BSD, seen_B11S, own)
        return x_BSD

    def logits(self, tokens_BS: jax.Array, positions_BM: jax.Array, key: Key) -> jax.Array:
        """Float32 [B, M, V] at the given positions."""
        x_BSD = self.hidden(tokens_BS, key)
        x_BMD = jnp.take_along_axis(x_BSD, positions_BM[:, :, None], axis=1)
        return layers.remat(Head.__call__, "none")(self.head, x_BMD, self.embeddings.words)

    def loss(self, batch: Batch, key: jax.Array) -> tuple[jax.Array, jax.Array, Sums]:
        """Cross-entropy (nats) summed over masked tokens, and how many there are."""
        sums = self._sums(batch, key)
        return *sums["loss"], {"accuracy": sums["accuracy"]}

    def evaluate(self, batch: Batch) -> Sums:
        """`loss` and `accuracy`, over masked tokens; nothing is dropped out."""
        return self._sums(batch, None)

    def _sums(self, batch: Batch, key: Key) -> dict[str, tuple[jax.Array, jax.Array]]:
        logits_BMV = self.logits(batch["tokens"], batch["positions"], key)
        weight_BM = batch["target_weights"] * batch["weight"][:, None]
        nats_BM = optax.softmax_cross_entropy_with_integer_labels(logits_BMV, batch["targets"])
        right_BM = logits_BMV.argmax(-1) == batch["targets"]
        weight = weight_BM.sum()
        return {
            "loss": ((nats_BM * weight_BM).sum(), weight),
            "accuracy": ((right_BM * weight_BM).sum(), weight),
        }


class Embeddings(nnx.Module):
    """Word and position, summed and normalised."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.words = _embedding(config.vocab_size, config.hidden, rngs)
        self.positions = _embedding(config.sequence_length, config.hidden, rngs)
        self.norm = _norm(config.hidden, rngs)
        self.dropout = config.dropout

    def __call__(self, tokens_BS: jax.Array, key: Key) -> jax.Array:
        """[B, S] -> [B, S, D]."""
        words_BSD = self.words[...][tokens_BS]
        positions_1SD = self.positions[...][None, : tokens_BS.shape[1]]
        return _drop(self.norm(words_BSD + positions_1SD), self.dropout, key)


class EncoderLayer(nnx.Module):
    """Attention and a feed-forward layer, each summed with its input and then normalised."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.qkv = _linear(config.hidden, 3 * config.hidden, rngs)
        self.attended = _linear(config.hidden, config.hidden, rngs)
        self.attention_norm = _norm(config.hidden, rngs)
        self.up = _linear(config.hidden, config.feed_forward, rngs)
        self.down = _linear(config.feed_forward, config.hidden, rngs)
        self.ff_norm = _norm(config.hidden, rngs)
        self.heads = config.heads
        self.dropout = config.dropout

    def __call__(self, x_BSD: jax.Array, seen_B11S: jax.Array, key: Key) -> jax.Array:
        """[B, S, D] -> the same shape."""
        keys = [None] * 3 if key is None else list(jax.random.split(key, 3))
        attended = self.attended(self._attend(x_BSD, seen_B11S, keys[0]))
        x_BSD = self.attention_norm(x_BSD + _drop(attended, self.dropout, keys[1]))
        forward = self.down(jax.nn.gelu(self.up(x_BSD), approximate=False))
        return self.ff_norm(x_BSD + _drop(forward, self.dropout, keys[2]))

    def _attend(self, x_BSD: jax.Array, seen_B11S: jax.Array, key: Key) -> jax.Array:
        """Plain products: fused attention kernels cannot drop attention weights out."""
        b, s, d = x_BSD.shape
        size = d // self.heads
        q_BSHK, k_BSHK, v_BSHK = jnp.moveaxis(
            self.qkv(x_BSD).reshape(b, s, 3, self.heads, size), 2, 0
        )
        scores_BHSS = jnp.einsum(
            "bqhk,bshk->bhqs", q_BSHK, k_BSHK, preferred_element_type=jnp.float32
        )
        # The lowest number rather than -inf: a row that is all padding must not become NaN.
        lowest = jnp.finfo(jnp.float32).min
        weights_BHSS = jax.nn.softmax(
            jnp.where(seen_B11S, scores_BHSS / math.sqrt(size), lowest), axis=-1
        )
        weights_BHSS = _drop(weights_BHSS.astype(x_BSD.dtype), self.dropout, key)
        return jnp.einsum("bhqs,bshk->bqhk", weights_BHSS, v_BSHK).reshape(b, s, d)


class Head(nnx.Module):
    """Transform, then the product with the word embedding."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        self.transform = _linear(config.hidden, config.hidden, rngs)
        self.norm = _norm(config.hidden, rngs)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size, jnp.float32))

    def __call__(self, x_BMD: jax.Array, words: nnx.Param[Any]) -> jax.Array:
        """[B, M, D] -> float32 [B, M, V]; ``words`` is the embedding [V, D]."""
        x_BMD = self.norm(jax.nn.gelu(self.transform(x_BMD), approximate=False))
        logits_BMV = jnp.einsum(
            "bmd,vd->bmv", x_BMD, words[...], preferred_element_type=jnp.float32
        )
        return logits_BMV + self.bias[...].astype(jnp.float32).reshape(1, 1, -1)


def _linear(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        inputs, outputs, kernel_init=nnx.initializers.normal(_INIT_STD), rngs=rngs
    )


def _norm(size: int, rngs: nnx.Rngs) -> nnx.LayerNorm:
    # "Fast" variance, E[x^2] - E[x]^2, loses digits where the mean is large.
    return nnx.LayerNorm(size, epsilon=_NORM_EPSILON, use_fast_variance=False, rngs=rngs)


def _embedding(rows: int, size: int, rngs: nnx.Rngs) -> nnx.Param[Any]:
    return nnx.Param(_INIT_STD * jax.random.normal(rngs.params(), (rows, size), jnp.float32))


def _drop(x: jax.Array, rate: float, key: Key) -> jax.Array:
    """Sets a share of the values to zero and scales up the rest; ``key`` None changes nothing."""
    if key is None or rate == 0.0:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), jnp.zeros((), x.dtype))
