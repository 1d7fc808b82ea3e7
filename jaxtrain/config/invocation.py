"""How this program was started, so that the commands it prints run when they are pasted."""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping

PROGRAM = "JAXTRAIN_PROGRAM"
"""Variable with which a process tells those it starts what the user typed."""


def program(environment: Mapping[str, str] = os.environ) -> str:
    """What one types before the arguments in this directory, such as ``python -m jaxtrain.main``.

    ``jaxtrain`` where that was typed; else, from Python too, this Python and the module.
    """
    if PROGRAM in environment:
        return environment[PROGRAM]
    script = sys.argv[0] if sys.argv else ""
    if os.path.basename(script) == "jaxtrain" and os.access(script, os.X_OK):
        found = shutil.which("jaxtrain")
        same = found is not None and os.path.samefile(found, script)
        return "jaxtrain" if same else shlex.quote(shortest(script))
    return f"{shlex.quote(_python())} -m jaxtrain.main"


def _python() -> str:
    """The shortest name under which a shell here finds this Python."""
    found = shutil.which("python")
    if found and os.path.abspath(found) == sys.executable:
        return "python"
    return shortest(sys.executable)


def shortest(path: str) -> str:
    """A path as one would type it here: relative where it is below this directory."""
    beside = os.path.relpath(path)
    if beside.startswith(".."):
        return os.path.abspath(path)
    return beside if "/" in beside else f"./{beside}"  # a bare name would be looked for on PATH
