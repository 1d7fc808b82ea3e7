"""The parameters of :mod:`jaxtrain.models.llama` under the names of transformers, and back.

`LlamaForCausalLM` has the embedding as its output layer too (`tie_word_embeddings`): it is one
array, `model.embed_tokens.weight`.
"""

from collections.abc import Mapping
from typing import Any

from jaxtrain.models import causal_weights

MODEL_TYPE, ARCHITECTURE = "llama", "LlamaForCausalLM"
_WORDS = "model.embed_tokens.weight"
NAMES = causal_weights.Names(
    ours="layers",
    theirs="model.layers",
    whole={"embedding.table": _WORDS, "head.norm": "model.norm.weight"},
    of_block={
        "attention_norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "out": "self_attn.o_proj",
        "ff_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    },
    unused=("rotary_emb.inv_freq",),
    tied={"lm_head.weight": _WORDS},
)
_FIXED = {  # what this network is, whatever its size
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
}
_LEFT_OUT = {"tie_word_embeddings": False}  # transformers' default where a file does not say


def settings(shape: causal_weights.Shape) -> dict[str, Any]:
    """The config.json of a model."""
    return shape.to_settings(MODEL_TYPE, ARCHITECTURE, _FIXED)


def shape(content: Mapping[str, Any], source: str) -> causal_weights.Shape:
    """What a config.json describes.

    Raises:
        InputError: it lacks an entry, or describes another network.
    """
    return causal_weights.Shape.from_settings(_LEFT_OUT | dict(content), _FIXED, source)
