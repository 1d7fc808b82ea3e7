"""Runs a command: its help, its flags, its module; and what commands share."""

import contextlib
import dataclasses
import importlib
import shlex
import signal
from collections.abc import Iterator, Sequence
from typing import Any

from jaxtrain import config, terminal
from jaxtrain.cli import flags, help
from jaxtrain.cli.commands import TABLE, Command, Json, OfConfig, OfModel
from jaxtrain.config import field_values, files, invocation
from jaxtrain.config.run_flags import RunFlags
from jaxtrain.errors import InputError, Stopped
from jaxtrain.storage import atomic

_HELP = {"--help", "-h"}


def run(name: str, arguments: Sequence[str]) -> int:
    """Runs a command, or prints its help, and returns the exit code."""
    command, own_arguments = name, list(arguments)
    if own_arguments and f"{name} {own_arguments[0]}" in TABLE:
        command, own_arguments = f"{name} {own_arguments[0]}", own_arguments[1:]
    if command not in TABLE:
        return _group(name, own_arguments)
    kind = TABLE[command]
    if not arguments or not _HELP.isdisjoint(own_arguments):
        terminal.out(help.command(kind, kind.usages or (_usage(command),)))
        return 0
    parsed = parse(command, own_arguments)
    if isinstance(parsed, Json):
        atomic.check_writable("--json", parsed.json)
    if isinstance(parsed, OfModel) and parsed.config is not None:
        config.named(parsed.config)  # runs the file, so that its model can be loaded
    module = importlib.import_module(f"jaxtrain.cli.{kind.module or name}")
    code: int = module.main(parsed)
    return code


def _group(name: str, arguments: Sequence[str]) -> int:
    actions = [command for command in TABLE if command.startswith(f"{name} ")]
    if arguments and arguments[0] not in _HELP:
        hint = field_values.did_you_mean(arguments[0], [action.split()[1] for action in actions])
        raise InputError(f"{name}: unknown action '{arguments[0]}'; {hint}")
    terminal.out(help.usage(map(_usage, actions)))
    terminal.out(f"\n{help.entries([(action, _summary(TABLE[action])) for action in actions])}")
    terminal.out("\nFor the flags of a command, add --help to it.")
    return 0


def _summary(kind: type[Command]) -> str:
    return (kind.__doc__ or "").partition("\n")[0].removesuffix(".")


def _usage(command: str) -> str:
    kind = TABLE[command]
    usage = [command, *(["NAME"] if issubclass(kind, OfConfig) else [])]
    for flag in flags.of(kind):
        if flag.positional:
            usage.append(f"{flag.name} [{flag.name} ...]" if flag.many else flag.name)
            if not flag.required:
                usage[-1] = f"[{flag.name}]"
        elif flag.required:
            usage.append(f"{flag.name} {flag.metavar}")
    if any(not flag.positional and not flag.required for flag in flags.of(kind)):
        usage.append("[flags]")
    return " ".join(usage + (["[--section.field VALUE ...]"] if issubclass(kind, OfConfig) else []))


def parse(command: str, arguments: Sequence[str]) -> Any:
    """Returns the flags of a command."""
    kind = TABLE[command]
    pasted = issubclass(kind, OfConfig) and kind.takes_run_flags
    ignored = flags.of(RunFlags) if pasted else []
    parsed, problems = flags.parse(kind, command, arguments, ignored)
    if problems:
        raise InputError(*problems)
    if isinstance(parsed, OfConfig):
        require_config(parsed.config)
    return parsed


def require_config(name: str | None) -> None:
    """Refuses a command line without a config."""
    if not name:
        raise InputError(
            "the name of a config is missing; try demo, demo_gpt, or demo_mlm; "
            f"{invocation.program()} configs list describes all {len(files.names())}"
        )


@contextlib.contextmanager
def cleaning_up() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise Stopped, so that incomplete files are deleted and workers end.

    A closed terminal or connection sends SIGHUP, unless ``nohup`` started the command.
    """

    def leave(number: int, _: Any) -> None:
        raise Stopped("SIGHUP" if number == signal.SIGHUP else "SIGTERM")

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if number != signal.SIGHUP or handler != signal.SIG_IGN:
            signal.signal(number, leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextlib.contextmanager
def resumable(finished: str) -> Iterator[None]:
    """Does the same for a command that can be repeated, and says so after a signal.

    Args:
        finished: what is kept, such as "videos".
    """
    try:
        with cleaning_up():
            yield
    except (Stopped, KeyboardInterrupt):
        with contextlib.suppress(OSError):  # the terminal is closed
            terminal.warn(
                f"stopped; finished {finished} are kept: start the same command again to continue"
            )
        raise


def refuse(command: Command, names: Sequence[str], reason: str) -> None:
    """Refuses flags that have no effect.

    Raises:
        InputError: one of these fields has another value than its default.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(command)}
    for name in names:
        if (value := getattr(command, name)) != defaults[name]:
            text = shlex.join(value) if isinstance(value, tuple) else value
            raise InputError(f"--{name.replace('_', '-')} {text}: {reason}; omit the flag")
