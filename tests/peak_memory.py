"""The most memory that a program takes, run by itself."""

import os
import subprocess
import sys

# Not getrusage: its maximum begins with that of the process that started this one.
_SAYS = """
with open("/proc/self/status") as file:
    print([line.split()[1] for line in file if line.startswith("VmHWM:")][0])
"""


def peak_mib(program: str, *arguments: object) -> tuple[float, str]:
    """Runs a program in Python.

    Args:
        program: its text.
        arguments: its ``sys.argv[1:]``.

    Returns:
        Its largest resident memory in MiB, and what it printed.
    """
    found = subprocess.run(
        [sys.executable, "-c", program + _SAYS, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    printed, _, kib = found.stdout.rstrip().rpartition("\n")
    return int(kib) / 1024, printed
