"""Checks an exported model: what was written computes the same as what it was written from.

The files are read back by jaxtrain, whose parameters must be equal to the bit, and a folder also by
transformers or diffusers, if that is installed.
"""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import InputError, first_line
from jaxtrain.interop import huggingface, weights
from jaxtrain.storage import tensor_files
from jaxtrain.training import state

TOLERANCE = 1e-3
"""Of the largest difference, in standard deviations of the output. Two implementations that round
differently in float32 differ by 1e-6 to 1e-5; a swapped axis or another constant by 0.01 to 2."""
_TOKENS = 64
_SIDE = 4  # of a video, in latents

Outputs = dict[str, np.ndarray]
Params = Mapping[str, np.ndarray]


def check(target: Path, model: Any, params: Params) -> list[str]:
    """Checks exported files, and returns a sentence for each check.

    Args:
        params: its parameters by dotted path, float32.
    """
    model = model.bare()
    checks = [_read_back(target, model, params)]
    if model.diffusers_class and target.is_dir():
        if all(importlib.util.find_spec(package) for package in ("diffusers", "torch")):
            video = _video(model)[:, : model.timing.decoded(2)]
            theirs = _of_diffusers(target, model, video)
            checks.append(_same("diffusers", _frames(model, params, video, theirs), theirs, target))
    elif huggingface.is_model_folder(target):
        packages = ("transformers", "torch")
        if all(importlib.util.find_spec(package) for package in packages):
            tokens = _tokens(model)
            try:
                theirs = _of_transformers(target, model.task, tokens)
            except Exception as error:  # an older version may not know the kind of model
                checks.append(f"Not compared: transformers cannot read it ({first_line(error)}).")
            else:
                checks.append(_same("transformers", _logits(model, params, tokens), theirs, target))
    return checks


def _read_back(target: Path, model: Any, params: Params) -> str:
    """Reads the files as ``--model.init_from`` and ``load_model`` do."""
    if target.is_dir():
        stored = weights.load(target)
        read_model, read_params = stored.model.bare(), stored.params
    else:
        tensors, about = tensor_files.read(target)
        read_model = weights.load(target).model.bare() if about.get(weights.ABOUT) else model
        read_params = read_model.from_weights(tensors, str(target))
    for name, array in read_params.items():
        if not np.array_equal(array, params[name], equal_nan=True):
            raise InputError(
                f"{target}: {name} differs from the exported model after it was written and read "
                "back: check the disk, and export again"
            )
    if read_model != model and not target.is_dir():
        raise InputError(
            f"{target}: its model config differs from the exported model: export again"
        )
    if read_model != model and model.model_type is not None:
        # config.json lacks what does not affect the outputs, such as how a run divides its batch.
        inputs = _tokens(model)
        ours, theirs = (
            _logits(config, arrays, inputs)
            for config, arrays in ((model, params), (read_model, read_params))
        )
        for name in ours:
            if not np.array_equal(ours[name], theirs[name]):
                raise InputError(f"{target}: config.json describes another model: export again")
    return "Read back by jaxtrain: the parameters are equal to the bit."


def _same(program: str, ours: Outputs, theirs: Outputs, target: Path) -> str:
    """Compares outputs by name."""
    differences = []
    for name, expected in theirs.items():
        if expected.shape != ours[name].shape:
            raise InputError(
                f"{target}: {program} computes {name} of shape {list(expected.shape)}, but "
                f"jaxtrain of {list(ours[name].shape)}: the model is not one that it supports"
            )
        difference = float(np.abs(ours[name] - expected).max() / ours[name].std())
        if not difference <= TOLERANCE:
            raise InputError(
                f"{target}: {program} computes other {name} than jaxtrain (largest difference "
                f"{difference:.2g} standard deviations): the model is not one that it supports"
            )
        differences.append(f"{name} {difference:.1g}")
    return (
        f"Read by {program}: it computes the same as jaxtrain (largest difference in standard "
        f"deviations: {', '.join(differences)})."
    )


def _tokens(model: Any) -> np.ndarray:
    """Returns the input of a language model, [1, S], without padding."""
    length = min(model.sequence_length, _TOKENS)
    tokens = np.random.default_rng(0).integers(0, model.vocab_size - 1, (1, length), np.int32)
    return tokens + (tokens >= model.pad_id) if model.task == "fill" else tokens


def _module(model: Any, params: Params) -> Any:
    arrays = {name: jnp.asarray(array) for name, array in params.items()}
    definition = state.ModelDefinition(model.build)
    return definition.module({name: arrays[name] for name in definition.params}, {})


def _logits(model: Any, params: Params, tokens: np.ndarray) -> Outputs:
    module = _module(model, params)
    if model.task == "fill":
        positions = np.arange(tokens.shape[1], dtype=np.int32)[None]
        logits = jax.jit(type(module).logits_at)(module, tokens, positions)
    else:
        logits = jax.jit(type(module).logits)(module, tokens)
    return {"logits": np.asarray(logits)}


def _of_transformers(folder: Path, task: str, tokens: np.ndarray) -> Outputs:
    import torch
    import transformers  # type: ignore[import-not-found]

    kinds = {
        "fill": transformers.AutoModelForMaskedLM,
        "generate": transformers.AutoModelForCausalLM,
    }
    network = kinds[task].from_pretrained(folder, local_files_only=True)
    with torch.no_grad():
        logits = network.eval()(input_ids=torch.from_numpy(tokens.astype(np.int64))).logits
    return {"logits": logits.float().numpy()}


def _of_diffusers(folder: Path, model: Any, video: np.ndarray) -> Outputs:
    import diffusers
    import torch

    network = getattr(diffusers, model.diffusers_class).from_pretrained(folder)

    def statistics(name: str) -> Any:
        return torch.tensor(network.config[name]).reshape(1, -1, 1, 1, 1)

    with torch.no_grad():
        pixels = torch.from_numpy(2 * video - 1).permute(0, 4, 1, 2, 3)
        mode = network.eval().encode(pixels).latent_dist.mode()
        frames = (network.decode(mode).sample + 1) / 2
    latents = (mode - statistics("latents_mean")) / statistics("latents_std")
    outputs = {"latents": latents, "frames": frames}
    return {name: x.permute(0, 2, 3, 4, 1).numpy() for name, x in outputs.items()}


def _video(model: Any) -> np.ndarray:
    """Returns the input of a video autoencoder, [1, T, H, W, 3] in [0, 1]."""
    side = _SIDE * model.space_factor
    frames = model.timing.factor * 2
    return np.random.default_rng(0).random((1, frames, side, side, 3), np.float32)


def _frames(model: Any, params: Params, video: np.ndarray, theirs: Outputs) -> Outputs:
    """Returns our latents of the video, and our frames of their latents."""
    module = _module(model, params)
    latents = jax.jit(type(module).encode)(module, video)
    frames = jax.jit(type(module).decode)(module, theirs["latents"])
    return {"latents": np.asarray(latents), "frames": np.asarray(frames).clip(0, 1)}
