"""Converts between our weights and the reference's (TAEHV's state dict, `.pth` or `.safetensors`).

The reference numbers the layers of two ``nn.Sequential``s. Its kernels are [out, in, height,
width]. The first convolution of its memory blocks stacks frame and previous frame as input
channels; ours stacks the kernels of the two as output channels (:class:`blocks.MemoryConv`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxtrain.errors import InputError
from jaxtrain.models.video_ae import network
from jaxtrain.storage import tensor_files

Tensors = Mapping[str, np.ndarray]
Kind = Literal["vector", "conv", "memory", "matrix", "grow"]
_LISTED = 6


@dataclasses.dataclass(frozen=True)
class Weight:
    """An array's two names.

    Attributes:
        reference: name in the reference's state dict.
        ours: dotted path in the module.
        kind: layout.
    """

    reference: str
    ours: str
    kind: Kind


def table(*, wide: bool) -> list[Weight]:
    """Lists all arrays of the network, in the reference's order.

    Args:
        wide: whether the decoder is "super".
    """
    found: list[Weight] = []

    def layer(reference: str, ours: str, kind: Kind, *, bias: bool) -> None:
        found.append(Weight(f"{reference}.weight", f"{ours}.kernel", kind))
        if bias:
            found.append(Weight(f"{reference}.bias", f"{ours}.bias", "vector"))

    def memory_blocks(part: str, first: int, stage: str) -> None:
        for number in range(network.MEMORY_BLOCKS):
            reference, ours = f"{part}.{first + number}.conv", f"{stage}.blocks.{number}"
            layer(f"{reference}.0", f"{ours}.conv1", "memory", bias=True)
            layer(f"{reference}.2", f"{ours}.conv2", "conv", bias=True)
            layer(f"{reference}.4", f"{ours}.conv3", "conv", bias=True)

    def wide_blocks(first: int, stage: str) -> None:
        for number in range(network.MEMORY_BLOCKS):
            reference, ours = f"decoder.{first + number}.conv", f"{stage}.blocks.{number}"
            found.append(Weight(f"{reference}.0.weight", f"{ours}.around", "conv"))
            layer(f"{reference}.1", f"{ours}.up", "matrix", bias=True)
            layer(f"{reference}.3", f"{ours}.down", "matrix", bias=False)

    layer("encoder.0", "encoder.head", "conv", bias=True)
    for number in range(3):
        first, stage = 2 + 5 * number, f"encoder.stages.{number}"
        layer(f"encoder.{first}.conv", f"{stage}.pool", "matrix", bias=False)
        layer(f"encoder.{first + 1}", f"{stage}.down", "conv", bias=False)
        memory_blocks("encoder", first + 2, stage)
    layer("encoder.17", "encoder.tail", "conv", bias=True)
    if wide:
        layer("decoder.0", "decoder.head", "matrix", bias=False)
    else:
        layer("decoder.1", "decoder.head", "conv", bias=True)
    for number in range(3):
        stage = f"decoder.stages.{number}"
        if wide:
            first = 1 + 7 * number
            wide_blocks(first, stage)
            layer(f"decoder.{first + 3}", f"{stage}.out", "conv", bias=True)
            layer(f"decoder.{first + 6}.conv", f"{stage}.grow", "grow", bias=False)
        else:
            first = 3 + 6 * number
            memory_blocks("decoder", first, stage)
            layer(f"decoder.{first + 4}.conv", f"{stage}.grow", "grow", bias=False)
            layer(f"decoder.{first + 5}", f"{stage}.out", "conv", bias=False)
    layer("decoder.22", "decoder.tail", "conv", bias=True)
    return found


def to_reference(params: Tensors, *, wide: bool) -> dict[str, np.ndarray]:
    """Converts our parameters to the reference's names, layout, and order.

    Args:
        params: dotted path -> float32 array, for the parameters and nothing else.
        wide: whether the decoder is "super".
    """
    return {one.reference: _OUT[one.kind](np.asarray(params[one.ours])) for one in table(wide=wide)}


def from_reference(
    tensors: Tensors, expected: Mapping[str, tuple[int, ...]], *, wide: bool, source: str
) -> dict[str, np.ndarray]:
    """Converts the reference's state dict to our parameters, float32.

    Args:
        tensors: name -> array.
        expected: dotted path -> shape of each of the model's parameters.
        wide: whether the decoder is "super".
        source: the file's name, for error messages.

    Raises:
        InputError: arrays are missing, have the wrong shape, or belong to no layer; the message
            names them.
    """
    known = table(wide=wide)
    missing = [one.reference for one in known if one.reference not in tensors]
    extra = sorted(set(tensors) - {one.reference for one in known})
    found: dict[str, np.ndarray] = {}
    misshapen: list[str] = []
    for one in known:
        if one.reference not in tensors:
            continue
        tensor_files.check_real({one.reference: tensors[one.reference]}, source)
        tensor = np.asarray(tensors[one.reference], np.float32)
        # A broadcast array takes no memory, except where the layout change copies it.
        wanted = _OUT[one.kind](np.broadcast_to(np.bool_(0), expected[one.ours])).shape
        if tensor.shape != wanted:
            misshapen.append(f"{one.reference} {tensor.shape} instead of {wanted}")
        else:
            found[one.ours] = _IN[one.kind](tensor)
    complaints = [
        f"{what}: {', '.join(names[:_LISTED])}"
        + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
        for what, names in (("missing", missing), ("extra", extra), ("misshapen", misshapen))
        if names
    ]
    if complaints:
        raise InputError(
            f"{source} does not fit this model; {'; '.join(complaints)}. Its shape is set by "
            "--model.patch_size, --model.latent_channels, --model.decoder, and "
            "--model.time_downscale"
        )
    return found


def guess(tensors: Tensors, name: str) -> dict[str, Any]:
    """Infers the config fields that the weights require.

    Args:
        tensors: the reference's name -> array.
        name: the file's name, which alone identifies weights for CogVideoX and H3, as in the
            reference.

    Raises:
        InputError: the weights do not belong to this network.
    """
    head, tail = tensors.get("encoder.0.weight"), tensors.get("encoder.17.weight")
    if head is None or tail is None or head.ndim != 4 or tail.ndim != 4 or not head.size:
        few = ", ".join(sorted(tensors)[:_LISTED])
        raise InputError(
            f"{name} does not have weights of TAEHV: encoder.0.weight or encoder.17.weight is "
            f"missing or is not a kernel; it has {len(tensors)} arrays: {few}"
        )
    wide = "decoder.0.weight" in tensors
    found = {
        "patch_size": round((head.shape[1] / 3) ** 0.5),
        "latent_channels": tail.shape[0],
        "encoder_width": head.shape[0],
        "decoder": "super" if wide else "base",
        "trim": _trim_by_name(name) or "always",
    }
    found["time_downscale"] = tuple(
        _strides(tensors, name, [f"encoder.{2 + 5 * number}.conv.weight" for number in range(3)], 1)
    )
    reference = {one.ours: one.reference for one in table(wide=wide)}
    inside = (*(f"decoder.stages.{number}.out" for number in range(3)), "decoder.tail")
    kernels = [tensors.get(reference[f"{layer}.kernel"]) for layer in inside]
    if all(kernel is not None and kernel.ndim == 4 for kernel in kernels):
        found["decoder_widths"] = tuple(kernel.shape[1] for kernel in kernels if kernel is not None)
    return found


def ambiguity(config: Any, name: str) -> str | None:
    """Explains which values of ``trim`` fit weights of these shapes; None if only one does.

    Args:
        config: the config that :func:`guess` found.
        name: the file's name.
    """
    named = _trim_by_name(name)
    if named not in (None, "always") or config.time_downscale != (True, True, False):
        return None
    other = _SAME_SHAPES.get(config.latent_channels)
    if other is None or (named and config.latent_channels == _NAMED_CHANNELS):
        return None
    trim, family = other
    return (
        f"{name} fits two variants of TAEHV with {config.latent_channels} latent channels, which "
        f"its shapes do not tell apart: pass --trim always (Hunyuan, Wan, and others) or "
        f"--trim {trim} ({family})"
    )


# Published weights with shapes of another variant, by latent channels.
_SAME_SHAPES = {16: ("odd_latents", "CogVideoX"), 24: ("h3", "MiniMax H3")}
_NAMED_CHANNELS = 16  # of ordinary weights with a known name; none has 24
_NAMES = {
    "taecvx": "odd_latents",
    "taeh3": "h3",
    **dict.fromkeys(("taehv", "taew2_1", "taew2_2", "taeos1_3", "taeltx"), "always"),
}


def _trim_by_name(name: str) -> str | None:
    """Returns the value of ``trim`` of published weights, by the name of their file."""
    file = Path(name).name
    return next((trim for part, trim in _NAMES.items() if part in file), None)


def _strides(tensors: Tensors, name: str, layers: list[str], axis: int) -> list[bool]:
    """Returns for each of these layers whether it merges or makes two frames.

    Args:
        tensors: the reference's name -> array.
        name: the file's name.
        layers: pooling or growing layers.
        axis: of the larger dimension.

    Raises:
        InputError: a layer has another shape.
    """
    found = []
    for layer in layers:
        kernel = tensors.get(layer)
        if kernel is None or kernel.ndim != 4 or not kernel.size:
            found.append(False)  # from_reference lists it
            continue
        frames, rest = divmod(kernel.shape[axis], kernel.shape[1 - axis])
        if rest or frames not in (1, 2):
            raise InputError(
                f"{name} does not have weights of TAEHV: {layer} has shape {kernel.shape}, whose "
                "first two dimensions are not 1:1, 1:2, or 2:1"
            )
        found.append(frames == 2)
    return found


def _conv_in(tensor: np.ndarray) -> np.ndarray:
    return tensor.transpose(2, 3, 1, 0)


def _conv_out(kernel: np.ndarray) -> np.ndarray:
    return kernel.transpose(3, 2, 0, 1)


def _memory_in(tensor: np.ndarray) -> np.ndarray:
    own, left = np.split(_conv_in(tensor), 2, axis=2)
    return np.concatenate([own, left], axis=3)


def _memory_out(kernel: np.ndarray) -> np.ndarray:
    own, left = np.split(kernel, 2, axis=3)
    return _conv_out(np.concatenate([own, left], axis=2))


def _matrix_in(tensor: np.ndarray) -> np.ndarray:
    return tensor[:, :, 0, 0].T


def _matrix_out(kernel: np.ndarray) -> np.ndarray:
    return kernel.T[:, :, None, None]


def _same(array: np.ndarray) -> np.ndarray:
    return array


_Change = Callable[[np.ndarray], np.ndarray]
_IN: dict[Kind, _Change] = {
    "vector": _same,
    "conv": _conv_in,
    "memory": _memory_in,
    "matrix": _matrix_in,
    "grow": _matrix_in,
}
_OUT: dict[Kind, _Change] = {
    "vector": _same,
    "conv": _conv_out,
    "memory": _memory_out,
    "matrix": _matrix_out,
    "grow": _matrix_out,
}
