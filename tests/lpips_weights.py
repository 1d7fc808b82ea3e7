"""Writes random weights with the shapes and published names of LPIPS."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.storage import tensor_files

_SHAPES = ((64, 3, 11), (192, 64, 5), (384, 192, 3), (256, 384, 3), (256, 256, 3))
_NUMBERS = (0, 3, 6, 8, 10)


def alexnet(prefix: Any) -> dict[str, np.ndarray]:
    """Returns random weights; ``prefix`` maps a layer's place and number to its name."""
    rng = np.random.default_rng(3)
    found = {}
    for place, (number, (outputs, inputs, side)) in enumerate(zip(_NUMBERS, _SHAPES, strict=True)):
        name, scale = prefix(place, number), (2 / (inputs * side**2)) ** 0.5
        found[f"{name}.weight"] = rng.normal(size=(outputs, inputs, side, side)) * scale
        found[f"{name}.bias"] = rng.normal(size=outputs) * 0.1
    return {name: array.astype(np.float32) for name, array in found.items()}


def linear() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    return {
        f"lin{place}.model.1.weight": rng.uniform(size=(1, shape[0], 1, 1)).astype(np.float32)
        for place, shape in enumerate(_SHAPES)
    }


def write(path: Path) -> Path:
    """Writes a file with the contents of ``lpips.LPIPS(net="alex").state_dict()``."""
    whole = alexnet(lambda place, number: f"net.slice{place + 1}.{number}") | linear()
    tensor_files.write(path, whole, {})
    return path
