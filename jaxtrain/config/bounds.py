"""Bounds for the numbers of a config, which may come from an untrusted file.

A field's type has its bounds: ``layers: bounds.Layers``, which is ``Annotated[int, LAYERS]``, and
:class:`Section` checks them. Without bounds a file with ``depth=10**9`` hangs whatever builds its
model. Those of sizes are far above any model ever trained.
"""

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any

from jaxtrain import errors
from jaxtrain.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """The valid values of a number; every number is finite.

    Attributes:
        least: smallest value.
        above: largest number below all values.
        most: largest value.
        below: smallest number above all values.
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def within(self, usual: "Bounds") -> "Bounds":
        """Returns these bounds, with the usual ones on a side that has none."""
        return Bounds(
            least=usual.least if self.above is None and self.least is None else self.least,
            above=self.above,
            most=usual.most if self.below is None and self.most is None else self.most,
            below=self.below,
        )

    def problem(self, value: Any, kind: type) -> str | None:
        """Returns what to use in place of a value; None if it is valid.

        Args:
            value: the value, of any type.
            kind: int or float; a float may be given as an int.
        """
        if isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
            return "use a whole number" if kind is int else "use a number"
        limits = (
            ("at least", self.least, operator.ge),
            ("above", self.above, operator.gt),
            ("at most", self.most, operator.le),
            ("below", self.below, operator.lt),
        )
        checked = [
            (f"{word} {limit if kind is int else f'{limit:g}'}", holds(value, limit))
            for word, limit, holds in limits
            if limit is not None
        ]
        missed = [valid for valid, is_met in checked if not is_met]
        if kind is int:
            return f"use {missed[0]}" if missed else None
        if not missed and _is_finite(value):
            return None
        valid = " and ".join(limit for limit, _ in checked)
        number = "number of" if valid.startswith("at") else "number"
        finite = "" if valid and _is_finite(value) else "finite "
        return f"use a {finite}{number} {valid}".rstrip()


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False


WORDS, TOKENS, WIDTH = (Bounds(least=1, most=most) for most in (2**24, 2**20, 2**20))
LAYERS, HEADS = (Bounds(least=1, most=most) for most in (1000, 2**14))
EPSILON, ROTARY = Bounds(above=0, most=1), Bounds(above=0, most=1e15)
FRACTION = Bounds(least=0, below=1)

Words = Annotated[int, WORDS]
"""The size of a vocabulary."""
Tokens = Annotated[int, TOKENS]
"""The length of a sequence."""
Width = Annotated[int, WIDTH]
Layers = Annotated[int, LAYERS]
Heads = Annotated[int, HEADS]
Epsilon = Annotated[float, EPSILON]
"""A number that is added to a mean square."""
RotaryBase = Annotated[float, ROTARY]
Fraction = Annotated[float, FRACTION]
ClosedFraction = Annotated[float, Bounds(least=0, most=1)]
Count = Annotated[int, Bounds(least=1)]
Weight = Annotated[float, Bounds(least=0)]
"""A factor of a loss or of a decay."""
Positive = Annotated[float, Bounds(above=0)]


class Section:
    """A frozen dataclass that checks its fields when it is made."""

    section = ""
    """Dotted name of the section, such as ``model.teacher``, for messages."""

    def __post_init__(self) -> None:
        section: Any = type(self)  # mypy does not take a class for hashable
        for name, annotation in _types(section).items():
            value = getattr(self, name)
            if (cure := problem(annotation, value)) is not None:
                field = f"{self.section}.{name}"
                raise InputError(f"{field}={errors.short_repr(value)}: {cure}", about=field)
        self.check()

    def check(self) -> None:
        """Checks fields that depend on each other, each of which is within its bounds.

        Raises:
            InputError: they contradict each other.
        """


@functools.cache
def _types(section: type[Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(section, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(section)}


def problem(annotation: Any, value: Any, usual: Mapping[type, Bounds] | None = None) -> str | None:
    """Returns what to use in place of a field's value; None if it is valid.

    Args:
        annotation: the field's type, with its bounds.
        value: its value.
        usual: int, float -> limits where the type has none; without it, only types with bounds are
            checked.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        cures = [problem(choice, value, usual) for choice in arguments if choice is not type(None)]
        cure = None if None in cures else cures[0]
        return f"{cure}, or None" if cure and type(None) in arguments else cure
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            arguments = arguments[:1] * (len(value) if isinstance(value, tuple) else 1)
        if not isinstance(value, tuple) or len(value) != len(arguments):
            return f"use {len(arguments)} values"
        cures = [problem(kind, item, usual) for kind, item in zip(arguments, value, strict=True)]
        return next(filter(None, cures), None)
    kind, limits = annotation, (usual or {}).get(annotation)
    if origin is Annotated and isinstance(arguments[1], Bounds):
        kind, limits = arguments[0], arguments[1].within((usual or {}).get(arguments[0], Bounds()))
    return None if limits is None else limits.problem(value, kind)


def check(name: str, value: Any, within: Bounds, kind: type = int) -> None:
    """Checks a number that is not a field of a section, such as one in a config.json.

    Args:
        name: name of the number, for messages.
        value: the value, of any type.
        within: the valid values.
        kind: int or float.

    Raises:
        InputError: has the name, the value and the nearest bound.
    """
    if (cure := within.problem(value, kind)) is not None:
        raise InputError(f"{name}={errors.short_repr(value)}: {cure}", about=name)


def entry(content: Mapping[str, Any], name: str, within: Bounds, source: str) -> int:
    """Returns an entry of a config.json that must be a whole number.

    Raises:
        InputError: it is missing or something else.
    """
    if name not in content:
        raise InputError(f"{source}: {name!r} is missing")
    check(f"{source}: {name}", content[name], within)
    return int(content[name])


def differing(content: Mapping[str, Any], fixed: Mapping[str, Any]) -> list[str]:
    """Returns which entries of a config.json are not as a network has them, one part each."""
    return [
        f"{name}={errors.short_repr(content[name])} (here {wanted!r})"
        for name, wanted in fixed.items()
        if content.get(name, wanted) != wanted
    ]
