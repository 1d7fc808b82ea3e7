"""The command line: ``python -m jaxtrain.main --config NAME`` trains; a command first does that.

Processes that load data import this module again, before anything else. So it imports nothing
heavy until it knows what to do, and there it keeps jax away.
"""

import atexit
import importlib
import multiprocessing
import os
import sys

# A process that was spawned has its name before it imports this, and its parent only afterwards.
if multiprocessing.current_process().name != "MainProcess":
    from jaxtrain.data import worker_process

    worker_process.begin_without_jax()

from jaxtrain import terminal
from jaxtrain.cli import train
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.errors import INTERRUPTED, RUN_AGAIN, WRONG_USE, InputError, RunAgain, Stopped

COMMANDS = {
    "bench": "measure a config on the devices at hand: start, steps, pipeline, memory, saves",
    "checkpoints": "list and verify a run's checkpoints; which one a resume would take",
    "configs": "list the configs, show one whole, or compare two",
    "decode": "latents of a video to a video",
    "doctor": "is this machine, this cluster and this data fit for a config?",
    "encode": "a video to its latents",
    "evaluate": "quality of autoencoders on the same videos; of a language model on a text",
    "export": "weights out, under the names of the program that the model comes from",
    "fill": "the likeliest words for each [MASK] of a text",
    "generate": "a causal language model goes on with a text",
    "import": "published weights in: checks them and says which model they are",
    "plan": "memory, traffic, time and money of a config on GPUs, without any",
    "prepare": "once, before a run: videos cut, text tokenised, a teacher's latents computed",
    "report": "a run, or several side by side, as one HTML page",
    "reconstruct": "a video, any length, through an autoencoder and back",
}


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line and returns its exit code.

    0 done, 1 an error that nobody foresaw, or what a command has found (doctor and checkpoints
    problems, bench a failure), 2 wrong use or input, 3 a plan does not fit, 75 run me again
    (preempted, hung, a full disk), 130 Ctrl-C, 141 nobody reads what it prints.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if arguments and not arguments[0].startswith("-"):
            return _command(arguments[0], arguments[1:])
        with StopSignals() as signals:
            return train.main(arguments, signals, COMMANDS)
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
            "that jaxtrain was installed into, or name its python (.venv/bin/python)"
        )
        return WRONG_USE
    except Stopped as stopped:
        return stopped.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else again at exit
        return 141


def _command(name: str, arguments: list[str]) -> int:
    if name not in COMMANDS:
        from jaxtrain.config import overrides

        raise InputError(f"no command {name!r}; {overrides.did_you_mean(name, COMMANDS)}")
    module = importlib.import_module(f"jaxtrain.cli.{name}")
    try:
        code: int = module.main(arguments)
    except (BrokenPipeError, ConnectionError):
        raise
    except OSError as error:  # of a file or disk that no part of the command has expected
        if error.strerror is None:
            raise
        from jaxtrain.storage import disks

        where = error.filename or "a file"
        cure = "; free space there, or write to another place" if disks.is_full(error) else ""
        text = f"{name}: {where} cannot be read or written: {error.strerror}{cure}"
        raise InputError(text) from error
    return code


def console() -> None:
    """The ``jaxtrain`` console script."""
    sys.excepthook = terminal.show_error
    code = main()
    if code in (INTERRUPTED, RUN_AGAIN):
        # A compilation that is broken off goes on in XLA's threads, and XLA crashes where it is
        # torn down under them (jaxlib 0.10.2). Python waits for its own threads, then calls this.
        atexit.register(_end, code)
    sys.exit(code)


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    console()
