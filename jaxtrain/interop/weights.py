"""Parameters without a run: from a checkpoint, a run's directory or a weights file, and out again.

A weights file holds a model's parameters under the names of the program that the model comes from;
a model's config knows them (``to_weights`` and ``from_weights``, :mod:`jaxtrain.models`). Those
that this program writes as ``.safetensors`` also say which config they belong to.
"""

import dataclasses
import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtrain import config
from jaxtrain.checkpoint import layout, resume
from jaxtrain.checkpoint.restore import restore
from jaxtrain.config import invocation
from jaxtrain.config import param_groups as parameter_groups
from jaxtrain.errors import InputError
from jaxtrain.interop import huggingface
from jaxtrain.models import from_file
from jaxtrain.optim import ema
from jaxtrain.sharding import HasShape
from jaxtrain.storage import tensor_files

ABOUT = "jaxtrain_model"
"""Under this name a ``.safetensors`` file holds its model's config, as JSON."""
_PARAMS = "params."
_LISTED = 4

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

    def exactly(self, expected: Mapping[str, HasShape]) -> Params:
        """These parameters, without others.

        Args:
            expected: dotted path -> shape of each of the model's parameters.

        Raises:
            InputError: some are missing, or have another shape than the model's config asks for.
        """
        lacking = sorted(expected.keys() - self.params.keys())
        if lacking:
            raise InputError(f"{self.source} lacks {len(lacking)} parameters, as {lacking[0]}")
        for name, wanted in expected.items():
            if self.params[name].shape != wanted.shape:
                raise InputError(
                    f"{self.source}: {name} has shape {self.params[name].shape}, and the model "
                    f"that it describes has {wanted.shape}: it is damaged, or two were mixed"
                )
        return {name: self.params[name] for name in expected}


def load(
    source: Path,
    guess: Callable[[], str | None] = lambda: None,
    check: Callable[[Any], None] = lambda model: None,
) -> Weights:
    """Reads the parameters of a model, and which model it is.

    Args:
        source: a checkpoint, a run's directory (its best checkpoint, or else its newest), a folder
            of transformers, or a weights file.
        guess: gives the short name of the model for a file that does not say which it is of; None:
            there is none to take it for.
        check: takes the model's config before its arrays are read, and raises what it likes.

    Raises:
        InputError: nothing there, damaged, or of no known model.
    """
    check_there(source)
    if huggingface.is_one(source):
        model = huggingface.model(source)
        check(model)
        params = model.from_weights(huggingface.tensors(source), str(source))
        return Weights(model, params, str(source))
    if source.is_dir():
        path = resume.of_source(source)
        model = from_file.make(_described(path), str(path))
        check(model)
        return Weights(model, _of_checkpoint(path), str(path))
    tensors, about = tensor_files.read(source)
    if ABOUT in about:
        model = from_file.make(from_file.parse(about[ABOUT], str(source)), str(source))
    else:
        kind = from_file.config_class(guess() or "")
        if kind is None or not hasattr(kind, "guess"):
            raise InputError(
                f"{source} does not say which model it is of: {invocation.program()} import "
                f"{shlex.quote(str(source))} OUT.safetensors makes a file that does"
            )
        model = kind.guess(tensors, str(source))
    check(model)
    return Weights(model, model.from_weights(tensors, str(source)), str(source))


def model_at(source: Path) -> Any | None:
    """The model that a source says it is of; None where nothing is there or it does not say.

    No array is read, and so none verified: that is for those who take them (:func:`load`).

    Raises:
        InputError: another version wrote it.
    """
    if huggingface.is_one(source):
        return huggingface.model(source)
    path = next(resume.complete_of_source(source), None)
    return None if path is None else from_file.make(_described(path), str(path))


def check_there(source: Path) -> None:
    """Refuses what cannot be a source, before anything else is done.

    Raises:
        InputError: nothing is there, or a file of another kind.
    """
    if not source.exists():
        raise InputError(
            f"{source}: nothing is there; name a checkpoint, a run's directory or a weights file"
        )
    if source.is_file():
        tensor_files.check_ending(source)


def params_for(
    source: Path, model: Any, expected: Mapping[str, HasShape]
) -> tuple[Params, list[str]]:
    """The parameters that a model is to start from.

    What the source was trained as does not matter, only names and shapes. Groups that the model
    sets apart, as a discriminator, may be missing in it or be there in vain.

    Args:
        source: as in :func:`load`.
        model: its config.
        expected: dotted path -> shape of each of the model's parameters.

    Returns:
        The parameters, and sentences about what else there is.

    Raises:
        InputError: they do not fit the model; names those that do not.
    """
    notes: list[str] = []
    if huggingface.is_one(source):
        theirs = huggingface.model(source)
        if getattr(model, "model_type", None) != theirs.model_type:
            raise InputError(
                f"{source} holds the model {from_file.name_of(theirs)}, and this run's model is "
                f"{from_file.name_of(model)}: take a source of that model"
            )
        from_file.check_not_in_weights(model, vars(theirs), source)
        path, found = source, model.from_weights(huggingface.tensors(source), str(source))
    elif source.is_dir():
        path = resume.of_source(source)
        found = _of_checkpoint(path)
        from_file.check_not_in_weights(model, _described(path), path)
    elif not hasattr(model, "from_weights"):
        raise InputError(
            f"{source}: this model starts from checkpoints and runs' directories only, not from "
            "weights files"
        )
    else:
        path, (tensors, about) = source, tensor_files.read(source)
        found = model.from_weights(tensors, str(source))
        if ABOUT in about:
            from_file.check_not_in_weights(model, from_file.parse(about[ABOUT], str(source)), path)
        else:
            notes += _check_guess(model, model.guess(tensors, str(path)), path)
    groups = model.optimizer_groups() if hasattr(model, "optimizer_groups") else {}
    apart = tuple(group.prefix for group in parameter_groups.apart(groups).values())
    fitting = {
        name: array
        for name, array in found.items()
        if name in expected and expected[name].shape == array.shape
    }
    wrong = [
        f"{name} has shape {found[name].shape} there and {array.shape} in the model"
        if name in found
        else f"{name} is not there"
        for name, array in expected.items()
        if name not in fitting and not name.startswith(apart)
    ]
    if wrong:
        more = f", and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise InputError(
            f"{path} does not fit this model: {'; '.join(wrong[:_LISTED])}{more}: take the model "
            "that it was trained as"
        )
    notes += [
        f"{len(names)} parameters {what}, as {min(names)}"
        for what, names in (
            ("of the model start fresh", set(expected) - set(fitting)),
            ("there are not taken", set(found) - set(fitting)),
        )
        if names
    ]
    return fitting, notes


def save(path: Path, model: Any, params: Mapping[str, np.ndarray]) -> int:
    """Writes a weights file; returns how many numbers it holds."""
    about = {ABOUT: json.dumps(config.to_dict(model))}
    tensors = model.to_weights(params)
    tensor_files.write(path, tensors, about)
    return sum(tensor.size for tensor in tensors.values())


def _check_guess(model: Any, guess: Any, source: Path) -> list[str]:
    """The same for weights that nobody has described; says what they do not tell.

    A guess knows what it sets, and does not know what it leaves as it is by default.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(guess)}
    known = {
        field: getattr(guess, field)
        for field, _ in getattr(model, "not_in_weights", ())
        if getattr(guess, field) != defaults[field]
    }
    from_file.check_not_in_weights(model, known, source)
    return [
        f"it does not tell model.{field}, {getattr(model, held)} is taken"
        for field, held in getattr(model, "not_in_weights", ())
        if field not in known
    ]


def _described(path: Path) -> Mapping[str, Any]:
    """What a checkpoint says of its model, in :func:`jaxtrain.config.to_dict` form."""
    held: Any = layout.read_meta(path)
    for name in ("config", "model"):
        held = held.get(name) if isinstance(held, Mapping) else None
    if not isinstance(held, Mapping):
        raise InputError(f"{path} does not describe its model: its metadata has no config.model")
    return held


def _of_checkpoint(path: Path) -> Params:
    shapes = layout.read_shapes(path)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    own = {name.removeprefix(_PARAMS): name for name in shapes if name.startswith(_PARAMS)}
    own |= ema.names(shapes)  # what a validation saw
    wanted = {
        name: jax.ShapeDtypeStruct(shapes[name].shape, shapes[name].dtype, sharding=here)
        for name in own.values()
    }
    arrays = restore(path, wanted, subset=True)
    return {name: np.asarray(arrays[stored]) for name, stored in own.items()}
