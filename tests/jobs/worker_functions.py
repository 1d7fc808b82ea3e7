"""Functions that tests run in a separate process (jaxtrain.jobs.subprocess_worker)."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from jaxtrain.errors import InputError, RunAgain
from jaxtrain.jobs.subprocess_worker import Send


def count(request: dict[str, Any], send: Send) -> None:
    """Sends the requested number of messages."""
    print("noise on standard output", flush=True)
    assert sys.stdin.read() == ""
    for number in range(request["to"]):
        send({"number": number, "é": "\n", "start": sorted(request["start"])})


def refuse(request: dict[str, Any], send: Send) -> None:
    """Raises an error that the parent raises again."""
    send({"before": True})
    raise RunAgain("the disk is full") if request["again"] else InputError("a is 1", "b is 2")


def fail(request: dict[str, Any], send: Send) -> None:
    """Raises an unexpected error with several lines."""
    raise ValueError("odd\nand a page of stack")


def kill_itself(request: dict[str, Any], send: Send) -> None:
    """Ends like a process that the kernel kills when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def break_off(request: dict[str, Any], send: Send) -> None:
    """Exits in the middle of a message."""
    send({"half": 1})
    for descriptor in range(3, 10):  # one of them is the pipe
        with contextlib.suppress(OSError):
            os.write(descriptor, b'["message", {"half": ')
    os._exit(4)


def leave(request: dict[str, Any], send: Send) -> None:
    """Exits without a message to the parent, but with some output."""
    for number in range(9):
        print("line", number, flush=True)
    os._exit(3)


def sleep(request: dict[str, Any], send: Send) -> None:
    """Sleeps, and cleans up if it has the time."""
    try:
        send({"pid": os.getpid(), "ignores": signal.getsignal(signal.SIGINT) == signal.SIG_IGN})
        if request["stuck"]:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)
    finally:
        Path(request["tidied"]).touch()
