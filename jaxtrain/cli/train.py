"""``jaxtrain train NAME``, or ``--config NAME``: trains. Also prints the help and the version.

Like :mod:`jaxtrain.main`, it imports nothing heavy until it knows what to do.
"""

import argparse
import functools
import os
import textwrap
from collections.abc import Mapping, Sequence

from jaxtrain.distributed.signals import StopSignals
from jaxtrain.errors import InputError
from jaxtrain.storage import addresses

Groups = Mapping[str, Mapping[str, str]]
"""Task -> command -> one line of help."""

_USAGE = """\
jaxtrain train NAME [--section.field VALUE ...] | jaxtrain COMMAND ..."""
_DEMO = "demo"  # the config that --help SECTION describes where none is given


def main(arguments: list[str], signals: StopSignals, groups: Groups) -> int:
    """Trains, and returns the exit code.

    Args:
        arguments: the command line, without the program.
        signals: entered.
        groups: the commands, for the help.

    Raises:
        InputError: wrong use or input.
        RunAgain: something outside of jaxtrain is full or temporarily missing.
    """
    parser = flags_parser()
    try:
        parser.exit_on_error = False
        flags, settings = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        from jaxtrain.config import invocation

        raise InputError(f"{error}; see {invocation.program()} --help") from None
    asked = vars(flags)
    name, sections, version = (asked.pop(one) for one in ("config", "help", "version"))
    if version:
        from jaxtrain import versions

        print(versions.line())
        return 0
    if not arguments or (sections == [] and not name):
        print(_program_help(groups))
        return 0
    if sections is not None:
        print(_config_help(name, sections, groups))
        return 0
    from jaxtrain import config
    from jaxtrain.cli import command_line
    from jaxtrain.config import overrides

    command_line.require_config(name)
    run, wrong = overrides.apply_fitting(config.named(name), settings)
    if run is None:
        raise InputError(*wrong)
    if flags.debug:
        os.environ.setdefault("NCCL_DEBUG", "INFO")
    from jaxtrain.telemetry import tracker
    from jaxtrain.training import preflight, session

    asked["track"] = tracker.names(flags.track)
    typed = preflight.Flags(**asked, arguments=addresses.scrubbed(tuple(arguments)))
    preflight.refuse(run, typed, wrong)
    return session.start(run, typed, signals)


def flags_parser() -> argparse.ArgumentParser:
    """The flags that are not config fields; a test freezes this list.

    All but ``--config``, ``--version`` and ``--help`` are attributes of
    :class:`jaxtrain.training.preflight.Flags` as well.
    """
    parser = argparse.ArgumentParser(
        prog="jaxtrain",
        usage=_USAGE,
        add_help=False,
        allow_abbrev=False,
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=30),
    )
    add = parser.add_argument_group("flags").add_argument
    add("--config", metavar="NAME", help="a shipped config, or the path of a .py file")
    add(
        "--output-dir",
        metavar="DIR",
        help="run directory, or s3:// or gs:// (default: output/NAME/<UTC time>)",
    )
    add(
        "--resume",
        metavar="latest|STEP|PATH",
        help="resume from the latest checkpoint, from a step, or from another run",
    )
    add(
        "--simulate-devices",
        metavar="N",
        type=int,
        help="run on N virtual CPU devices, to try a mesh without GPUs",
    )
    add(
        "--debug",
        action="store_true",
        help="check for NaNs, disable buffer donation, log collectives",
    )
    add("--profile", metavar="START:STOP", help="write a profiler trace of these steps")
    add(
        "--track",
        metavar="NAME",
        action="append",
        default=[],
        help="also record the run with wandb, trackio, or mlflow; repeat the flag for several",
    )
    add("--version", action="store_true", help="print the versions of jaxtrain and its libraries")
    add(
        "--help",
        "-h",
        nargs="*",
        metavar="SECTION",
        help="print this help, or the fields of sections, such as --help optim data",
    )
    return parser


def _program_help(groups: Groups) -> str:
    """The commands by task, on one screen of 80 columns."""
    rows = [("Train", "train NAME", "train a config; try demo, demo_gpt, or demo_mlm")]
    for task, commands in groups.items():
        rows += [
            ("" if number else task, name, text)
            for number, (name, text) in enumerate(commands.items())
        ]
    flags = [action.option_strings[0] for action in flags_parser()._actions[1:]]
    more = (
        f"Run flags: {', '.join(flags)}.",
        "Details: train demo --help, COMMAND --help, or --help SECTION, such as optim.",
    )
    return "\n".join(
        (
            f"usage: {_USAGE}",
            "",
            *(f"{task:16}{name:15}{text}" for task, name, text in rows),
            "",
            *(
                textwrap.fill(one, 80, subsequent_indent="  ", break_on_hyphens=False)
                for one in more
            ),
        )
    )


def _config_help(name: str | None, names: Sequence[str], groups: Groups) -> str:
    """The flags and sections of a config, or the fields of the named sections."""
    for one in names:
        if any(one in commands for commands in groups.values()):
            raise InputError(f"{one} is a command, not a section: use {one} --help")
    from jaxtrain import config
    from jaxtrain.config import help as config_help

    run = config.named(name or _DEMO)
    if names:
        text = config_help.fields(run, names)
        note = "" if name else f"\n\nDefaults are those of --config {_DEMO}."
        return text + note
    return "\n".join(
        (
            flags_parser().format_help(),
            f"sections of {run.name} (fields: --help SECTION ..., or --help all):",
            config_help.overview(run),
        )
    )
