"""Divides batches among worker processes.

The rows of a batch are divided into equal parts, so that workers load one batch together instead of
one batch each. If there are more workers than parts, the others load the next batch.
"""

import math

# Smaller arrays are sent through a pipe, because creating, mapping and freeing shared memory costs
# more. But a worker's prefetched batches must fit into the pipe (64 KiB): when the run stops, they
# are no longer read, and Grain waits 25 s for a worker that is blocked on writing them.
MIN_SHARED_BYTES = 2**12

_BATCHES_OF_PIPELINE = 3  # that it holds in addition to those that workers have ready


def parts_per_batch(rows: int, workers: int, devices: int) -> int:
    """Returns the number of equal parts into which a process's rows of a batch are divided.

    With several devices, a part holds the rows of one or more complete devices, so no rows are
    concatenated first: a node's batch of clips can be 1.6 GB, three times per second. A single
    device leaves more time for that, so there may be more parts.

    Args:
        rows: rows of a batch that the process loads; a multiple of ``devices``.
        workers: workers of the process.
        devices: devices of the process.
    """
    return math.gcd(devices if devices > 1 else rows, max(1, workers))


def most_batches(rows: int, workers: int, prefetch: int, devices: int) -> float:
    """Returns the largest number of batches in shared memory.

    Counts the batches that are ready, being loaded, and in the main process.

    Args:
        rows: rows of a batch that the process loads.
        workers: workers of the process.
        prefetch: ``data.prefetch``, the parts that each worker holds ready.
        devices: devices of the process.
    """
    parts = workers * (prefetch + 1)
    return parts / parts_per_batch(rows, workers, devices) + _BATCHES_OF_PIPELINE
