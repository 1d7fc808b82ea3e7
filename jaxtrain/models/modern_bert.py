"""ModernBERT: an encoder of today for masked language modeling.

The network is ModernBERT's (https://arxiv.org/abs/2412.13663), which Ettin
(https://arxiv.org/abs/2507.11412) trains at other sizes: norms before attention and feed-forward
layer, after the embedding, and at the end; GeGLU; rotary positions; and no biases but that of the
output layer. Every third layer attends globally, the others to the tokens nearby, so most of the
cost is linear in the length. Parameters map one to one to transformers' `ModernBertForMaskedLM`.

The published models have no dropout. Training may have it where ModernBERT's has: after the matrix
that combines the heads (`attention_out_dropout`).

Shapes: B sequences, S tokens, D hidden width, F feed-forward width, N heads, K head width, I half
of K, C blocks of L queries, which attend to T keys.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtrain import errors
from jaxtrain.config import bounds
from jaxtrain.errors import InputError
from jaxtrain.models import masked
from jaxtrain.models.weight_table import MATRIX, Row, WeightTable
from jaxtrain.ops import attention
from jaxtrain.ops.init import normal_init
from jaxtrain.ops.layers import dropout, geglu, remat, split_keys
from jaxtrain.ops.per_device import Copies

INIT_STD, NORM_EPS = 0.02, 1e-5
GLOBAL_EVERY = 3  # the first layer and every third after it, in all published models
_REACH = bounds.Bounds(least=2, most=2**15)
_FIXED = {  # properties of this network at any size
    "hidden_activation": "gelu",
    "classifier_activation": "gelu",
    "norm_eps": NORM_EPS,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "classifier_bias": False,
    "decoder_bias": True,
    "attention_dropout": 0.0,
    "embedding_dropout": 0.0,
    "mlp_dropout": 0.0,
    "tie_word_embeddings": True,
    "global_attn_every_n_layers": GLOBAL_EVERY,
}
_KINDS = ("full_attention", "sliding_attention")
_WORD, _BIAS = "model.embeddings.tok_embeddings.weight", "decoder.bias"
TABLE = WeightTable(
    rows=(
        Row(_WORD, "embeddings.word"),
        Row("model.embeddings.norm.weight", "embeddings.norm.scale"),
        Row("model.layers.{}.attn_norm.weight", "layers.{}.attention_norm.scale"),
        Row("model.layers.{}.attn.Wqkv.weight", "layers.{}.qkv", MATRIX),
        Row("model.layers.{}.attn.Wo.weight", "layers.{}.attention_out", MATRIX),
        Row("model.layers.{}.mlp_norm.weight", "layers.{}.ff_norm.scale"),
        Row("model.layers.{}.mlp.Wi.weight", "layers.{}.ff_in", MATRIX),
        Row("model.layers.{}.mlp.Wo.weight", "layers.{}.ff_out", MATRIX),
        Row("model.final_norm.weight", "final_norm.scale"),
        Row("head.dense.weight", "head.dense.kernel", MATRIX),
        Row("head.norm.weight", "head.norm.scale"),
        Row(_BIAS, "head.bias"),
    ),
    tied={"decoder.weight": _WORD},
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(masked.MaskedConfig):
    """ModernBERT; the base model has 22 layers of width 768, the large one 28 of width 1024."""

    model_type = "modernbert"  # in transformers' config.json
    in_weights = ("vocab_size", "hidden", "layers", "ff")
    not_in_weights = (
        *masked.MaskedConfig.not_in_weights,
        *((name, name) for name in ("local_attention", "global_base", "local_base")),
    )

    ff: bounds.Width
    """Width of the feed-forward layers: 1152 in the base model, 2624 in the large one."""
    local_attention: Annotated[int, _REACH] = 128
    """Tokens that a token of a local layer attends to, in addition to itself: half of them before
    it, half after it. An even number. The first layer and every third after it attend to all."""
    global_base: Annotated[float, bounds.ROTARY] = 160_000.0
    """Base of the rotary positions of global layers. ModernBERT and Ettin train sequences of 1024
    tokens with 10,000, and longer ones, which continue from those, with 160,000."""
    local_base: Annotated[float, bounds.ROTARY] = 10_000.0
    """Base of the rotary positions of local layers."""
    attention_out_dropout: bounds.Fraction = 0.0
    """Dropout rate of the outputs of attention, in training, 0 to 1."""
    mask_fraction: Annotated[float, bounds.Bounds(above=0, most=1)] = 0.3
    init_from: str | None = None
    """Initial parameters of a new run: a checkpoint, a run directory, a transformers folder
    (ModernBertForMaskedLM), or ``hf:ORG/MODEL[@REVISION]`` on the Hugging Face Hub."""

    def check(self) -> None:
        """Checks also that heads have pairs to rotate, and the two sides of a local layer."""
        super().check()
        if self.hidden % (2 * self.heads):
            raise InputError(
                f"model.heads={self.heads} must divide model.hidden={self.hidden} into an even "
                "head width: use another number of heads",
                about=("model.heads", "model.hidden"),
            )
        if self.local_attention % 2:
            raise InputError(
                f"model.local_attention={self.local_attention} must be even, half of it on each "
                f"side of a token: use {self.local_attention + 1}",
                about="model.local_attention",
            )

    def may_change(self, field: str, theirs: Mapping[str, Any]) -> bool:
        """Longer sequences may continue from shorter ones with another base."""
        shorter = theirs.get("sequence_length", self.sequence_length) < self.sequence_length
        return field == "global_base" and shorter

    def is_global(self, layer: int) -> bool:
        """Returns whether a layer attends to all tokens."""
        return layer % GLOBAL_EVERY == 0

    def build(self, rngs: nnx.Rngs) -> "ModernBert":
        """Builds the module, with new float32 parameters."""
        return ModernBert(self, rngs)

    def weight_tables(self) -> tuple[WeightTable, ...]:
        """Returns the names of `ModernBertForMaskedLM`."""
        return (TABLE,)

    def to_settings(self) -> dict[str, Any]:
        """Returns the `config.json` of transformers, also as its versions before 5 read it."""
        bases = {"full_attention": self.global_base, "sliding_attention": self.local_base}
        return {
            "architectures": ["ModernBertForMaskedLM"],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": self.ff,
            "max_position_embeddings": self.sequence_length,
            "local_attention": self.local_attention,
            "layer_types": [_KINDS[not self.is_global(n)] for n in range(self.layers)],
            "global_rope_theta": self.global_base,
            "local_rope_theta": self.local_base,
            "rope_parameters": {
                kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()
            },
            "initializer_range": INIT_STD,
            "pad_token_id": self.pad_id,
            "dtype": "float32",
            **_FIXED,
        }

    @classmethod
    def fields_of(cls, content: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Returns the fields that correspond to a `config.json`; see the base class."""
        layers = bounds.entry(content, "num_hidden_layers", bounds.LAYERS, source)
        wanted = [_KINDS[bool(number % GLOBAL_EVERY)] for number in range(layers)]
        expected = _FIXED | {"layer_types": wanted, "rope_scaling": None}
        if other := bounds.differing(content, expected):
            raise InputError(f"{source}: this network is not ModernBERT: {', '.join(other)}")
        pad_id = content.get("pad_token_id", 50_283)  # transformers' own
        local = content.get("local_attention", 128)
        bounds.check(f"{source}: pad_token_id", pad_id, bounds.Bounds(least=0))
        bounds.check(f"{source}: local_attention", local, _REACH)
        return {
            "vocab_size": bounds.entry(content, "vocab_size", bounds.WORDS, source),
            "sequence_length": bounds.entry(
                content, "max_position_embeddings", bounds.TOKENS, source
            ),
            "hidden": bounds.entry(content, "hidden_size", bounds.WIDTH, source),
            "layers": layers,
            "heads": bounds.entry(content, "num_attention_heads", bounds.HEADS, source),
            "ff": bounds.entry(content, "intermediate_size", bounds.WIDTH, source),
            "local_attention": local,
            "global_base": _rotary_base(content, 0, "global_rope_theta", 160_000.0, source),
            "local_base": _rotary_base(content, 1, "local_rope_theta", 10_000.0, source),
            "pad_id": pad_id,
        }

    @classmethod
    def tiny(cls) -> Self:
        """Returns four layers of width 16, two of them local, 16 tokens per sequence."""
        return cls(
            vocab_size=50,
            sequence_length=16,
            hidden=16,
            layers=4,
            heads=2,
            ff=24,
            local_attention=8,
        )


def _rotary_base(
    content: Mapping[str, Any], kind: int, old_name: str, usual: float, source: str
) -> float:
    """Reads the base of a kind of layer, as transformers 5 or its versions before write it."""
    name, entry = f"rope_parameters.{_KINDS[kind]}", content.get("rope_parameters")
    if isinstance(entry, Mapping):
        entry = entry.get(_KINDS[kind])
    entry = {} if entry is None else entry
    if not isinstance(entry, Mapping) or entry.get("rope_type", "default") != "default":
        raise InputError(
            f"{source}: {name}={errors.short_repr(entry)}: rotary positions must be default"
        )
    base = entry.get("rope_theta", content.get(old_name, usual))
    bounds.check(f"{source}: {name}.rope_theta", base, bounds.ROTARY, float)
    return float(base)


class Embeddings(masked.WordEmbedding):
    """Token vectors, normalized."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        super().__init__(config, INIT_STD, rngs)
        self.norm = _norm(config)

    def __call__(self, words: Copies | None, tokens_BS: jax.Array) -> jax.Array:
        """Maps ids to [B, S, D]."""
        return self.norm(self.vectors(words, tokens_BS))


class Dense(nnx.Module):
    """Linear layer without a bias; its kernel is [in, out]."""

    def __init__(self, inputs: int, outputs: int, deviation: float, rngs: nnx.Rngs) -> None:
        self.kernel = normal_init(rngs, (inputs, outputs), deviation)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps [B, any, in] to [B, any, out]."""
        return x @ self.kernel[...]


class Layer(nnx.Module):
    """Attention and feed-forward layer, each with a norm before it and a residual connection.

    Args:
        number: of the layer, from 0. The embedding is normalized already, so the first has no norm
            before its attention.
    """

    def __init__(self, config: Config, rngs: nnx.Rngs, number: int) -> None:
        d, ff, writing_std = config.hidden, config.ff, _writing_std(config)
        self.attention_norm = _norm(config) if number else None
        self.qkv = normal_init(rngs, (d, 3 * d), INIT_STD)  # queries, keys, values, side by side
        self.attention_out = normal_init(rngs, (d, d), writing_std)
        self.ff_norm = _norm(config)
        self.ff_in = normal_init(rngs, (d, 2 * ff), INIT_STD)  # the input of GELU, and the gate
        self.ff_out = normal_init(rngs, (ff, d), writing_std)
        self.heads = config.heads
        self.attention_out_dropout = config.attention_out_dropout

    def __call__(
        self,
        x_BSD: jax.Array,
        cos_SI: jax.Array,
        sin_SI: jax.Array,
        visible: jax.Array,
        keys_B: jax.Array | None,
    ) -> jax.Array:
        """Maps [B, S, D] to the same shape.

        Args:
            visible: of a local layer, bool [B, C, L, T] of :func:`attention.near_blocks`; of a
                global one, of :func:`attention.attend`.
            keys_B: each example's key, for dropout; without keys, there is none.
        """
        b, s, d = x_BSD.shape
        h_BSD = x_BSD if self.attention_norm is None else self.attention_norm(x_BSD)
        qkv_BS3NK = (h_BSD @ self.qkv[...]).reshape(b, s, 3, self.heads, d // self.heads)
        q_BSNK, k_BSNK = (attention.rotate(qkv_BS3NK[:, :, i], cos_SI, sin_SI) for i in (0, 1))
        attend = attention.attend_near if visible.ndim == 4 else attention.attend
        seen_BSNK = attend(q_BSNK, k_BSNK, qkv_BS3NK[:, :, 2], visible)
        out_BSD = seen_BSNK.reshape(b, s, d) @ self.attention_out[...]
        x_BSD = x_BSD + dropout(out_BSD, self.attention_out_dropout, keys_B)
        return x_BSD + geglu(self.ff_norm(x_BSD) @ self.ff_in[...]) @ self.ff_out[...]


class ModernBert(masked.MaskedModel):
    """Embeddings, layers, and head."""

    embeddings: Embeddings

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        super().__init__(config)
        self.embeddings = Embeddings(config, rngs)
        self.layers = nnx.List([Layer(config, rngs, n) for n in range(config.layers)])
        self.final_norm = _norm(config)
        dense = Dense(config.hidden, config.hidden, _writing_std(config), rngs)
        self.head = masked.Head(dense, _norm(config), config.vocab_size)
        self.config = config

    def hidden_states(
        self,
        tokens_BS: jax.Array,
        keys_B: jax.Array | None = None,
        segments_BS: jax.Array | None = None,
        words: Copies | None = None,
    ) -> jax.Array:
        """Maps ids to the last vectors, normalized, [B, S, D]; see the base class.

        Positions count from the start of the sequence: only their differences matter.
        """
        config, length = self.config, tokens_BS.shape[1]
        x_BSD = remat(Embeddings.__call__, self.remat)(self.embeddings, words, tokens_BS)
        of_global = _angles(length, config, config.global_base)
        of_local = _angles(length, config, config.local_base)
        if segments_BS is None:
            segments_BS = (tokens_BS != self.pad_id).astype(jnp.int32)
            attended_BQS = (segments_BS > 0)[:, None, :]
        else:
            attended_BQS = segments_BS[:, :, None] == segments_BS[:, None, :]
        near_BCLT = attention.near_blocks(segments_BS, config.local_attention // 2)
        run_layer = remat(Layer.__call__, self.remat)
        layer_keys = split_keys(keys_B if config.attention_out_dropout else None, config.layers)
        for number, (layer, keys) in enumerate(zip(self.layers, layer_keys, strict=True)):
            if config.is_global(number):
                x_BSD = run_layer(layer, x_BSD, *of_global, attended_BQS, keys)
            else:
                x_BSD = run_layer(layer, x_BSD, *of_local, near_BCLT, keys)
        return self.final_norm(x_BSD)


def _norm(config: Config) -> masked.LayerNorm:
    return masked.LayerNorm(config.hidden, NORM_EPS, bias=False)


def _writing_std(config: Config) -> float:
    """Of kernels that write to the residual stream, as in GPT-2, and of the head's."""
    return INIT_STD / math.sqrt(2 * config.layers)


def _angles(length: int, config: Config, base: float) -> tuple[jax.Array, jax.Array]:
    cos_SI, sin_SI = attention.rotary(length, config.hidden // config.heads, base)
    return cos_SI, -sin_SI  # transformers rotates counterclockwise
