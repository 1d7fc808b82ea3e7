"""Converts the masked LM to transformers' ``BertForMaskedLM`` and back: parameters and config.json.

transformers' kernels are [out, in], ours [in, out]; its queries, keys, and values are three
kernels, ours are one. Its token type 0, that of a single text, is part of our positions. What type
1 adds to it is an array that no module has: only a conversion from folder to folder keeps it.
Arrays that a masked LM does not need are skipped when reading: the pooler and the next-sentence
head of ``BertForPreTraining``, and ``position_ids`` of old files.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.config import bounds
from jaxtrain.errors import InputError
from jaxtrain.models import weight_table
from jaxtrain.models.weight_table import MATRIX, Row, Tensors, WeightTable

_EMBEDDINGS, _HEAD = "bert.embeddings", "cls.predictions"
WORD = f"{_EMBEDDINGS}.word_embeddings.weight"
_POSITION = f"{_EMBEDDINGS}.position_embeddings.weight"
_TYPES = f"{_EMBEDDINGS}.token_type_embeddings.weight"
_BIAS = f"{_HEAD}.bias"
_TOKEN_TYPES = 2
TYPE_1 = "embeddings.token_type_1"  # [hidden], absent if it is zeros
INIT_STD, NORM_EPS = 0.02, 1e-12
MODEL_TYPE, ARCHITECTURE = "bert", "BertForMaskedLM"
_FIXED = {  # properties of this network at any size
    "hidden_act": "gelu",
    "layer_norm_eps": NORM_EPS,
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
    "is_decoder": False,
    "add_cross_attention": False,
}
_DENSE = {
    "head.dense": f"{_HEAD}.transform.dense",
    "layers.{}.attention_out": "bert.encoder.layer.{}.attention.output.dense",
    "layers.{}.ff_in": "bert.encoder.layer.{}.intermediate.dense",
    "layers.{}.ff_out": "bert.encoder.layer.{}.output.dense",
}
_NORMS = {
    "embeddings.norm": f"{_EMBEDDINGS}.LayerNorm",
    "head.norm": f"{_HEAD}.transform.LayerNorm",
    "layers.{}.attention_norm": "bert.encoder.layer.{}.attention.output.LayerNorm",
    "layers.{}.ff_norm": "bert.encoder.layer.{}.output.LayerNorm",
}
_QKV = [f"bert.encoder.layer.{{}}.attention.self.{part}" for part in ("query", "key", "value")]
TABLE = WeightTable(
    rows=(
        Row(WORD, "embeddings.word"),
        Row(_POSITION, "embeddings.position"),
        *(Row(f"{theirs}.weight", f"{ours}.scale") for ours, theirs in _NORMS.items()),
        *(Row(f"{theirs}.bias", f"{ours}.bias") for ours, theirs in _NORMS.items()),
        *(Row(f"{theirs}.weight", f"{ours}.kernel", MATRIX) for ours, theirs in _DENSE.items()),
        *(Row(f"{theirs}.bias", f"{ours}.bias") for ours, theirs in _DENSE.items()),
        Row(tuple(f"{part}.weight" for part in _QKV), "layers.{}.qkv.kernel", MATRIX),
        Row(tuple(f"{part}.bias" for part in _QKV), "layers.{}.qkv.bias"),
        Row(_BIAS, "head.bias"),
    ),
    unused=("bert.pooler.", "cls.seq_relationship.", f"{_EMBEDDINGS}.position_ids"),
    # The output layer is the token embedding, and its bias is the head's.
    tied={f"{_HEAD}.decoder.weight": WORD, f"{_HEAD}.decoder.bias": _BIAS},
)
"""All arrays but those of the token types."""


def with_types(tensors: Tensors, params: Tensors) -> dict[str, np.ndarray]:
    """Adds the array of the token types to arrays by transformers' names.

    Args:
        params: ours, by dotted path, of which :data:`TYPE_1` is one if it is not zeros.
    """
    zeros_D = np.zeros(tensors[WORD].shape[1], np.float32)
    types = np.stack([zeros_D, np.asarray(params.get(TYPE_1, zeros_D))])
    return {**tensors, _TYPES: types}


def without_types(
    tensors: Tensors, positions: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Separates the token types, and replaces the names of old files.

    Args:
        positions: number of positions of the model; one for shorter sequences uses the first.

    Returns:
        The arrays of :data:`TABLE`; and that of the token types.
    """
    renamed = {
        name.replace("LayerNorm.gamma", "LayerNorm.weight").replace(
            "LayerNorm.beta", "LayerNorm.bias"
        ): array
        for name, array in tensors.items()
    }
    if _POSITION in renamed and renamed[_POSITION].ndim:
        renamed[_POSITION] = renamed[_POSITION][:positions]
    types = {_TYPES: renamed.pop(_TYPES)} if _TYPES in renamed else {}
    return renamed, types


def add_types(params: Tensors, tensors: Tensors, source: str) -> dict[str, np.ndarray]:
    """Adds token type 0 to our positions; :data:`TYPE_1` is what type 1 adds, if not zeros."""
    (count,) = [len(array) for array in tensors.values() if array.ndim] or [_TOKEN_TYPES]
    width = params["embeddings.position"].shape[1]
    cure = "Its width is set by --model.hidden"
    weight_table.check(tensors, {_TYPES: (count, width)}, source, cure)
    if count > _TOKEN_TYPES:
        raise InputError(
            f"{source} has {count} token types (type_vocab_size), but this model keeps at most "
            f"{_TOKEN_TYPES}: use another model"
        )
    first, *others = np.asarray(tensors[_TYPES], np.float32)
    ours = {**params, "embeddings.position": params["embeddings.position"] + first}
    differs = [other - first for other in others if np.any(other != first)]
    return ours | ({TYPE_1: differs[0]} if differs else {})


def settings(model: Any) -> dict[str, Any]:
    """Returns the config.json of a masked LM, from our config."""
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "intermediate_size": model.ff_width,
        "max_position_embeddings": model.sequence_length,
        "type_vocab_size": _TOKEN_TYPES,
        "hidden_dropout_prob": model.dropout,
        "attention_probs_dropout_prob": model.attention_dropout,
        "initializer_range": INIT_STD,
        "pad_token_id": model.pad_id,
        "dtype": "float32",
        **_FIXED,
    }


def fields(content: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Returns the fields of our config that correspond to a config.json."""
    if other := bounds.differing(content, _FIXED):
        raise InputError(f"{source}: this network is not BERT: {', '.join(other)}")
    dropout = content.get("hidden_dropout_prob", 0.1)
    of_attention = content.get("attention_probs_dropout_prob", dropout)
    bounds.check(f"{source}: hidden_dropout_prob", dropout, bounds.FRACTION, float)
    bounds.check(f"{source}: attention_probs_dropout_prob", of_attention, bounds.FRACTION, float)
    hidden = bounds.entry(content, "hidden_size", bounds.WIDTH, source)
    ff = bounds.entry(content, "intermediate_size", bounds.WIDTH, source)
    pad_id = content.get("pad_token_id") or 0  # null: BERT's own
    bounds.check(f"{source}: pad_token_id", pad_id, bounds.Bounds(least=0, most=bounds.WORDS.most))
    return {
        "vocab_size": bounds.entry(content, "vocab_size", bounds.WORDS, source),
        "sequence_length": bounds.entry(content, "max_position_embeddings", bounds.TOKENS, source),
        "hidden": hidden,
        "layers": bounds.entry(content, "num_hidden_layers", bounds.LAYERS, source),
        "heads": bounds.entry(content, "num_attention_heads", bounds.HEADS, source),
        "ff": None if ff == 4 * hidden else ff,
        "pad_id": pad_id,
        "dropout": float(dropout),
        "attention_dropout": float(of_attention),
    }
