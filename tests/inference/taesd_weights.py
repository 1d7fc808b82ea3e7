"""Random weights with the names of TAESD's files."""

from pathlib import Path

import numpy as np

from jaxtrain.storage import tensor_files


def write(folder: Path, channels: int = 4, width: int = 8, **changed: np.ndarray) -> Path:
    """Writes an encoder and a decoder; the blocks at the smallest size have TAEF2's branch."""
    rng = np.random.default_rng(0)

    def conv(inputs: int, outputs: int, side: int = 3) -> np.ndarray:
        scale = 1 / np.sqrt(inputs * side**2)
        return (scale * rng.standard_normal((outputs, inputs, side, side))).astype(np.float32)

    def block(at: int, pool: bool) -> dict[str, np.ndarray]:
        arrays = {}
        for number in (0, 2, 4):
            arrays[f"{at}.conv.{number}.weight"] = conv(width, width)
            arrays[f"{at}.conv.{number}.bias"] = rng.random(width, np.float32) / 10
        if pool:
            arrays |= {
                f"{at}.pool.0.weight": conv(width, 4 * width, 1),
                f"{at}.pool.1.weight": 1 + rng.random(4 * width, np.float32),
                f"{at}.pool.1.bias": rng.random(4 * width, np.float32) / 10,
                f"{at}.pool.3.weight": conv(4 * width, width, 1),
            }
        return arrays

    def ends(at: int, inputs: int, outputs: int) -> dict[str, np.ndarray]:
        return {
            f"{at}.weight": conv(inputs, outputs),
            f"{at}.bias": rng.random(outputs, np.float32) / 10,
        }

    encoder = ends(0, 3, width) | block(1, False) | ends(14, width, channels)
    decoder = ends(1, channels, width) | block(18, False) | ends(19, width, 3)
    for stage in range(3):
        encoder[f"{2 + 4 * stage}.weight"] = conv(width, width)
        decoder[f"{7 + 5 * stage}.weight"] = conv(width, width)
        for number in range(3):
            encoder |= block(3 + 4 * stage + number, stage == 2)
            decoder |= block(3 + 5 * stage + number, stage == 0)
    for part, arrays in (("encoder", encoder), ("decoder", decoder | changed)):
        tensor_files.write(folder / f"tiny_{part}.safetensors", arrays, {})
    return folder
