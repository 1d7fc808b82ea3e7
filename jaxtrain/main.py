"""Runs the command line: ``jaxtrain train NAME`` trains, ``jaxtrain COMMAND`` runs a command.

Data worker processes import this module first, too. So it imports nothing heavy before it has
chosen the command, and no jax in workers.
"""

import atexit
import multiprocessing
import os
import sys

# In a spawned process, the name is already set here, and parent_process() is not yet.
if multiprocessing.current_process().name != "MainProcess":
    from jaxtrain.jobs import worker_process

    worker_process.begin_without_jax()

from jaxtrain import terminal
from jaxtrain.cli import COMMAND_GROUPS, COMMANDS, train
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.errors import INTERRUPTED, RUN_AGAIN, WRONG_USE, InputError, RunAgain, Stopped
from jaxtrain.xla import platform


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line and returns its exit code.

    0 done, 1 unexpected error or problems found (by doctor, checkpoints or bench, or in some inputs
    of prepare, encode or decode), 2 wrong usage or invalid input, 3 a plan does not fit, 4 a gate
    or canary ended the run, 20 to 24 the verdict of compare, 75 temporary failure (such as SIGTERM,
    a hang or a full disk), 130 Ctrl-C, 134 ended by jax because another process is gone, 141 output
    pipe closed.
    """
    arguments = _with_flags(sys.argv[1:] if arguments is None else arguments)
    platform.use_cpu_without_driver(os.environ)
    try:
        if arguments and not arguments[0].startswith("-"):
            return _command(arguments[0], arguments[1:])
        with StopSignals() as signals:
            return train.main(arguments, signals, COMMAND_GROUPS)
    except InputError as error:
        terminal.fail(error)
        return WRONG_USE
    except RunAgain as error:
        terminal.fail(error)
        return RUN_AGAIN
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "jaxtrain":
            raise
        terminal.warn(
            f"error: {error.name} is not installed for {sys.executable}: activate the environment "
            "that has jaxtrain, or run its interpreter (.venv/bin/python)"
        )
        return WRONG_USE
    except Stopped as stopped:
        return stopped.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or it recurs at exit
        return 141


def _with_flags(arguments: list[str]) -> list[str]:
    """Spells ``train NAME``, ``help [COMMAND]`` and ``version`` with flags, as scripts do."""
    match arguments:
        case ["train", name, *rest] if not name.startswith("-"):
            return ["--config", name, *rest]
        case ["train", *rest]:
            return rest or ["--help"]
        case ["help", *rest]:
            return [*_with_flags(rest), "--help"]
        case ["version", *rest]:
            return ["--version", *rest]
    return arguments


def _command(name: str, arguments: list[str]) -> int:
    if name not in COMMANDS:
        raise InputError(f"unknown command {name!r}; {_hint(name)}")
    from jaxtrain.cli import command_line

    try:
        return command_line.run(name, arguments)
    except (BrokenPipeError, ConnectionError):
        raise
    except OSError as error:  # of a file or disk, not handled by the command
        if error.strerror is None:
            raise
        from jaxtrain.storage import disks

        path = error.filename or "a file"
        text = f"{name}: {path} cannot be read or written: {error.strerror}"
        if disks.is_full(error):
            raise RunAgain(f"{text}; free space there, or write to another disk") from error
        raise InputError(text) from error


def _hint(name: str) -> str:
    """Returns what a word that is not a command probably meant."""
    from jaxtrain.config import field_values, files, invocation

    train_with = f"{invocation.program()} train"
    if name in files.names():
        return f"to train this config: {train_with} {name}"
    near = field_values.close_to(name, [*COMMANDS, *files.names(), "train", "help", "version"])
    if not near:
        return f"the commands are train, {', '.join(COMMANDS)}"
    return f"did you mean {f'train {near[0]}' if near[0] in files.names() else near[0]}?"


def console() -> None:
    """The ``jaxtrain`` console script."""
    _open_closed_streams()
    terminal.escape_unwritable()
    sys.excepthook = terminal.show_error
    code = main()
    if code in (INTERRUPTED, RUN_AGAIN):
        # An abandoned compilation continues in XLA's threads, and XLA crashes if it is torn down
        # during it (jaxlib 0.10.2). Python joins its own threads and then calls this.
        atexit.register(_end, code)
    sys.exit(code)


def _open_closed_streams() -> None:
    """Connects standard streams that are closed, as under cron, to the null device.

    Otherwise Python has None in their place, and the first file that is opened gets their number:
    what a library prints would be written into it.
    """
    for number, mode in enumerate("rww"):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(number, True)  # for worker processes
            stream = open(number, mode, closefd=False)  # noqa: SIM115
            setattr(sys, ("stdin", "stdout", "stderr")[number], stream)


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    console()
