"""Measures the peak memory of a Python program in a separate process."""

import os
import subprocess
import sys

# Not getrusage: its maximum starts with that of the parent process.
_PRINT_PEAK = """
with open("/proc/self/status") as file:
    print([line.split()[1] for line in file if line.startswith("VmHWM:")][0])
"""


def peak_mib(program: str, *arguments: object) -> tuple[float, str]:
    """Runs a program in Python.

    Args:
        program: source code.
        arguments: for its ``sys.argv[1:]``.

    Returns:
        Its peak resident memory in MiB, and its standard output.
    """
    found = subprocess.run(
        [sys.executable, "-c", program + _PRINT_PEAK, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    printed, _, kib = found.stdout.rstrip().rpartition("\n")
    return int(kib) / 1024, printed
