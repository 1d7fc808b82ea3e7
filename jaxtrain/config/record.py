"""A config in JSON types, as recorded; how two of them differ; and back to its sections."""

import dataclasses
import json
import math
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from jaxtrain import errors
from jaxtrain.config import field_values
from jaxtrain.errors import InputError
from jaxtrain.storage import addresses

T = TypeVar("T")

OTHER_VERSION = (
    "it was written by another version of jaxtrain or another program; export the weights with "
    "that version"
)

_LARGEST = 2**63  # for integers: no size or count comes close
_SECTIONS = "jaxtrain.config.run"  # whose place in a config says what they are


def to_dict(section: Any) -> dict[str, Any]:
    """Converts a config to JSON types: nested dicts, tuples as lists.

    Model and data have an entry ``class`` with a short name, such as ``gpt`` or ``text.Causal``,
    which stays the same when modules move; :mod:`jaxtrain.models.from_file` finds the classes again
    and accepts no other names. The result is recorded, so URLs come without their query
    (:mod:`jaxtrain.storage.addresses`).
    """
    named = {} if type(section).__module__ == _SECTIONS else {"class": short_name(type(section))}
    return named | _fields(section)


def _fields(section: Any) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            # Unless it is Any, the type of the field is the class of the section.
            value = to_dict(value) if field.type is Any else _fields(value)
        value = _as_text(list(value) if isinstance(value, tuple) else value)
        result[field.name] = addresses.scrubbed(value)
    return result


def _as_text(value: Any) -> Any:
    """Escapes bytes that are not UTF-8 in paths, which JSON and TensorBoard do not take."""
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def short_name(section: type[Any]) -> str:
    """Returns the name by which :func:`to_dict` records a class."""
    path = f"{section.__module__}.{section.__qualname__}"
    package, _, inside = section.__module__.removeprefix("jaxtrain.").partition(".")
    if not section.__module__.startswith("jaxtrain."):
        return path
    name = inside.partition(".")[0] or package
    return name if section.__qualname__ == "Config" else f"{name}.{section.__qualname__}"


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flattens the result of :func:`to_dict`: ``{"optim.peak_lr": 0.003, ...}``, in order."""
    values: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            values.update(flat(value, f"{prefix}{key}."))
        else:
            values[prefix + key] = value
    return values


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Compares two results of :func:`to_dict`: ``"seed: 1 -> 2"`` for each change, in order."""
    left, right = flat(before), flat(after)
    return [
        f"{name}: {left.get(name, '(absent)')} -> {right.get(name, '(absent)')}"
        for name in {**left, **right}
        if name not in left or name not in right or left[name] != right[name]
    ]


def section(kind: type[T], saved: Any, source: str, name: str) -> T:
    """Builds a section of a run's config, such as ``Optim``, from its recorded fields."""
    if not isinstance(saved, Mapping):
        raise InputError(f"{source}: {name} is not a section: {OTHER_VERSION}")
    made: T = _make(kind, _without_class(saved), source, name)
    return made


def _without_class(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a model or of data, whose descriptions also have a class."""
    return {name: value for name, value in saved.items() if name != "class"}


def parse(text: str | bytes, source: str) -> Mapping[str, Any]:
    """Parses the JSON that describes the model of a weights file."""
    try:
        saved = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source} describes its model in invalid JSON: {error}") from error
    if not isinstance(saved, Mapping):
        raise InputError(f"{source} does not name its model: {OTHER_VERSION}")
    return saved


def _make(section: type[Any], saved: Mapping[str, Any], source: str, location: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(section) if field.init}
    hints = typing.get_type_hints(section)
    for name in saved:
        if name not in fields:
            raise InputError(
                f"{source}: {location} has no field {errors.short_repr(name)}: {OTHER_VERSION}"
            )
    for name, field in fields.items():
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and name not in saved:
            raise InputError(f"{source}: {location}.{name} is missing: {OTHER_VERSION}")
    values = {
        name: _value(value, hints[name], source, f"{location}.{name}")
        for name, value in saved.items()
    }
    try:
        return section(**values)
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    except (ArithmeticError, ValueError, TypeError) as error:  # a check failed on odd values
        raise InputError(f"{source}: the fields of {location} do not fit ({error})") from error


def _value(value: Any, annotation: Any, source: str, location: str) -> Any:
    if isinstance(value, Mapping):
        for choice in (annotation, *typing.get_args(annotation)):
            if isinstance(choice, type) and dataclasses.is_dataclass(choice):
                return _make(choice, value, source, location)
    items = tuple(value) if isinstance(value, list) else value
    if not field_values.matches(items, annotation):
        raise InputError(
            f"{source}: {location} takes {field_values.takes(annotation)}, not "
            f"{errors.short_repr(value)}"
        )
    for number in items if isinstance(items, tuple) else (items,):
        too_large = isinstance(number, int) and abs(number) >= _LARGEST
        if too_large or (isinstance(number, float) and not math.isfinite(number)):
            raise InputError(
                f"{source}: {location}={errors.short_repr(number)}: use a smaller, finite number"
            )
    return items
