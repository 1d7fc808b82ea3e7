"""Functions that tests run in a process of their own (jaxtrain.xla.subprocess_worker)."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from jaxtrain.errors import InputError, RunAgain
from jaxtrain.xla.subprocess_worker import Send


def count(request: dict[str, Any], send: Send) -> None:
    """Sends what it was asked for, one message at a time."""
    print("noise on standard output", flush=True)
    assert sys.stdin.read() == ""
    for number in range(request["to"]):
        send({"number": number, "é": "\n", "start": sorted(request["start"])})


def refuse(request: dict[str, Any], send: Send) -> None:
    """Raises what crosses the border as itself."""
    send({"before": True})
    raise RunAgain("the disk is full") if request["again"] else InputError("a is 1", "b is 2")


def fail(request: dict[str, Any], send: Send) -> None:
    """Raises what nothing expects, with more lines than one."""
    raise ValueError("odd\nand a page of stack")


def kill_itself(request: dict[str, Any], send: Send) -> None:
    """As the kernel kills a process when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def break_off(request: dict[str, Any], send: Send) -> None:
    """Dies in the middle of a message."""
    pipe = int(sys.argv[2])
    os.write(pipe, b'["message", {"half": ')
    os._exit(4)


def leave(request: dict[str, Any], send: Send) -> None:
    """Ends without a word to the parent, but with some lines."""
    for number in range(9):
        print("line", number, flush=True)
    os._exit(3)


def sleep(request: dict[str, Any], send: Send) -> None:
    """Sleeps, and tidies up if it may."""
    try:
        send({"pid": os.getpid(), "ignores": signal.getsignal(signal.SIGINT) == signal.SIG_IGN})
        time.sleep(60)
    finally:
        Path(request["tidied"]).touch()
