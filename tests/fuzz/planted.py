"""Entry points with forbidden outcomes, which the harness must detect, and two allowed ones."""

import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path


def works() -> int:
    Path("out/a").write_text("a")
    print("done")
    return 0


def refuses() -> int:
    print("error: in/a.json: not valid", file=sys.stderr)
    return 2


def traceback() -> int:
    raise KeyError("model")


def two_lines() -> int:
    print("error: in/a\nb.json: not valid", file=sys.stderr)
    return 2


def other_code() -> int:
    return 1


def aborts() -> int:
    os.abort()


def writes_outside() -> int:
    Path("escaped").write_text("a")
    return 0


def renames_outside() -> int:
    Path("out/a").write_text("a")
    os.rename("out/a", "../escaped")
    os.remove("../escaped")
    return 0


def changes_input() -> int:
    os.truncate("in/a.json", 0)
    return 0


def starts_program() -> int:
    subprocess.run(["true"], check=True)
    return 0


def leaves_process() -> int:
    if os.fork() == 0:
        time.sleep(30)
    return 0


def connects() -> int:
    with socket.socket() as probe:
        probe.connect_ex(("192.0.2.1", 9))
    return 0


def runs_code_of_input() -> int:
    Path("out/plugin.py").write_text("x = 1")
    sys.path.insert(0, "out")
    __import__("plugin")
    return 0


def unpickles_function() -> int:
    pickle.loads(b"cposix\nsystem\n.")
    return 0


def eats_memory() -> int:
    kept = [bytes(os.urandom(2**20)) * 8 for _ in range(60)]
    time.sleep(0.2)
    return len(kept) * 0


def acts() -> int:
    """Does everything that does not end a process, so that one process is enough."""
    for act in ACTS:
        act()
    return 0


def hangs() -> int:
    time.sleep(60)
    return 0


def escape() -> int:
    print("\x1b[2J")
    return 0


def endless_line() -> int:
    print("error: " + "a" * 100_000, file=sys.stderr)
    return 2


ACTS = (writes_outside, renames_outside, changes_input, starts_program, connects)
ACTS += (runs_code_of_input, unpickles_function, escape, endless_line, leaves_process)
