"""Writes random weights with the shapes and published names of I3D."""

from pathlib import Path

import numpy as np

from jaxtrain.inference.evaluation import i3d
from jaxtrain.storage import tensor_files


def tensors() -> dict[str, np.ndarray]:
    """Returns the contents of ``InceptionI3d(400, in_channels=3).state_dict()``, random."""
    rng, found = np.random.default_rng(5), {}
    for name, (side, inputs, outputs) in i3d.shapes().items():
        scale = (2 / (inputs * side**3)) ** 0.5
        kernel = rng.standard_normal((outputs, inputs, side, side, side)) * scale
        found[f"{name}.conv3d.weight"] = kernel
        if name == "logits":
            found[f"{name}.conv3d.bias"] = rng.standard_normal(outputs)
            continue
        found[f"{name}.bn.weight"] = rng.uniform(0.8, 1.2, outputs)
        found[f"{name}.bn.bias"] = rng.standard_normal(outputs) * 0.1
        found[f"{name}.bn.running_mean"] = rng.standard_normal(outputs) * 0.1
        found[f"{name}.bn.running_var"] = rng.uniform(0.5, 1.5, outputs)
        found[f"{name}.bn.num_batches_tracked"] = np.array(7)
    return {
        name: array if array.dtype.kind == "i" else array.astype(np.float32)
        for name, array in found.items()
    }


def write(path: Path) -> Path:
    tensor_files.write(path, tensors(), {})
    return path
