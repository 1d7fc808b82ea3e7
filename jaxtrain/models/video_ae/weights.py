"""Names our weights as the reference does (TAEHV's state dict, `.pth` or `.safetensors`).

The reference numbers the layers of two ``nn.Sequential``s. The first convolution of its memory
blocks stacks frame and previous frame as input channels; ours stacks the kernels of the two as
output channels (:class:`blocks.MemoryConv`).
"""

from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.errors import InputError
from jaxtrain.models.video_ae import network
from jaxtrain.models.weight_table import KERNEL, POINTWISE, Layout, Row, Tensors, WeightTable

_LISTED = 6


def _memory_in(tensor: np.ndarray) -> np.ndarray:
    of_frame, left = np.split(KERNEL.inward(tensor), 2, axis=2)
    return np.concatenate([of_frame, left], axis=3)


def _memory_out(kernel: np.ndarray) -> np.ndarray:
    of_frame, left = np.split(kernel, 2, axis=3)
    return KERNEL.outward(np.concatenate([of_frame, left], axis=2))


_MEMORY = Layout(_memory_in, _memory_out)
_BLOCK = (("0", "conv1", _MEMORY), ("2", "conv2", KERNEL), ("4", "conv3", KERNEL))


def table(*, wide: bool) -> WeightTable:
    """Lists all arrays of the network."""
    rows = _layer("encoder.0", "encoder.head")
    for number in range(3):
        first, stage = 2 + 5 * number, f"encoder.stages.{number}"
        rows += [
            Row(f"encoder.{first}.conv.weight", f"{stage}.pool.kernel", POINTWISE),
            Row(f"encoder.{first + 1}.weight", f"{stage}.down.kernel", KERNEL),
            *_memory_blocks("encoder.{}.conv.", first + 2, stage),
        ]
    rows += _layer("encoder.17", "encoder.tail")
    rows += _wide_decoder() if wide else _base_decoder()
    return WeightTable(rows=(*rows, *_layer("decoder.22", "decoder.tail")))


def _base_decoder() -> list[Row]:
    rows = _layer("decoder.1", "decoder.head")
    for number in range(3):
        first, stage = 3 + 6 * number, f"decoder.stages.{number}"
        rows += [
            *_memory_blocks("decoder.{}.conv.", first, stage),
            Row(f"decoder.{first + 4}.conv.weight", f"{stage}.grow.kernel", POINTWISE),
            Row(f"decoder.{first + 5}.weight", f"{stage}.out.kernel", KERNEL),
        ]
    return rows


def _wide_decoder() -> list[Row]:
    rows = [Row("decoder.0.weight", "decoder.head.kernel", POINTWISE)]
    for number in range(3):
        first, stage = 1 + 7 * number, f"decoder.stages.{number}"
        for block in range(network.MEMORY_BLOCKS):
            reference, ours = f"decoder.{first + block}.conv", f"{stage}.blocks.{block}"
            rows += [
                Row(f"{reference}.0.weight", f"{ours}.around", KERNEL),
                *_layer(f"{reference}.1", f"{ours}.up", POINTWISE),
                Row(f"{reference}.3.weight", f"{ours}.down.kernel", POINTWISE),
            ]
        rows += _layer(f"decoder.{first + 3}", f"{stage}.out")
        rows.append(Row(f"decoder.{first + 6}.conv.weight", f"{stage}.grow.kernel", POINTWISE))
    return rows


def _memory_blocks(reference: str, first: int, stage: str) -> list[Row]:
    return [
        row
        for block in range(network.MEMORY_BLOCKS)
        for theirs, ours, layout in _BLOCK
        for row in _layer(
            reference.format(first + block) + theirs, f"{stage}.blocks.{block}.{ours}", layout
        )
    ]


def _layer(reference: str, ours: str, layout: Layout = KERNEL) -> list[Row]:
    return [
        Row(f"{reference}.weight", f"{ours}.kernel", layout),
        Row(f"{reference}.bias", f"{ours}.bias"),
    ]


def guess(tensors: Tensors, name: str) -> dict[str, Any]:
    """Infers the config fields that the weights require.

    Args:
        tensors: the reference's name -> array.
        name: the file's name, which alone identifies weights for CogVideoX and H3, as in the
            reference.
    """
    head, tail = tensors.get("encoder.0.weight"), tensors.get("encoder.17.weight")
    if head is None or tail is None or head.ndim != 4 or tail.ndim != 4 or not head.size:
        few = ", ".join(sorted(tensors)[:_LISTED])
        raise InputError(
            f"{name} does not have weights of TAEHV: encoder.0.weight or encoder.17.weight is "
            f"missing or is not a kernel; it has {len(tensors)} arrays: {few}"
        )
    wide = "decoder.0.weight" in tensors
    fields = {
        "patch_size": round((head.shape[1] / 3) ** 0.5),
        "latent_channels": tail.shape[0],
        "encoder_width": head.shape[0],
        "decoder": "super" if wide else "base",
        "trim": _trim_by_name(name) or "always",
    }
    fields["time_downscale"] = tuple(
        _strides(tensors, name, [f"encoder.{2 + 5 * number}.conv.weight" for number in range(3)], 1)
    )
    inside = (*(f"decoder.stages.{number}.out" for number in range(3)), "decoder.tail")
    names = table(wide=wide)
    kernels = [tensors.get(names.name(f"{layer}.kernel")) for layer in inside]
    if all(kernel is not None and kernel.ndim == 4 for kernel in kernels):
        fields["decoder_widths"] = tuple(
            kernel.shape[1] for kernel in kernels if kernel is not None
        )
    return fields


def ambiguity(config: Any, name: str) -> str | None:
    """Explains which values of ``trim`` fit weights of these shapes; None if only one does."""
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
    return next((trim for fragment, trim in _NAMES.items() if fragment in file), None)


def _strides(tensors: Tensors, name: str, layers: list[str], axis: int) -> list[bool]:
    """Returns for each of these layers whether it merges or makes two frames.

    Args:
        tensors: the reference's name -> array.
    """
    strides = []
    for layer in layers:
        kernel = tensors.get(layer)
        if kernel is None or kernel.ndim != 4 or not kernel.size:
            strides.append(False)  # from_weights lists it
            continue
        frames, remainder = divmod(kernel.shape[axis], kernel.shape[1 - axis])
        if remainder or frames not in (1, 2):
            raise InputError(
                f"{name} does not have weights of TAEHV: {layer} has shape {kernel.shape}, whose "
                "first two dimensions are not 1:1, 1:2, or 2:1"
            )
        strides.append(frames == 2)
    return strides
