"""I3D compared with PyTorch's layers.

Run by name, because PyTorch is an optional extra:

    python -m pytest tests/interop/torch_i3d.py
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from inference.evaluation import i3d_weights
from inference.evaluation import test_i3d as ours
from torch.nn import functional

from jaxtrain.inference.evaluation import i3d

POOLS = {"2a": (1, 3, 3, 1, 2, 2), "4a": (3, 3, 3, 2, 2, 2), "5a": (2, 2, 2, 2, 2, 2)}
STEM = ("Conv3d_1a_7x7", "2a", "Conv3d_2b_1x1", "Conv3d_2c_3x3", "2a")
BLOCKS = ("3b", "3c", "4a", "4b", "4c", "4d", "4e", "4f", "5a", "5b", "5c")


def same(x: torch.Tensor, window: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """Pads with zeros as TensorFlow's "SAME" does."""
    border: list[int] = []
    for size, side, step in zip(x.shape[2:], window, stride, strict=True):
        missing = max((-(-size // step) - 1) * step + side - size, 0)
        border = [missing // 2, missing - missing // 2, *border]
    return functional.pad(x, border)


def torch_logits(video_BTHWC: np.ndarray) -> np.ndarray:
    arrays: dict[str, Any] = {k: torch.from_numpy(v) for k, v in i3d_weights.tensors().items()}

    def unit(x: torch.Tensor, name: str, step: int = 1) -> torch.Tensor:
        kernel = arrays[f"{name}.conv3d.weight"]
        x = same(x, tuple(kernel.shape[2:]), (step,) * 3)
        x = functional.conv3d(x, kernel, stride=step)
        mean, variance, weight, bias = (
            arrays[f"{name}.bn.{part}"]
            for part in ("running_mean", "running_var", "weight", "bias")
        )
        return functional.relu(functional.batch_norm(x, mean, variance, weight, bias, eps=1e-3))

    def pool(x: torch.Tensor, *sizes: int) -> torch.Tensor:
        return functional.max_pool3d(same(x, sizes[:3], sizes[3:]), sizes[:3], sizes[3:])

    x = torch.from_numpy(np.ascontiguousarray(video_BTHWC.transpose(0, 4, 1, 2, 3)))
    for name in STEM:
        x = pool(x, *POOLS[name]) if name in POOLS else unit(x, name, 1 + (name == STEM[0]))
    for name in BLOCKS:
        if name in POOLS:
            x = pool(x, *POOLS[name])
            continue
        block = f"Mixed_{name}"
        x = torch.cat(
            [
                unit(x, f"{block}.b0"),
                unit(unit(x, f"{block}.b1a"), f"{block}.b1b"),
                unit(unit(x, f"{block}.b2a"), f"{block}.b2b"),
                unit(pool(x, 3, 3, 3, 1, 1, 1), f"{block}.b3b"),
            ],
            dim=1,
        )
    x = functional.avg_pool3d(x, (2, *x.shape[3:]), stride=1)
    x = functional.conv3d(x, arrays["logits.conv3d.weight"], arrays["logits.conv3d.bias"])
    return x[..., 0, 0].mean(2).numpy()


def test_the_stored_numbers_equal_those_of_pytorch() -> None:
    found = torch_logits(ours.clips(32))
    np.testing.assert_allclose(found[:, :3], ours.WANTED, rtol=1e-5)


def test_features_of_whole_clips_equal(tmp_path: Path) -> None:
    """17 frames of another size, resized as by PyTorch."""
    video = np.random.default_rng(1).random((1, 17, 128, 160, 3), np.float32)
    path = i3d_weights.write(tmp_path / "i3d.safetensors")
    found = np.asarray(jax.jit(i3d.measure(path))(jnp.asarray(video)))
    frames = torch.from_numpy(video[0]).permute(0, 3, 1, 2)
    large = functional.interpolate(frames, (224, 280), mode="bilinear", align_corners=False)
    prepared = large[..., 28:252].permute(0, 2, 3, 1)[None].numpy() * 2 - 1
    wanted = torch_logits(prepared)
    assert np.abs(wanted).max() > 1
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())
