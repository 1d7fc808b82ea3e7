"""Runs the harness in separate namespaces: no network, and no surviving processes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

_INSIDE = "JAXTRAIN_FUZZ_INSIDE"


def inside() -> bool:
    """Whether this process has its own namespaces."""
    return os.environ.get(_INSIDE) == "1"


def enter(arguments: list[str]) -> str:
    """Replaces this process with the harness in separate namespaces.

    Returns:
        Only if this is not possible: the reason.
    """
    # bash is process 1 and reaps orphans, like an init.
    unshare = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    unshare += [] if os.geteuid() == 0 else ["--map-root-user"]
    unshare += ["bash", "-c", '"$@"; exit $?', "bash"]
    if shutil.which("unshare") is None:
        return "unshare not found"
    probe = subprocess.run([*unshare, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        return probe.stderr.strip()
    os.environ[_INSIDE] = "1"
    return os.execvp(unshare[0], [*unshare, sys.executable, str(Path(__file__).parent), *arguments])
