"""TAESD's networks, also with TAEF2's branch, compute the same in PyTorch.

Run by name, because PyTorch is an optional extra:

    python -m pytest tests/interop/torch_taesd.py
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from inference import taesd_weights
from torch import nn

from jaxtrain.inference import taesd_network
from jaxtrain.storage import tensor_files

pytestmark = pytest.mark.filterwarnings("default")  # other packages may warn
WIDTH, CHANNELS = 8, 4


def _conv(inputs: int, outputs: int, **more: Any) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3, padding=1, **more)


class _Block(nn.Module):
    def __init__(self, branch: bool) -> None:
        super().__init__()
        w = WIDTH
        self.conv = nn.Sequential(_conv(w, w), nn.ReLU(), _conv(w, w), nn.ReLU(), _conv(w, w))
        self.pool = None
        if branch:
            wide, narrow = (nn.Conv2d(*pair, 1, bias=False) for pair in ((w, 4 * w), (4 * w, w)))
            self.pool = nn.Sequential(wide, nn.GroupNorm(4, 4 * w), nn.ReLU(), narrow)

    def forward(self, x: Any) -> Any:
        x = x if self.pool is None else x + self.pool(x)
        return torch.relu(self.conv(x) + x)


class _Limit(nn.Module):
    def forward(self, x: Any) -> Any:
        return torch.tanh(x / 3) * 3


def test_both_parts_are_equal(tmp_path: Path) -> None:
    files = taesd_network.files_of(taesd_weights.write(tmp_path, CHANNELS, WIDTH))
    assert files is not None
    encoder: list[nn.Module] = [_conv(3, WIDTH), _Block(False)]
    decoder: list[nn.Module] = [_Limit(), _conv(CHANNELS, WIDTH), nn.ReLU()]
    for stage in range(3):
        encoder.append(_conv(WIDTH, WIDTH, stride=2, bias=False))
        encoder += [_Block(stage == 2) for _ in range(3)]
        decoder += [_Block(stage == 0) for _ in range(3)]
        decoder += [nn.Upsample(scale_factor=2), _conv(WIDTH, WIDTH, bias=False)]
    encoder.append(_conv(WIDTH, CHANNELS))
    decoder += [_Block(False), _conv(WIDTH, 3)]
    layers, channels = taesd_network.read(files)
    assert channels == CHANNELS
    x = np.random.default_rng(0).random((2, 32, 48, 3), np.float32)
    for part, modules, run in (
        ("encoder", encoder, taesd_network.encode),
        ("decoder", decoder, taesd_network.decode),
    ):
        network = nn.Sequential(*modules)
        tensors = tensor_files.read(files[part])[0]  # type: ignore[index]
        network.load_state_dict({name: torch.from_numpy(array) for name, array in tensors.items()})
        with torch.no_grad():
            expected = network(torch.from_numpy(x.transpose(0, 3, 1, 2))).permute(0, 2, 3, 1)
        x = np.asarray(run(layers[part], x))  # type: ignore[index]
        np.testing.assert_allclose(x, expected.numpy(), atol=1e-4)
