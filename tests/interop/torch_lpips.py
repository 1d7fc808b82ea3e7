"""LPIPS compared with PyTorch's layers.

Run by name, because PyTorch is an optional extra:

    python -m pytest tests/interop/torch_lpips.py
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from models.reconstruction import lpips_weights
from models.reconstruction import test_lpips as ours
from torch.nn import functional


def torch_lpips(one: np.ndarray, other: np.ndarray, network: str) -> np.ndarray:
    if network == "alex":
        weights = lpips_weights.alexnet(lambda place, _: f"{place}") | lpips_weights.linear()
    else:
        weights = lpips_weights.vgg(lambda _, number: f"{number}") | lpips_weights.linear_vgg()
    arrays: dict[str, Any] = {name: torch.from_numpy(array) for name, array in weights.items()}
    shift = torch.tensor([-0.030, -0.088, -0.188])[:, None, None]
    scale = torch.tensor([0.458, 0.448, 0.450])[:, None, None]
    features = alexnet_features if network == "alex" else vgg_features

    def normal(frames: np.ndarray) -> list[torch.Tensor]:
        x = (2 * torch.from_numpy(frames).permute(0, 3, 1, 2) - 1 - shift) / scale
        return [y / (y.square().sum(1, keepdim=True).sqrt() + 1e-10) for y in features(x, arrays)]

    total = torch.zeros(one.shape[0])
    for place, (a, b) in enumerate(zip(normal(one), normal(other), strict=True)):
        channels = arrays[f"lin{place}.model.1.weight"]
        total += functional.conv2d((a - b).square(), channels).mean((1, 2, 3))
    return total.numpy()


def alexnet_features(x: torch.Tensor, arrays: dict[str, Any]) -> Iterator[torch.Tensor]:
    for place, (stride, padding) in enumerate(((4, 2), (1, 2), (1, 1), (1, 1), (1, 1))):
        if place in (1, 2):
            x = functional.max_pool2d(x, 3, 2)
        weight, bias = arrays[f"{place}.weight"], arrays[f"{place}.bias"]
        x = functional.relu(functional.conv2d(x, weight, bias, stride, padding))
        yield x


def vgg_features(x: torch.Tensor, arrays: dict[str, Any]) -> Iterator[torch.Tensor]:
    """torchvision's configuration D, with the taps of lpips.pretrained_networks.vgg16."""
    number = 0
    for width in (64, 64, "M", 128, 128, "M", *(256,) * 3, "M", *(512,) * 3, "M", *(512,) * 3):
        if width == "M":
            x, number = functional.max_pool2d(x, 2, 2), number + 1
            continue
        weight, bias = arrays[f"{number}.weight"], arrays[f"{number}.bias"]
        x = functional.relu(functional.conv2d(x, weight, bias, 1, 1))
        if number in (2, 7, 14, 21, 28):  # relu1_2, relu2_2, relu3_3, relu4_3, relu5_3
            yield x
        number += 2


@pytest.mark.parametrize(("network", "wanted"), ours.WANTED.items())
def test_the_stored_numbers_equal_those_of_pytorch(network: str, wanted: Any) -> None:
    found = torch_lpips(ours.frames(0), ours.frames(1), network)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
