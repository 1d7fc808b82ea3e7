"""LPIPS, the perceptual distance of two frames (Zhang et al., arXiv 1801.03924), v0.1.

The features of five layers of AlexNet or VGG16 are normalized to unit length at each pixel. Their
squared differences are weighted by channel, averaged over pixels and summed over layers.
Architecture and constants are those of github.com/richzhang/PerceptualSimilarity. Distances by
different networks cannot be compared.

Shapes: N frames, H height, W width, C channels; layout NHWC.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxtrain.errors import InputError
from jaxtrain.models.weight_table import KERNEL, Layout, Row, WeightTable, shapes_of
from jaxtrain.ops.layers import FromFile
from jaxtrain.storage import tensor_files

LEAST_SIDE = 32
"""Minimum height and width: smaller frames have no pixels left in the deepest layer."""

_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
_EPSILON = 1e-10


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Layer:
    """A convolution and a ReLU.

    Attributes:
        pool: side of the max pooling before it, with a stride of 2; None without.
        stage: number of layers that are compared before it, plus 1.
    """

    side: int = 3
    stride: int = 1
    border: int = 1
    inputs: int
    outputs: int
    pool: int | None = None
    number: int
    stage: int
    compared: bool = True


def _vgg16() -> Iterator[_Layer]:
    """Yields the convolutions of VGG16: two, two, three, three and three of equal width."""
    inputs, number = 3, 0
    for stage, (count, width) in enumerate(((2, 64), (2, 128), (3, 256), (3, 512), (3, 512)), 1):
        for place in range(count):
            yield _Layer(
                inputs=inputs,
                outputs=width,
                pool=2 if place == 0 and stage > 1 else None,
                number=number,
                stage=stage,
                compared=place == count - 1,
            )
            inputs, number = width, number + 2
        number += 1  # of the pooling


NETWORKS: dict[str, tuple[_Layer, ...]] = {
    "alex": (
        _Layer(side=11, stride=4, border=2, inputs=3, outputs=64, number=0, stage=1),
        _Layer(side=5, border=2, inputs=64, outputs=192, pool=3, number=3, stage=2),
        _Layer(inputs=192, outputs=384, pool=3, number=6, stage=3),
        _Layer(inputs=384, outputs=256, number=8, stage=4),
        _Layer(inputs=256, outputs=256, number=10, stage=5),
    ),
    "vgg": tuple(_vgg16()),
}
"""The layers of each network, by its name in ``lpips.LPIPS(net=...)``."""


class Lpips(nnx.Module):
    """The network, initialized with zero weights; :func:`read` reads the real ones.

    Args:
        network: a key of :data:`NETWORKS`.
    """

    def __init__(self, network: str = "alex") -> None:
        self.network, layers = network, NETWORKS[network]
        self.kernels = nnx.List(
            [
                FromFile(jnp.zeros((layer.side, layer.side, layer.inputs, layer.outputs)))
                for layer in layers
            ]
        )
        self.biases = nnx.List([FromFile(jnp.zeros((layer.outputs,))) for layer in layers])
        compared = [layer for layer in layers if layer.compared]
        self.channels = nnx.List([FromFile(jnp.zeros((layer.outputs,))) for layer in compared])

    def __call__(self, frames_NHW3: jax.Array, others_NHW3: jax.Array) -> jax.Array:
        """Computes the distance of each pair of frames; values in [0, 1].

        Returns:
            float32 [N], at least 0.
        """
        distance = jnp.zeros(frames_NHW3.shape[0])
        pairs = zip(
            self._features(frames_NHW3), self._features(others_NHW3), self.channels, strict=True
        )
        for features, other_features, channels in pairs:
            difference = jnp.square(_to_length_one(features) - _to_length_one(other_features))
            distance += jnp.einsum("nhwc,c->nhw", difference, channels[...]).mean((1, 2))
        return distance

    def _features(self, frames_NHW3: jax.Array) -> list[jax.Array]:
        shift, scale = (jnp.asarray(x).reshape(1, 1, 1, 3) for x in (_SHIFT, _SCALE))
        x = ((2 * frames_NHW3 - 1 - shift) / scale).astype(frames_NHW3.dtype)
        features = []
        for layer, kernel, bias in zip(
            NETWORKS[self.network], self.kernels, self.biases, strict=True
        ):
            if layer.pool is not None:
                x = _pool(x, layer.pool)
            x = lax.conv_general_dilated(
                x,
                kernel[...].astype(x.dtype),
                window_strides=(layer.stride, layer.stride),
                padding=((layer.border, layer.border), (layer.border, layer.border)),
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            x = jnp.maximum(x + bias[...].astype(x.dtype).reshape(1, 1, 1, -1), 0)
            if layer.compared:
                features.append(x)
        return features


def read(weights: Path, network: str | None = None) -> tuple[str, dict[str, np.ndarray]]:
    """Reads the weights, keyed by their dotted path inside :class:`Lpips`.

    Args:
        weights: complete state dict of ``lpips.LPIPS(net="alex")`` or ``net="vgg"``.
        network: the only network that is allowed; None is the one of the file.

    Returns:
        The network, a key of :data:`NETWORKS`, and its weights.
    """
    tensors, _ = tensor_files.read(weights)
    # The second of the linear layers has 192 channels for AlexNet, 128 for VGG16.
    second = tensors.get(_linear(1))
    name = "vgg" if second is not None and second.shape == (1, 128, 1, 1) else "alex"
    if network not in (None, name):
        raise InputError(f"{weights} has LPIPS by {name}, but this takes {network}: pass that file")
    expected = shapes_of(lambda: Lpips(name), FromFile)
    cure = (
        "LPIPS needs the complete state dict of lpips.LPIPS, and not only its linear layers: "
        f"save it with torch.save(lpips.LPIPS(net='{name}').state_dict(), 'lpips.pth')"
    )
    return name, _table(name).inward(tensors, expected, str(weights), cure)


def _table(network: str) -> WeightTable:
    """Returns the names in LPIPS's file."""
    rows = []
    for number, layer in enumerate(NETWORKS[network]):
        place = f"net.slice{layer.stage}.{layer.number}"
        rows += [
            Row(f"{place}.weight", f"kernels.{number}", KERNEL),
            Row(f"{place}.bias", f"biases.{number}"),
        ]
    channels = Layout(np.ravel, lambda array: array.reshape(1, -1, 1, 1))
    compared = sum(layer.compared for layer in NETWORKS[network])
    rows += [Row(_linear(number), f"channels.{number}", channels) for number in range(compared)]
    return WeightTable(rows=tuple(rows), complete=False)


def _linear(number: int) -> str:
    return f"lin{number}.model.1.weight"


def measure(
    weights: Path,
) -> tuple[str, Callable[[jax.Array, jax.Array], jax.Array]]:
    """Returns a network, and a function that computes its distance of each frame of two videos.

    The function maps two float32 arrays [B, T, H, W, 3] in [0, 1] to [B, T].

    Raises:
        InputError: see :func:`read`; the returned function raises it for frames that are too small.
    """
    network, values = read(weights)
    graph, variables = nnx.split(nnx.eval_shape(lambda: Lpips(network)))
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

    return network, distance


def _to_length_one(x_NHWC: jax.Array) -> jax.Array:
    x = x_NHWC.astype(jnp.float32)
    squares = jnp.square(x).sum(-1, keepdims=True)
    # Where all features are 0 the square root has no gradient; it must be 0.
    length = jnp.where(squares > 0, jnp.sqrt(jnp.where(squares > 0, squares, 1)), 0)
    return x / (length + _EPSILON)


def _pool(x_NHWC: jax.Array, side: int) -> jax.Array:
    low = np.asarray(-np.inf, x_NHWC.dtype)  # JAX differentiates max pooling only for a constant
    return lax.reduce_window(x_NHWC, low, lax.max, (1, side, side, 1), (1, 2, 2, 1), "VALID")
