"""The host's memory, as the C library hands it out."""

import ctypes
import platform

# Of mallopt (malloc.h of the GNU C library).
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_NEVER = -1


def keep_freed() -> bool:
    """Has this process keep the memory that it frees, for its next allocation.

    On a CPU, XLA allocates a step's temporaries anew each step. Blocks above 32 MiB the C library
    takes from the system and gives back at once, so each step touches all its pages for the first
    time: for `demo` 86,000 page faults, a fifth of the step's processor time. The price is that the
    process stays as large as it once was; its peak does not grow.

    One arena, because only the first of them can hold large blocks without asking the system. Call
    it before jax looks for devices: threads that have an arena by then keep it.

    Returns:
        Whether it was possible: with the GNU C library only, on Linux.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_ARENA_MAX, 1))
    return all(mallopt(name, value) == 1 for name, value in settings)
