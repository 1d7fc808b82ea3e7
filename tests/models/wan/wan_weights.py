"""Writes folders of diffusers' AutoencoderKLWan, with narrow networks and random weights."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.models.wan import network
from jaxtrain.storage import tensor_files
from jaxtrain.training.state import ModelDefinition

NARROW: dict[network.Version, network.Architecture] = {
    "wan2.1": network.Architecture(width=8, decoder_width=8, latent_channels=4),
    "wan2.2": network.Architecture(
        width=8, decoder_width=12, latent_channels=4, patch_size=2, residual=True
    ),
}


def settings(sizes: network.Architecture) -> dict[str, Any]:
    """Returns the config.json of a network, with statistics that are neither 0 nor 1."""
    count = sizes.latent_channels
    return {
        "_class_name": "AutoencoderKLWan",
        "base_dim": sizes.width,
        "decoder_base_dim": sizes.decoder_width,
        "z_dim": count,
        "is_residual": sizes.residual,
        "in_channels": 3 * sizes.patch_size**2,
        "out_channels": 3 * sizes.patch_size**2,
        "patch_size": sizes.patch_size if sizes.patch_size > 1 else None,
        "latents_mean": np.linspace(-0.2, 0.3, count).round(3).tolist(),
        "latents_std": np.linspace(0.5, 1.5, count).round(3).tolist(),
    }


def tensors(sizes: network.Architecture, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random weights by diffusers' names."""
    rng = np.random.default_rng(seed)
    found = {}
    table, shapes = network.table(sizes, decodes=True)
    for name, shape in table.shapes(shapes).items():
        scale = 1.0 if name.endswith("gamma") else 0.1
        if name.endswith("weight"):
            scale = float(np.prod(shape[1:])) ** -0.5
        found[name] = (rng.standard_normal(shape) * scale).astype(np.float32)
    return found


def write(folder: Path, sizes: network.Architecture, seed: int = 0, parts: int = 1) -> Path:
    """Writes a folder; with several parts, its weights are split over as many files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / network.SETTINGS).write_text(json.dumps(settings(sizes)))
    whole = tensors(sizes, seed)
    if parts == 1:
        tensor_files.write(folder / network.ARRAYS, whole, {})
        return folder
    places = {}
    for number in range(parts):
        name = network.ARRAYS.replace(".", f"-{number + 1:05}-of-{parts:05}.", 1)
        some = {key: whole[key] for key in sorted(whole)[number::parts]}
        tensor_files.write(folder / name, some, {})
        places |= dict.fromkeys(some, name)
    index = folder / f"{network.ARRAYS}{tensor_files.INDEX}"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def module(folder: Path, sizes: network.Architecture, *, decodes: bool = True) -> network.WanVae:
    """Returns the network of a folder."""
    found = network.read(folder, sizes, decodes=decodes, field="folder")
    return filled(sizes, found, decodes=decodes)


def decode(module: network.WanVae, latents: jax.Array, chunk: int | None) -> jax.Array:
    """Decodes normalized latents to a video, not clamped; `chunk` is that of `in_chunks`."""
    x = network.denormalized(latents, module.latents_mean[...], module.latents_std[...])
    return network.to_pixels(network.in_chunks(module.decoder, x, chunk), module.patch_size)


def filled(
    sizes: network.Architecture, arrays: dict[str, np.ndarray], *, decodes: bool = True
) -> network.WanVae:
    """Returns the network with these arrays, by dotted path."""
    definition = ModelDefinition(lambda _: network.WanVae(sizes, decodes=decodes))
    found = jax.tree.map(jnp.asarray, arrays)
    return definition.module(found, found)
