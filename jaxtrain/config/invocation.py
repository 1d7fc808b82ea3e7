"""How jaxtrain was started, so that the commands it prints can be pasted and run."""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence

from jaxtrain import versions
from jaxtrain.errors import shortest_path

# Flags that commands for later runs do not repeat.
_ONE_RUN_ONLY = ("--output-dir", "--resume", "--profile", "--debug")

PROGRAM = "JAXTRAIN_PROGRAM"
"""Environment variable that passes what the user typed on to subprocesses."""


def program(environment: Mapping[str, str] = os.environ) -> str:
    """Returns what to type before the arguments here, such as ``python -m jaxtrain.main``.

    ``jaxtrain`` if that was typed; otherwise, also from Python, this Python and the module.
    """
    if PROGRAM in environment:
        return environment[PROGRAM]
    script = sys.argv[0] if sys.argv else ""
    if os.path.basename(script) == "jaxtrain" and os.access(script, os.X_OK):
        found = shutil.which("jaxtrain")
        same = found is not None and os.path.samefile(found, script)
        return "jaxtrain" if same else shlex.quote(shortest_path(script))
    return f"{versions.python()} -m jaxtrain.main"


def again(program: str, arguments: Sequence[str], changes: Mapping[str, str | None]) -> str:
    """Returns the command line with changed flags, each flag once; None removes a flag."""
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
    for name in (*_ONE_RUN_ONLY, *changes):
        settings.pop(name, None)
    settings |= {name: [value] for name, value in changes.items() if value is not None}
    words = (word for name, values in settings.items() for word in (name, *values))
    return f"{program} {shlex.join(words)}"
