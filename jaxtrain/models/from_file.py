"""Finds models by the names in files, and builds their configs.

Files are data: a name in a file never decides which code runs. A file has the short name of its
model, such as ``gpt``, which is looked up among the modules of this package, and then among the
classes that are imported already: a ``--config`` file that you pass defines or imports your own
model. Only such a class is instantiated, with the dataclasses that its fields declare. So a new
model needs no entry anywhere.
"""

import contextlib
import dataclasses
import importlib
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtrain import config, errors, models
from jaxtrain.config import field_values, record
from jaxtrain.errors import InputError

_UNFIT = (InputError, ArithmeticError, TypeError, ValueError)  # of a value in a file


def names() -> list[str]:
    """Returns the sorted short names of all models. Imports all of them."""
    return sorted(name for name, _ in configs())


def configs() -> Iterator[tuple[str, type[Any]]]:
    """Yields the short name and the ``Config`` class of each model; imports one at a time."""
    for name in _modules():
        kind = config_class(name)
        if kind is not None:
            yield name, kind


def recognized(tensors: Mapping[str, Any]) -> type[Any] | None:
    """Returns the ``Config`` class of weights without a config, if their names tell it."""
    return next((kind for _, kind in configs() if kind.recognizes(tensors)), None)


def in_weights(model: Any) -> dict[str, Any]:
    """Returns the fields that set the shapes of a model's arrays."""
    return {name: getattr(model, name) for name in model.in_weights}


def name_of(model: Any) -> str:
    """Returns the short name of a config's model, such as ``gpt``."""
    return str(config.to_dict(model)["class"])


def model_config(saved: Any, source: str, defined_in: str | None = None) -> Any:
    """Builds the config that :func:`jaxtrain.config.to_dict` converted to ``saved``.

    Args:
        defined_in: the file of the model's class as it was recorded. It is never imported.
    """
    class_name = saved.get("class") if isinstance(saved, Mapping) else None
    if not isinstance(class_name, str):
        raise InputError(f"{source} does not name its model: {record.OTHER_VERSION}")
    kind = config_class(class_name)
    if kind is None:
        raise _unknown(class_name, source, defined_in)
    return record.section(kind, saved, source, "model")


def _unknown(name: str, source: str, defined_in: str | None) -> InputError:
    """Makes the error for a model that is neither in this package nor imported."""
    if "." not in name:
        return InputError(
            f"{source}: unknown model {errors.short_repr(name)}; the models are "
            f"{', '.join(names())}"
        )
    origin = f" (it was defined in {errors.short_repr(defined_in, 200)})" if defined_in else ""
    return InputError(
        f"{source}: its model {errors.short_repr(name)} is not part of jaxtrain{origin}: pass the "
        "config that it was trained with, --config FILE.py"
    )


def file_of(model: Any) -> str | None:
    """Returns the file of the class of a model that is not in this package; None for the others."""
    kind = type(model)
    if kind.__module__.startswith("jaxtrain."):
        return None
    return getattr(sys.modules.get(kind.__module__), "__file__", None)


def _modules() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(models.__path__)]


def config_class(name: str) -> type[Any] | None:
    """Returns the ``Config`` of the model with this name, or None if there is none.

    Args:
        name: a short name such as ``gpt``, or ``MODULE.CLASS`` of a class that is imported already.
    """
    from jaxtrain.models.contract import ModelConfig  # imports jax

    for module in _modules():
        if module == name:
            model_class = vars(importlib.import_module(f"{models.__name__}.{module}")).get("Config")
            if isinstance(model_class, type) and issubclass(model_class, ModelConfig):
                return model_class
    newest = None  # a config file may have been run twice
    for kind in below(ModelConfig):
        if f"{kind.__module__}.{kind.__qualname__}" == name:
            newest = kind
    return newest


def below(kind: type[Any]) -> Iterator[type[Any]]:
    """Yields the imported subclasses of a class, in the order of their definition."""
    for each in kind.__subclasses__():
        yield each
        yield from below(each)


def check_not_in_weights(model: Any, theirs: Mapping[str, Any], source: Path | str) -> None:
    """Refuses parameters trained with other values of fields that array shapes do not determine."""
    known = {name: field_values.plain(value) for name, value in theirs.items()}
    differing = _differing(model, known)
    if not differing:
        return
    sizes = {
        name: known[name]
        for name in model.in_weights
        if name in known and known[name] != getattr(model, name)
    }
    with contextlib.suppress(*_UNFIT):  # its values may follow from the sizes
        differing = _differing(dataclasses.replace(model, **sizes), known)
    fields = sizes | differing
    first = next(iter(fields))
    ours = getattr(model, dict(model.not_in_weights).get(first, first))
    flags = [
        word
        for name in fields
        for word in (f"--model.{name}", *field_values.as_arguments(fields[name]))
    ]
    raise InputError(
        f"{source} was trained with model.{first}={fields[first]}, but this model has {ours}: set "
        f"{' '.join(flags)}"
    )


def _differing(model: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    differing = {}
    for field, attribute in model.not_in_weights:
        if field not in known or model.may_change(field, known):
            continue
        value = known[field]
        with contextlib.suppress(*_UNFIT):
            # If it does not fit the other fields, it differs from ours anyway.
            value = getattr(dataclasses.replace(model, **{field: value}), attribute)
        if value != getattr(model, attribute):
            differing[field] = value
    return differing
