"""Flags and positional arguments of commands, as fields of a dataclass."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from jaxtrain.cli import flags
from jaxtrain.config.bounds import Bounds
from jaxtrain.config.run_flags import UNTYPED
from jaxtrain.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shared:
    precision: Literal["float32", "bfloat16"] = "float32"
    """precision"""


@dataclasses.dataclass(frozen=True)
class Command(Shared):
    source: Path | None
    """the source"""
    texts: Annotated[tuple[str, ...], "TEXT"]
    """the texts"""
    _: dataclasses.KW_ONLY
    data: Annotated[str, "PATH"]
    """required"""
    top_k: Annotated[int | None, "K", Bounds(least=1)] = None
    """a number"""
    track: Annotated[tuple[str, ...], "NAME"] = ()
    """repeated"""
    debug: bool = False
    """without a value"""
    arguments: tuple[str, ...] = dataclasses.field(default=(), metadata=UNTYPED)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfConfig:
    config: Annotated[str, "NAME"] = ""
    """a config"""
    fit: bool = False
    """without a value"""
    overrides: tuple[str, ...] = dataclasses.field(default=(), metadata=UNTYPED)


def changed(kind: type[Any], *arguments: str) -> dict[str, Any]:
    """Returns the fields that are not their defaults."""
    parsed, problems = flags.parse(kind, "do", arguments)
    assert not problems
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    found = {name: value for name, value in vars(parsed).items() if value != defaults[name]}
    return {name: value for name, value in found.items() if name != "arguments" and value}


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("a --data d", {"texts": ("a",)}),
        ("src a --data d", {"source": Path("src"), "texts": ("a",)}),
        ("src --data=d a b", {"source": Path("src"), "texts": ("a", "b")}),
        ("--top-k 2 a --data d", {"texts": ("a",), "top_k": 2}),
        ("a --top_k=2k --data d", {"texts": ("a",), "top_k": 2000}),
        ("a --top-k 2 --top-k 3 --data d", {"texts": ("a",), "top_k": 3}),
        ("a --track x --track y,z --data d", {"texts": ("a",), "track": ("x", "y,z")}),
        ("--debug a --data d", {"texts": ("a",), "debug": True}),
        ("a --precision bfloat16 --data d", {"texts": ("a",), "precision": "bfloat16"}),
        ("--data d -- --a", {"texts": ("--a",)}),
        ("-1 --data d", {"texts": ("-1",)}),
    ],
)
def test_arguments_are_parsed(typed: str, expected: dict[str, Any]) -> None:
    assert changed(Command, *typed.split()) == {"data": "d"} | expected


def test_a_text_with_a_space_is_not_a_flag() -> None:
    assert changed(Command, "--so it goes", "--data", "d")["texts"] == ("--so it goes",)


@pytest.mark.parametrize(
    ("typed", "overrides"),
    [
        ("demo --a.b 1 2 --fit", ("--a.b", "1", "2")),
        ("--a.b=1 --fit --config demo --seed -1", ("--a.b=1", "--seed", "-1")),
        ("--fit demo --xyz", ("--xyz",)),
    ],
)
def test_fields_of_a_config_are_left_to_it(typed: str, overrides: tuple[str, ...]) -> None:
    expected = {"config": "demo", "fit": True, "overrides": overrides}
    assert changed(OfConfig, *typed.split()) == expected


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        ("a --data d --top-k 0", ["--top-k 0: use at least 1"]),
        ("a --data d --top-k x", ["--top-k takes a whole number, not 'x'"]),
        ("a --data d --top-k --debug", ["--top-k needs a value: K"]),
        ("a --data d --debug=1", ["--debug takes no value, not '1'"]),
        ("a --data d --tpo-k 3", ["do: unknown flag --tpo-k; did you mean --top-k?"]),
        ("a --data d --top-k x --debg", ["did you mean --debug?", "--top-k takes"]),
        ("a", ["do: missing --data PATH; see "]),
        ("", ["do: missing TEXT and --data PATH; see "]),
        ("a --data", ["--data needs a value: PATH"]),
    ],
)
def test_all_wrong_arguments_are_named(typed: str, messages: list[str]) -> None:
    try:
        _, problems = flags.parse(Command, "do", typed.split())
    except InputError as error:
        problems = list(error.messages)
    assert len(problems) == len(messages)
    for message, part in zip(problems, messages, strict=True):
        assert part in message


def test_flags_of_base_classes_come_last() -> None:
    names = [flag.name for flag in flags.of(Command)]
    assert names[:2] == ["SOURCE", "TEXT"]
    assert names[2:] == ["--data", "--top-k", "--track", "--debug", "--precision"]
