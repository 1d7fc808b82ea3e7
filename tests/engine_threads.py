"""Workers of jaxtrain.data.engine as threads, because processes take a second to start."""

import concurrent.futures
from collections.abc import Callable
from typing import Any

from jaxtrain.data import engine


def pool(
    workers: int, work: Callable[..., Any], fixed: tuple[Any, ...]
) -> concurrent.futures.Executor:
    """Replaces ``engine._pool``."""
    return concurrent.futures.ThreadPoolExecutor(
        workers, initializer=engine._begin, initargs=(work, fixed)
    )
