"""The command line: ``python -m jaxtrain.main --config NAME`` trains; a command first does that.

Grain's worker processes import this module again, so it imports nothing heavy until it knows what
to do.
"""

import argparse
import importlib
import os
import shlex
import shutil
import sys

from jaxtrain.errors import InputError, RunAgain
from jaxtrain.signals import INTERRUPTED, RUN_AGAIN, WRONG_USE, Stopped, StopSignals

COMMANDS = {
    "bench": "measure a config on the devices at hand: start, steps, pipeline, memory, saves",
    "checkpoints": "list and verify a run's checkpoints; which one a resume would take",
    "configs": "list the configs, show one whole, or compare two",
    "doctor": "is this machine, this cluster and this data fit for a config?",
    "prepare": "cut videos into pieces once; compute a teacher's latents once",
    "plan": "memory, traffic, time and money of a config on GPUs, without any",
}

FLAGS_HELP = """\
jaxtrain --config NAME [flags] [--section.field value ...]
       jaxtrain COMMAND ...
"""


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line and returns its exit code.

    0 done, 1 doctor or checkpoints have found problems, 2 wrong use or input, 3 a plan does not
    fit, 75 run me again (preempted, hung, a full disk), 130 Ctrl-C, 141 nobody reads what it
    prints.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments and not arguments[0].startswith("-"):
            return _command(arguments[0], arguments[1:])
        with StopSignals() as signals:
            return _train(arguments, signals)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USE
    except RunAgain as error:
        print(f"error: {error}", file=sys.stderr)
        return RUN_AGAIN
    except Stopped as stopped:
        return stopped.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else again at exit
        return 141


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


def _command(name: str, arguments: list[str]) -> int:
    if name not in COMMANDS:
        from jaxtrain import overrides

        raise InputError(f"no command {name!r}; {overrides.did_you_mean(name, COMMANDS)}")
    module = importlib.import_module(f"jaxtrain.commands.{name}")
    code: int = module.main(arguments)
    return code


def _train(arguments: list[str], signals: StopSignals) -> int:
    parser = flags_parser()
    try:
        parser.exit_on_error = False
        flags, overrides = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise InputError(f"{error}; see jaxtrain --help") from None
    if flags.version:
        from jaxtrain import versions

        print(versions.line())
        return 0
    if (flags.help and not flags.config) or not arguments:
        parser.print_help()
        print("\ncommands:\n" + "\n".join(f"  {name}  {what}" for name, what in COMMANDS.items()))
        return 0
    from jaxtrain import config
    from jaxtrain.commands import command_line

    command_line.require_config(flags)
    if flags.help:
        parser.print_help()
        config.print_help(config.load(flags.config, []))
        return 0
    run = config.load(flags.config, overrides)
    if flags.debug:
        os.environ.setdefault("NCCL_DEBUG", "INFO")
    from jaxtrain import loop, profiling

    return loop.start(
        run,
        loop.Flags(
            output_dir=flags.output_dir,
            resume=flags.resume,
            simulate_devices=flags.simulate_devices,
            debug=flags.debug,
            profile=profiling.span(flags.profile),
            program=_program(),
            arguments=tuple(arguments),
        ),
        signals,
    )


def _program() -> str:
    """What one types before the arguments, in this directory."""
    return f"{shlex.quote(_python())} -m jaxtrain.main"


def _python() -> str:
    """The shortest name under which a shell here finds this Python."""
    found = shutil.which("python")
    if found and os.path.abspath(found) == sys.executable:
        return "python"
    beside = os.path.relpath(sys.executable)
    return sys.executable if beside.startswith("..") else beside


def console() -> None:
    """The ``jaxtrain`` console script."""
    sys.exit(main())


if __name__ == "__main__":
    console()
