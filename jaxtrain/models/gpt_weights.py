"""Converts parameters of :mod:`jaxtrain.models.gpt` to other implementations' names, and back.

These are nanochat, and transformers' `NanoChatForCausalLM`, which computes the same.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.errors import InputError
from jaxtrain.models import causal_weights
from jaxtrain.models.weight_table import MATRIX, Row, WeightTable
from jaxtrain.ops import attention

MODEL_TYPE, ARCHITECTURE = "nanochat", "NanoChatForCausalLM"
_OUTPUT = "lm_head.weight"
_DEFAULTS = {"final_logit_softcapping": 15.0}  # transformers' default, if missing in a file


def _table(word: str, block: str, **parts: str) -> WeightTable:
    rows = [
        Row(f"{block}.{{}}.{name}.weight", f"blocks.{{}}.{ours}", MATRIX)
        for ours, name in parts.items()
    ]
    return WeightTable(
        rows=(Row(word, "wte.table"), *rows, Row(_OUTPUT, "lm_head.words")),
        unused=("rotary_emb.inv_freq",),
    )


NANOCHAT = _table(
    "transformer.wte.weight",
    "transformer.h",
    q="attn.c_q",
    k="attn.c_k",
    v="attn.c_v",
    out="attn.c_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
)
TRANSFORMERS = _table(
    "model.embed_tokens.weight",
    "model.layers",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    out="self_attn.o_proj",
    up="mlp.fc1",
    down="mlp.fc2",
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


def sizes(tensors: Mapping[str, np.ndarray], source: str, head: int) -> dict[str, Any]:
    """Infers fields of the config from shapes; assumes that the heads follow from the width.

    Raises:
        InputError: the weights are not of this model.
    """
    table = TRANSFORMERS if any(name.startswith("model.") for name in tensors) else NANOCHAT
    word, keys_of = table.name("lm_head.words"), table.name("blocks.{}.k")
    key = keys_of.format(0)
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
        "depth": next(n for n in itertools.count() if keys_of.format(n) not in tensors),
        "width": width,
        "kv_heads": keys.shape[0] * heads // width,
    }
