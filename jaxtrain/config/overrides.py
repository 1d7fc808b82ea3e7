"""Overrides of dataclass fields from the command line: ``--section.field VALUE``.

tyro parses the values. The errors are our own: one line with the field, the given value, what the
field takes, and the nearest valid name or value.
"""

import contextlib
import dataclasses
import difflib
import io
import numbers
import os
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

from jaxtrain.config.invocation import RUN_FLAGS
from jaxtrain.errors import InputError, Problem, fields_of

T = TypeVar("T")

_FACTORS = {"k": 10**3, "M": 10**6, "B": 10**9}
_WRITTEN = re.compile(r"([+-]?\d+)(?:\.(\d+))?([kMB])")

# Names that other trainers use, and the field's name here.
_OTHER_NAMES = {
    "lr": "optim.peak_lr",
    "learning_rate": "optim.peak_lr",
    "bs": "data.batch_size",
    "global_batch_size": "data.batch_size",
    "num_workers": "data.workers",
    "wd": "optim.weight_decay",
    "beta1": "optim.b1",
    "beta2": "optim.b2",
    "grad_clip": "optim.max_grad_norm",
    "clip_grad_norm": "optim.max_grad_norm",
    "gradient_accumulation_steps": "optim.accumulate",
    "grad_accum": "optim.accumulate",
    "warmup": "optim.warmup_steps",
    "max_steps": "loop.steps",
    "iterations": "loop.steps",
    "num_epochs": "loop.epochs",
    "eval_interval": "loop.eval_every",
    "log_interval": "loop.log_every",
    "save_every": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "dtype": "precision",
}


Assignments = list[tuple[str, list[str]]]


class Leaf(NamedTuple):
    """A field that is not a section, at any depth.

    Attributes:
        name: dotted, such as ``"optim.peak_lr"``.
        value: its value in the instance.
        annotation: its resolved type.
    """

    name: str
    value: Any
    annotation: Any


def leaves(instance: Any, prefix: str = "") -> Iterator[Leaf]:
    """Yields all fields of a dataclass instance; of a nested dataclass, its fields instead."""
    hints = typing.get_type_hints(type(instance))
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{prefix}{field.name}.")
        else:
            yield Leaf(prefix + field.name, value, hints[field.name])


def apply(default: T, arguments: Sequence[str]) -> T:
    """Returns a copy of a dataclass with the fields in ``arguments`` changed.

    Args:
        default: nested frozen dataclasses.
        arguments: ``["--optim.peak_lr", "1e-3", "--model.decoder_widths", "64", "32", ...]``; also
            ``--optim.peak_lr=1e-3``. Whole numbers may end in k, M or B. Optional fields take
            ``None``, bools ``True`` or ``False``. Setting a field of an optional section that is
            None turns the section on; ``None`` turns it off, and undoes what precedes it.

    Raises:
        InputError: an unknown field, or a value that the field does not take.
    """
    sections = [name for name, _, _ in _optional_sections(default)]
    settings = _in_effect(_grouped(arguments), sections)
    try:
        return _applied(default, settings)
    except InputError:
        # A section that is turned on may only fit the other fields as they will be.
        off = {name for name, value, _ in _optional_sections(default) if value is None}
        last = [one for one in settings if any(one[0].startswith(f"--{name}.") for name in off)]
        first = [one for one in settings if one not in last]
        if not first or not last:
            raise
    return _applied(_applied(default, first), last)


def _applied(default: T, settings: Assignments) -> T:
    """Returns a copy with fields changed: first the sections that are turned on or off."""
    if not settings:
        return default
    default, settings = _switched_on(default, settings)
    known = {"--" + leaf.name: leaf for leaf in leaves(default)}
    unknown = [_unknown(flag, known) for flag, _ in settings if flag not in known]
    if unknown:
        raise InputError(*unknown)
    settings = [(flag, _written_out(values, known[flag].annotation)) for flag, values in settings]
    parsed, complaint = _parse(default, settings)
    if parsed is not None:
        return parsed
    misfits: list[str] = [
        _misfit(known[flag], values)
        for flag, values in settings
        if not _fits(default, flag, values)
    ]
    raise InputError(*(misfits or [complaint]))


def apply_fitting(default: T, arguments: Sequence[str]) -> tuple[T | None, list[str]]:
    """Applies the valid overrides and returns what is wrong with the others.

    This way, other problems with the config can be reported at the same time.

    Returns:
        The changed dataclass, or None if no single override is to blame; the messages.
    """
    found: list[str] = []
    words = list(arguments)
    while words and not words[0].startswith("--"):
        found.append(_not_a_flag(words.pop(0)))
    settings = _grouped(words)
    while True:
        try:
            kept = [word for flag, values in settings for word in (flag, *values)]
            return apply(default, kept), found
        except InputError as error:
            # The config's own value may be as wrong as the one that was dropped.
            found += [message for message in error.messages if message not in found]
            to_blame = {name for message in error.messages for name in fields_of(message)[:1]}
            right = [one for one in settings if not _is_within(one[0][2:], to_blame)]
            if len(right) == len(settings):
                return None, found
            settings = right


def _not_a_flag(word: str) -> str:
    return f"unexpected argument '{word}'; set fields with --section.field VALUE"


def _is_within(name: str, sections: Iterable[str]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in sections)


def matches(value: Any, annotation: Any) -> bool:
    """Whether a value fits an annotation; an int fits ``float``, a bool fits neither."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return True
    if annotation is None or annotation is type(None):
        return value is None
    if origin in (typing.Union, types.UnionType):
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
    if origin in (typing.Union, types.UnionType):
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
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "text"}
    return words.get(annotation, "None" if annotation is type(None) else str(annotation))


def merged(*parts: Sequence[str]) -> tuple[str, ...]:
    """Joins overrides into one list with each field once; the last value wins.

    Args:
        parts: each a sequence of flags and values: ``("--model.remat", "block")``.
    """
    fields: dict[str, list[str]] = {}
    for flag, values in _grouped([word for part in parts for word in part]):
        fields.pop(flag, None)  # it takes the place of its last value
        fields[flag] = values
    return tuple(word for flag, values in fields.items() for word in (flag, *values))


def words(value: Any) -> list[str]:
    """A field's value as typed after its flag."""
    return [str(one) for one in value] if isinstance(value, tuple) else [str(value)]


def choices(section: Any, field: str) -> tuple[str, ...]:
    """Returns the values of a field with a fixed list of them (a ``Literal``)."""
    return typing.get_args(typing.get_type_hints(type(section))[field])


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Returns ``"did you mean WORD?"``, or a list of all choices if none is close."""
    choices = list(choices)
    near = close_to(word, choices)
    return f"did you mean {near[0]}?" if near else f"choose from {', '.join(choices)}"


def close_to(word: str, choices: Iterable[str]) -> list[str]:
    """Returns up to three choices that resemble a word, the closest first."""
    return difflib.get_close_matches(word, list(choices))


def _grouped(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Groups arguments by flag. Dashes inside a name count as underscores."""
    settings: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            settings.append(("--" + flag[2:].replace("-", "_"), [value] if equals else []))
        elif settings:
            settings[-1][1].append(argument)
        else:
            raise InputError(_not_a_flag(argument))
    return settings


def _in_effect(settings: Assignments, sections: Iterable[str]) -> Assignments:
    """Drops the settings of a section and its fields that precede a ``--section None``."""
    for name in sections:
        off = [
            place for place, setting in enumerate(settings) if setting == (f"--{name}", ["None"])
        ]
        if off:
            settings = [
                setting
                for place, setting in enumerate(settings)
                if place >= off[-1] or not _is_within(setting[0][2:], [name])
            ]
    return settings


def _switched_on(default: T, settings: Assignments) -> tuple[T, Assignments]:
    """Turns optional sections on and off; also returns the settings that remain to be parsed.

    ``--model.teacher None`` turns a section off; setting a field of it turns it on.

    Raises:
        InputError: a field of such a section is wrong, or a required one is missing.
    """
    for name, value, section in list(_optional_sections(default)):
        off = [(flag, values) for flag, values in settings if flag == f"--{name}"]
        if off and off[-1][1] == ["None"]:
            default = _with(default, name.split("."), None)
            settings = [setting for setting in settings if setting not in off]
            value = None
        given = [(flag, values) for flag, values in settings if flag.startswith(f"--{name}.")]
        if value is None and given:
            default = _with(default, name.split("."), _section(name, section, given))
            settings = [setting for setting in settings if setting not in given]
    return default, settings


def _optional_sections(instance: Any, prefix: str = "") -> Iterator[tuple[str, Any, type[Any]]]:
    """Yields the dotted name, value, and class of each field that is a dataclass or None."""
    hints = typing.get_type_hints(type(instance))
    for field in dataclasses.fields(instance):
        name, value = prefix + field.name, getattr(instance, field.name)
        for choice in typing.get_args(hints[field.name]):
            if dataclasses.is_dataclass(choice):
                yield name, value, typing.cast(type[Any], choice)
        if dataclasses.is_dataclass(value):
            yield from _optional_sections(value, f"{name}.")


def _section(name: str, section: type[Any], given: Assignments) -> Any:
    """Builds a section from some of its fields; the others keep their defaults."""
    fields = {field.name: field for field in dataclasses.fields(section)}
    hints = typing.get_type_hints(section)
    own = [(f"--{flag.removeprefix(f'--{name}.')}", values) for flag, values in given]
    for flag, _ in own:
        if flag[2:] not in fields:
            near = did_you_mean(flag[2:], fields)
            raise InputError(
                f"unknown field --{name}.{flag[2:]}; {near}",
                about=f"{name}.{flag[2:]}",
            )
    lacking = [
        f"--{name}.{field.name}"
        for field in fields.values()
        if field.default is dataclasses.MISSING and f"--{field.name}" not in dict(own)
    ]
    if lacking:
        raise InputError(
            f"{given[0][0]} turns on {name}, which also needs {', '.join(lacking)}",
            about=(name, *(flag.removeprefix("--") for flag in lacking)),
        )
    made, complaint = _parse(section, own)
    if made is not None:
        return made
    for flag, values in own:
        if not _fits_alone(section, own, flag, values):
            leaf = Leaf(f"{name}.{flag[2:]}", None, hints[flag[2:]])
            raise InputError(_misfit(leaf, values))
    raise InputError(f"{name}: {complaint}", about=name)


def _fits_alone(section: type[Any], own: Assignments, flag: str, values: list[str]) -> bool:
    """Whether a value has the type of its field; required fields of the section are added."""
    needed = [
        (other, given)
        for other, given in own
        if {field.name: field for field in dataclasses.fields(section)}[other[2:]].default
        is dataclasses.MISSING
        and other != flag
    ]
    try:
        return _parse(section, [*needed, (flag, values)])[0] is not None
    except InputError:  # from the section's own check: the type is right
        return True


def _with(instance: T, path: Sequence[str], value: Any) -> T:
    """Returns a copy of a nested dataclass with one field changed."""
    name, *rest = path
    inner = _with(getattr(instance, name), rest, value) if rest else value
    return dataclasses.replace(instance, **{name: inner})  # type: ignore[type-var]


def _unknown(flag: str, known: dict[str, Leaf]) -> Problem:
    message, likely = _in_words(flag, known)
    return Problem(message, flag.removeprefix("--"), *(one.removeprefix("--") for one in likely))


def _in_words(flag: str, known: dict[str, Leaf]) -> tuple[str, list[str]]:
    """Returns the error for an unknown flag, and the fields that were probably meant."""
    message = f"unknown field {flag}"
    for other, leaf in known.items():
        if flag.startswith(other + ".") and leaf.value is None:
            return f"{message}: {leaf.name} is None, not a section", [leaf.name]
    if any(other.startswith(flag + ".") for other in known):
        inside = [other for other in known if other.startswith(flag + ".")]
        return f"{flag} is a section, not a field; its fields are {', '.join(inside)}", inside
    word = flag.rpartition(".")[2].removeprefix("--")
    same = [other for other in known if other.rpartition(".")[2].removeprefix("--") == word]
    if not same and f"--{_OTHER_NAMES.get(word)}" in known:
        same = [f"--{_OTHER_NAMES[word]}"]
    if same:
        return f"{message}; did you mean {' or '.join(same)}?", same
    dashed = flag.replace("_", "-")
    if dashed in RUN_FLAGS:  # suggesting the same word would not help
        return f"{message}; {dashed} is a flag that not every command takes", []
    near = difflib.get_close_matches(flag, [*known, *RUN_FLAGS], n=1)
    hint = f"did you mean {near[0]}?" if near else "--help all lists the fields"
    return f"{message}; {hint}", near


def _fits(default: Any, flag: str, values: list[str]) -> bool:
    try:
        return _parse(default, [(flag, values)])[0] is not None
    except InputError:  # from the config's own check: the type is right
        return True


def _misfit(leaf: Leaf, values: list[str]) -> Problem:
    wanted = takes(leaf.annotation)
    if not values:
        return Problem(f"--{leaf.name} needs a value: {wanted}", leaf.name)
    given = " ".join(values)
    near = nearest_value(given, leaf.annotation)
    hint = "" if near is None else f"; did you mean {near}?"
    return Problem(f"--{leaf.name} takes {wanted}, not '{given}'{hint}", leaf.name)


def _written_out(values: list[str], annotation: Any) -> list[str]:
    """Writes out 500k, 2.5M and 1B if the field takes a whole number."""
    if annotation is not int and int not in typing.get_args(annotation):
        return values
    found = [(value, whole_number(value)) for value in values]
    return [value if number is None else str(number) for value, number in found]


def whole_number(text: str) -> int | None:
    """The number behind "500k", "2.5M" or "1B"; None for other text and for fractions."""
    match = _WRITTEN.fullmatch(text.replace("_", ""))
    if match is None:
        return None
    digits, decimals, factor = match[1], match[2] or "", _FACTORS[match[3]]
    value, rest = divmod(int(digits + decimals) * factor, 10 ** len(decimals))
    return None if rest else value


def nearest_value(given: str, annotation: Any) -> str | None:
    """The value of this type that ``given`` probably stands for, or None."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        found = (nearest_value(given, choice) for choice in arguments)
        return next((value for value in found if value is not None), None)
    if origin is Literal:
        near = difflib.get_close_matches(given.lower(), list(map(str, arguments)), n=1)
        return near[0] if near else None
    if annotation is bool:
        words = {"1": "True", "yes": "True", "on": "True", "0": "False", "no": "False"}
        words |= {"true": "True", "false": "False", "off": "False"}
        return words.get(given.lower())
    if annotation is int:
        with contextlib.suppress(ValueError, OverflowError):
            if float(given) == int(float(given)):
                return str(int(float(given)))
    if annotation is type(None) and given.lower() in ("none", "null", "off"):
        return "None"
    return None


def _tyro_options() -> dict[str, Any]:
    import tyro

    return {
        "use_underscores": True,
        # A bool takes True or False like any field; optional sections are not subcommands.
        "config": (tyro.conf.FlagConversionOff, tyro.conf.AvoidSubcommands),
    }


def _parse(default: T | type[T], settings: Assignments) -> tuple[T | None, str]:
    """The parsed instance, or None and tyro's error in one line."""
    import tyro

    arguments: list[str] = []
    for flag, values in settings:
        dashed = len(values) == 1 and values[0].startswith("-")
        arguments += [f"{flag}={values[0]}"] if dashed else [flag, *values]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            if isinstance(default, type):
                parsed = tyro.cli(default, args=arguments, **_tyro_options())
            else:
                parsed = tyro.cli(type(default), default=default, args=arguments, **_tyro_options())
    except SystemExit:
        inside = (line.strip("│ ") for line in said.getvalue().splitlines() if "│" in line)
        return None, " ".join(line for line in inside if line.strip("─"))
    return parsed, ""


def replaced(instance: T, changes: Mapping[str, Any]) -> T:
    """Returns the dataclass with the named fields changed, from Python rather than from text.

    Args:
        instance: nested frozen dataclasses.
        changes: dotted name -> value, such as ``{"optim.peak_lr": 3e-4, "optim.muon": None}``. A
            value is of the field's type (see :func:`plain`), or a text as one types it, such as
            ``"2.5M"``. A field of an optional section that is None switches the section on.

    Raises:
        InputError: no such field, or a value that the field does not take.
    """
    known = {"--" + leaf.name: leaf for leaf in leaves(instance)}
    sections = {name: section for name, _, section in _optional_sections(instance)}
    off = [name for name in sections if name in changes and changes[name] is None]
    known = {flag: leaf for flag, leaf in known.items() if not _is_within(leaf.name, off)}
    names = list(changes)
    undone = {
        name
        for section in off
        for name in names[: names.index(section)]
        if _is_within(name, [section])
    }
    wrong: list[str] = []
    typed: list[str] = []
    direct: dict[str, Any] = {}
    for name, given in changes.items():
        if name in undone:
            continue
        value = plain(given)
        leaf = known.get(f"--{name}")
        if leaf is not None and isinstance(value, str) and not matches(value, leaf.annotation):
            typed += [f"--{name}", value]
        elif leaf is not None and not matches(value, leaf.annotation):
            wrong.append(_misfit(leaf, words(value)))
        elif leaf is not None:
            direct[name] = float(value) if leaf.annotation is float else value
        elif any(name.startswith(f"{section}.") for section in sections):
            typed += [f"--{name}", *words(value)]
        elif (name in sections and (value is None or isinstance(value, sections[name]))) or (
            dataclasses.is_dataclass(value) and hasattr(instance, name)
        ):
            direct[name] = value
        else:
            wrong.append(_unknown(f"--{name}", known))
    if wrong:
        raise InputError(*wrong)
    return apply(_with_all(instance, direct), typed)


def plain(value: Any) -> Any:
    """Returns a value as a config stores it: a list as a tuple, a path as text, NumPy as Python."""
    if isinstance(value, list | tuple):
        return tuple(plain(one) for one in value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, bool | int):
        return float(value)
    return value


def _with_all(instance: T, changes: Mapping[str, Any]) -> T:
    """Changes the fields of each section at once, as a section checks its fields together."""
    own: dict[str, Any] = {name: value for name, value in changes.items() if "." not in name}
    nested: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        head, dot, rest = name.partition(".")
        if dot:
            nested.setdefault(head, {})[rest] = value
    for head, inner in nested.items():
        own[head] = _with_all(own.get(head, getattr(instance, head)), inner)
    return dataclasses.replace(instance, **own)  # type: ignore[type-var]
