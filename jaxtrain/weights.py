"""Parameters without a run: from a checkpoint, a run's directory or a weights file, and out again.

A weights file holds a model's parameters under the names of the program that the model comes from;
a model's config knows them (``to_weights`` and ``from_weights``, :mod:`jaxtrain.models`). Those
that this program writes as ``.safetensors`` also say which config they belong to.
"""

import dataclasses
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from jaxtrain import checkpoint, config, resuming, tensor_files
from jaxtrain.errors import InputError

ABOUT = "jaxtrain_model"
"""Under this name a ``.safetensors`` file holds its model's config, as JSON."""
_PARAMS = "params."

Params = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters and the model that they belong to.

    Attributes:
        model: its config.
        params: dotted path -> float32 array.
        source: where they come from, for messages.
    """

    model: Any
    params: Params
    source: str


def load(source: Path, family: type[Any] | None) -> Weights:
    """Reads the parameters of a model that nobody has described.

    Args:
        source: a checkpoint, a run's directory (its best checkpoint, or else its newest), or a
            weights file.
        family: the model's ``Config`` class; guesses from a file that does not say. None takes any
            model, from what says which it is.

    Raises:
        InputError: nothing there, damaged, or another model's.
    """
    if not source.exists():
        raise InputError(
            f"{source}: nothing is there; name a checkpoint, a run's directory or a weights file"
        )
    if source.is_dir():
        path = _checkpoint(source)
        model = model_from(checkpoint.read_meta(path)["config"]["model"], str(path))
        _check_family(model, family, str(path))
        return Weights(model, _of_checkpoint(path), str(path))
    tensors, about = tensor_files.read(source)
    if ABOUT in about:
        model = model_from(json.loads(about[ABOUT]), str(source))
        _check_family(model, family, str(source))
    elif family is None:
        raise InputError(
            f"{source} does not say which model it is of: jaxtrain import {source} OUT.safetensors "
            "makes a file that does"
        )
    else:
        model = family.guess(tensors, str(source))
    return Weights(model, model.from_weights(tensors, str(source)), str(source))


def params_for(source: Path, model: Any) -> Params:
    """The parameters that a model is to start from.

    Args:
        source: as in :func:`load`.
        model: its config; what the source was trained as does not matter, only names and shapes.

    Raises:
        InputError: they do not fit the model; names those that do not.
    """
    if not source.is_dir():
        tensors, _ = tensor_files.read(source)
        return cast(Params, model.from_weights(tensors, str(source)))
    return _of_checkpoint(_checkpoint(source))


def save(path: Path, model: Any, params: Mapping[str, np.ndarray]) -> None:
    """Writes a weights file (:func:`jaxtrain.tensor_files.write`)."""
    about = {ABOUT: json.dumps(config.to_dict(model))}
    tensor_files.write(path, model.to_weights(params), about)


def model_from(saved: Mapping[str, Any], source: str) -> Any:
    """A model's config from the form that :func:`jaxtrain.config.to_dict` gave it.

    Raises:
        InputError: another version of the program wrote it.
    """
    try:
        module, _, name = str(saved["class"]).rpartition(".")
        if module.partition(".")[0] != "jaxtrain":
            raise InputError(f"{source} names a model of another program: {saved['class']}")
        made = getattr(importlib.import_module(module), name)
        fields = {
            field: model_from(value, source)
            if isinstance(value, Mapping)
            else tuple(value)
            if isinstance(value, list)
            else value
            for field, value in saved.items()
            if field != "class"
        }
        return made(**fields)
    except (KeyError, ImportError, AttributeError, TypeError) as error:
        raise InputError(
            f"{source} was written by another version of jaxtrain ({error}): name its model with a "
            "config, or export it with that version"
        ) from error


def _check_family(model: Any, family: type[Any] | None, source: str) -> None:
    if family is not None and not isinstance(model, family):
        raise InputError(
            f"{source} holds a model of {type(model).__module__}, and this needs one of "
            f"{family.__module__}"
        )


def _checkpoint(source: Path) -> Path:
    """A checkpoint itself, or that of a run."""
    if checkpoint.is_complete(source):
        return source
    for folder in (checkpoint.BEST, checkpoint.CHECKPOINTS):
        path, _ = resuming.first_verified(
            source / folder, reversed(checkpoint.steps(source / folder))
        )
        if path is not None:
            return path
    raise InputError(
        f"{source} is no checkpoint, and no run's directory with one; "
        f"jaxtrain checkpoints {source} lists what is there"
    )


def _of_checkpoint(path: Path) -> Params:
    shapes = checkpoint.read_shapes(path)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here)
        for name, leaf in shapes.items()
        if name.startswith(_PARAMS)
    }
    arrays = checkpoint.restore(path, wanted, subset=True)
    return {name.removeprefix(_PARAMS): np.asarray(array) for name, array in arrays.items()}
