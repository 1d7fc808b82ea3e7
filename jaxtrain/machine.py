"""What this process may use of its machine: cores, memory, open files, and processes."""

import errno
import math
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

from jaxtrain import formats
from jaxtrain.errors import InputError

WORKER_BYTES = 0.3 * 2**30
"""Memory of a worker process, besides the batches in shared memory. Measured: 0.09 GiB for clips of
64x64, 0.25 GiB for 480x720."""

# Memory that any worker needs. Measured: 37 MiB of anonymous memory for text, 42 for clips.
_LEAST_WORKER_MIB = 32

_FILES = 2**16  # open files to allow: far more than any run has needed
_SHARE_OF_MEMORY = 0.8  # that threads for videos may fill

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")  # names the cgroups of this process
_MEMORY = Path("/proc/meminfo")


def cores(processes: int = 1) -> int:
    """Returns the number of CPU cores that this process may use.

    That is the least of its affinity (set by taskset, SLURM, or a cpuset), the machine's cores, and
    the CPU limits and cpusets of its cgroups (``docker run --cpus`` and ``--cpuset-cpus``, a pod's
    limits). A process gets its part of all but the affinity, which may be its own, if several
    processes of the run share them.
    """
    limits: list[float] = [os.cpu_count() or 1]
    for folder in _cgroup_folders():
        quota_and_period = _text(folder / "cpu.max").split()  # "max 100000" is unlimited
        quota_and_period = quota_and_period or [
            _first(folder, f"cpu.cfs_{name}_us") for name in ("quota", "period")
        ]
        if all(map(str.isdecimal, quota_and_period)) and int(quota_and_period[1]):
            limits.append(int(quota_and_period[0]) / int(quota_and_period[1]))
        if listed := _first(folder, "cpuset.cpus.effective", "cpuset.effective_cpus"):
            limits.append(sum(map(_length, listed.split(","))))
    return max(1, min(len(os.sched_getaffinity(0)), *(int(each / processes) for each in limits)))


def memory() -> tuple[float, bool]:
    """Returns the bytes of host memory that this process can still get.

    That is the least of what the machine has available and what each memory limit of its cgroups
    (``docker run --memory``, a pod's limits) leaves. Files that the kernel keeps in memory do not
    count as used, because it drops them when memory is needed.
    """
    available = re.search(r"^MemAvailable:\s+(\d+) kB", _text(_MEMORY), re.MULTILINE)
    free = int(available[1]) * 1024.0 if available else math.inf
    limits = [left for folder in _cgroup_folders() if (left := _memory_left(folder)) is not None]
    return min(free, *limits) if limits else free, min(limits, default=math.inf) < free


def throttled_s() -> float:
    """Returns for how many seconds the CPU limits of its cgroups have stopped this process.

    The kernel sums the time over the cores that the process would have used. It is 0 without limit.
    """
    texts = (_text(folder / "cpu.stat") for folder in _cgroup_folders())
    counts = (re.search(r"^throttled_(usec|time) (\d+)$", text, re.MULTILINE) for text in texts)
    units = {"usec": 1e-6, "time": 1e-9}
    return max((int(count[2]) * units[count[1]] for count in counts if count), default=0.0)


def threads() -> int:
    """Returns how many videos to process at once: one per core, if they fit into memory."""
    return max(1, min(cores(), int(min(_SHARE_OF_MEMORY * memory()[0] / WORKER_BYTES, 2**20))))


def _memory_left(folder: Path) -> float | None:
    """Returns the bytes that a cgroup may still use; None without a limit."""
    limit = _first(folder, "memory.max", "memory.limit_in_bytes")
    now = _first(folder, "memory.current", "memory.usage_in_bytes")
    if not limit.isdecimal() or not now.isdecimal():
        return None
    stat = _text(folder / "memory.stat")
    total = "total_" if "total_active_file" in stat else ""  # version 1 has both
    files = re.findall(rf"^{total}(?:in)?active_file (\d+)$", stat, re.MULTILINE)
    return max(0.0, int(limit) - max(0, int(now) - sum(map(int, files))))


def _length(span: str) -> int:
    """Returns how many numbers a span such as "0-31" or "7" has."""
    first, _, last = span.partition("-")
    return int(last or first) - int(first) + 1


def _cgroup_folders() -> Iterator[Path]:
    """Yields this process's cgroup, and those that contain it; of version 1, for each resource."""
    for kinds, path in re.findall(r"^\d+:(.*?):(.*)$", _text(_OWN_CGROUPS), re.MULTILINE):
        top = _CGROUPS / kinds
        # In a container, the path may be that of the host, which is not visible: its own limit is
        # then at the root.
        folder = top if ".." in path else top / path.lstrip("/")
        yield from (above for above in (folder, *folder.parents) if above.is_relative_to(top))


def _first(folder: Path, *names: str) -> str:
    return next((text for name in names if (text := _text(folder / name).strip())), "")


def too_many(workers: int, flag: str = "--data.workers") -> str | None:
    """Returns why this process cannot have a number of workers, and what to do; else None."""
    free, limited = memory()
    need = workers * _LEAST_WORKER_MIB
    if need <= free / 2**20:
        return None
    bound = "the container's limit leaves" if limited else "this host has"
    return (
        f"{flag} {workers} needs about {need:,} MiB of memory, and {bound} {free / 2**20:,.0f} "
        f"free: use at most {formats.counted(max(1, int(free / WORKER_BYTES)), 'worker')}"
    )


def allow_files() -> None:
    """Raises this process's soft limit of open files, which is often 1024, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def refused(error: OSError, workers: int, flag: str = "--data.workers") -> InputError | None:
    """Returns the error, with the fix, if the system does not start more processes; else None."""
    if error.errno not in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM):
        return None
    return InputError(
        f"{flag} {workers}: the system refuses so many processes ({error.strerror}): use fewer, or "
        "raise the hard limits of open files and processes (ulimit -Hn and -Hu, or docker run "
        "--ulimit)"
    )


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
