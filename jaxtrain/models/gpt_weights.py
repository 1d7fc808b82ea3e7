"""The parameters of :mod:`jaxtrain.models.gpt` under nanochat's names, and back.

nanochat's linear layers are [out, in], ours [in, out]; embedding and output layer are [V, D] in
both.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxtrain.errors import InputError

_WHOLE = {"wte.table": "transformer.wte.weight", "lm_head.words": "lm_head.weight"}
_OF_BLOCK = {
    "q": "attn.c_q",
    "k": "attn.c_k",
    "v": "attn.c_v",
    "out": "attn.c_proj",
    "up": "mlp.c_fc",
    "down": "mlp.c_proj",
}
_LAYER = re.compile(r"transformer\.h\.(\d+)\.")
_LISTED = 4


def to_nanochat(params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters by dotted path -> nanochat's state dict."""
    return {
        _name(path): np.asarray(array) if path in _WHOLE else np.ascontiguousarray(array.T)
        for path, array in params.items()
    }


def from_nanochat(
    tensors: Mapping[str, np.ndarray], expected: Mapping[str, tuple[int, ...]], source: str
) -> dict[str, np.ndarray]:
    """The way back, in float32.

    Args:
        tensors: nanochat's state dict.
        expected: dotted path -> shape of each of the model's parameters.
        source: of the tensors, for messages.

    Raises:
        InputError: names the arrays that are missing, extra or misshapen.
    """
    wanted = {
        _name(path): shape if path in _WHOLE else shape[::-1] for path, shape in expected.items()
    }
    wrong = [f"{name} is not there" for name in wanted if name not in tensors]
    wrong += [f"{name} is not of this model" for name in tensors if name not in wanted]
    wrong += [
        f"{name} has shape {tensors[name].shape} there and {shape} in the model"
        for name, shape in wanted.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if wrong:
        more = f", and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise InputError(
            f"{source} does not fit this model: {'; '.join(wrong[:_LISTED])}{more}: set "
            "--model.depth and --model.vocab_size to those that it was trained with"
        )
    found = {path: np.asarray(tensors[_name(path)], np.float32) for path in expected}
    return {
        path: array if path in _WHOLE else np.ascontiguousarray(array.T)
        for path, array in found.items()
    }


def sizes(tensors: Mapping[str, np.ndarray], source: str, head: int) -> dict[str, Any]:
    """Fields of the model that the shapes tell, if heads are as many as the width gives.

    Raises:
        InputError: no weights of this model.
    """
    word, key = _WHOLE["lm_head.words"], "transformer.h.0.attn.c_k.weight"
    layers = {int(match[1]) for name in tensors if (match := _LAYER.match(name))}
    if word not in tensors or key not in tensors:
        raise InputError(f"{source} holds no {word if word not in tensors else key}: no such GPT")
    vocab, width = tensors[word].shape
    heads = -(-width // head)
    return {
        "vocab_size": vocab,
        "sequence_length": 2048,
        "depth": len(layers),
        "width": width,
        "kv_heads": tensors[key].shape[0] * heads // width,
    }


def _name(path: str) -> str:
    if path in _WHOLE:
        return _WHOLE[path]
    _, number, part = path.split(".")
    return f"transformer.h.{number}.{_OF_BLOCK[part]}.weight"
