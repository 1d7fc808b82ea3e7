"""How the commands read their command line."""

import argparse
import contextlib
import dataclasses
import difflib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from jaxtrain import config
from jaxtrain.config import files, invocation
from jaxtrain.errors import InputError
from jaxtrain.storage.atomic import expanded


def _plain(docstring: str | None) -> str | None:
    """Without the marks of code."""
    return None if docstring is None else docstring.replace("``", "")


def _typed(parser: argparse.ArgumentParser) -> str:
    """A parser's command as one types it here."""
    return f"{invocation.program()} {parser.prog.removeprefix('jaxtrain ')}"


def parser(command: str, usage: str, description: str | None) -> argparse.ArgumentParser:
    """A parser with ``--config`` and ``--json``, which leaves overrides to the config.

    Args:
        command: as "plan".
        usage: without "usage:".
        description: the command's docstring.
    """
    made = argparse.ArgumentParser(
        prog=f"jaxtrain {command}",
        usage=usage,
        description=_plain(description),
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )
    made.add_argument("--config", metavar="NAME", help="a shipped config, or a path to a .py file")
    add_json(made)
    return made


def add_ignored(parser: argparse.ArgumentParser, *without: str) -> None:
    """The flags of a run, ignored, so that a run's command line can be pasted behind a command.

    Args:
        parser: takes them.
        without: those that the command uses itself.
    """
    for flag in ("--output-dir", "--resume", "--profile", "--simulate-devices"):
        if flag not in without:
            parser.add_argument(flag, help=argparse.SUPPRESS)
    parser.add_argument("--debug", action="store_true", help=argparse.SUPPRESS)


def add_json(parser: argparse.ArgumentParser) -> None:
    """``--json``."""
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write everything that was found there too"
    )


def parse(
    parser: argparse.ArgumentParser, arguments: list[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Flags, and overrides of the config.

    Raises:
        InputError: a flag is wrong, or no config is named.
    """
    try:
        flags, overrides = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise InputError(f"{error}; see {_typed(parser)} --help") from None
    _refuse_misspelled(parser, overrides)
    require_config(flags.config)
    return flags, overrides


def _refuse_misspelled(parser: argparse.ArgumentParser, overrides: list[str]) -> None:
    """Refuses what resembles a flag of the command: the config would only suggest its fields."""
    fields = {f"--{field.name}" for field in dataclasses.fields(config.Run)}
    own = [flag for action in parser._actions for flag in action.option_strings]
    for word in overrides:
        typed = word.partition("=")[0]
        if not typed.startswith("--") or "." in typed or typed in fields:
            continue
        near = difflib.get_close_matches(typed, own, n=1, cutoff=0.75)
        if near:
            raise InputError(f"{parser.prog}: unknown flag {typed}; did you mean {near[0]}?")


def require_config(name: str | None) -> None:
    """Refuses a command line without ``--config``.

    Raises:
        InputError: lists the configs.
    """
    if not name:
        names = ", ".join(files.names())
        raise InputError(f"--config is missing; the configs are: {names}")


class _Parser(argparse.ArgumentParser):
    """Until Python 3.12 argparse ends the program where an argument is missing."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {_typed(self)} --help")


def bare_parser(command: str, usage: str, description: str | None) -> argparse.ArgumentParser:
    """A parser for a command that takes no config.

    Args:
        command: as "export".
        usage: without "usage:".
        description: the command's docstring.
    """
    return _Parser(
        prog=f"jaxtrain {command}",
        usage=usage,
        description=_plain(description),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )


def add_precision(parser: argparse.ArgumentParser) -> None:
    """``--precision``."""
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the computation (float32); bfloat16 is faster on GPUs",
    )


def parse_all(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace | None:
    """Flags; None if only help was asked for, which is printed.

    Raises:
        InputError: a flag is wrong, missing or unknown.
    """
    if not arguments or "--help" in arguments or "-h" in arguments:
        parser.print_help()
        return None
    try:
        flags, rest = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise InputError(f"{error}; see {_typed(parser)} --help") from None
    if rest:
        raise InputError(
            f"{parser.prog} does not know {' '.join(rest)}; see {_typed(parser)} --help"
        )
    return flags


def named_file(text: str) -> Path:
    """A path, with ~ for the home folder; a type for argparse."""
    return expanded(text)


@contextlib.contextmanager
def cleaning_up() -> Iterator[None]:
    """SIGTERM leaves through the finally clauses, so that no half file stays."""

    def leave(number: int, _: Any) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
