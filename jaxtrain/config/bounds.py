"""Bounds for the numbers of a config, which may come from an untrusted file.

Without them a file with ``depth=10**9`` hangs whatever builds its model. They are far above any
model ever trained.
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxtrain import errors
from jaxtrain.errors import InputError

WORDS = 2**24
TOKENS = 2**20
LAYERS = 1000
WIDTH = 2**20
HEADS = 2**14
ROTARY = 1e15


def whole(name: str, value: Any, most: int, *, least: int = 1, or_none: str = "") -> None:
    """Checks that a value is a whole number within bounds.

    Args:
        name: name of the field, such as ``model.depth``.
        value: value of the field.
        most: largest value allowed.
        least: smallest value allowed.
        or_none: other values that the field takes, for the error, such as ``", or None"``.

    Raises:
        InputError: has the field, its value and the nearest bound.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{name}={errors.shown(value)}: use a whole number{or_none}", about=name)
    if value < least:
        raise InputError(f"{name}={errors.shown(value)}: use at least {least}{or_none}", about=name)
    if value > most:
        raise InputError(f"{name}={errors.shown(value)}: use at most {most}{or_none}", about=name)


def entry(content: Mapping[str, Any], name: str, most: int, source: str) -> int:
    """Returns an entry of a config.json that must be a whole number from 1 to ``most``.

    Raises:
        InputError: it is missing or something else.
    """
    if name not in content:
        raise InputError(f"{source}: {name!r} is missing")
    value = content[name]
    whole(f"{source}: {name}", value, most)
    return int(value)


def number(name: str, value: Any, *, above: float = -math.inf, most: float = math.inf) -> None:
    """Checks that a value is a finite number in (above, most].

    Raises:
        InputError: has the field, its value and the valid range.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{name}={errors.shown(value)}: use a number", about=name)
    if not above < value:  # also NaN
        words = "finite number" if above == -math.inf else f"number above {above:g}"
        raise InputError(f"{name}={errors.shown(value)}: use a {words}", about=name)
    if value > most or value == math.inf:
        words = "finite number" if most == math.inf else f"number up to {most:g}"
        raise InputError(f"{name}={errors.shown(value)}: use a {words}", about=name)


def fraction(name: str, value: Any) -> None:
    """Checks that a value is a number from 0 to below 1.

    Raises:
        InputError: has the field and its value.
    """
    number(name, value)
    if not 0 <= value < 1:
        raise InputError(
            f"{name}={errors.shown(value)}: use a fraction of at least 0 and below 1", about=name
        )
