"""A config as it is recorded, in JSON types, and how two of them differ."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtrain.storage import addresses

_SECTIONS = "jaxtrain.config.run"  # whose place in a config says what they are


def to_dict(section: Any) -> dict[str, Any]:
    """Converts a config to JSON types: nested dicts, tuples as lists.

    Model and data have an entry ``class`` with a short name, such as ``gpt`` or ``text.Causal``,
    which stays the same when modules move; :mod:`jaxtrain.models.from_file` reads them back and
    accepts no other names. The result is recorded, so URLs come without their query
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
