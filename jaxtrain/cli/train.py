"""``jaxtrain --config NAME``: trains. Its flags, and what stands before a run.

It imports nothing heavy until it knows what to do, as :mod:`jaxtrain.main` imports it.
"""

import argparse
import functools
import os
from collections.abc import Mapping

from jaxtrain.distributed.signals import StopSignals
from jaxtrain.errors import InputError
from jaxtrain.storage import addresses

FLAGS_HELP = """\
jaxtrain --config NAME [flags] [--section.field value ...]
       jaxtrain COMMAND ...
"""


def main(arguments: list[str], signals: StopSignals, commands: Mapping[str, str]) -> int:
    """Trains, and returns the exit code.

    Args:
        arguments: of the command line.
        signals: entered.
        commands: name -> what it does; of the help.

    Raises:
        InputError: wrong use or input.
        RunAgain: something outside of this program is full or not there.
    """
    parser = flags_parser()
    try:
        parser.exit_on_error = False
        flags, settings = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        from jaxtrain.config import invocation

        raise InputError(f"{error}; see {invocation.program()} --help") from None
    if flags.version:
        from jaxtrain import versions

        print(versions.line())
        return 0
    if (flags.help and not flags.config) or not arguments:
        parser.print_help()
        print("\ncommands:\n" + "\n".join(f"  {name}  {what}" for name, what in commands.items()))
        return 0
    from jaxtrain import config
    from jaxtrain.cli import command_line
    from jaxtrain.config import overrides

    command_line.require_config(flags)
    if flags.help:
        parser.print_help()
        config.print_help(config.load(flags.config, []))
        return 0
    run, wrong = overrides.apply_fitting(config.named(flags.config), settings)
    if run is None:
        raise InputError(*wrong)
    if flags.debug:
        os.environ.setdefault("NCCL_DEBUG", "INFO")
    from jaxtrain.planning import relief
    from jaxtrain.training import preflight, session

    typed = preflight.Flags(
        output_dir=flags.output_dir,
        resume=flags.resume,
        simulate_devices=flags.simulate_devices,
        debug=flags.debug,
        profile=flags.profile,
        arguments=addresses.scrubbed(tuple(arguments)),
    )
    preflight.refuse(run, typed, wrong)
    return session.start(
        run, typed, signals, functools.partial(relief.find, flags.config, settings)
    )


def flags_parser() -> argparse.ArgumentParser:
    """The flags that are no fields of a config; a test freezes this list."""
    parser = argparse.ArgumentParser(
        prog="jaxtrain", usage=FLAGS_HELP, add_help=False, allow_abbrev=False
    )
    add = parser.add_argument
    add("--config", metavar="NAME", help="a shipped config, or a path to a .py file")
    add("--output-dir", metavar="DIR", help="the run's directory (output/NAME/<UTC time>)")
    add(
        "--resume",
        metavar="latest|STEP|PATH",
        help="go on from a checkpoint of this directory, or of another run",
    )
    add(
        "--simulate-devices",
        metavar="N",
        type=int,
        help="N virtual CPU devices, for trying a mesh without GPUs",
    )
    add("--debug", action="store_true", help="NaN checks, no donation, verbose collectives")
    add("--profile", metavar="START:STOP", help="a profiler trace of those steps")
    add("--version", action="store_true", help="versions of jaxtrain and what it stands on")
    add("--help", "-h", action="store_true", help="this text; with --config, every field too")
    return parser
