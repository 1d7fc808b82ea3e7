"""How the commands that take a config read their command line."""

import argparse
from pathlib import Path

from jaxtrain import config_files
from jaxtrain.errors import InputError


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
        description=description,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )
    made.add_argument("--config", metavar="NAME", help="a shipped config, or a path to a .py file")
    made.add_argument(
        "--json", metavar="FILE", type=Path, help="write everything that was found there too"
    )
    return made


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
        raise InputError(f"{error}; see {parser.prog} --help") from None
    require_config(flags)
    return flags, overrides


def require_config(flags: argparse.Namespace) -> None:
    """Refuses a command line without ``--config``.

    Raises:
        InputError: names the configs.
    """
    if not flags.config:
        names = ", ".join(config_files.names())
        raise InputError(f"--config is missing; the configs are: {names}")
