"""How jaxtrain was started: its messages name commands that run, or arguments of Python."""

import contextlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence

from jaxtrain import versions
from jaxtrain.config import run_flags
from jaxtrain.errors import InputError, Problem, RunAgain, fields_of, shortest_path

PROGRAM = "JAXTRAIN_PROGRAM"
"""Environment variable that passes what the user typed on to subprocesses."""


def program(environment: Mapping[str, str] = os.environ) -> str:
    """Returns what to type before the arguments here, which need no activated environment.

    ``jaxtrain`` if that is this environment's script on PATH; otherwise the path of the script that
    was typed, or is beside this Python; without one, this Python and the module.
    """
    if PROGRAM in environment:
        return environment[PROGRAM]
    started_as = sys.argv[0] if sys.argv else ""
    beside = os.path.join(os.path.dirname(sys.executable), "jaxtrain")
    for script in (started_as, beside):
        if os.path.basename(script) == "jaxtrain" and os.access(script, os.X_OK):
            on_path = shutil.which("jaxtrain")
            if on_path is not None and os.path.samefile(on_path, script):
                return "jaxtrain"
            return shlex.quote(shortest_path(script))
    return f"{versions.python()} -m jaxtrain.main"


@contextlib.contextmanager
def from_python() -> Iterator[None]:
    """Changes errors inside to name the arguments of the Python API instead of flags."""
    try:
        yield
    except InputError as error:
        messages = [
            Problem(with_arguments(message), *fields_of(message)) for message in error.messages
        ]
        error.args = error.messages = tuple(messages)
        raise
    except RunAgain as error:
        error.args = (with_arguments(str(error)), *error.args[1:])
        raise


# Flags of commands whose functions have the argument, and fields of a config.
_ARGUMENTS = (
    *(flag[2:] for flag in run_flags.FLAGS),
    *(
        "gpu",
        "gpus",
        "price-per-gpu-hour",
        "cores",
        "data",
        "max-examples",
        "max-tokens",
        "source",
        "text-field",
        "rate-per-core",
        "efficiency",
        "seed",
    ),
    *("precision", "deterministic", "name"),
)
_FLAG = re.compile(rf"(?<![\w-])--({'|'.join(_ARGUMENTS)}|\w+(?:\.\w+)+)(?![\w.-]*[\w-])")


def with_arguments(message: str) -> str:
    """Returns a message with Python's arguments instead of flags; commands stay as they are.

    ``--resume latest`` becomes ``resume="latest"``, ``--data.path X`` becomes ``data.path X``.
    """
    command = rf"{re.escape(program())} [^;)`]*"
    segments = re.split(f"({command})", message)
    for index in range(0, len(segments), 2):
        text = segments[index].replace("--resume latest", 'resume="latest"')
        segments[index] = _FLAG.sub(lambda flag: flag[1].replace("-", "_"), text)
    return "".join(segments)


def again(
    program: str, command: str, arguments: Sequence[str], changes: Mapping[str, str | None]
) -> str:
    """Returns a command line with the config of another, and its flags, each once.

    Args:
        program: what to type first.
        command: the command, such as train.
        arguments: of the other command line, with ``--config``.
        changes: values that replace those of flags; None removes a flag.
    """
    settings: dict[str, list[str]] = {}
    flag, tracked = "", list[str]()  # --track is the only flag that may be repeated
    for argument in arguments:
        if argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            settings[flag] = tracked if flag == "--track" else []
            settings[flag] += [value] if equals else []
        elif flag:
            settings[flag].append(argument)
    if tracked:
        settings["--track"] = [",".join(tracked)]
    for name in (*run_flags.ONE_RUN_ONLY, *changes):
        settings.pop(name, None)
    settings |= {name: [value] for name, value in changes.items() if value is not None}
    of_config = settings.pop("--config", [])
    all_arguments = (word for name, values in settings.items() for word in (name, *values))
    return f"{program} {command} {shlex.join([*of_config, *all_arguments])}"
