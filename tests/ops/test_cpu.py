"""Tests the tuning for CPUs: freed memory is reused."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, threading
import numpy as np
from jaxtrain.ops import cpu

if sys.argv[1] == "keep":
    assert cpu.keep_freed()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    thread = threading.Thread(target=lambda: np.empty(2**27, np.uint8).fill(1))
    thread.start()
    thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
"""


@pytest.mark.long
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the GNU C library's setting")
def test_freed_memory_is_kept() -> None:
    """Uses separate processes, since the setting cannot be reverted."""
    found = {
        how: int(subprocess.check_output([sys.executable, "-c", PROGRAM, how], text=True))
        for how in ("keep", "leave")
    }
    assert found["keep"] < 10
    assert found["leave"] > 10  # holds even for 2 MiB pages
