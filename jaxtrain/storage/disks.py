"""Classifies disk errors: which may be temporary, and how to fix them; waits for disks."""

import errno
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jaxtrain.errors import BadExample, InputError, RunAgain, stop_inside

OUTAGE_S = 120.0
"""Longest outage of a data disk that readers wait for. Launchers then start the run again."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0

ResultT = TypeVar("ResultT")


class DiskAway(RunAgain):
    """A disk is temporarily unavailable, or open files or memory are scarce."""


# Errors that may be gone when a launcher restarts the same command, and their fixes.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_AWAY = (
    *(errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENXIO, errno.ENODEV),
    *(errno.EAGAIN, errno.EBUSY, errno.ENOTCONN, errno.ESHUTDOWN, errno.ENOLINK),
    *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
)
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
FREE_SPACE = "free space on that disk"
_CURES = {
    **dict.fromkeys(_FULL, FREE_SPACE),
    **dict.fromkeys(_AWAY, "bring the disk back"),
    **dict.fromkeys(_SCARCE, "raise the limit of open files or memory (ulimit)"),
}


def disk_trouble(error: OSError, failure: str, cure: str) -> InputError | RunAgain:
    """Returns the exception for a disk error: RunAgain if it may be temporary, else InputError.

    Args:
        failure: what failed, with the path.
        cure: the fix if the disk itself is fine.
    """
    system_message = error.strerror or reason(error)
    first = cure_of(system_message)
    message = f"{failure} ({system_message}): {f'{first}, or ' if first else ''}{cure}"
    if is_away(error):
        return DiskAway(message)
    return RunAgain(message) if first else InputError(message)


def unreadable(
    path: str,
    error: OSError,
    more: str = "",
    *,
    existed: bool = False,
    folder: str | None = None,
) -> DiskAway | BadExample:
    """Returns the exception for an input file that cannot be read.

    It is DiskAway if the error may be temporary. So is the absence of a file that existed before,
    and a missing permission for it, if the nearest folder above it that exists is empty or cannot
    be listed: then the disk is most likely not mounted.

    Args:
        more: end of the reason.
        existed: whether the file could be read before.
        folder: of the file; None is the folder of ``path``.
    """
    system_message = f"{error.strerror or error}{more}"
    if error.errno in (*_AWAY, *_SCARCE):
        return DiskAway(
            f"{path} cannot be read ({system_message}): {_CURES[error.errno]}, and start again"
        )
    gone = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM)
    if existed and error.errno in gone and _is_unmounted(folder or os.path.dirname(path)):
        return DiskAway(
            f"{path} cannot be read ({system_message}): bring the disk back, and start again"
        )
    return BadExample(path, system_message)


def _is_unmounted(folder: str) -> bool:
    while True:
        try:
            with os.scandir(folder) as entries:
                return next(entries, None) is None
        except (FileNotFoundError, NotADirectoryError):
            if folder == os.path.dirname(folder):
                return True
            folder = os.path.dirname(folder)
        except OSError:
            return True


def when_readable(read: Callable[[], ResultT]) -> ResultT:
    """Returns what ``read`` returns; calls it again while it raises DiskAway.

    Raises:
        DiskAway: the disk has been unavailable for :data:`OUTAGE_S`.
    """
    began, pause_s = time.monotonic(), _FIRST_PAUSE_S
    while True:
        try:
            return read()
        except DiskAway:
            if time.monotonic() - began + pause_s > OUTAGE_S:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def unwritable(path: Path, system_message: str | None) -> InputError | RunAgain:
    """Returns the exception for an output file that cannot be written.

    It is RunAgain if the disk is full, so that a command with many outputs ends: the others would
    fail, too.
    """
    if cure_of(system_message or "") == FREE_SPACE:
        return RunAgain(
            f"{path} cannot be written ({system_message}): {FREE_SPACE}, and start again"
        )
    return InputError(f"{path} cannot be written: {system_message}")


def free_bytes(folder: Path) -> int:
    """Returns the bytes that this user may still write to the disk of a folder."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def check_room(folder: Path, need: int, content: str, cure: str) -> None:
    """Checks that a folder's disk has room for what is about to be written.

    Args:
        need: in bytes.

    Raises:
        RunAgain: it has not.
    """
    free = free_bytes(folder)
    if need > free:
        raise RunAgain(
            f"{content} needs {need:,} bytes, but only {free:,} are free in {folder}: {cure}"
        )


def is_away(error: OSError) -> bool:
    """Returns whether what failed may work again later: the disk does not respond, for example."""
    return error.errno in (*_AWAY, *_SCARCE)


def is_full(error: OSError) -> bool:
    """Whether the disk or quota is full."""
    return error.errno in _FULL


def cure_of(system_message: str) -> str:
    """Returns the fix for a temporary disk error, by the system's message; "" for other errors."""
    return next(
        (cure for number, cure in _CURES.items() if os.strerror(number) in system_message), ""
    )


def reason(error: BaseException) -> str:
    """Returns the root cause in a few words: the system's message if there is one.

    Raises:
        Stopped, KeyboardInterrupt: a library wrapped it in its own exception.
    """
    stop = stop_inside(error)
    if stop is not None:
        raise stop
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # TensorStore appends notes in brackets, such as this one, in any order.
    from_system = re.search(r"\[os_error_code='(\d+)'", str(error))
    if from_system:
        return os.strerror(int(from_system[1]))
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
