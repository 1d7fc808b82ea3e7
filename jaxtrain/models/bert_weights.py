"""Converts the masked LM to transformers' ``BertForMaskedLM`` and back: parameters and config.json.

transformers' kernels are [out, in], ours [in, out]; its queries, keys, and values are three
kernels, ours are one. Its token type 0, that of a single text, is part of our positions. What type
1 adds to it is an array that no module has: only a conversion from folder to folder keeps it.
Arrays that a masked LM does not need are skipped when reading: the pooler and the next-sentence
head of ``BertForPreTraining``, and ``position_ids`` of old files.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain import errors
from jaxtrain.config import bounds
from jaxtrain.errors import InputError
from jaxtrain.storage import tensor_files

Tensors = Mapping[str, np.ndarray]
_EMBEDDINGS, _HEAD = "bert.embeddings", "cls.predictions"
WORD = f"{_EMBEDDINGS}.word_embeddings.weight"
_POSITION = f"{_EMBEDDINGS}.position_embeddings.weight"
_TYPES = f"{_EMBEDDINGS}.token_type_embeddings.weight"
_BIAS = f"{_HEAD}.bias"
# Aliases of arrays above: the output layer is the token embedding, its bias is the head's.
_TIED = {f"{_HEAD}.decoder.weight": WORD, f"{_HEAD}.decoder.bias": _BIAS}
UNUSED = ("bert.pooler.", "cls.seq_relationship.", f"{_EMBEDDINGS}.position_ids")
_TOKEN_TYPES = 2
TYPE_1 = "embeddings.token_type_1"  # [hidden], absent if it is zeros
_LISTED = 6
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
_PARTS = {
    "attention.output.dense": "attention_out",
    "intermediate.dense": "ff_in",
    "output.dense": "ff_out",
}
_NORMS = {"attention.output.LayerNorm": "attention_norm", "output.LayerNorm": "ff_norm"}
_QKV = ("query", "key", "value")


def to_bert(params: Tensors) -> dict[str, np.ndarray]:
    """Converts our parameters to transformers' names and layout.

    Args:
        params: dotted path -> float32 array.
    """
    word, position = (np.asarray(params[f"embeddings.{name}"]) for name in ("word", "position"))
    zeros_D = np.zeros(word.shape[1], np.float32)
    found = {
        WORD: word,
        _POSITION: position,
        _TYPES: np.stack([zeros_D, np.asarray(params.get(TYPE_1, zeros_D))]),
        _BIAS: np.asarray(params["head.bias"]),
    }
    for theirs, ours in _dense(_layers(params, "layers")).items():
        found[f"{theirs}.weight"] = np.asarray(params[f"{ours}.kernel"]).T
        found[f"{theirs}.bias"] = np.asarray(params[f"{ours}.bias"])
    for theirs, ours in _norms(_layers(params, "layers")).items():
        found[f"{theirs}.weight"] = np.asarray(params[f"{ours}.scale"])
        found[f"{theirs}.bias"] = np.asarray(params[f"{ours}.bias"])
    for number in range(_layers(params, "layers")):
        ours = f"layers.{number}.qkv"
        kernels = np.split(np.asarray(params[f"{ours}.kernel"]), len(_QKV), axis=1)
        biases = np.split(np.asarray(params[f"{ours}.bias"]), len(_QKV))
        for part, kernel, bias in zip(_QKV, kernels, biases, strict=True):
            theirs = _attention(number, part)
            found[f"{theirs}.weight"], found[f"{theirs}.bias"] = kernel.T, bias
    return found


def from_bert(
    tensors: Tensors, expected: Mapping[str, tuple[int, ...]], source: str
) -> dict[str, np.ndarray]:
    """Converts transformers' state dict to our parameters, float32.

    A model for shorter sequences uses the first positions. :data:`TYPE_1` is in the result if token
    types 0 and 1 differ.

    Args:
        tensors: name -> array.
        expected: dotted path -> shape of each of the model's parameters.
        source: the file, for messages.

    Raises:
        InputError: lists every array that is missing, extra or misshapen; or there are more than
            two token types.
    """
    given = _renamed(tensors, source)
    tensor_files.check_real(given, source)
    shapes = {name: array.shape for name, array in to_bert(_empty(expected)).items()}
    types = given.get(_TYPES)
    if types is not None and types.ndim == 2 and types.shape[0]:  # as many as they have
        shapes[_TYPES] = (types.shape[0], shapes[_TYPES][1])
    positions = given.get(_POSITION)
    if positions is not None and positions.ndim == 2 and positions.shape[0] > shapes[_POSITION][0]:
        given[_POSITION] = positions[: shapes[_POSITION][0]]
    complaints = {
        "missing": [name for name in shapes if name not in given],
        "extra": sorted(set(given) - set(shapes)),
        "misshapen": [
            f"{name} {given[name].shape} instead of {shape}"
            for name, shape in shapes.items()
            if name in given and given[name].shape != shape
        ],
    }
    listed = [
        f"{what}: {', '.join(names[:_LISTED])}"
        + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
        for what, names in complaints.items()
        if names
    ]
    if listed:
        raise InputError(
            f"{source} does not fit this model; {'; '.join(listed)}. Its shape is set by "
            "--model.vocab_size, --model.sequence_length, --model.hidden, --model.layers, and "
            "--model.ff"
        )
    if given[_TYPES].shape[0] > _TOKEN_TYPES:
        raise InputError(
            f"{source} has {given[_TYPES].shape[0]} token types (type_vocab_size), but this model "
            f"keeps at most {_TOKEN_TYPES}: use another model"
        )
    return _ours({name: np.asarray(array, np.float32) for name, array in given.items()})


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
    """Returns the fields of our config that correspond to a config.json.

    Raises:
        InputError: an entry is missing, or it describes another network.
    """
    other = [
        f"{name}={errors.shown(content[name])} (here {wanted!r})"
        for name, wanted in _FIXED.items()
        if content.get(name, wanted) != wanted
    ]
    if other:
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


def _renamed(tensors: Tensors, source: str) -> dict[str, np.ndarray]:
    """Skips unused arrays and aliases, and replaces old names."""
    found: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        if name.startswith(UNUSED):
            continue
        modern = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        modern = modern.replace("LayerNorm.beta", "LayerNorm.bias")
        if modern not in _TIED:
            found[modern] = array
    for name, own in _TIED.items():
        if name not in tensors:
            continue
        if own in found and not np.array_equal(found[own], tensors[name]):
            raise InputError(
                f"{source}: {name} differs from {own}, but this model has one array for both "
                "(tie_word_embeddings)"
            )
        found.setdefault(own, tensors[name])
    return found


def _ours(given: Tensors) -> dict[str, np.ndarray]:
    found = {
        "embeddings.word": given[WORD],
        "embeddings.position": given[_POSITION] + given[_TYPES][0],
        "head.bias": given[_BIAS],
    }
    if np.any(given[_TYPES] != given[_TYPES][0]):
        found[TYPE_1] = given[_TYPES][1] - given[_TYPES][0]
    layers = _layers(given, "bert.encoder.layer")
    for theirs, ours in _dense(layers).items():
        found[f"{ours}.kernel"] = given[f"{theirs}.weight"].T
        found[f"{ours}.bias"] = given[f"{theirs}.bias"]
    for theirs, ours in _norms(layers).items():
        found[f"{ours}.scale"] = given[f"{theirs}.weight"]
        found[f"{ours}.bias"] = given[f"{theirs}.bias"]
    for number in range(layers):
        parts = [_attention(number, part) for part in _QKV]
        found[f"layers.{number}.qkv.kernel"] = np.concatenate(
            [given[f"{part}.weight"].T for part in parts], axis=1
        )
        found[f"layers.{number}.qkv.bias"] = np.concatenate(
            [given[f"{part}.bias"] for part in parts]
        )
    return found


def _empty(expected: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Returns arrays of these shapes that take no memory."""
    return {name: np.broadcast_to(np.bool_(0), shape) for name, shape in expected.items()}


def _layers(names: Mapping[str, Any], prefix: str) -> int:
    numbers = re.compile(rf"{re.escape(prefix)}\.(\d+)\.")
    return 1 + max((int(m[1]) for m in map(numbers.match, names) if m), default=-1)


def _attention(number: int, part: str) -> str:
    return f"bert.encoder.layer.{number}.attention.self.{part}"


def _dense(layers: int) -> dict[str, str]:
    """Maps their linear layers to ours, except queries, keys, and values."""
    return {f"{_HEAD}.transform.dense": "head.dense"} | _of_layers(_PARTS, layers)


def _norms(layers: int) -> dict[str, str]:
    own = {
        f"{_EMBEDDINGS}.LayerNorm": "embeddings.norm",
        f"{_HEAD}.transform.LayerNorm": "head.norm",
    }
    return own | _of_layers(_NORMS, layers)


def _of_layers(names: Mapping[str, str], layers: int) -> dict[str, str]:
    return {
        f"bert.encoder.layer.{number}.{theirs}": f"layers.{number}.{ours}"
        for number in range(layers)
        for theirs, ours in names.items()
    }
