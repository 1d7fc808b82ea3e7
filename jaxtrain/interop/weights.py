"""Loads parameters from a checkpoint, a run directory, or a weights file, and writes weights files.

A weights file has the parameter names of the model's original implementation; the model's config
converts them (``to_weights`` and ``from_weights``, :mod:`jaxtrain.models.contract`). A
``.safetensors`` file that jaxtrain wrote also has the config of its model.
"""

import dataclasses
import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxtrain import config
from jaxtrain.checkpoint import pointer, resume
from jaxtrain.checkpoint.restore import restore
from jaxtrain.config import invocation, record
from jaxtrain.errors import InputError
from jaxtrain.interop import huggingface
from jaxtrain.models import from_file, weight_table
from jaxtrain.optim import ema
from jaxtrain.sharding import HasShape
from jaxtrain.storage import tensor_files

ABOUT = "jaxtrain_model"
"""Metadata entry of a ``.safetensors`` file with the config of its model, in JSON."""
_PARAMS = "params."

Params = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Weights:
    """Parameters and their model.

    Attributes:
        params: dotted path -> float32 array.
    """

    model: Any
    params: Params
    source: str

    def exactly(self, expected: Mapping[str, HasShape]) -> Params:
        """Returns the expected parameters.

        Args:
            expected: dotted path -> shape of each of the model's parameters.
        """
        shapes = {name: wanted.shape for name, wanted in expected.items()}
        cure = "It is incomplete, damaged, or of another model: export or download it again"
        weight_table.check(self.params, shapes, self.source, cure, extra=False)
        return {name: self.params[name] for name in expected}


def load(
    source: Path, usual: str = "", check: Callable[[Any], None] = lambda model: None
) -> Weights:
    """Loads the parameters of a model and its config.

    Args:
        source: a checkpoint, a run directory (its best checkpoint, else its newest), a transformers
            folder, or a weights file.
        usual: short name of the model to assume for a file without a config; "" for none.
    """
    check_there(source)
    if huggingface.is_model_folder(source):
        model = huggingface.model(source)
        check(model)
        params = model.from_weights(huggingface.tensors(source), str(source))
        return Weights(model, params, str(source))
    if source.is_dir() or pointer.is_checkpoint(source):
        path = resume.trained_checkpoint(source)
        model = _model_of(path)
        check(model)
        return Weights(model, _of_checkpoint(path), str(path))
    tensors, about = tensor_files.read(source)
    if ABOUT in about:
        model = from_file.model_config(record.parse(about[ABOUT], str(source)), str(source))
    else:
        kind = from_file.recognized(tensors) or from_file.config_class(usual)
        if kind is None or not kind.tiny().has_weights:
            raise InputError(
                f"{source} has no model config: convert it with {invocation.program()} import "
                f"{shlex.quote(str(source))} OUT.safetensors"
            )
        model = kind.guess(tensors, str(source))
    check(model)
    params = model.from_weights(tensors, str(source))
    if ABOUT not in about:
        unclear = model.ambiguity(tensors, str(source))
        if unclear:
            raise InputError(
                f"{unclear}, to {invocation.program()} import {shlex.quote(str(source))} "
                "OUT.safetensors"
            )
    return Weights(model, params, str(source))


def model_at(source: Path) -> Any | None:
    """Returns the model config of a source; None if nothing is there or it has no config.

    Arrays are neither read nor verified (see :func:`load`).
    """
    if huggingface.is_model_folder(source):
        return huggingface.model(source)
    path = next(resume.likely_checkpoints(source), None)
    return None if path is None else _model_of(path)


def run_meta(source: Path) -> Mapping[str, Any]:
    """Returns the metadata of the run that trained a source; {} if there is none."""
    path = next(resume.likely_checkpoints(source), None)
    meta: Mapping[str, Any] = {} if path is None else pointer.read_meta(path)
    return meta if isinstance(meta.get("config"), Mapping) else {}


def check_there(source: Path) -> None:
    """Checks that a source exists and has a known format."""
    if pointer.is_checkpoint(source):
        return
    if not source.exists():
        raise InputError(
            f"{source} does not exist; pass a checkpoint, a run directory, or a weights file"
        )
    if source.is_file():
        tensor_files.check_ending(source)
    below = source / huggingface.AUTOENCODER
    if (
        huggingface.is_model_folder(below)
        and not huggingface.is_model_folder(source)
        and not next(resume.likely_checkpoints(source), None)
    ):
        raise InputError(
            f"{source} has no checkpoint and no {huggingface.SETTINGS} of a model: pass {below}"
        )


def params_for(
    source: Path, model: Any, expected: Mapping[str, HasShape]
) -> tuple[Params, list[str]]:
    """Loads the initial parameters of a model from a source.

    Only names and shapes must match; a model may also slice those of a wider one. What only
    training needs, such as a discriminator, may be missing or superfluous.

    Args:
        expected: dotted path -> shape of each of the model's parameters.
    """
    notes: list[str] = []
    if huggingface.is_model_folder(source):
        theirs = check_settings(source, model)
        path, params = source, theirs.from_weights(huggingface.tensors(source), str(source))
    elif source.is_dir() or pointer.is_checkpoint(source):
        path = resume.trained_checkpoint(source)
        params = _of_checkpoint(path)
        theirs = _sliced_by(model, _built(model, _described(path), path), path)
        _check_values(model, theirs, _described(path), path)
    elif not model.has_weights:
        raise InputError(
            f"{source} is a weights file, but this model can only start from a checkpoint or a run "
            "directory"
        )
    else:
        path, (tensors, about) = source, tensor_files.read(source)
        saved = record.parse(about[ABOUT], str(source)) if ABOUT in about else None
        if saved is not None:
            theirs = _sliced_by(model, _built(model, saved, source), source)
        else:
            known = model.recognizes(tensors)
            theirs = _sliced_by(model, model.guess(tensors, str(path)), path) if known else model
        params = theirs.from_weights(tensors, str(source))
        if saved is not None:
            _check_values(model, theirs, saved, path)
        else:
            notes += _check_guess(model, model.guess(tensors, str(path)), path)
            unclear = model.ambiguity(tensors, str(path))
            notes += [unclear.replace("--trim", "--model.trim")] if unclear else []
    if theirs is not model:
        shapes = weight_table.shapes_of(lambda: theirs.bare().build(nnx.Rngs(0)))
        weight_table.check(params, shapes, path, "Slice a source with the widths of its config")
        params = model.slicer(theirs, str(path))(params)
        notes.append("sliced: the kept channels rebuild the others")
    network = weight_table.shapes_of(lambda: model.bare().build(nnx.Rngs(0)))
    fitting = {
        name: array
        for name, array in params.items()
        if name in expected and expected[name].shape == array.shape
    }
    required = {name: array.shape for name, array in expected.items() if name in network}
    cure = "Use the model config that it was trained with"
    weight_table.check(params, required, path, cure, extra=False)
    notes += [
        f"{len(names)} parameters {problem}, such as {min(names)}"
        for problem, names in (
            ("of the model are newly initialized", set(expected) - set(fitting)),
            ("in the source are not used", set(params) - set(fitting)),
        )
        if names
    ]
    return fitting, notes


def check_settings(folder: Path, model: Any) -> Any:
    """Checks that a folder is for a model, by its config.json; reads no arrays.

    Returns:
        The config of the folder's arrays: the model, or a wider one that it slices.
    """
    theirs = huggingface.model(folder)
    if type(model) is not type(theirs):
        raise InputError(
            f"{folder} has the model {from_file.name_of(theirs)}, but this run's model is "
            f"{from_file.name_of(model)}: use a source with that model"
        )
    known = vars(theirs)
    theirs = _sliced_by(model, theirs, folder)
    _check_values(model, theirs, known, folder)
    return theirs


def _built(model: Any, described: Mapping[str, Any], source: Path) -> Any:
    """Builds the config of parameters for a model of their class, if shapes differ; else None."""
    if described.get("class") == from_file.name_of(model) and any(
        described.get(name) != value for name, value in from_file.in_weights(model).items()
    ):
        return from_file.model_config(described, str(source))
    return None


def _sliced_by(model: Any, theirs: Any, source: Path) -> Any:
    """Returns the config of the parameters if the model slices them, else the model."""
    return model if model.slicer(theirs, str(source)) is None else theirs


def _check_values(model: Any, theirs: Any, known: Mapping[str, Any], source: Path) -> None:
    """Checks the fields that array shapes do not determine; slices have other shapes."""
    shapes = () if theirs is model else model.in_weights
    known = {name: value for name, value in known.items() if name not in shapes}
    from_file.check_not_in_weights(model, known, source)


def in_float16(weights: Weights) -> Params:
    """Returns parameters rounded to float16, as float32."""
    with np.errstate(over="ignore"):
        rounded = {
            name: array.astype(np.float16).astype(np.float32)
            for name, array in weights.params.items()
        }
    for name, array in rounded.items():
        if not np.isfinite(array).all():
            raise InputError(
                f"{weights.source}: {name} has values above 65504 or NaN/Inf, which float16 cannot "
                "store: export without --format comfyui"
            )
    return rounded


def save(path: Path, model: Any, params: Mapping[str, np.ndarray], *, float16: bool = False) -> int:
    """Writes a weights file and returns the total number of elements."""
    about = {ABOUT: json.dumps(config.to_dict(model))}
    tensors = model.to_weights(params)
    if float16:
        tensors = {name: array.astype(np.float16) for name, array in tensors.items()}
    tensor_files.write(path, tensors, about)
    return sum(tensor.size for tensor in tensors.values())


def _check_guess(model: Any, guess: Any, source: Path) -> list[str]:
    """Checks a model against the config guessed from weights; returns notes on the unknown fields.

    Fields that a guess leaves at their defaults are unknown.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(guess)}
    known = {
        field: getattr(guess, field)
        for field, _ in model.not_in_weights
        if getattr(guess, field) != defaults[field]
    }
    from_file.check_not_in_weights(model, known, source)
    return [
        f"model.{field} cannot be read from the weights: using {getattr(model, attribute)}"
        for field, attribute in model.not_in_weights
        if field not in known
    ]


def _model_of(path: Path) -> Any:
    defined_in = pointer.read_meta(path).get("model_file")
    return from_file.model_config(_described(path), str(path), defined_in)


def _described(path: Path) -> Mapping[str, Any]:
    described: Any = pointer.read_meta(path)
    for name in ("config", "model"):
        described = described.get(name) if isinstance(described, Mapping) else None
    if not isinstance(described, Mapping):
        raise InputError(f"{path} has no model config: its metadata lacks config.model")
    return described


def _of_checkpoint(path: Path) -> Params:
    shapes = pointer.read_shapes(path)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    own = {name.removeprefix(_PARAMS): name for name in shapes if name.startswith(_PARAMS)}
    own |= ema.names(shapes)  # the averages, which validation uses
    wanted = {
        name: jax.ShapeDtypeStruct(shapes[name].shape, shapes[name].dtype, sharding=here)
        for name in own.values()
    }
    arrays = restore(path, wanted, subset=True)
    return {name: np.asarray(arrays[stored]) for name, stored in own.items()}
