"""Work on pieces of data in several processes, with the results in the order of the pieces.

Which process did what leaves no trace: the results are those of one process.
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

from jaxtrain.errors import RunAgain

Item = TypeVar("Item")
Result = TypeVar("Result")

# Pieces that wait for a process, for each of them: enough that none runs dry, few in memory.
_WAITING = 2


def cores() -> int:
    """Processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_order(
    work: Callable[..., Result],
    items: Iterable[Item],
    *fixed: Any,
    processes: int,
) -> Iterator[Result]:
    """``work(item, *fixed)`` of each item, in order.

    Memory holds a few items for each process, however many there are.

    Args:
        work: a function of a module, for processes that are started anew.
        items: pieces of data; taken as there is room for them.
        fixed: more arguments, the same for all.
        processes: 1 or less works in this one.

    Raises:
        RunAgain: a process died, as of a lack of memory.
    """
    if processes <= 1:
        for item in items:
            yield work(item, *fixed)
        return
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
            "a process that prepares the data was killed, most likely for lack of memory: free "
            "some and start again; what is finished stays"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def begin() -> None:
    """In a new process: Ctrl-C is the parent's affair, and without the parent there is no work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes share the cores out already
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent").start()
