"""Flags of commands: each is a field of a frozen dataclass.

A keyword-only field is a flag, any other field a positional argument; one that may be None, or has
a default, may be absent. The docstring below a field is its help. Its annotation may have a text
that stands for its value, and bounds: ``Annotated[int, "N", bounds.Bounds(least=1)]``. A flag
whose field is a bool takes no value, and one whose field is a tuple may be repeated.
"""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from jaxtrain.config import bounds, field_values, invocation
from jaxtrain.config.run_flags import UNTYPED
from jaxtrain.errors import InputError

T = TypeVar("T")

OVERRIDES, ARGUMENTS = "overrides", "arguments"
"""Untyped fields: the config's overrides, of a command with a config; all that was typed."""

# Sections of a config, and fields in none: not misspelled flags, as --seed is not --seconds.
_TOP_FIELDS = (
    *("--name", "--seed", "--precision", "--deterministic"),
    *("--model", "--data", "--optim", "--mesh", "--loop", "--checkpoint"),
)
_FLAG = re.compile(r"--?[A-Za-z][\w.-]*(=.*)?", re.DOTALL)
_USUAL = {int: "N", float: "X"}


class Flag(NamedTuple):
    """A flag or a positional argument.

    Attributes:
        field: name of the field.
        name: as typed: ``--top-k``, or ``SOURCE``.
        kind: type of one value.
        metavar: what stands for a value in the help; "" without one.
        limits: of a number.
        many: whether the field is a tuple of such values.
        positional: whether it is not a flag.
        required: whether it must be typed.
        default: of the field.
    """

    field: str
    name: str
    kind: Any
    metavar: str
    limits: bounds.Bounds | None
    many: bool
    positional: bool
    required: bool
    default: Any


def of(kind: type[Any]) -> list[Flag]:
    """Returns the positional arguments of a class and its flags, those of base classes last."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.metadata != UNTYPED}
    own_first = [name for base in kind.__mro__ for name in vars(base).get("__annotations__", ())]
    names = [name for name in dict.fromkeys(own_first) if name in fields]
    return sorted(
        (_flag(fields[name], hints[name]) for name in names), key=lambda flag: not flag.positional
    )


def _flag(field: "dataclasses.Field[Any]", annotation: Any) -> Flag:
    kind, notes, many, optional = _unwrapped(annotation)
    metavar = next((note for note in notes if isinstance(note, str)), None)
    if metavar is None:
        choices = f"{{{','.join(map(str, typing.get_args(kind)))}}}"
        metavar = choices if typing.get_origin(kind) is Literal else _USUAL.get(kind, "VALUE")
        metavar = field.name.upper() if not field.kw_only else "" if kind is bool else metavar
    return Flag(
        field=field.name,
        name=f"--{field.name.replace('_', '-')}" if field.kw_only else metavar,
        kind=kind,
        metavar=metavar,
        limits=next((note for note in notes if isinstance(note, bounds.Bounds)), None),
        many=many,
        positional=not field.kw_only,
        required=field.default is dataclasses.MISSING and not optional,
        default=field.default,
    )


def _unwrapped(annotation: Any) -> tuple[Any, tuple[Any, ...], bool, bool]:
    """Returns the type of one value, notes, and whether there may be several, or None."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        kind, notes, many, optional = _unwrapped(arguments[0])
        return kind, (*arguments[1:], *notes), many, optional
    if origin in (typing.Union, types.UnionType):
        (choice,) = (choice for choice in arguments if choice is not type(None))
        return *_unwrapped(choice)[:3], True
    if origin is tuple:
        kind, notes, _, _ = _unwrapped(arguments[0])
        return kind, notes, True, False
    return annotation, (), False, False


FlagValue = tuple[Flag, list[str]]
"""A flag or positional argument, and the arguments that are its value."""


class _Split(NamedTuple):
    flag_values: list[FlagValue]
    positional: list[str]
    overrides: list[str]
    problems: list[str]


def parse(
    kind: type[T], command: str, arguments: Sequence[str], ignored: Iterable[Flag] = ()
) -> tuple[T, list[str]]:
    """Parses the arguments of a command.

    Args:
        kind: the class of its flags. If it has a field ``overrides``, this receives the flags of
            the config, with their values; and the first positional argument is ``--config``. A
            field ``arguments`` receives all arguments.
        command: its name, such as ``plan``, for messages.
        arguments: without the name of the command.
        ignored: more flags that are accepted.

    Returns:
        The flags, and the problems; a flag with a problem keeps its default.

    Raises:
        InputError: a required argument is wrong or missing; has all problems.
    """
    known = of(kind)
    names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    has_config = OVERRIDES in names
    accepted = {flag.name: flag for flag in (*ignored, *known) if not flag.positional}
    split = _split(command, arguments, accepted, has_config=has_config)
    assigned, extra = _assigned([flag for flag in known if flag.positional], split.positional)
    problems, values = split.problems, dict[str, Any]()
    for flag, texts in (*split.flag_values, *assigned):
        try:
            value = _value(flag, texts)
        except InputError as error:
            problems += error.messages
            continue
        values[flag.field] = (*values.get(flag.field, ()), value) if flag.many else value
    for word in extra:
        cure = "set fields with --section.field VALUE" if has_config else f"see {_help(command)}"
        problems.append(f"{command}: unexpected argument '{word}'; {cure}")
    lacking = [flag for flag in known if flag.required and flag.field not in values]
    if lacking and not problems:
        missing = (
            flag.name if flag.positional else f"{flag.name} {flag.metavar}" for flag in lacking
        )
        problems.append(f"{command}: missing {' and '.join(missing)}; see {_help(command)}")
    if lacking:
        raise InputError(*problems)
    values |= {OVERRIDES: tuple(split.overrides), ARGUMENTS: tuple(arguments)}
    absent = {flag.field: None for flag in known if flag.default is dataclasses.MISSING}
    return kind(**absent | {name: values[name] for name in values if name in names}), problems


def _split(
    command: str, arguments: Sequence[str], accepted: Mapping[str, Flag], *, has_config: bool
) -> _Split:
    """Sorts the arguments of a command line.

    Args:
        command: its name.
        arguments: without the name of the command.
        accepted: name of a flag -> the flag.
        has_config: whether an unknown flag may be a field.
    """
    split = _Split([], [], [], [])
    remaining = list(reversed(arguments))
    while remaining:
        word = remaining.pop()
        if word == "--":  # only positional arguments follow
            split.positional.extend(reversed(remaining))
            break
        if not _FLAG.fullmatch(word):
            split.positional.append(word)
            continue
        name, equals, value = word.partition("=")
        flag = accepted.get(name.replace("_", "-"))
        after = [value] if equals else []
        if flag is not None:
            takes_next = flag.kind is not bool and not equals
            # "--field VALUE" in one word, with a space, is a value: that of compare --change.
            if (
                takes_next
                and remaining
                and not (remaining[-1].startswith("--") and _FLAG.fullmatch(remaining[-1]))
            ):
                after.append(remaining.pop())
            split.flag_values.append((flag, after))
            continue
        after = []
        while remaining and not remaining[-1].startswith("--"):
            after.append(remaining.pop())
        near = difflib.get_close_matches(name, accepted, n=1, cutoff=0.75)
        if has_config and ("." in name or name in _TOP_FIELDS or not near):
            split.overrides.extend((word, *after))
            continue
        hint = f"did you mean {near[0]}?" if near else f"see {_help(command)}"
        split.problems.append(f"{command}: unknown flag {name}; {hint}")
    if (
        has_config
        and split.positional
        and "config" not in {flag.field for flag, _ in split.flag_values}
    ):
        split.flag_values.append((accepted["--config"], [split.positional.pop(0)]))
    return split


def _assigned(wanted: list[Flag], positional: list[str]) -> tuple[list[FlagValue], list[str]]:
    """Gives values to positional arguments; also returns the values that are left."""
    for flag in [flag for flag in wanted if not flag.required]:
        if len(positional) < len(wanted):
            wanted.remove(flag)
    assigned: list[FlagValue] = []
    for number, flag in enumerate(wanted, 1):
        count = max(1, len(positional) - (len(wanted) - number)) if flag.many else 1
        assigned += [(flag, [word]) for word in positional[:count]]
        positional = positional[count:]
    return assigned, positional


def _value(flag: Flag, texts: list[str]) -> Any:
    """Returns the value of a flag.

    Raises:
        InputError: it is not of the type, or out of bounds.
    """
    if flag.kind is bool:
        if texts:
            raise _flag_error(flag, f"{flag.name} takes no value, not '{texts[0]}'")
        return True
    if not texts:
        raise _flag_error(flag, f"{flag.name} needs a value: {flag.metavar}")
    try:
        value = field_values.parse(texts, flag.kind)
    except ValueError:
        raise _flag_error(flag, field_values.misfit(flag.name, texts, flag.kind)) from None
    if flag.limits is not None and (cure := flag.limits.problem(value, flag.kind)):
        raise _flag_error(flag, f"{flag.name} {texts[0]}: {cure}")
    return value


def _flag_error(flag: Flag, message: str) -> InputError:
    return InputError(message, about=flag.name)


def _help(command: str) -> str:
    return f"{invocation.program()} {command} --help"
