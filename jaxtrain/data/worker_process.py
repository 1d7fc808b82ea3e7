"""What every process that loads data does: it starts light, hears no signals, ends with its parent.

Loading takes numpy alone. Grain imports jax and Orbax where they are there, which is two thirds of
the time that a worker takes to start, and goes on without them.
"""

import contextlib
import importlib.util
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import cast

import absl.logging

_NOT_FOR_DATA = ("jax", "orbax")


def begin_without_jax() -> None:
    """Makes imports of jax and Orbax fail in this process; call it before anything is imported."""
    modules = cast(dict[str, object], sys.modules)
    for name in _NOT_FOR_DATA:
        modules.setdefault(name, None)
    absl.logging.get_absl_logger().addFilter(_not_of_jax)  # Grain warns that it is not there


def prepare(worker: int, workers: int) -> None:
    """Signals are for the main process, which saves and then ends the workers.

    Where the main process is killed and ends nobody, a worker ends itself. A worker that does have
    jax (of a program that is not ours) takes no memory of the accelerator.
    """
    del worker, workers
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"


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


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is started by multiprocessing"
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)
