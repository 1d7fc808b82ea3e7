"""Chooses the number of workers of a process, from the cores and the memory that it may use.

The rows of a batch are divided into equal parts, so that workers load one batch together instead of
one batch each. If there are more workers than parts, the others load the next batch. So the number
of workers never changes the examples or their order, and may differ from host to host, and from one
start of a run to the next.

A part has complete blocks if the process's rows do (:class:`jaxtrain.data.source.Source`): a block
that is divided between workers, such as the crops of a clip, is read by each of them.
"""

import functools
import math
from pathlib import Path
from typing import Any, NamedTuple

from jaxtrain import formats, machine
from jaxtrain.jobs import worker_process
from jaxtrain.storage.disks import free_bytes

_SHARED_MEMORY = Path("/dev/shm")

LOOP_CORES = 2
"""Cores that the training loop needs on GPUs: a thread runs the loop, another one puts batches on
the devices. On CPU devices, the steps themselves need cores: half of them."""

PROGRAM_BYTES = 2.0 * 2**30
"""Assumed: memory that the main process still needs when it starts the workers."""

# Smaller arrays are sent through a pipe, because creating, mapping and freeing shared memory costs
# more. But a worker's prefetched batches must fit into the pipe (64 KiB): when the run stops, they
# are no longer read, and Grain waits 25 s for a worker that is blocked on writing them.
MIN_SHARED_BYTES = 2**12

_BATCHES_OF_PIPELINE = 3  # that it holds in addition to those that workers have ready

# The fraction of the free memory that the main process and chosen workers may fill.
_SHARE_OF_MEMORY = 0.8

# The fraction of the free shared memory that chosen workers may fill. Other processes use it, too.
_SHARE_OF_SHARED_MEMORY = 0.8


class WorkerCount(NamedTuple):
    """The number of worker processes, 0 to load in the main process; and a line for the log."""

    number: int
    sentence: str


def choose(
    data: Any, model: Any, *, rows: int, devices: int, on_cpu: bool, processes: int = 1
) -> WorkerCount:
    """Returns the config's number of workers, or else the number that suits this host.

    Args:
        rows: examples of a global batch that this process loads.
        processes: processes of the run on this host.
    """
    if data.workers != 0 and not worker_process.may_start():
        return WorkerCount(
            0,
            "data.workers 0: this process is a worker of a pool, and may start no others (in "
            "Python: multiprocessing.Process.daemon)",
        )
    batch, shared = shared_batch_bytes(data, model, rows), _free(_SHARED_MEMORY)
    if data.workers is not None:
        text = f"data.workers {data.workers}"
        batches_held = most_batches(rows, data.workers, data.prefetch, devices, data.block)
        need = batch * processes * batches_held / 2**30
        if data.workers and need > shared / 2**30:  # the system would kill them, perhaps much later
            text = (
                f"warning: {text} needs up to {need:.1f} GiB of {_SHARED_MEMORY}, which has "
                f"{shared / 2**30:.1f} GiB free: use fewer, lower data.prefetch, or give it more "
                "space (docker run --shm-size)"
            )
        return WorkerCount(data.workers, text)
    available = machine.cores(processes)
    batches = math.inf if not batch else _SHARE_OF_SHARED_MEMORY * shared / (batch * processes)
    free, limited = machine.memory()
    left = _SHARE_OF_MEMORY * free / processes - PROGRAM_BYTES
    fit = functools.partial(chosen, data, available, rows=rows, devices=devices, on_cpu=on_cpu)
    by_cores, number = fit(), fit(batches=batches, memory=left, batch=batch)
    why = f"this process may use {available} CPU {'core' if available == 1 else 'cores'}"
    if number < by_cores:
        bound = "the container's limit leaves" if limited else "this host has"
        why += (
            f", and {bound} {free / 2**30:.1f} GiB of memory and {shared / 2**30:.1f} GiB of "
            f"{_SHARED_MEMORY} free, too little for {formats.counted(by_cores, 'worker')}"
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
        n
        for n in needed
        if n <= fit_shared and n * machine.WORKER_BYTES + needed[n] * batch <= memory
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
        prefetch: ``data.prefetch``, the parts that each worker holds ready.
    """
    parts = workers * (prefetch + 1)
    return parts / parts_per_batch(rows, workers, devices, block) + _BATCHES_OF_PIPELINE


def shared_batch_bytes(data: Any, model: Any, rows: int) -> int:
    """Returns the bytes of a batch of ``rows`` examples that are sent through shared memory."""
    spec = data.sent(data.training_model(model).batch_spec(rows), model)
    sizes = (math.prod(array.shape) * array.dtype.itemsize for array in spec.values())
    return sum(size for size in sizes if size >= MIN_SHARED_BYTES)


def _free(folder: Path) -> float:
    try:
        return free_bytes(folder)
    except OSError:  # a system without such a folder
        return math.inf
