"""LPIPS compared with PyTorch's layers.

Run by name, because PyTorch is an optional extra:

    python -m pytest tests/interop/torch_lpips.py
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import lpips_weights
import test_lpips as ours


def torch_lpips(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    weights = lpips_weights.alexnet(lambda place, _: f"{place}") | lpips_weights.linear()
    arrays: dict[str, Any] = {name: torch.from_numpy(array) for name, array in weights.items()}
    shift = torch.tensor([-0.030, -0.088, -0.188])[:, None, None]
    scale = torch.tensor([0.458, 0.448, 0.450])[:, None, None]

    def features(frames: np.ndarray) -> list[torch.Tensor]:
        x = (2 * torch.from_numpy(frames).permute(0, 3, 1, 2) - 1 - shift) / scale
        found = []
        for place, (stride, padding) in enumerate(((4, 2), (1, 2), (1, 1), (1, 1), (1, 1))):
            if place in (1, 2):
                x = functional.max_pool2d(x, 3, 2)
            weight, bias = arrays[f"{place}.weight"], arrays[f"{place}.bias"]
            x = functional.relu(functional.conv2d(x, weight, bias, stride, padding))
            found.append(x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10))
        return found

    total = torch.zeros(one.shape[0])
    for place, (a, b) in enumerate(zip(features(one), features(other), strict=True)):
        channels = arrays[f"lin{place}.model.1.weight"]
        total += functional.conv2d((a - b).square(), channels).mean((1, 2, 3))
    return total.numpy()


def test_the_stored_numbers_equal_those_of_pytorch() -> None:
    found = torch_lpips(ours.frames(0), ours.frames(1))
    np.testing.assert_allclose(found, ours.WANTED, rtol=1e-5)
