"""I3D, whose logits of videos the Fréchet video distance compares (Carreira and Zisserman 2017).

Inception v1 with 3D convolutions, trained on Kinetics-400 (https://arxiv.org/abs/1705.07750). Names
and layers are those of https://github.com/piergiaj/pytorch-i3d, and the preparation of a clip is
that of https://github.com/universome/fvd-comparison.

Shapes: B clips, T frames, H height, W width, C channels; K = 400 classes.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxtrain.errors import InputError
from jaxtrain.models.weight_table import KERNEL, Row, WeightTable
from jaxtrain.storage import tensor_files

LEAST_FRAMES = 9
"""Minimum frames: of fewer, the last pooling has only one left."""

CLASSES = 400
_SIDE = 224
_EPSILON = 1e-3  # of the batch norms
# Output channels of the branches of each Inception block: 1x1; 1x1 and 3x3; 1x1 and 3x3; 1x1 after
# pooling. Pools have windows and strides (frames, rows and columns).
_Layer = tuple[int, ...]
_POOLS: dict[str, tuple[_Layer, _Layer]] = {
    "MaxPool3d_2a_3x3": ((1, 3, 3), (1, 2, 2)),
    "MaxPool3d_3a_3x3": ((1, 3, 3), (1, 2, 2)),
    "MaxPool3d_4a_3x3": ((3, 3, 3), (2, 2, 2)),
    "MaxPool3d_5a_2x2": ((2, 2, 2), (2, 2, 2)),
}
_MIXED: dict[str, _Layer] = {
    "Mixed_3b": (64, 96, 128, 16, 32, 32),
    "Mixed_3c": (128, 128, 192, 32, 96, 64),
    "Mixed_4b": (192, 96, 208, 16, 48, 64),
    "Mixed_4c": (160, 112, 224, 24, 64, 64),
    "Mixed_4d": (128, 128, 256, 24, 64, 64),
    "Mixed_4e": (112, 144, 288, 32, 64, 64),
    "Mixed_4f": (256, 160, 320, 32, 128, 128),
    "Mixed_5b": (256, 160, 320, 32, 128, 128),
    "Mixed_5c": (384, 192, 384, 48, 128, 128),
}
_ORDER = (
    *("Conv3d_1a_7x7", "MaxPool3d_2a_3x3", "Conv3d_2b_1x1", "Conv3d_2c_3x3", "MaxPool3d_3a_3x3"),
    *("Mixed_3b", "Mixed_3c", "MaxPool3d_4a_3x3"),
    *("Mixed_4b", "Mixed_4c", "Mixed_4d", "Mixed_4e", "Mixed_4f", "MaxPool3d_5a_2x2"),
    *("Mixed_5b", "Mixed_5c"),
)
_LOGITS = "logits"
_NORM = ("bn.weight", "bn.bias", "bn.running_mean", "bn.running_var")

Features = Callable[[jax.Array], jax.Array]
"""Float32 videos [B, T, H, W, 3] in [0, 1] -> features [B, K]."""


def shapes() -> dict[str, tuple[int, int, int]]:
    """Returns layer -> (side of the kernel, input channels, output channels)."""
    result = {
        "Conv3d_1a_7x7": (7, 3, 64),
        "Conv3d_2b_1x1": (1, 64, 64),
        "Conv3d_2c_3x3": (3, 64, 192),
    }
    channels = 192
    for name, (b0, b1a, b1b, b2a, b2b, b3b) in _MIXED.items():
        result |= {
            f"{name}.b0": (1, channels, b0),
            f"{name}.b1a": (1, channels, b1a),
            f"{name}.b1b": (3, b1a, b1b),
            f"{name}.b2a": (1, channels, b2a),
            f"{name}.b2b": (3, b2a, b2b),
            f"{name}.b3b": (1, channels, b3b),
        }
        channels = b0 + b1b + b2b + b3b
    return result | {_LOGITS: (1, channels, CLASSES)}


def measure(weights: Path) -> Features:
    """Returns the function that computes a clip's features, the mean logits over time.

    Args:
        weights: state dict of ``InceptionI3d(400, in_channels=3)``.

    Raises:
        InputError: an array is missing or has another shape; the returned function raises it for
            clips with too few frames.
    """
    units = read(weights)

    def features(video_BTHW3: jax.Array) -> jax.Array:
        if video_BTHW3.shape[1] < LEAST_FRAMES:
            raise InputError(
                f"clips of {video_BTHW3.shape[1]} compared frames: rFVD needs {LEAST_FRAMES}"
            )
        return logits(units, prepared(video_BTHW3))

    return features


def prepared(video_BTHW3: jax.Array) -> jax.Array:
    """Resizes the shorter side to 224, crops the center, and scales colors to [-1, 1]."""
    b, t, h, w, c = video_BTHW3.shape
    scale = _SIDE / min(h, w)
    high = _SIDE if h <= w else math.ceil(h * scale)
    wide = _SIDE if w <= h else math.ceil(w * scale)
    x = jax.image.resize(video_BTHW3, (b, t, high, wide, c), "linear", antialias=False)
    top, left = (high - _SIDE) // 2, (wide - _SIDE) // 2
    return 2 * x[:, :, top : top + _SIDE, left : left + _SIDE] - 1


def logits(units: Mapping[str, tuple[np.ndarray, np.ndarray]], x_BTHWC: jax.Array) -> jax.Array:
    """Returns the mean logits over time, [B, K].

    Args:
        units: layer -> kernel and bias, as from :func:`read`.
        x_BTHWC: clips of :func:`prepared`.
    """

    def unit(x: jax.Array, name: str, stride: int = 1) -> jax.Array:
        kernel, bias = units[name]
        y = lax.conv_general_dilated(
            x,
            jnp.asarray(kernel),
            window_strides=(stride,) * 3,
            padding="SAME",
            dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
        )
        return y + jnp.asarray(bias).reshape(1, 1, 1, 1, -1)

    x = x_BTHWC
    for name in _ORDER:
        if name in _POOLS:
            x = _largest(x, *_POOLS[name])
        elif name in _MIXED:
            pooled = _largest(x, (3, 3, 3), (1, 1, 1))
            paths = (
                unit(x, f"{name}.b0"),
                unit(jax.nn.relu(unit(x, f"{name}.b1a")), f"{name}.b1b"),
                unit(jax.nn.relu(unit(x, f"{name}.b2a")), f"{name}.b2b"),
                unit(pooled, f"{name}.b3b"),
            )
            x = jax.nn.relu(jnp.concatenate(paths, axis=-1))
        else:
            x = jax.nn.relu(unit(x, name, stride=2 if name == _ORDER[0] else 1))
    means_BTC = x.mean((2, 3))
    of_pairs = (means_BTC[:, 1:] + means_BTC[:, :-1]) / 2  # average pooling of 2 frames
    kernel, bias = units[_LOGITS]
    return of_pairs.mean(1) @ jnp.asarray(kernel[0, 0, 0]) + jnp.asarray(bias)[None]


def _largest(x_BTHWC: jax.Array, window: _Layer, stride: _Layer) -> jax.Array:
    """Max pooling; the border never wins, as all values are at least 0."""
    return lax.reduce_window(
        x_BTHWC, -jnp.inf, lax.max, (1, *window, 1), (1, *stride, 1), padding="SAME"
    )


def read(weights: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Reads the weights; returns layer -> kernel [T, H, W, in, out] and bias, norms included."""
    tensors, _ = tensor_files.read(weights)
    rows: list[Row] = []
    expected: dict[str, tuple[int, ...]] = {}
    for name, (side, inputs, outputs) in shapes().items():
        rows.append(Row(f"{name}.conv3d.weight", f"{name}.kernel", KERNEL))
        expected[f"{name}.kernel"] = (side, side, side, inputs, outputs)
        for part in ("conv3d.bias",) if name == _LOGITS else _NORM:
            rows.append(Row(f"{name}.{part}", f"{name}.{part}"))
            expected[f"{name}.{part}"] = (outputs,)
    cure = (
        "rFVD needs the state dict of InceptionI3d(400) of pytorch-i3d, such as "
        "i3d_pretrained_400.pt"
    )
    table = WeightTable(rows=tuple(rows), complete=False)
    arrays = table.inward(tensors, expected, str(weights), cure)
    params = {}
    for name in shapes():
        kernel = arrays[f"{name}.kernel"]
        if name == _LOGITS:
            params[name] = kernel, arrays[f"{name}.conv3d.bias"]
            continue
        weight, shift, mean, variance = (
            arrays[f"{name}.{part}"].astype(np.float64) for part in _NORM
        )
        factor = weight / np.sqrt(variance + _EPSILON)
        params[name] = (
            (kernel * factor).astype(np.float32),
            (shift - mean * factor).astype(np.float32),
        )
    return params
