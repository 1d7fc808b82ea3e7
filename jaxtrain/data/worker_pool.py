"""Runs a function over items in a pool of worker processes, with the results in order.

The results do not depend on the number of workers or on which worker did what.
"""

import collections
import concurrent.futures
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from jaxtrain.data import worker_count
from jaxtrain.errors import RunAgain

Item = TypeVar("Item")
Result = TypeVar("Result")

# Items queued per worker: enough to keep every worker busy, few enough for memory.
_WAITING = 2


def in_order(
    work: Callable[..., Result],
    items: Iterable[Item],
    *fixed: Any,
    processes: int,
) -> Iterator[Result]:
    """Yields ``work(item, *fixed)`` for each item, in order.

    Memory holds only a few items per worker.

    Args:
        work: a module-level function, because workers are spawned and must import it.
        items: inputs; read only as fast as the workers process them.
        fixed: further arguments, the same for every item.
        processes: number of workers; with 1 or less, this process does the work.

    Raises:
        RunAgain: a worker was killed, for example for lack of memory.
    """
    if processes <= 1:
        for item in items:
            yield work(item, *fixed)
        return
    worker_count.allow_files(worker_count.files_needed(processes, 0))
    pool = concurrent.futures.ProcessPoolExecutor(
        processes, mp_context=multiprocessing.get_context("spawn"), initializer=begin
    )
    running: collections.deque[concurrent.futures.Future[Result]] = collections.deque()
    waiting = iter(items)
    try:
        while True:
            room = _WAITING * processes - len(running)
            running.extend(
                pool.submit(work, item, *fixed) for item in itertools.islice(waiting, room)
            )
            if not running:
                return
            yield running.popleft().result()
    except BrokenProcessPool as error:
        raise RunAgain(
            "a worker that prepares the data was killed, most likely for lack of memory: free "
            "some memory and start again; finished work is kept"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def begin() -> None:
    """Initializes a worker: ignores Ctrl-C, which the parent handles, and ends with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers already use all cores
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent").start()
