"""Counts the cores and memory that a process may use, and chooses its number of workers.

The rows of a batch are divided into equal parts, so that workers load one batch together instead of
one batch each. If there are more workers than parts, the others load the next batch. So the number
of workers never changes the examples or their order, and may differ from host to host, and from one
start of a run to the next.

A part has complete blocks if the process's rows do (:class:`jaxtrain.data.source.Source`): a block
that is divided between workers, such as the crops of a clip, is read by each of them.
"""

import errno
import functools
import math
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain.data import worker_process
from jaxtrain.errors import InputError
from jaxtrain.storage.disks import free_bytes

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_SHARED_MEMORY = Path("/dev/shm")
_MEMORY = Path("/proc/meminfo")

LOOP_CORES = 2
"""Cores that the training loop needs on GPUs: a thread runs the loop, another one puts batches on
the devices. On CPU devices, the steps themselves need cores: half of them."""

WORKER_BYTES = 0.3 * 2**30
"""Memory of a worker process, besides the batches in shared memory. Measured: 0.09 GiB for clips of
64x64, 0.25 GiB for 480x720."""

PROGRAM_BYTES = 2.0 * 2**30
"""Assumed: memory that the main process still needs when it starts the workers."""

# Memory that any worker needs. Measured: 37 MiB of anonymous memory for text, 42 for clips.
_LEAST_WORKER_MIB = 32

_FILES = 2**16  # open files to allow: far more than any run has needed

# Smaller arrays are sent through a pipe, because creating, mapping and freeing shared memory costs
# more. But a worker's prefetched batches must fit into the pipe (64 KiB): when the run stops, they
# are no longer read, and Grain waits 25 s for a worker that is blocked on writing them.
MIN_SHARED_BYTES = 2**12

_BATCHES_OF_PIPELINE = 3  # that it holds in addition to those that workers have ready

# The fraction of the free memory that the main process and chosen workers may fill.
_SHARE_OF_MEMORY = 0.8

# The fraction of the free shared memory that chosen workers may fill. Other processes use it, too.
_SHARE_OF_SHARED_MEMORY = 0.8


def cores(
    processes: int = 1,
    groups: Path = _CGROUPS,
    cgroups: Path = _OWN_CGROUPS,
    machine: int | None = None,
) -> int:
    """Returns the number of CPU cores that this process may use.

    That is the least of its affinity (set by taskset, SLURM, or a cpuset), the machine's cores, and
    the CPU limits and cpusets of its cgroups (``docker run --cpus`` and ``--cpuset-cpus``, a pod's
    limits). A process gets its part of all but the affinity, which may be its own, if several
    processes of the run share them.

    Args:
        processes: processes of the run on this host.
        groups: where the kernel's cgroups are mounted.
        cgroups: the kernel's file that names the cgroups of this process.
        machine: number of cores of the machine; None asks the system.
    """
    all_cores = machine or os.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else all_cores
    limits: list[float] = [all_cores]
    for folder in _cgroup_folders(groups, cgroups):
        both = _text(folder / "cpu.max").split()  # "max 100000" is unlimited
        both = both or [_first(folder, f"cpu.cfs_{name}_us") for name in ("quota", "period")]
        if all(map(str.isdecimal, both)) and int(both[1]):
            limits.append(int(both[0]) / int(both[1]))
        if listed := _first(folder, "cpuset.cpus.effective", "cpuset.effective_cpus"):
            limits.append(sum(map(_length, listed.split(","))))
    return max(1, min(allowed, *(int(limit / processes) for limit in limits)))


def memory(
    groups: Path = _CGROUPS, cgroups: Path = _OWN_CGROUPS, machine: Path = _MEMORY
) -> tuple[float, bool]:
    """Returns the bytes of host memory that this process can still get.

    That is the least of what the machine has available and what each memory limit of its cgroups
    (``docker run --memory``, a pod's limits) leaves. Files that the kernel keeps in memory do not
    count as used, because it drops them when memory is needed.

    Args:
        groups: where the kernel's cgroups are mounted.
        cgroups: the kernel's file that names the cgroups of this process.
        machine: the kernel's file about the machine's memory.

    Returns:
        The bytes, infinite if unknown, and whether a cgroup limits them.
    """
    available = re.search(r"^MemAvailable:\s+(\d+) kB", _text(machine), re.MULTILINE)
    free = int(available[1]) * 1024.0 if available else math.inf
    limits = [
        left
        for folder in _cgroup_folders(groups, cgroups)
        if (left := _memory_left(folder)) is not None
    ]
    return min(free, *limits) if limits else free, min(limits, default=math.inf) < free


def throttled_s(groups: Path = _CGROUPS, cgroups: Path = _OWN_CGROUPS) -> float:
    """Returns for how many seconds the CPU limits of its cgroups have stopped this process.

    The kernel sums the time over the cores that the process would have used. It is 0 without limit.

    Args:
        groups: where the kernel's cgroups are mounted.
        cgroups: the kernel's file that names the cgroups of this process.
    """
    texts = (_text(folder / "cpu.stat") for folder in _cgroup_folders(groups, cgroups))
    counts = (re.search(r"^throttled_(usec|time) (\d+)$", text, re.MULTILINE) for text in texts)
    units = {"usec": 1e-6, "time": 1e-9}
    return max((int(count[2]) * units[count[1]] for count in counts if count), default=0.0)


def threads() -> int:
    """Returns how many videos to process at once: one per core, if they fit into memory."""
    return max(1, min(cores(), int(min(_SHARE_OF_MEMORY * memory()[0] / WORKER_BYTES, 2**20))))


def _memory_left(folder: Path) -> float | None:
    """Returns the bytes that a cgroup may still use; None without a limit."""
    most = _first(folder, "memory.max", "memory.limit_in_bytes")
    now = _first(folder, "memory.current", "memory.usage_in_bytes")
    if not most.isdecimal() or not now.isdecimal():
        return None
    stat = _text(folder / "memory.stat")
    total = "total_" if "total_active_file" in stat else ""  # version 1 has both
    files = re.findall(rf"^{total}(?:in)?active_file (\d+)$", stat, re.MULTILINE)
    return max(0.0, int(most) - max(0, int(now) - sum(map(int, files))))


def _length(span: str) -> int:
    """Returns how many numbers a span such as "0-31" or "7" has."""
    first, _, last = span.partition("-")
    return int(last or first) - int(first) + 1


def _cgroup_folders(groups: Path, cgroups: Path) -> Iterator[Path]:
    """Yields this process's cgroup, and those that contain it; of version 1, for each resource."""
    for kinds, path in re.findall(r"^\d+:(.*?):(.*)$", _text(cgroups), re.MULTILINE):
        top = groups / kinds
        # In a container, the path may be that of the host, which is not visible: its own limit is
        # then at the root.
        folder = top if ".." in path else top / path.lstrip("/")
        yield from (above for above in (folder, *folder.parents) if above.is_relative_to(top))


def _first(folder: Path, *names: str) -> str:
    """Returns the content of the first file that exists and is not empty."""
    return next((text for name in names if (text := _text(folder / name).strip())), "")


class WorkerCount(NamedTuple):
    """The number of worker processes, 0 to load in the main process; and a line for the log."""

    number: int
    sentence: str


def too_many(workers: int, flag: str = "--data.workers") -> str | None:
    """Returns why this process cannot have a number of workers, and what to do; else None.

    Args:
        workers: the number that was set.
        flag: the flag that sets it.
    """
    free, limited = memory()
    need = workers * _LEAST_WORKER_MIB
    if need <= free / 2**20:
        return None
    where = "the container's limit leaves" if limited else "this host has"
    return (
        f"{flag} {workers} needs about {need:,} MiB of memory, and {where} {free / 2**20:,.0f} "
        f"free: use at most {_workers(max(1, int(free / WORKER_BYTES)))}"
    )


def _workers(count: int) -> str:
    return f"{count:,} worker{'s'[: count != 1]}"


def allow_files() -> None:
    """Raises this process's soft limit of open files, which is often 1024, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def refused(error: OSError, workers: int, flag: str = "--data.workers") -> InputError | None:
    """Returns an error of the system that does not start more processes, with the fix; else None.

    Args:
        error: of the start of workers.
        workers: their number.
        flag: the flag that sets it.
    """
    if error.errno not in (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM):
        return None
    return InputError(
        f"{flag} {workers}: the system refuses so many processes ({error.strerror}): use fewer, or "
        "raise the hard limits of open files and processes (ulimit -Hn and -Hu, or docker run "
        "--ulimit)"
    )


def choose(
    data: Any, model: Any, *, rows: int, devices: int, on_cpu: bool, processes: int = 1
) -> WorkerCount:
    """Returns the config's number of workers, or else the number that suits this host.

    Args:
        data: the config's data.
        model: the config's model.
        rows: examples of a global batch that this process loads.
        devices: devices of this process.
        on_cpu: whether the devices are CPUs.
        processes: processes of the run on this host.
    """
    if data.workers != 0 and not worker_process.may_start():
        return WorkerCount(
            0,
            "data.workers 0: this process is a worker of a pool, and may start no others (in "
            "Python: multiprocessing.Process.daemon)",
        )
    if data.workers is not None:
        return WorkerCount(data.workers, f"data.workers {data.workers}")
    available = cores(processes)
    batch, shared = shared_batch_bytes(data, model, rows), _free(_SHARED_MEMORY)
    batches = math.inf if not batch else _SHARE_OF_SHARED_MEMORY * shared / (batch * processes)
    free, limited = memory()
    left = _SHARE_OF_MEMORY * free / processes - PROGRAM_BYTES
    fit = functools.partial(chosen, data, available, rows=rows, devices=devices, on_cpu=on_cpu)
    most, number = fit(), fit(batches=batches, memory=left, batch=batch)
    why = f"this process may use {available} CPU {'core' if available == 1 else 'cores'}"
    if number < most:
        where = "the container's limit leaves" if limited else "this host has"
        why += (
            f", and {where} {free / 2**30:.1f} GiB of memory and {shared / 2**30:.1f} GiB of "
            f"{_SHARED_MEMORY} free, too little for {_workers(most)}"
        )
    return WorkerCount(number, f"data.workers {number}, chosen for this host: {why}")


def chosen(
    data: Any,
    cores: int,
    *,
    rows: int,
    devices: int,
    on_cpu: bool,
    batches: float = math.inf,
    memory: float = math.inf,
    batch: float = 0.0,
) -> int:
    """Chooses the number of workers for a host.

    Takes the cores that the loop leaves, rounded down by at most a quarter so that a batch divides
    evenly among the workers: then they load it together, and fewer batches wait in shared memory.
    With several devices, that is a multiple of their number if there are enough cores and blocks.

    Args:
        data: the config's data.
        cores: CPU cores of the process.
        rows: examples of a global batch that the process loads.
        devices: devices of the process.
        on_cpu: whether the devices are CPUs.
        batches: the number of batches for which shared memory has space.
        memory: bytes of memory for the workers and their batches.
        batch: bytes of a batch in shared memory.
    """
    free = max(1, cores // 2 if on_cpu else cores - LOOP_CORES)
    free = max(1, int(min(free, data.most_workers or free)))
    needed = {
        n: most_batches(rows, n, data.prefetch, devices, data.block) for n in range(1, free + 1)
    }
    fitting = [n for n in needed if needed[n] <= batches]
    fit_shared = max(fitting, default=min(free, devices))
    fitting = [
        n for n in needed if n <= fit_shared and n * WORKER_BYTES + needed[n] * batch <= memory
    ]
    largest = max(fitting, default=1)
    unit = _most_parts(rows, devices, data.block)
    near = range(-(-3 * largest // 4), largest + 1)
    return max(near, key=lambda number: (math.gcd(number, unit), number))


def parts_per_batch(rows: int, workers: int, devices: int, block: int) -> int:
    """Returns the number of equal parts into which a process's rows of a batch are divided.

    With several devices, a part holds the rows of one or more complete devices, so no rows are
    concatenated first: a node's batch of clips can be 1.6 GB, three times per second. A single
    device leaves more time for that, so there may be more parts.

    Args:
        rows: rows of a batch that the process loads; a multiple of ``devices``.
        workers: workers of the process.
        devices: devices of the process.
        block: successive examples that are read together (``DataConfig.block``).
    """
    return math.gcd(_most_parts(rows, devices, block), max(1, workers))


def _most_parts(rows: int, devices: int, block: int) -> int:
    """Returns the largest number of parts. It is 1 if the rows are not complete blocks."""
    blocks = 1 if rows % block else rows // block
    return math.gcd(devices, blocks) if devices > 1 else blocks


def reads_per_block(rows: int, workers: int, devices: int, block: int) -> float:
    """Returns by how many parts of batches a block is read, on average.

    The arguments are those of :func:`parts_per_batch`.
    """
    part = rows // parts_per_batch(rows, workers, devices, block)
    return 1 + (block - math.gcd(block, part)) / part


def most_batches(rows: int, workers: int, prefetch: int, devices: int, block: int) -> float:
    """Returns the largest number of batches in shared memory.

    Counts the batches that are ready, being loaded, and in the main process.

    Args:
        rows: rows of a batch that the process loads.
        workers: workers of the process.
        prefetch: ``data.prefetch``, the parts that each worker holds ready.
        devices: devices of the process.
        block: successive examples that are read together.
    """
    parts = workers * (prefetch + 1)
    return parts / parts_per_batch(rows, workers, devices, block) + _BATCHES_OF_PIPELINE


def shared_batch_bytes(data: Any, model: Any, rows: int) -> int:
    """Returns the bytes of a batch of ``rows`` examples that are sent through shared memory."""
    spec = data.sent(data.training_model(model).batch_spec(rows), model)
    sizes = (math.prod(part.shape) * part.dtype.itemsize for part in spec.values())
    return sum(size for size in sizes if size >= MIN_SHARED_BYTES)


def _free(folder: Path) -> float:
    try:
        return free_bytes(folder)
    except OSError:  # a system without such a folder
        return math.inf


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
