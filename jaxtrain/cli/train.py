"""``jaxtrain train NAME``, or ``--config NAME``: trains. Also prints the help and the version.

Like :mod:`jaxtrain.main`, it imports nothing heavy until it knows what to do.
"""

import dataclasses
import itertools
import os
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.distributed.signals import StopSignals
from jaxtrain.errors import INTERRUPTED, InputError, Stopped
from jaxtrain.jobs.subprocess_worker import Send
from jaxtrain.storage import addresses

Groups = Mapping[str, Mapping[str, str]]
"""Task -> command -> one line of help."""

USAGE, _COMMAND = "train NAME [--section.field VALUE ...]", "COMMAND ..."
_DEMO = "demo"  # the config that --help SECTION describes where none is given
_HELP = ("--help", "-h")
_MORE = (
    ("--version", "print the versions of jaxtrain and its libraries"),
    (
        "--help, -h [SECTION ...]",
        "print this help, or the fields of sections, such as --help optim data",
    ),
)


def main(arguments: list[str], signals: StopSignals, groups: Groups) -> int:
    """Trains, and returns the exit code."""
    if "--version" in arguments:
        from jaxtrain import versions

        print(versions.line())
        return 0
    if not arguments or not set(_HELP).isdisjoint(arguments):
        print(_help(arguments, groups))
        return 0
    from jaxtrain import config
    from jaxtrain.cli import command_line, flags
    from jaxtrain.config import overrides
    from jaxtrain.config.run_flags import RunFlags

    run_flags, problems = flags.parse(RunFlags, "train", arguments)
    command_line.require_config(run_flags.config)
    run, misfits = overrides.apply_fitting(config.named(run_flags.config), run_flags.overrides)
    problems += misfits
    if run is None:
        raise InputError(*problems)
    if run_flags.debug:
        os.environ.setdefault("NCCL_DEBUG", "INFO")
    from jaxtrain.telemetry import tracker
    from jaxtrain.training import preflight, session

    run_flags = dataclasses.replace(
        run_flags,
        track=tracker.names(run_flags.track),
        arguments=addresses.scrubbed(tuple(arguments)),
    )
    preflight.refuse(run, run_flags, problems)
    return session.start(run, run_flags, signals)


def in_worker(request: dict[str, Any], send: Send) -> None:
    """Trains in a process of its own, for ``compare``; sends ``{"code": exit code}``.

    Args:
        request: ``arguments``, as of the command line.
        send: receives the message.
    """
    from jaxtrain.jobs import worker_process

    with worker_process.started_by_us(), StopSignals() as signals:
        try:
            code = main(request["arguments"], signals, {})
        except Stopped as stopped:
            code = stopped.code
        except KeyboardInterrupt:
            code = INTERRUPTED
    send({"code": code})


def all_flags() -> list[str]:
    """Returns all that a run takes beside the fields of its config."""
    from jaxtrain.config import run_flags

    return [*run_flags.FLAGS, "--version", *_HELP]


def _help(arguments: Sequence[str], groups: Groups) -> str:
    from jaxtrain import config
    from jaxtrain.cli import flags
    from jaxtrain.cli import help as config_help
    from jaxtrain.config.run_flags import RunFlags

    at = next((at for at, word in enumerate(arguments) if word in _HELP), 0)
    after = arguments[at + 1 :]
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), after))
    run_flags, _ = flags.parse(RunFlags, "train", [*arguments[:at], *after[len(names) :]])
    if not run_flags.config and not names:
        return _program_help(groups)
    for name in names:
        if any(name in commands for commands in groups.values()):
            raise InputError(f"{name} is a command, not a section: use {name} --help")
    run = config.named(run_flags.config or _DEMO)
    if names:
        note = "" if run_flags.config else f"\n\nDefaults are those of {_DEMO}."
        return config_help.fields(run, names) + note
    return "\n".join(
        (
            config_help.usage((USAGE, _COMMAND)),
            f"\nflags:\n{config_help.of_flags(RunFlags, flags.of(RunFlags), _MORE)}",
            f"\nsections of {run.name} (fields: --help SECTION ..., or --help all):",
            config_help.overview(run),
        )
    )


def _program_help(groups: Groups) -> str:
    rows = [("Train", "train NAME", "train a config; try demo, demo_gpt, or demo_mlm")]
    for task, commands in groups.items():
        rows += [
            ("" if number else task, name, text)
            for number, (name, text) in enumerate(commands.items())
        ]
    more = (
        f"Run flags: {', '.join(all_flags()[:-1])}.",
        "Details: train demo --help, COMMAND --help, or --help SECTION, such as optim.",
    )
    return "\n".join(
        (
            f"usage: jaxtrain {USAGE} | jaxtrain {_COMMAND}",
            "",
            *(f"{task:16}{name:15}{text}" for task, name, text in rows),
            "",
            *(
                textwrap.fill(paragraph, 80, subsequent_indent="  ", break_on_hyphens=False)
                for paragraph in more
            ),
        )
    )
