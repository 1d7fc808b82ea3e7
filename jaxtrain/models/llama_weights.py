"""Converts parameters of :mod:`jaxtrain.models.llama` to transformers' names, and back.

`LlamaForCausalLM` uses the embedding as its output layer, too (`tie_word_embeddings`): both are one
array, `model.embed_tokens.weight`.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.models import causal_weights
from jaxtrain.models.weight_table import MATRIX, Row, WeightTable

MODEL_TYPE, ARCHITECTURE = "llama", "LlamaForCausalLM"
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
_FIXED = {  # properties of this network at any size
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
}
_DEFAULTS = {"tie_word_embeddings": False}  # transformers' default, if missing in a file


def settings(shape: causal_weights.Shape) -> dict[str, Any]:
    """Returns the config.json of a model."""
    return shape.to_settings(MODEL_TYPE, ARCHITECTURE, _FIXED)


def shape(content: Mapping[str, Any], source: str) -> causal_weights.Shape:
    """Reads a config.json.

    Raises:
        InputError: an entry is missing, or it describes another network.
    """
    return causal_weights.Shape.from_settings(_DEFAULTS | dict(content), _FIXED, source)
