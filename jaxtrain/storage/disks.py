"""What the system says of a disk that fails: which of it may pass, and the cure."""

import errno
import os
import re

from jaxtrain.errors import InputError, RunAgain, stop_inside

# A disk that may be well again when a launcher starts the same command again, and the cure.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_AWAY = (
    *(errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENXIO, errno.ENODEV),
    *(errno.EAGAIN, errno.EBUSY, errno.ENOTCONN, errno.ESHUTDOWN, errno.ENOLINK),
    *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
)
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_CURES = {
    **dict.fromkeys(_FULL, "free space on that disk (lower --checkpoint.keep)"),
    **dict.fromkeys(_AWAY, "bring the disk back"),
    **dict.fromkeys(_SCARCE, "raise the limit of open files or memory (ulimit)"),
}


def disk_trouble(error: OSError, what: str, cure: str) -> InputError | RunAgain:
    """What to raise where a disk fails: one that may be well again is worth another start.

    Args:
        error: of the system.
        what: cannot be done, with the path.
        cure: where the disk itself is as it should be.
    """
    words = error.strerror or reason(error)
    first = cure_of(words)
    message = f"{what} ({words}): {f'{first}, or ' if first else ''}{cure}"
    return RunAgain(message) if first else InputError(message)


def is_full(error: OSError) -> bool:
    """Whether there is no room for what was to be written."""
    return error.errno in _FULL


def cure_of(words: str) -> str:
    """What helps against a disk's failure that may pass, by the system's own words; or ""."""
    return next((cure for number, cure in _CURES.items() if os.strerror(number) in words), "")


def reason(error: BaseException) -> str:
    """The first cause in a few words: the system's own, where it is to blame.

    Raises:
        Stopped, KeyboardInterrupt: a library has wrapped it into an error of its own.
    """
    stop = stop_inside(error)
    if stop is not None:
        raise stop
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    # TensorStore ends its messages with notes in brackets, this one and others, in any order.
    from_system = re.search(r"\[os_error_code='(\d+)'", str(error))
    if from_system:
        return os.strerror(int(from_system[1]))
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
