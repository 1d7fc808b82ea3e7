"""Converts parameters of :mod:`jaxtrain.models.gpt` to other implementations' names, and back.

These are nanochat, and transformers' `NanoChatForCausalLM`, which computes the same.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.errors import InputError
from jaxtrain.models import causal_weights
from jaxtrain.ops import attention

MODEL_TYPE, ARCHITECTURE = "nanochat", "NanoChatForCausalLM"
_OUTPUT = "lm_head.weight"
_DEFAULTS = {"final_logit_softcapping": 15.0}  # transformers' default, if missing in a file
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
    """Returns the config.json of a model with capped logits."""
    return shape.to_settings(MODEL_TYPE, ARCHITECTURE, _fixed(cap))


def fields(
    content: Mapping[str, Any], source: str, *, cap: float, ff_factor: int, rotary_base: float
) -> dict[str, Any]:
    """Returns the fields of our config that correspond to a config.json.

    Args:
        content: the config.json.
        source: the file, for messages.
        cap: cap of our logits.
        ff_factor: our feed-forward width / width.
        rotary_base: base of our rotary positions.

    Raises:
        InputError: an entry is missing, or it describes another network.
    """
    theirs = _DEFAULTS | dict(content)
    shape = causal_weights.Shape.from_settings(theirs, _fixed(cap), source)
    for name, found, ours in (
        ("intermediate_size", shape.ff, ff_factor * shape.hidden),
        ("rope_theta", shape.rotary_base, rotary_base),
    ):
        if found != ours:
            raise InputError(
                f"{source}: this network is not supported: {name}={found} (here {ours})"
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
    """Returns the properties of this network at any size."""
    return {
        "hidden_act": "relu2",
        "attention_bias": False,
        "final_logit_softcapping": cap,
        "tie_word_embeddings": False,
    }


def from_either(
    tensors: Mapping[str, np.ndarray], expected: Mapping[str, tuple[int, ...]], source: str
) -> dict[str, np.ndarray]:
    """Converts either implementation's state dict to parameters by dotted path, float32.

    Args:
        tensors: the state dict.
        expected: dotted path -> shape of each of the model's parameters.
        source: origin of the tensors, for messages.

    Raises:
        InputError: lists arrays that are missing, extra or misshapen.
    """
    cure = "set --model.depth and --model.vocab_size to the values that it was trained with"
    return _names(tensors).inward(tensors, expected, source, cure)


def sizes(tensors: Mapping[str, np.ndarray], source: str, head: int) -> dict[str, Any]:
    """Infers fields of the config from shapes; assumes that the heads follow from the width.

    Raises:
        InputError: the weights are not of this model.
    """
    names = _names(tensors)
    word, key = names.whole["lm_head.words"], f"{names.theirs}.0.{names.of_block['k']}.weight"
    if word not in tensors or key not in tensors:
        raise InputError(
            f"{source} is not a GPT of this kind: it has no {word if word not in tensors else key}"
        )
    words, keys = tensors[word], tensors[key]
    if words.ndim != 2 or keys.ndim != 2 or not 0 < words.shape[1] <= 2**20:
        raise InputError(
            f"{source} is not a GPT of this kind: {word} has shape {words.shape} and {key} has "
            f"shape {keys.shape}"
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
