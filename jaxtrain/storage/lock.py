"""One run at a time in a directory: process 0 locks ``<run>/.lock`` for as long as it lives.

A job that was requeued can start while the one before it still saves; both would move and delete
each other's checkpoints. The system gives a killed process's lock back by itself.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from jaxtrain.errors import RunAgain
from jaxtrain.storage import atomic

NAME = ".lock"

# A POSIX lock belongs to the process, so no worker inherits it and outlives it with it; and it is
# lost when the process closes any descriptor of the file: nothing else here may open it.
_held: dict[Path, int] = {}


def hold(directory: Path, say: Callable[[str], None]) -> None:
    """Locks a run's directory for this process; does nothing where it already has it.

    Args:
        directory: of the run. Where it is missing or cannot be written there is no lock.
        say: takes a line where the file system has no locks.

    Raises:
        RunAgain: another process has it; names its host and number.
    """
    path = directory / NAME
    try:
        if directory in _held and os.path.samestat(os.fstat(_held[directory]), path.stat()):
            return
        descriptor = atomic.open_own(path, os.O_RDWR | os.O_CREAT)
    except OSError:
        return  # whoever needs to write there says it
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _holder(descriptor)
        os.close(descriptor)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise RunAgain(
                f"another run is at work in {directory} ({holder}): wait for its end, or end it"
            ) from None
        say(
            f"warning: {path} cannot be locked ({error.strerror}): start no second run in this "
            "directory, as nothing would notice it"
        )
        return
    _held[directory] = descriptor
    with contextlib.suppress(OSError):  # as on a full disk; the lock holds without it
        os.ftruncate(descriptor, 0)
        os.pwrite(
            descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0
        )


def holder(directory: Path) -> str:
    """The process that is at work in a run's directory, in words; "" if none is.

    It takes no lock itself, which a run that begins would find. Not for a process that holds some.
    """
    # struct flock of Linux: type, whence, start, length (0: all), process.
    question = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        descriptor = atomic.open_own(directory / NAME, os.O_RDONLY)
    except OSError:
        return ""
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, question)
        return "" if struct.unpack("hhqqi", answer)[0] == fcntl.F_UNLCK else _holder(descriptor)
    except OSError:  # it has no locks
        return ""
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    try:
        found = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {found['pid']} on {found['host']}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return "nobody knows which"
