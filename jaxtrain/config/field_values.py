"""Values of fields and flags: parsed from arguments, described, and compared with their type."""

import contextlib
import dataclasses
import difflib
import numbers
import os
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from jaxtrain.storage.atomic import expanded

_FACTORS = {"k": 10**3, "M": 10**6, "B": 10**9}
_UNITS = {"s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh])")
_WRITTEN = re.compile(r"([+-]?\d+)(?:\.(\d+))?([kMB])")


def parse(texts: Sequence[str], annotation: Any) -> Any:
    """Returns the value of a type that arguments stand for.

    Args:
        texts: the arguments after a flag, such as ``["64", "32"]`` or ``["2.5M"]``.
        annotation: int, float, bool, str, Path, Literal, None, or an optional or a tuple of them.

    Raises:
        ValueError: they are not a value of this type.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return parse(texts, arguments[0])
    if _is_union(origin):
        # None first: otherwise a text could not be None.
        for choice in sorted(arguments, key=lambda kind: kind is not type(None)):
            with contextlib.suppress(ValueError):
                return parse(texts, choice)
        raise ValueError
    if origin is tuple:
        kinds = arguments[:1] * len(texts) if arguments[-1] is Ellipsis else arguments
        return tuple(parse([word], kind) for word, kind in zip(texts, kinds, strict=True))
    (word,) = texts
    if annotation is int:
        number = whole_number(word)
        return int(word) if number is None else number
    if annotation is float:
        return float(word)
    if annotation is str:
        return word
    if annotation is Path:
        return expanded(word)
    by_word = {str(choice): choice for choice in _CHOICES.get(annotation, arguments)}
    if word not in by_word:
        raise ValueError
    return by_word[word]


_CHOICES: dict[Any, tuple[Any, ...]] = {bool: (True, False), type(None): (None,)}


def _is_union(origin: Any) -> bool:
    return origin in (typing.Union, types.UnionType)


def matches(value: Any, annotation: Any) -> bool:
    """Whether a value fits an annotation; an int fits ``float``, a bool fits neither."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return matches(value, arguments[0])
    if annotation is Any:
        return True
    if annotation is None or annotation is type(None):
        return value is None
    if _is_union(origin):
        return any(matches(value, choice) for choice in arguments)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if origin is tuple and isinstance(value, tuple):
        if arguments[-1] is Ellipsis:
            arguments = arguments[:1] * len(value)
        return len(value) == len(arguments) and all(map(matches, value, arguments))
    if annotation in (int, float):
        numbers = (int,) if annotation is int else (int, float)
        return isinstance(value, numbers) and not isinstance(value, bool)
    return isinstance(value, origin or annotation)


def takes(annotation: Any) -> str:
    """Describes the values that an annotation takes."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return takes(arguments[0])
    if _is_union(origin):
        return " or ".join(takes(choice) for choice in arguments)
    if origin is Literal:
        return "one of " + ", ".join(map(str, arguments))
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"a list, each {takes(arguments[0])}"
        return f"{len(arguments)} values, each {takes(arguments[0])}"
    if origin is not None:
        return "a dict" if issubclass(origin, Mapping) else f"a {origin.__name__}"
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return f"a {annotation.__name__}"
    known: dict[Any, str] = {
        int: "a whole number",
        float: "a number",
        bool: "True or False",
        str: "text",
        Path: "a path",
        type(None): "None",
    }
    return known.get(annotation, str(annotation))


def misfit(name: str, texts: Sequence[str], annotation: Any) -> str:
    """Returns the error for arguments that :func:`parse` does not take.

    Args:
        name: of the field or flag, as typed.
        texts: the arguments after it.
        annotation: what it takes.
    """
    wanted = takes(annotation)
    if not texts:
        return f"{name} needs a value: {wanted}"
    text = " ".join(texts)
    near = nearest(text, annotation)
    return f"{name} takes {wanted}, not '{text}'" + (f"; did you mean {near}?" if near else "")


def nearest(text: str, annotation: Any) -> str | None:
    """Returns the value of this type that a text probably stands for, or None."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return nearest(text, arguments[0])
    if _is_union(origin):
        return next(filter(None, (nearest(text, choice) for choice in arguments)), None)
    if origin is Literal:
        near = difflib.get_close_matches(text.lower(), list(map(str, arguments)), n=1)
        return near[0] if near else None
    if annotation is bool:
        by_word = {"1": "True", "yes": "True", "on": "True", "0": "False", "no": "False"}
        by_word |= {"true": "True", "false": "False", "off": "False"}
        return by_word.get(text.lower())
    if annotation is int:
        with contextlib.suppress(ValueError, OverflowError):
            if float(text) == int(float(text)):
                return str(int(float(text)))
    if annotation is type(None) and text.lower() in ("none", "null", "off"):
        return "None"
    return None


def whole_number(text: str) -> int | None:
    """The number behind "500k", "2.5M" or "1B"; None for other text and for fractions."""
    match = _WRITTEN.fullmatch(text.replace("_", ""))
    if match is None:
        return None
    digits, decimals, factor = match[1], match[2] or "", _FACTORS[match[3]]
    value, rest = divmod(int(digits + decimals) * factor, 10 ** len(decimals))
    return None if rest else value


def duration_s(text: str) -> float | None:
    """Returns the seconds of a duration such as "90s", "5m" or "1.5h"; None for another text."""
    match = _DURATION.fullmatch(text)
    return float(match[1]) * _UNITS[match[2]] if match and float(match[1]) else None


def as_arguments(value: Any) -> list[str]:
    """Returns a value as typed after its flag."""
    return [str(item) for item in value] if isinstance(value, tuple) else [str(value)]


def plain(value: Any) -> Any:
    """Returns a value as a config stores it: a list as a tuple, a path as text, NumPy as Python."""
    if isinstance(value, list | tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool | int):
        return float(value)
    return value


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Returns ``"did you mean WORD?"``, or a list of all choices if none is close."""
    choices = list(choices)
    near = close_to(word, choices)
    return f"did you mean {near[0]}?" if near else f"choose from {', '.join(choices)}"


def close_to(word: str, choices: Iterable[str]) -> list[str]:
    """Returns up to three choices that resemble a word, the closest first."""
    return difflib.get_close_matches(word, list(choices))
