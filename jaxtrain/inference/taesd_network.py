"""TAESD's autoencoders of images (github.com/madebyollin/taesd), for SD, FLUX, and FLUX.2.

The networks are lists of layers that follow from the names and shapes of the arrays, so the same
code runs all variants. TAEF2 also has a branch with a group norm in its first blocks.

Shapes: N images, H height, W width, C channels, layout NHWC; latents h x w with Z channels.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp

from jaxtrain.errors import InputError, first_line
from jaxtrain.storage import tensor_files

SPACE_FACTOR = 8
_GROUPS = 4  # of the norm of TAEF2's branch
_EPSILON = 1e-5
_LIMIT = 3.0  # of the latents that the decoder sees

Part = Literal["encoder", "decoder"]
PARTS: tuple[Part, Part] = ("encoder", "decoder")
Files = Mapping[Part, Path]
Arrays = Mapping[str, jax.Array]
"""The arrays of a layer, by their names in it."""


def files_of(path: Path) -> Files | None:
    """Returns the files NAME_encoder and NAME_decoder (.pth or .safetensors) of a folder.

    None if it does not have exactly one of each.
    """
    found: dict[Part, Path] = {}
    for part in PARTS:
        named = [file for file in path.glob(f"*_{part}.*") if file.suffix in tensor_files.ENDINGS]
        if len(named) != 1:
            return None
        found[part] = named[0]
    return found


def read(files: Files) -> tuple[dict[Part, list[Arrays]], int]:
    """Reads an autoencoder with 8x8 pixels per latent.

    Returns:
        The layers of the encoder and of the decoder, and the number of channels of a latent.
    """
    layers = {part: _layers(files[part]) for part in PARTS}
    what = f"{files['encoder']} and {files['decoder']} do not have one autoencoder of TAESD"
    image = jax.ShapeDtypeStruct((1, 2 * SPACE_FACTOR, 2 * SPACE_FACTOR, 3), jnp.float32)
    try:
        latent = jax.eval_shape(encode, layers["encoder"], image)
        decoded = jax.eval_shape(decode, layers["decoder"], latent)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{what} ({first_line(error)}): {_CURE}") from error
    if latent.shape[1:3] != (2, 2) or decoded.shape != image.shape:
        raise InputError(
            f"{what} with {SPACE_FACTOR}x{SPACE_FACTOR} pixels per latent: a square of "
            f"{image.shape[1]} pixels becomes {latent.shape[1]}, then {decoded.shape[1]}: {_CURE}"
        )
    return layers, latent.shape[-1]


_CURE = "pass a folder with the two files of taesd, taesdxl, taesd3, taef1, or taef2"


def _layers(file: Path) -> list[Arrays]:
    numbered: dict[int, dict[str, jax.Array]] = {}
    for name, array in tensor_files.read(file)[0].items():
        match = re.fullmatch(r"(\d{1,3})\.((?:(?:conv|pool)\.\d\.)?(?:weight|bias))", name)
        if match is None or array.ndim not in (1, 4):
            raise InputError(f"{file} does not have weights of TAESD, but an array {name}: {_CURE}")
        kernel = array.transpose(2, 3, 1, 0) if array.ndim == 4 else array
        numbered.setdefault(int(match[1]), {})[match[2]] = jnp.asarray(kernel)
    return [numbered[number] for number in sorted(numbered)]


def encode(layers: Sequence[Arrays], images_NHW3: jax.Array) -> jax.Array:
    """Maps images in [0, 1] to latents [N, H / 8, W / 8, Z], as diffusion models see them."""
    x = images_NHW3
    for arrays in layers:
        x = _layer(arrays, x, stride=2 if _resizes(arrays) else 1)
    return x


def decode(layers: Sequence[Arrays], latents_NhwZ: jax.Array) -> jax.Array:
    """Maps latents to images [N, 8 h, 8 w, 3], not clamped."""
    x = jax.nn.relu(_layer(layers[0], _LIMIT * jnp.tanh(latents_NhwZ / _LIMIT)))
    for arrays in layers[1:]:
        if _resizes(arrays):
            x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
        x = _layer(arrays, x)
    return x


def _resizes(arrays: Arrays) -> bool:
    """Returns whether a layer halves or doubles the image: its convolution has no bias."""
    return "weight" in arrays and "bias" not in arrays


def _layer(arrays: Arrays, x_NHWC: jax.Array, stride: int = 1) -> jax.Array:
    if "weight" in arrays:
        return _conv(arrays, "", x_NHWC, stride)
    x = x_NHWC
    if "pool.0.weight" in arrays:
        y = _group_norm(arrays, "pool.1.", _conv(arrays, "pool.0.", x))
        x += _conv(arrays, "pool.3.", jax.nn.relu(y))
    y = _conv(arrays, "conv.0.", x)
    for name in ("conv.2.", "conv.4."):
        y = _conv(arrays, name, jax.nn.relu(y))
    return jax.nn.relu(y + x)


def _conv(arrays: Arrays, name: str, x_NHWC: jax.Array, stride: int = 1) -> jax.Array:
    kernel, bias = arrays[f"{name}weight"], arrays.get(f"{name}bias")
    border = kernel.shape[0] // 2
    y = jax.lax.conv_general_dilated(
        x_NHWC,
        kernel,
        window_strides=(stride, stride),
        padding=((border, border),) * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return y if bias is None else y + bias.reshape(1, 1, 1, -1)


def _group_norm(arrays: Arrays, name: str, x_NHWC: jax.Array) -> jax.Array:
    n, h, w, c = x_NHWC.shape
    x = x_NHWC.reshape(n, h, w, _GROUPS, c // _GROUPS)
    mean, variance = (of(x, axis=(1, 2, 4), keepdims=True) for of in (jnp.mean, jnp.var))
    x = ((x - mean) / jnp.sqrt(variance + _EPSILON)).reshape(n, h, w, c)
    scale, shift = (arrays[f"{name}{part}"].reshape(1, 1, 1, -1) for part in ("weight", "bias"))
    return x * scale + shift
