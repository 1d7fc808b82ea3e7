"""Writes random weights with the shapes and published names of LPIPS."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.storage import tensor_files

_ALEX = ((64, 3, 11), (192, 64, 5), (384, 192, 3), (256, 384, 3), (256, 256, 3))
_NUMBERS = (0, 3, 6, 8, 10)
# VGG16 in torchvision: number of the layer, channels, and the part of LPIPS's copy.
VGG = (
    *((0, 64, 1), (2, 64, 1), (5, 128, 2), (7, 128, 2)),
    *((10, 256, 3), (12, 256, 3), (14, 256, 3), (17, 512, 4), (19, 512, 4), (21, 512, 4)),
    *((24, 512, 5), (26, 512, 5), (28, 512, 5)),
)


def alexnet(prefix: Any) -> dict[str, np.ndarray]:
    """Returns random weights; ``prefix`` maps a layer's place and number to its name."""
    names = [prefix(place, number) for place, number in enumerate(_NUMBERS)]
    return _random(names, _ALEX)


def vgg(prefix: Any) -> dict[str, np.ndarray]:
    """Returns random weights; ``prefix`` maps a layer's part and number to its name."""
    widths = [3, *(width for _, width, _ in VGG)]
    shapes = [(outputs, inputs, 3) for inputs, outputs in itertools.pairwise(widths)]
    return _random([prefix(part, number) for number, _, part in VGG], shapes)


def _random(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> dict[str, np.ndarray]:
    rng, found = np.random.default_rng(3), {}
    for name, (outputs, inputs, side) in zip(names, shapes, strict=True):
        scale = (2 / (inputs * side**2)) ** 0.5
        found[f"{name}.weight"] = rng.normal(size=(outputs, inputs, side, side)) * scale
        found[f"{name}.bias"] = rng.normal(size=outputs) * 0.1
    return {name: array.astype(np.float32) for name, array in found.items()}


def linear(channels: Sequence[int] = tuple(shape[0] for shape in _ALEX)) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(4)
    return {
        f"lin{place}.model.1.weight": rng.uniform(size=(1, width, 1, 1)).astype(np.float32)
        for place, width in enumerate(channels)
    }


def linear_vgg() -> dict[str, np.ndarray]:
    return linear((64, 128, 256, 512, 512))


def write(path: Path) -> Path:
    """Writes a file with the contents of ``lpips.LPIPS(net="alex").state_dict()``."""
    whole = alexnet(lambda place, number: f"net.slice{place + 1}.{number}") | linear()
    tensor_files.write(path, whole, {})
    return path


def write_vgg(path: Path) -> Path:
    """Writes a file with the contents of ``lpips.LPIPS(net="vgg").state_dict()``."""
    whole = vgg(lambda part, number: f"net.slice{part}.{number}") | linear_vgg()
    tensor_files.write(path, whole, {})
    return path
