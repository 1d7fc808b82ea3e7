"""Argument parsing that the commands share."""

import argparse
import contextlib
import dataclasses
import difflib
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from jaxtrain import config, terminal
from jaxtrain.config import files, invocation, run_flags
from jaxtrain.errors import InputError, Stopped
from jaxtrain.storage.atomic import expanded


class _HelpFormatter(argparse.HelpFormatter):
    """Keeps the paragraphs of a description."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            super(_HelpFormatter, self)._fill_text(one, width, indent)
            for one in text.strip().split("\n\n")
        )


def _plain(docstring: str | None) -> str | None:
    """Returns a docstring without the markup of code."""
    return None if docstring is None else docstring.replace("``", "")


def _typed(parser: argparse.ArgumentParser) -> str:
    """The command of a parser as typed here."""
    return f"{invocation.program()} {parser.prog.removeprefix('jaxtrain ')}"


def parser(command: str, usage: str, description: str | None) -> argparse.ArgumentParser:
    """Makes a parser with ``--config`` and ``--json``; overrides are left to the config.

    Args:
        command: the command's name, such as "plan".
        usage: the usage, without "usage:".
        description: the command's docstring.
    """
    made = argparse.ArgumentParser(
        prog=f"jaxtrain {command}",
        usage=usage,
        description=_plain(description),
        formatter_class=_HelpFormatter,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )
    made.add_argument(
        "--config", metavar="NAME", help="a shipped config, or the path of a .py file"
    )
    add_json(made)
    return made


def add_ignored(parser: argparse.ArgumentParser, *without: str) -> None:
    """Accepts and ignores the flags of a run, so that a run's arguments can be pasted.

    Args:
        parser: the parser of a command.
        without: the flags that the command uses itself.
    """
    for flag in (f"--{name}" for name in run_flags.NAMES):
        if flag not in ("--config", *without):
            action = "store_true" if flag == "--debug" else "store"
            parser.add_argument(flag, action=action, help=argparse.SUPPRESS)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json``."""
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="also write the results to FILE, as JSON"
    )


def parse(
    parser: argparse.ArgumentParser, arguments: list[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Returns the flags, and the overrides of the config.

    Raises:
        InputError: a flag is wrong, or ``--config`` is missing.
    """
    try:
        flags, overrides = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise InputError(f"{error}; see {_typed(parser)} --help") from None
    _refuse_misspelled(parser, overrides)
    require_config(flags.config)
    return flags, overrides


def _refuse_misspelled(parser: argparse.ArgumentParser, overrides: list[str]) -> None:
    """Rejects arguments that resemble a flag of the command: the config would only suggest
    fields."""
    fields = {f"--{field.name}" for field in dataclasses.fields(config.Run)}
    for word in overrides:
        typed = word.partition("=")[0]
        if not typed.startswith("--") or "." in typed or typed in fields:
            continue
        if near := _near(parser, typed):
            raise InputError(f"{parser.prog}: unknown flag {typed}; did you mean {near}?")


def _near(parser: argparse.ArgumentParser, typed: str) -> str | None:
    """Returns the flag of a command that a misspelled one resembles, if any."""
    own = [flag for action in parser._actions for flag in action.option_strings]
    return next(iter(difflib.get_close_matches(typed, own, n=1, cutoff=0.75)), None)


def refuse_unknown(parser: argparse.ArgumentParser, rest: list[str]) -> None:
    """Rejects arguments that a command does not have.

    Raises:
        InputError: there are any; the message has the flag that the first one resembles.
    """
    if rest:
        near = _near(parser, rest[0].partition("=")[0])
        raise InputError(
            f"{parser.prog}: unknown argument {' '.join(rest)}; "
            + (f"did you mean {near}? see " if near else "see ")
            + f"{_typed(parser)} --help"
        )


def require_config(name: str | None) -> None:
    """Refuses a command line without ``--config``.

    Raises:
        InputError: the message has the command that lists the configs.
    """
    if not name:
        raise InputError(
            "--config is missing; try demo, demo_gpt, or demo_mlm; "
            f"{invocation.program()} configs list describes all {len(files.names())}"
        )


class _Parser(argparse.ArgumentParser):
    """Raises if an argument is missing; before Python 3.12 argparse would exit."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {_typed(self)} --help")


def bare_parser(command: str, usage: str, description: str | None) -> argparse.ArgumentParser:
    """Makes a parser for a command without ``--config``.

    Args:
        command: the command's name, such as "export".
        usage: the usage, without "usage:".
        description: the command's docstring.
    """
    return _Parser(
        prog=f"jaxtrain {command}",
        usage=usage,
        description=_plain(description),
        formatter_class=_HelpFormatter,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )


def add_precision(parser: argparse.ArgumentParser) -> None:
    """Adds ``--precision``."""
    parser.add_argument(
        "--precision",
        choices=("float32", "bfloat16"),
        default="float32",
        help="precision of the computation; bfloat16 is faster on GPUs (default: float32)",
    )


def own_config(text: str) -> config.Run:
    """Runs a config file, so that its model can be loaded; a type for argparse."""
    return config.named(text)


def add_config(parser: argparse.ArgumentParser) -> None:
    """Adds ``--config`` to a command that uses a trained model."""
    parser.add_argument(
        "--config",
        metavar="FILE.py",
        type=own_config,
        help="the config that it was trained with; only for your own model, which this file "
        "defines or imports",
    )


def parse_all(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace | None:
    """Returns the flags; for ``--help``, prints the help and returns None.

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
    refuse_unknown(parser, rest)
    return flags


def values_of(flag: str, arguments: list[str]) -> Iterator[str]:
    """Yields the values of a flag, typed as ``--flag VALUE`` or ``--flag=VALUE``, before parsing.

    So input can be checked before imports that take seconds.
    """
    for word, after in itertools.pairwise([*arguments, ""]):
        name, equals, value = word.partition("=")
        if name == flag and (value or after):
            yield value if equals else after


def named_file(text: str) -> Path:
    """Expands ~ in a path; a type for argparse."""
    return expanded(text)


@contextlib.contextmanager
def cleaning_up() -> Iterator[None]:
    """Makes SIGTERM raise Stopped, so that incomplete files are deleted and workers end."""

    def leave(number: int, _: Any) -> None:
        raise Stopped("SIGTERM")

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def resumable(finished: str) -> Iterator[None]:
    """Does the same for a command that can be repeated, and says so after SIGTERM or Ctrl-C.

    Args:
        finished: what is kept, such as "videos".
    """
    try:
        with cleaning_up():
            yield
    except (Stopped, KeyboardInterrupt):
        terminal.warn(
            f"stopped; finished {finished} are kept: start the same command again to continue"
        )
        raise
