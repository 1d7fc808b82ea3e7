"""Allows one run at a time in a directory: process 0 locks ``<run>/.lock`` until the run ends.

A requeued job may start while the previous one is still saving; each would move and delete the
other's checkpoints. The operating system releases the lock of a killed process.
"""

import contextlib
import errno
import fcntl
import json
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxtrain.errors import RunAgain

NAME = ".lock"

# A POSIX lock belongs to the process, so workers that outlive it do not inherit the lock. It is
# released when the process closes any descriptor of the file, so nothing else may open the file.
_held: dict[Path, int] = {}


def hold(directory: Path, say: Callable[[str], None]) -> bool:
    """Locks a run directory for this process; does nothing if already locked.

    Args:
        directory: the run directory. If it is missing or not writable, it is not locked.
        say: receives a warning if the file system does not support locks.

    Returns:
        Whether it is locked.

    Raises:
        RunAgain: another process holds the lock; the message has its host and PID.
    """
    path = directory / NAME
    try:
        if directory in _held and os.path.samestat(os.fstat(_held[directory]), path.stat()):
            return True
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:
        return False  # writing to the directory will report the error
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = _holder(descriptor)
        os.close(descriptor)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise RunAgain(
                f"another run is using {directory} ({holder}): wait until it ends, or stop it"
            ) from None
        say(
            f"warning: {path} cannot be locked ({error.strerror}): do not start a second run in "
            "this directory, as it would not be detected"
        )
        return False
    _held[directory] = descriptor
    with contextlib.suppress(OSError):  # for example on a full disk; the lock holds anyway
        os.ftruncate(descriptor, 0)
        os.pwrite(
            descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode(), 0
        )
    return True


@contextlib.contextmanager
def released() -> Iterator[None]:
    """Releases the locks of :func:`hold` in the block at its end, not at that of the process."""
    before = set(_held)
    try:
        yield
    finally:
        for directory in _held.keys() - before:
            os.close(_held.pop(directory))


@contextlib.contextmanager
def locked(path: Path, say: Callable[[str], None], doing: str) -> Iterator[bool]:
    """Waits for an advisory lock, which ends with the process; yields whether it was acquired.

    The lock only saves duplicate work: where it matters, a rename prevents reads of half-written
    folders.

    Args:
        path: the file to lock; created if missing.
        say: prints a message while this waits, or if the file system does not support locks.
    """
    with open(path, "a", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except BlockingIOError:
            say(f"another process is {doing}: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
            locked = True
        except OSError as error:
            say(
                f"{path.parent} does not support locks ({error.strerror}): several processes may "
                f"be {doing} at once"
            )
            locked = False
        yield locked


def boot() -> str:
    """Returns an identifier of this boot of the machine.

    Raises:
        OSError: it is unknown.
    """
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def machine() -> str:
    """Returns an identifier of this boot of the machine, the same in all of its containers.

    It is the host name where the boot is unknown: not on Linux, or in some sandboxes.
    """
    try:
        return boot()
    except OSError:
        return socket.gethostname()


def holder(directory: Path) -> str:
    """Describes the process that has locked a run directory; "" if none has.

    Takes no lock itself, as a starting run would find it. Must not be called by a process that
    holds a lock.
    """
    # struct flock of Linux: type, whence, start, length (0: all), process.
    question = struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    try:
        descriptor = os.open(directory / NAME, os.O_RDONLY)
    except OSError:
        return ""
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, question)
        return "" if struct.unpack("hhqqi", answer)[0] == fcntl.F_UNLCK else _holder(descriptor)
    except OSError:  # locks are not supported
        return ""
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 1000, 0))
        return f"process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return "unknown process"
