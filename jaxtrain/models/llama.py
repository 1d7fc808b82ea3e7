"""A Llama-style language model.

Of the network in :mod:`jaxtrain.models.causal`, it has norms with a weight, SwiGLU, and the
embedding as output layer. Parameters map one to one to transformers' `LlamaForCausalLM`, where both
are one array, too (`tie_word_embeddings`). It rotates in the opposite direction to nanochat.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx

from jaxtrain import config
from jaxtrain.config import bounds
from jaxtrain.models import causal
from jaxtrain.models.causal_settings import Sizes
from jaxtrain.models.weight_table import MATRIX, Row, WeightTable
from jaxtrain.ops.init import normal_init
from jaxtrain.ops.layers import Remat

_INIT_STD = 0.02
_WORDS = "model.embed_tokens.weight"
_LAYER = {
    "attention_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
TABLE = WeightTable(
    rows=(
        Row(_WORDS, "embedding.table"),
        *(
            Row(f"model.layers.{{}}.{theirs}.weight", f"layers.{{}}.{ours}", MATRIX)
            for ours, theirs in _LAYER.items()
        ),
        Row("model.norm.weight", "head.norm"),
    ),
    unused=("rotary_emb.inv_freq",),
    tied={"lm_head.weight": _WORDS},
)


def _normal(rngs: nnx.Rngs, inputs: int, outputs: int) -> nnx.Param[jax.Array]:
    return normal_init(rngs, (inputs, outputs), _INIT_STD)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(causal.CausalConfig):
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
    init_from: str | None = None
    """Initial parameters of a new run: a checkpoint, a run directory, a transformers folder
    (LlamaForCausalLM), or ``hf:ORG/MODEL[@REVISION]`` on the Hugging Face Hub."""

    kind = causal.Kind(
        norm_scales=True,
        qk_norm=False,
        swiglu=True,
        tied=True,
        cap=None,
        clockwise=False,
        embedding_std=_INIT_STD,
        reading=_normal,
        feeding=_normal,
        writing=_normal,
    )
    model_type = "llama"  # in transformers' config.json
    architecture = "LlamaForCausalLM"
    fixed = MappingProxyType(
        {
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
        }
    )
    theirs = MappingProxyType[str, Any]({"tie_word_embeddings": False})
    width_field, most_head_width = "hidden", 2**20
    in_weights = ("vocab_size", "hidden", "layers", "heads", "kv_heads", "ff")
    not_in_weights = tuple((name, name) for name in ("heads", "norm_eps", "rotary_base"))

    @property
    def sizes(self) -> Sizes:
        """Returns the sizes of the network."""
        return Sizes(
            vocab_size=self.vocab_size,
            sequence_length=self.sequence_length,
            hidden=self.hidden,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            ff=self.ff,
            norm_eps=self.norm_eps,
            rotary_base=self.rotary_base,
        )

    @classmethod
    def from_sizes(cls, sizes: Sizes) -> "Config":
        """Returns the config of a network without dropout."""
        return cls(dropout=0.0, **dataclasses.asdict(sizes))

    def build(self, rngs: nnx.Rngs) -> "Llama":
        """Builds the module, with new float32 parameters."""
        return Llama(self, rngs)

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
        return (TABLE,)

    @classmethod
    def tiny(cls) -> "Config":
        """Returns two layers of width 16, four heads in two groups, 16 tokens, vocabulary 50."""
        return cls(
            vocab_size=50, sequence_length=16, hidden=16, layers=2, heads=4, kv_heads=2, ff=24
        )


class Llama(causal.CausalModel):
    """Embedding, layers, and head."""

    def __init__(self, config: Config, rngs: nnx.Rngs) -> None:
        super().__init__(config, rngs)
        self.embedding = causal.Embedding(config, rngs)
        self.layers = nnx.List(
            [causal.Block(config, rngs, number) for number in range(config.layers)]
        )
        self.head = causal.Head(config, rngs)

    def components(self) -> tuple[causal.Embedding, nnx.List[causal.Block], causal.Head]:
        """Returns embedding, layers, and head."""
        return self.embedding, self.layers, self.head
