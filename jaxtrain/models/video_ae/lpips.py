"""LPIPS, the perceptual distance of two frames (Zhang et al., arXiv 1801.03924), v0.1, AlexNet.

The features of five AlexNet layers are normalized to unit length at each pixel. Their squared
differences are weighted by channel, averaged over pixels and summed over layers. Architecture and
constants are those of github.com/richzhang/PerceptualSimilarity.

Shapes: N frames, H height, W width, C channels; layout NHWC.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxtrain.errors import InputError
from jaxtrain.ops.layers import Frozen
from jaxtrain.storage import tensor_files

LEAST_SIDE = 32
"""Minimum height and width: smaller frames have no pixels left in the deepest layer."""

_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
_EPSILON = 1e-10
# Kernel size, stride, padding, input channels, output channels, whether max pooling (3x3, stride 2)
# comes before; then the layer's name in torchvision's AlexNet and in LPIPS's copy of it.
_LAYERS = (
    (11, 4, 2, 3, 64, False, "features.0", "net.slice1.0"),
    (5, 1, 2, 64, 192, True, "features.3", "net.slice2.3"),
    (3, 1, 1, 192, 384, True, "features.6", "net.slice3.6"),
    (3, 1, 1, 384, 256, False, "features.8", "net.slice4.8"),
    (3, 1, 1, 256, 256, False, "features.10", "net.slice5.10"),
)


class Lpips(nnx.Module):
    """The network, initialized with zero weights; :func:`read` reads the real ones."""

    def __init__(self) -> None:
        self.kernels = nnx.List(
            [Frozen(jnp.zeros((side, side, i, o))) for side, _, _, i, o, *_ in _LAYERS]
        )
        self.biases = nnx.List([Frozen(jnp.zeros((layer[4],))) for layer in _LAYERS])
        self.channels = nnx.List([Frozen(jnp.zeros((layer[4],))) for layer in _LAYERS])

    def __call__(self, frames_NHW3: jax.Array, others_NHW3: jax.Array) -> jax.Array:
        """Computes the distance of each pair of frames; values in [0, 1].

        Returns:
            float32 [N], at least 0.
        """
        distance = jnp.zeros(frames_NHW3.shape[0])
        pairs = zip(
            self._features(frames_NHW3), self._features(others_NHW3), self.channels, strict=True
        )
        for one, other, channels in pairs:
            difference = jnp.square(_to_length_one(one) - _to_length_one(other))
            distance += jnp.einsum("nhwc,c->nhw", difference, channels[...]).mean((1, 2))
        return distance

    def _features(self, frames_NHW3: jax.Array) -> list[jax.Array]:
        shift, scale = (jnp.asarray(x).reshape(1, 1, 1, 3) for x in (_SHIFT, _SCALE))
        x = ((2 * frames_NHW3 - 1 - shift) / scale).astype(frames_NHW3.dtype)
        found = []
        for (_, stride, border, _, _, pooled, *_), kernel, bias in zip(
            _LAYERS, self.kernels, self.biases, strict=True
        ):
            if pooled:
                x = _pool(x)
            x = lax.conv_general_dilated(
                x,
                kernel[...].astype(x.dtype),
                window_strides=(stride, stride),
                padding=((border, border), (border, border)),
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            x = jnp.maximum(x + bias[...].astype(x.dtype).reshape(1, 1, 1, -1), 0)
            found.append(x)
        return found


def read(weights: Path, backbone: Path | None) -> dict[str, np.ndarray]:
    """Reads the weights, keyed by their dotted path inside :class:`Lpips`.

    Args:
        weights: state dict of ``lpips.LPIPS(net="alex")``, complete or only its linear layers.
        backbone: state dict of torchvision's AlexNet; required if `weights` has only the linear
            layers.

    Raises:
        InputError: an array is missing or has the wrong shape; the message names it.
    """
    tensors, _ = tensor_files.read(weights)
    sources = {"net": str(weights), "features": str(backbone)}
    if backbone is not None:
        tensors |= tensor_files.read(backbone)[0]
    found: dict[str, np.ndarray] = {}
    for number, (side, _, _, inputs, outputs, _, alexnet, ours) in enumerate(_LAYERS):
        name = alexnet if backbone is not None else ours
        source = sources[name.partition(".")[0]]
        kernel = _taken(tensors, f"{name}.weight", (outputs, inputs, side, side), source)
        found[f"kernels.{number}"] = kernel.transpose(2, 3, 1, 0)
        found[f"biases.{number}"] = _taken(tensors, f"{name}.bias", (outputs,), source)
        linear = f"lin{number}.model.1.weight"
        channels = _taken(tensors, linear, (1, outputs, 1, 1), str(weights))
        found[f"channels.{number}"] = channels.reshape(outputs)
    return found


def measure(weights: Path, backbone: Path | None) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns a function that computes the LPIPS distance of each frame of two videos.

    It maps two float32 arrays [B, T, H, W, 3] in [0, 1] to [B, T].

    Raises:
        InputError: see :func:`read`; the returned function raises it for frames that are too small.
    """
    values = read(weights, backbone)
    graph, variables = nnx.split(nnx.eval_shape(Lpips))
    leaves = [
        (path, leaf.replace(jnp.asarray(values[".".join(map(str, path))])))
        for path, leaf in nnx.to_flat_state(variables)
    ]
    module = nnx.merge(graph, nnx.from_flat_state(leaves))

    def distance(video_BTHW3: jax.Array, other_BTHW3: jax.Array) -> jax.Array:
        b, t, *shape = video_BTHW3.shape
        if min(shape[:2]) < LEAST_SIDE:
            raise InputError(f"frames of {shape[1]}x{shape[0]}: LPIPS needs {LEAST_SIDE} pixels")
        return module(*(x.reshape(b * t, *shape) for x in (video_BTHW3, other_BTHW3))).reshape(b, t)

    return distance


def _taken(
    tensors: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...], source: str
) -> np.ndarray:
    if name not in tensors:
        raise InputError(
            f"{source} has no {name}: LPIPS needs the state dict of lpips.LPIPS(net='alex'), or "
            "its linear layers with torchvision's AlexNet beside them (backbone)"
        )
    if tensors[name].shape != shape:
        raise InputError(f"{source}: {name} has shape {tensors[name].shape} instead of {shape}")
    return tensors[name]


def _to_length_one(x_NHWC: jax.Array) -> jax.Array:
    x = x_NHWC.astype(jnp.float32)
    squares = jnp.square(x).sum(-1, keepdims=True)
    # Where all features are 0 the square root has no gradient; it must be 0.
    length = jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)
    return x / (length + _EPSILON)


def _pool(x_NHWC: jax.Array) -> jax.Array:
    low = np.asarray(-np.inf, x_NHWC.dtype)  # JAX differentiates max pooling only for a constant
    return lax.reduce_window(x_NHWC, low, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID")


def forward_flops(height: int, width: int) -> float:
    """Returns the forward FLOPs for one frame."""
    total = 0.0
    for side, stride, border, inputs, outputs, pooled, *_ in _LAYERS:
        if pooled:
            height, width = (height - 3) // 2 + 1, (width - 3) // 2 + 1
        height = (height + 2 * border - side) // stride + 1
        width = (width + 2 * border - side) // stride + 1
        total += 2.0 * height * width * side**2 * inputs * outputs
    return total
