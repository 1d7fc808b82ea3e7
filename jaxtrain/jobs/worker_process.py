"""Prepares worker processes: they load no jax, ignore signals, and end with their parent.

Loading needs only numpy. Grain imports jax and Orbax if they are installed, which takes two thirds
of a worker's start-up time, and works without them.
"""

import contextlib
import importlib.util
import logging
import multiprocessing
import os
import re
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any, cast

import absl.logging

_NOT_FOR_DATA = ("jax", "orbax")
_KILLED = re.compile(r"terminated unexpectedly with exit code -(\d+)")  # Grain, of a worker


def begin_without_jax() -> None:
    """Makes imports of jax and Orbax fail in this process; call it before any other import."""
    modules = cast(dict[str, object], sys.modules)
    for name in _NOT_FOR_DATA:
        modules.setdefault(name, None)
    absl.logging.get_absl_logger().addFilter(_not_of_jax)  # Grain warns that it is missing


def prepare(prefix: str, worker: int, workers: int) -> None:
    """Initializes a worker: ignores stop signals, ends with the parent, hides GPUs from jax.

    The main process handles them: it saves and then ends the workers. If it is killed, a worker
    ends itself. A worker may import jax if another program uses this package; it must not take
    accelerator memory.
    """
    del worker, workers
    shared_memory._SHM_NAME_PREFIX = prefix  # type: ignore[attr-defined]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


def may_start() -> bool:
    """Returns whether this process may start others; a worker of multiprocessing.Pool may not."""
    return not multiprocessing.current_process().daemon


def why_lost(error: RuntimeError, workers: int) -> str:
    """Returns which signal killed a worker, and the fix; "" for other errors."""
    killed = _KILLED.search(str(error))
    if killed is None:
        return ""
    number = int(killed[1])
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    cure = "give /dev/shm more space" if name == "SIGBUS" else "if memory was short, free some"
    return (
        f"one of {workers} processes that load examples was killed ({name}): {cure}, or use fewer "
        "(--data.workers)"
    )


def shared_prefix() -> str:
    """Returns how the names begin of shared memory that the workers of one pipeline make.

    It is random: containers with one /dev/shm (``--ipc=host``) have equal process ids. Names have
    at most 14 characters, of which a prefix may take 10.
    """
    return f"/jt{secrets.token_hex(3)}_"


def await_freed_memory() -> None:
    """Waits until Grain's thread has freed the shared memory in its queue.

    Memory that it has not freed when Python exits stays until Python's resource tracker finds it
    and prints a warning about leaked shared memory after the run's last line.
    """
    import grain  # here: workers begin without it

    thread = grain.multiprocessing.SharedMemoryArray._del_thread_pool  # no public way to wait
    if thread is not None:
        thread.apply(lambda: None)  # it has one thread, which works in order


def free_shared_memory(prefix: str) -> None:
    """Frees what workers held when they were killed.

    Otherwise, Python's resource tracker does so at exit, with a warning.
    """
    for path in Path("/dev/shm").glob(f"{prefix.removeprefix('/')}*"):
        with contextlib.suppress(OSError):  # freed just now
            memory = shared_memory.SharedMemory(path.name)
            memory.close()
            memory.unlink()


@contextlib.contextmanager
def started_by_us() -> Iterator[None]:
    """Worker processes import :mod:`jaxtrain.main` first, whatever program is running.

    multiprocessing would run the program's own file again in each worker: a script that calls
    ``jaxtrain.train`` outside of ``if __name__ == "__main__"`` would train again there. Objects of
    classes that the program's own file defines cannot be sent to a worker.
    """
    main = sys.modules["__main__"]
    before = main.__spec__
    main.__spec__ = importlib.util.find_spec("jaxtrain.main")
    try:
        yield
    finally:
        main.__spec__ = before


def _not_of_jax(record: logging.LogRecord) -> bool:
    return "jax profiler" not in record.getMessage()


def end_with_parent() -> None:
    """Ends this process when its parent ends, even if that is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is started by multiprocessing"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent").start()


class _Unraisable:
    """Python's hook for errors in destructors; ignores those about workers that did not start."""

    def __init__(self, before: Callable[[Any], object]) -> None:
        self._before = before

    def __call__(self, unraisable: Any) -> None:
        if "can only join a started process" not in str(unraisable.exc_value):
            self._before(unraisable)


def ignore_unstarted() -> None:
    """Prints nothing about workers that did not start, whose error is raised.

    If the system refuses a process, Grain deletes iterators that wait for the end of others.
    """
    if not isinstance(sys.unraisablehook, _Unraisable):
        sys.unraisablehook = _Unraisable(sys.unraisablehook)
