"""Overrides of dataclass fields from the command line: ``--section.field VALUE``.

Each field is parsed by itself, so each error is one line with the field, the given value, what the
field takes, and the nearest valid name or value.
"""

import dataclasses
import difflib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from jaxtrain.config import field_values, run_flags
from jaxtrain.errors import InputError, Problem, fields_of

T = TypeVar("T")

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

Settings = Sequence[tuple[str, Any]]
"""Dotted names of fields and what they are set to: the arguments after a flag, or a value."""


class Leaf(NamedTuple):
    """A field that is not a section, at any depth; or an optional section as a whole.

    Attributes:
        name: dotted, such as ``"optim.peak_lr"``.
        value: its value in the instance.
        annotation: its resolved type, with its bounds.
    """

    name: str
    value: Any
    annotation: Any


def leaves(instance: Any) -> Iterator[Leaf]:
    """Yields all fields of a dataclass instance; of a nested dataclass, its fields instead."""
    for leaf in _fields(type(instance), instance, "", off=False):
        if not dataclasses.is_dataclass(leaf.value):
            yield leaf


def _fields(kind: type[Any], instance: Any, prefix: str, *, off: bool) -> Iterator[Leaf]:
    """Yields all fields and all sections, each section before its fields.

    Args:
        kind: a dataclass.
        instance: None for a section that is off; then the values of its fields are None.
        prefix: of the names.
        off: whether to yield the fields of sections that are off, too.
    """
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        value = None if instance is None else getattr(instance, field.name)
        leaf = Leaf(prefix + field.name, value, hints[field.name])
        yield leaf
        if dataclasses.is_dataclass(value):
            yield from _fields(cast(type[Any], type(value)), value, f"{leaf.name}.", off=off)
        elif off and (section := section_class(leaf.annotation)):
            yield from _fields(section, None, f"{leaf.name}.", off=off)


def section_class(annotation: Any) -> type[Any] | None:
    """Returns the dataclass of an optional section, or None for any other field."""
    for choice in typing.get_args(annotation):
        if isinstance(choice, type) and dataclasses.is_dataclass(choice):
            return choice
    return None


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
    return _changed(default, grouped(arguments), _value_of_texts)


def apply_fitting(default: T, arguments: Sequence[str]) -> tuple[T | None, list[str]]:
    """Applies the valid overrides and returns what is wrong with the others.

    This way, other problems with the config can be reported at the same time.

    Returns:
        The changed dataclass, or None if no single override is to blame; the messages.
    """
    problems: list[str] = []
    remaining = list(arguments)
    while remaining and not remaining[0].startswith("--"):
        problems.append(_not_a_flag(remaining.pop(0)))
    settings = grouped(remaining)
    while True:
        try:
            return _changed(default, settings, _value_of_texts), problems
        except InputError as error:
            # The config's own value may be as wrong as the one that was dropped.
            problems += [message for message in error.messages if message not in problems]
            to_blame = {name for message in error.messages for name in fields_of(message)[:1]}
            right = [setting for setting in settings if not _is_within(setting[0], to_blame)]
            if len(right) == len(settings):
                return None, problems
            settings = right


def replaced(instance: T, changes: Mapping[str, Any]) -> T:
    """Returns the dataclass with the named fields changed, from Python rather than from text.

    Args:
        instance: nested frozen dataclasses.
        changes: dotted name -> value, such as ``{"optim.peak_lr": 3e-4, "optim.muon": None}``. A
            value is of the field's type (see :func:`field_values.plain`), or a text as one types
            it, such as ``"2.5M"``. A field of an optional section that is None turns it on.

    Raises:
        InputError: no such field, or a value that the field does not take.
    """
    settings = [(name, field_values.plain(value)) for name, value in changes.items()]
    return _changed(instance, settings, _checked_value)


def _value_of_texts(leaf: Leaf, texts: Sequence[str]) -> Any:
    try:
        return field_values.parse(texts, leaf.annotation)
    except ValueError:
        raise InputError(
            field_values.misfit(f"--{leaf.name}", texts, leaf.annotation), about=leaf.name
        ) from None


def _checked_value(leaf: Leaf, value: Any) -> Any:
    if field_values.matches(value, leaf.annotation):
        return float(value) if leaf.annotation is float else value
    return _value_of_texts(leaf, field_values.as_arguments(value))


def merged(*sequences: Sequence[str]) -> tuple[str, ...]:
    """Joins overrides into one list with each field once; the last value wins.

    Args:
        sequences: each of flags and values: ``("--model.remat", "block")``.
    """
    fields: dict[str, list[str]] = {}
    for name, values in grouped([word for sequence in sequences for word in sequence]):
        fields.pop(name, None)  # it takes the place of its last value
        fields[name] = values
    return tuple(word for name, values in fields.items() for word in (f"--{name}", *values))


def choices(section: Any, field: str) -> tuple[str, ...]:
    """Returns the values of a field with a fixed list of them (a ``Literal``)."""
    return typing.get_args(typing.get_type_hints(type(section))[field])


def grouped(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Groups arguments by field. Dashes inside a name count as underscores."""
    settings: list[tuple[str, list[str]]] = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, value = argument[2:].partition("=")
            settings.append((name.replace("-", "_"), [value] if equals else []))
        elif settings:
            settings[-1][1].append(argument)
        else:
            raise InputError(_not_a_flag(argument))
    return settings


def _not_a_flag(word: str) -> str:
    return f"unexpected argument '{word}'; set fields with --section.field VALUE"


def _is_within(name: str, sections: Iterable[str]) -> bool:
    return any(name == section or name.startswith(f"{section}.") for section in sections)


def _changed(default: T, settings: Settings, read: Callable[[Leaf, Any], Any]) -> T:
    """Returns a copy with fields changed.

    Args:
        default: nested frozen dataclasses.
        settings: the last one of a field wins.
        read: returns the value that a field is set to.

    Raises:
        InputError: has the problems of all names and types, or else those of the first section
            that its fields do not fit.
    """
    known = {leaf.name: leaf for leaf in _fields(type(default), default, "", off=True)}
    problems: list[str] = []
    changes: dict[str, Any] = {}
    for name, setting in settings:
        leaf = known.get(name)
        if leaf is None or (_is_section(leaf) and not dataclasses.is_dataclass(setting)):
            problems.append(_unknown(name, known))
            continue
        try:
            value = read(leaf, setting)
        except InputError as error:
            problems += error.messages
            continue
        # A section as a whole, such as None, undoes what precedes it.
        changes = {
            other: set_to for other, set_to in changes.items() if not _is_within(other, [name])
        }
        changes[name] = value
    if problems:
        raise InputError(*problems)
    return cast(T, _built(type(default), default, changes, "")) if changes else default


def _is_section(leaf: Leaf) -> bool:
    """Whether a field is a section that cannot be turned off."""
    return dataclasses.is_dataclass(leaf.value) and section_class(leaf.annotation) is None


def _built(kind: type[Any], instance: Any, changes: Mapping[str, Any], prefix: str) -> Any:
    """Makes a section with all its changes at once, as it checks its fields together.

    Args:
        kind: its class.
        instance: None if the changes turn the section on; other fields keep their defaults.
        changes: names inside the section -> values.
        prefix: the name of the section, and a dot.
    """
    hints = typing.get_type_hints(kind)
    fields = {name: value for name, value in changes.items() if "." not in name}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        head, dot, rest = name.partition(".")
        if dot:
            inner.setdefault(head, {})[rest] = value
    for head, inside in inner.items():
        before = fields[head] if head in fields else getattr(instance, head, None)
        section = section_class(hints[head]) if before is None else type(before)
        fields[head] = _built(cast(type[Any], section), before, inside, f"{prefix}{head}.")
    if instance is not None:
        return dataclasses.replace(instance, **fields)
    lacking = [
        f"{prefix}{field.name}"
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in fields
    ]
    if lacking:
        section_name = prefix.removesuffix(".")
        raise InputError(
            f"--{prefix}{next(iter(changes))} turns on {section_name}, which also needs --"
            + ", --".join(lacking),
            about=(section_name, *lacking),
        )
    return kind(**fields)


def _unknown(name: str, known: Mapping[str, Leaf]) -> Problem:
    """Returns the error for an unknown field; it is about the fields that were probably meant."""
    inside = [other for other in known if other.rpartition(".")[0] == name]
    if inside:
        fields = ", --".join(inside)
        return Problem(
            f"--{name} is a section, not a field; its fields are --{fields}", name, *inside
        )
    message, flag = f"unknown field --{name}", f"--{name.replace('_', '-')}"
    section, _, word = name.rpartition(".")
    off = [leaf.name for leaf in known.values() if leaf.value is None and section_class(leaf[2])]
    if section in {*known} - {*off} and not dataclasses.is_dataclass(known[section].value):
        return Problem(f"{message}: {section} is a field, not a section", section)
    if section in off:
        candidates = [other for other in known if other.startswith(f"{section}.")]
    else:
        candidates = [other for other in known if other in off or not _is_within(other, off)]
    near = [other for other in candidates if other.rpartition(".")[2] == word]
    if not near and _OTHER_NAMES.get(word) in known:
        near = [_OTHER_NAMES[word]]
    if not near and flag in run_flags.FLAGS:  # suggesting the same word would not help
        return Problem(f"{message}; {flag} is a flag that not every command takes", name)
    near = near or difflib.get_close_matches(name, candidates, n=1)
    hint = f"did you mean --{' or --'.join(near)}?" if near else "--help all lists the fields"
    return Problem(f"{message}; {hint}", name, *near)
