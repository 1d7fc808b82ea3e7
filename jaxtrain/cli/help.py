"""The help of a config and of commands, from the same dataclasses that parse them.

The help of a field or flag is the docstring below it, that of a section or command the docstring of
its class.
"""

import ast
import dataclasses
import functools
import inspect
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from jaxtrain.cli import flags
from jaxtrain.config import field_values
from jaxtrain.config.overrides import section_class
from jaxtrain.errors import InputError

TOP = "run"
"""The section of the fields that have no section, such as ``--seed``."""
ALL = "all"
REQUIRED = "required"

_NO_DEFAULT = (None, False, "", (), dataclasses.MISSING)
_HELP_COLUMN = 30  # at which the help of a field begins, at most


class HelpSection(NamedTuple):
    """A section of a config.

    Attributes:
        name: dotted, such as ``"optim.muon"``.
        kind: its class.
        value: None if the section is off.
    """

    name: str
    kind: type[Any]
    value: Any


def sections(run: Any) -> list[HelpSection]:
    """Returns all sections of a config, nested ones after the one that they are in."""
    return [HelpSection(TOP, type(run), run), *_nested(run)]


def _nested(instance: Any, prefix: str = "") -> Iterator[HelpSection]:
    hints = typing.get_type_hints(type(instance))
    for field in dataclasses.fields(instance):
        name, value = prefix + field.name, getattr(instance, field.name)
        if dataclasses.is_dataclass(value):
            yield HelpSection(name, typing.cast(type[Any], type(value)), value)
            yield from _nested(value, f"{name}.")
        elif kind := section_class(hints[field.name]):
            yield HelpSection(name, kind, None)


def overview(run: Any) -> str:
    """Lists the sections of a config, one line each."""
    all_sections = sections(run)
    width = max(len(section.name) for section in all_sections)
    columns = _columns()
    lines = [
        f"{section.name:{width}}  "
        + textwrap.shorten(_summary(section), max(columns - width - 5, 20), placeholder=" ...")
        for section in all_sections
    ]
    return "\n".join(f"  {line}" for line in lines)


def _summary(section: HelpSection) -> str:
    if section.name == TOP:
        return ", ".join(field.name for field in _own_fields(section))
    first = re.split(r"(?<=\.)\s(?=[A-Z])", " ".join((section.kind.__doc__ or "").split()))[0]
    return ("(off) " if section.value is None else "") + first.removesuffix(".")


def fields(run: Any, names: Sequence[str]) -> str:
    """Describes the fields of sections: each with its type, help, and default.

    Args:
        run: the config that the defaults come from.
        names: sections, with their nested ones; ``all``; single fields, such as ``peak_lr``.

    Raises:
        InputError: an unknown name; the message has the nearest one.
    """
    return "\n\n".join(text for name in names for text in _described(run, name))


def _described(run: Any, name: str) -> Iterator[str]:
    all_sections = sections(run)
    inside = [
        section
        for section in all_sections
        if section.name == name or section.name.startswith(f"{name}.")
    ]
    for section in all_sections if name == ALL else inside:
        if section.value is not None or section.name == name:
            yield _block(section, _own_fields(section))
        else:
            yield f"{section.name} is off; its fields: --help {section.name}"
    if inside or name == ALL:
        return
    single = [
        (section, field)
        for section in all_sections
        for field in _own_fields(section)
        if name in (field.name, f"{section.name}.{field.name}")
    ]
    if not single:
        known = [section.name for section in all_sections]
        flat = [field.name for section in all_sections for field in _own_fields(section)]
        near = field_values.close_to(name, [*known, *flat])
        hint = f"did you mean {' or '.join(near)}?" if near else f"use {', '.join(known)} or {ALL}"
        raise InputError(f"--help {name}: unknown section; {hint}")
    for section, field in single:
        yield _block(section, [field])


def _own_fields(section: HelpSection) -> list[dataclasses.Field[Any]]:
    """The fields of a section that are not sections themselves."""
    hints = typing.get_type_hints(section.kind)
    return [
        field
        for field in dataclasses.fields(section.kind)
        if not dataclasses.is_dataclass(getattr(section.value, field.name, None))
        and section_class(hints[field.name]) is None
    ]


class Described(NamedTuple):
    """One field, in words.

    Attributes:
        name: dotted, such as ``"optim.peak_lr"``.
        takes: stands for a value, such as ``INT|None``.
        text: its docstring, on one line, without the last period.
        default: as one types it, or "required".
    """

    name: str
    takes: str
    text: str
    default: str


def described(section: HelpSection) -> list[Described]:
    """Returns all fields of a section, but for those that are sections themselves."""
    return [_field(section, field) for field in _own_fields(section)]


def _field(section: HelpSection, field: dataclasses.Field[Any]) -> Described:
    hints = typing.get_type_hints(section.kind)
    texts = docstrings(section.kind)  # type: ignore[arg-type]
    return Described(
        name=field.name if section.name == TOP else f"{section.name}.{field.name}",
        takes=_placeholder(hints[field.name]),
        text=" ".join(texts.get(field.name, "").split()).removesuffix("."),
        default=_default(section, field),
    )


def _block(section: HelpSection, chosen: Sequence[dataclasses.Field[Any]]) -> str:
    off = ", off" if section.value is None else ""
    rows = []
    for described in (_field(section, field) for field in chosen):
        default = (
            described.default if described.default == REQUIRED else f"default: {described.default}"
        )
        rows.append(
            (f"--{described.name} {described.takes}", f"{described.text} ({default})".strip())
        )
    return f"{section.name}{off}:\n{paragraphs(_paragraph(section), '  ')}\n\n{entries(rows)}"


def command(kind: type[Any], usages: Iterable[str]) -> str:
    """Returns the help of a command.

    Args:
        kind: the class of its flags.
        usages: the ways to type it.
    """
    known = flags.of(kind)
    blocks = [usage(usages), paragraphs(inspect.cleandoc(kind.__doc__ or ""))]
    for title in ("arguments", "flags"):
        chosen = [flag for flag in known if flag.positional == (title == "arguments")]
        if chosen:
            blocks.append(f"{title}:\n{of_flags(kind, chosen)}")
    return "\n\n".join(blocks)


def usage(usages: Iterable[str]) -> str:
    """Returns the ways to type a command, below each other; what is in brackets stays together."""
    return "\n".join(
        textwrap.fill(
            re.sub(
                r"\[[^]]*\]", lambda bracketed: bracketed[0].replace(" ", "\0"), f"jaxtrain {line}"
            ),
            _columns() - 2,
            initial_indent=" " * 7 if number else "usage: ",
            subsequent_indent=" " * 9,
            break_on_hyphens=False,
        ).replace("\0", " ")
        for number, line in enumerate(usages)
    )


def of_flags(
    kind: type[Any], chosen: Iterable[flags.Flag], more: Iterable[tuple[str, str]] = ()
) -> str:
    """Describes flags, with their defaults.

    Args:
        kind: the class that has them.
        chosen: the flags.
        more: what else can be typed, and what it means.
    """
    texts = docstrings(kind)  # type: ignore[arg-type]
    rows = []
    for flag in chosen:
        text = " ".join(texts[flag.field].split())
        if flag.default not in _NO_DEFAULT and "(default" not in text:
            text += f" (default: {flag.default})"
        rows.append((flag.name if flag.positional else f"{flag.name} {flag.metavar}", text))
    return entries([*rows, *more])


def entries(rows: Sequence[tuple[str, str]]) -> str:
    """Lists what can be typed and, in a second column, what it means."""
    column = min(max(len(name.rstrip()) for name, _ in rows) + 4, _HELP_COLUMN)
    lines: list[str] = []
    for name, text in rows:
        wrapped = _wrapped(text, max(_columns() - 2 - column, 20))
        start = f"  {name.rstrip()}"
        if len(start) + 2 > column:
            lines.append(start)
            start = ""
        lines.append(f"{start:{column}}{wrapped[0]}")
        lines += [" " * column + line for line in wrapped[1:]]
    return "\n".join(lines)


def paragraphs(text: str, indent: str = "") -> str:
    """Wraps each paragraph of a text."""
    return "\n\n".join(
        "\n".join(f"{indent}{line}" for line in _wrapped(paragraph, _columns() - 2 - len(indent)))
        for paragraph in text.strip().split("\n\n")
    )


def _wrapped(text: str, width: int) -> list[str]:
    plain = " ".join(text.replace("``", "").split())
    return textwrap.wrap(plain, width, break_on_hyphens=False, break_long_words=False)


def _columns() -> int:
    return shutil.get_terminal_size().columns


def _paragraph(section: HelpSection) -> str:
    """The first paragraph of a section's docstring."""
    return inspect.cleandoc(section.kind.__doc__ or "").partition("\n\n")[0]


def _default(section: HelpSection, field: dataclasses.Field[Any]) -> str:
    if section.value is not None:
        value = getattr(section.value, field.name)
    elif field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return REQUIRED
    if value == ():
        return "empty"
    return " ".join(field_values.as_arguments(value)) or '""'


def _placeholder(annotation: Any) -> str:
    """What stands for a value of this type: ``INT``, ``{a,b}``, ``FLOAT|None``."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return "|".join(map(_placeholder, arguments))
    if origin is Literal:
        return "{" + ",".join(map(str, arguments)) + "}"
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return f"{_placeholder(arguments[0])} ..."
        return " ".join(map(_placeholder, arguments))
    known = {int: "INT", float: "FLOAT", bool: "{True,False}", str: "TEXT", type(None): "None"}
    return known.get(annotation, "VALUE")


@functools.cache
def docstrings(section: type[Any]) -> dict[str, str]:
    """The docstring below each field of a dataclass, those of its base classes included."""
    texts: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if not dataclasses.is_dataclass(kind):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, below in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                match below:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        texts[statement.target.id] = text
    return texts
