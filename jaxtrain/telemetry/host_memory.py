"""What a run takes of its host's memory; read from /proc, so nothing is known where there is none.

Reading takes about 20 ms for each GiB of ordinary pages (measured): not beside a step.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
SHARED = Path("/dev/shm")


class Shared(NamedTuple):
    """Bytes of the host's shared memory, of whomever."""

    used: int
    size: int


def family(pid: int, proc: Path = PROC) -> Iterator[int]:
    """A process and its descendants, those that end meanwhile left out."""
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        yield one
        try:
            for task in (proc / str(one) / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue


def proportional_bytes(pid: int | None = None, proc: Path = PROC) -> int | None:
    """Memory of a process and its descendants; a page that several of them hold counts once.

    The kernel calls it the proportional set size: each process has its share of a common page. What
    other programs hold too, as libraries, counts with the share of these processes.

    Args:
        pid: of this process, unless told.
        proc: where the kernel tells.

    Returns:
        Bytes; None where the kernel does not tell it of all of them.
    """
    pid = os.getpid() if pid is None else pid
    if not (proc / f"{pid}/task/{pid}/children").exists():  # no such file in this kernel
        return None
    total = 0
    try:
        for one in family(pid, proc):
            try:
                lines = (proc / str(one) / "smaps_rollup").read_text().splitlines()
            except ProcessLookupError:  # it has ended
                continue
            except FileNotFoundError:
                if (proc / str(one)).exists():  # no such file in this kernel
                    return None
                continue
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    except OSError:  # another user's, or hidden
        return None
    return total or None


def shared(folder: Path = SHARED) -> Shared | None:
    """How full the host's shared memory is; None where there is none.

    Args:
        folder: where it is mounted.
    """
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    blocks = found.f_blocks - found.f_bfree
    return Shared(blocks * found.f_frsize, found.f_blocks * found.f_frsize)
