"""The parameters of :mod:`jaxtrain.models.gpt` under other programs' names, and back.

nanochat's own, and those of transformers' `NanoChatForCausalLM`, which computes the same.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.config import bounds
from jaxtrain.errors import InputError
from jaxtrain.models import causal_weights
from jaxtrain.ops import attention

MODEL_TYPE, ARCHITECTURE = "nanochat", "NanoChatForCausalLM"
_OUTPUT = "lm_head.weight"
_LEFT_OUT = {"final_logit_softcapping": 15.0}  # transformers' default where a file does not say
NANOCHAT = causal_weights.Names(
    ours="blocks",
    theirs="transformer.h",
    whole={"wte.table": "transformer.wte.weight", "lm_head.words": _OUTPUT},
    of_block={
        "q": "attn.c_q",
        "k": "attn.c_k",
        "v": "attn.c_v",
        "out": "attn.c_proj",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    },
)
TRANSFORMERS = causal_weights.Names(
    ours="blocks",
    theirs="model.layers",
    whole={"wte.table": "model.embed_tokens.weight", "lm_head.words": _OUTPUT},
    of_block={
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "out": "self_attn.o_proj",
        "up": "mlp.fc1",
        "down": "mlp.fc2",
    },
    unused=("rotary_emb.inv_freq",),
)


def settings(shape: causal_weights.Shape, cap: float) -> dict[str, Any]:
    """The config.json of a model whose logits are capped."""
    return shape.to_settings(MODEL_TYPE, ARCHITECTURE, _fixed(cap))


def fields(
    content: Mapping[str, Any], source: str, *, cap: float, ff_factor: int, rotary_base: float
) -> dict[str, Any]:
    """Fields of our config that a config.json asks for.

    Args:
        content: of the config.json.
        source: the file, for messages.
        cap: of our logits.
        ff_factor: our feed-forward width / width.
        rotary_base: of our rotary positions.

    Raises:
        InputError: it lacks an entry, or describes another network.
    """
    theirs = _LEFT_OUT | dict(content)
    shape = causal_weights.Shape.from_settings(theirs, _fixed(cap), source)
    for name, found, ours in (
        ("intermediate_size", shape.ff, ff_factor * shape.hidden),
        ("rope_theta", shape.rotary_base, rotary_base),
    ):
        if found != ours:
            raise InputError(
                f"{source}: this network is not computed here: {name}={found} (here {ours})"
            )
    return {
        "vocab_size": shape.vocab_size,
        "sequence_length": shape.sequence_length,
        "depth": shape.layers,
        "width": shape.hidden,
        "heads": shape.heads,
        "kv_heads": shape.kv_heads,
        "norm_eps": shape.norm_eps,
    }


def _fixed(cap: float) -> dict[str, Any]:
    """What this network is, whatever its size."""
    return {
        "hidden_act": "relu2",
        "attention_bias": False,
        "final_logit_softcapping": cap,
        "tie_word_embeddings": False,
    }


def from_either(
    tensors: Mapping[str, np.ndarray], expected: Mapping[str, tuple[int, ...]], source: str
) -> dict[str, np.ndarray]:
    """Parameters by dotted path, float32, from either program's state dict.

    Args:
        tensors: the state dict.
        expected: dotted path -> shape of each of the model's parameters.
        source: of the tensors, for messages.

    Raises:
        InputError: names the arrays that are missing, extra or misshapen.
    """
    cure = "set --model.depth and --model.vocab_size to those that it was trained with"
    return _names(tensors).inward(tensors, expected, source, cure)


def sizes(tensors: Mapping[str, np.ndarray], source: str, head: int) -> dict[str, Any]:
    """Fields of the model that the shapes tell, if heads are as many as the width gives.

    Raises:
        InputError: no weights of this model.
    """
    names = _names(tensors)
    word, key = names.whole["lm_head.words"], f"{names.theirs}.0.{names.of_block['k']}.weight"
    if word not in tensors or key not in tensors:
        raise InputError(f"{source} holds no {word if word not in tensors else key}: no such GPT")
    words, keys = tensors[word], tensors[key]
    if words.ndim != 2 or keys.ndim != 2 or not 0 < words.shape[1] <= bounds.WIDTH:
        raise InputError(
            f"{source}: {word} has shape {words.shape} and {key} has shape {keys.shape}, which are "
            "not those of this GPT"
        )
    vocab, width = words.shape
    heads = attention.fewest_heads(width, head)
    return {
        "vocab_size": vocab,
        "sequence_length": 2048,
        "depth": names.layers(tensors),
        "width": width,
        "kv_heads": keys.shape[0] * heads // width,
    }


def _names(tensors: Mapping[str, np.ndarray]) -> causal_weights.Names:
    theirs = any(name.startswith("model.") for name in tensors)
    return TRANSFORMERS if theirs else NANOCHAT
