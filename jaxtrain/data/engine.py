"""Runs a function over many items: in processes of this machine, or on a Ray cluster.

The function, its arguments, and its results are the same on both. They finish in any order, and a
result must not depend on where or how often its item was processed: a Ray task is repeated if its
node is lost. Ray is an extra, and is imported only if it is chosen.
"""

import concurrent.futures
import dataclasses
import functools
import importlib.metadata
import itertools
import logging
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol, TypeVar

from jaxtrain import versions
from jaxtrain.errors import InputError, RunAgain, first_line

Item = TypeVar("Item")
Result = TypeVar("Result")

NAMES = ("local", "ray")
# A task whose worker dies is repeated, because its node may be lost. After that, the item is at
# fault.
_RETRIES = 3
# The same for a task that Ray kills because its node lacks memory. Ray's default is to repeat it
# forever. It may kill a small task beside a large one, so this number is larger.
_MEMORY_RETRIES = 10
# Tasks in flight for each CPU of the cluster: the next one starts without waiting for the driver.
_IN_FLIGHT = 2
_RESIZE_S = 10.0  # how often the number of CPUs is read, as nodes come and go


class Engine(Protocol):
    """Where a function runs.

    Attributes:
        where: names it for messages, such as "2 processes".
    """

    @property
    def where(self) -> str:
        """Returns where the work runs, for messages."""

    def as_finished(
        self,
        work: Callable[..., Result],
        items: Iterable[Item],
        *fixed: Any,
        died: Callable[[Item], Result],
    ) -> Iterator[tuple[Item, Result]]:
        """Yields (item, ``work(item, *fixed)``) in the order in which items are finished.

        Reads ``items`` only as fast as they are processed, so memory does not grow with them.

        Args:
            work: a module-level function, because workers import it.
            items: inputs that can be pickled.
            fixed: further arguments, the same for every item.
            died: returns the result of an item that kills its worker, also when it is retried.

        Raises:
            Exception: the first one that ``work`` raises; results after it are lost.
            RunAgain: the cluster is unavailable.
        """


@dataclasses.dataclass(frozen=True)
class Local:
    """Worker processes on this machine.

    Attributes:
        workers: number of processes.
    """

    workers: int

    @property
    def where(self) -> str:
        """Returns the number of processes, for messages."""
        return "one process" if self.workers == 1 else f"{self.workers} processes"

    def as_finished(
        self,
        work: Callable[..., Result],
        items: Iterable[Item],
        *fixed: Any,
        died: Callable[[Item], Result],
    ) -> Iterator[tuple[Item, Result]]:
        """Implements :meth:`Engine.as_finished`.

        If an item kills its worker, the pool is lost. Then the items that were in progress are
        retried one at a time.
        """
        waiting = iter(items)
        while True:
            suspects: list[Item] = []
            yield from self._together(work, waiting, fixed, suspects)
            if not suspects:
                return
            for item in suspects:
                with _pool(1, work, fixed) as pool:
                    try:
                        result = pool.submit(_call, item).result()
                    except BrokenProcessPool:
                        result = died(item)
                yield item, result

    def _together(
        self,
        work: Callable[..., Result],
        waiting: Iterator[Item],
        fixed: tuple[Any, ...],
        suspects: list[Item],
    ) -> Iterator[tuple[Item, Result]]:
        """Yields the results from one worker pool, until all items are done or a worker dies.

        Args:
            work: the function.
            waiting: items; every item taken becomes either a result or a suspect.
            fixed: its further arguments.
            suspects: receives the items that were in progress or being submitted when a worker
                died.
        """
        with _pool(self.workers, work, fixed) as pool:
            running: dict[concurrent.futures.Future[Result], Item] = {}

            def fill() -> None:
                while not suspects and len(running) < self.workers:
                    for item in itertools.islice(waiting, 1):
                        try:
                            running[pool.submit(_call, item)] = item
                        except BrokenProcessPool:  # a worker died in the meantime
                            suspects.append(item)
                        break
                    else:
                        return

            fill()
            while running:
                done, _ = concurrent.futures.wait(
                    running, return_when=concurrent.futures.FIRST_COMPLETED
                )
                for future in done:
                    item = running.pop(future)
                    try:
                        result = future.result()
                    except BrokenProcessPool:
                        suspects.append(item)
                        continue
                    yield item, result
                    fill()


def _pool(
    workers: int, work: Callable[..., Any], fixed: tuple[Any, ...]
) -> concurrent.futures.Executor:
    """Starts workers, which receive the fixed arguments once."""
    return concurrent.futures.ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(work, fixed),
    )


_task: tuple[Callable[..., Any], tuple[Any, ...]]  # of this worker


def _begin(work: Callable[..., Any], fixed: tuple[Any, ...]) -> None:
    """Initializes a worker. It ends with its parent, even if that is killed."""
    global _task
    _task = work, fixed
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers already use all cores
    parent = multiprocessing.parent_process()
    if parent is None:  # a test runs workers as threads
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="parent").start()


def _call(item: Any) -> Any:
    work, fixed = _task
    return work(item, *fixed)


@dataclasses.dataclass(frozen=True)
class Ray:
    """A Ray cluster, which schedules the work and repeats what a lost node was doing.

    All nodes must see the input and the output under the same paths, and have the same versions of
    jaxtrain and of the packages that determine its results.

    Attributes:
        address: as for ``ray.init``: HOST:PORT, ``ray://HOST:PORT``, "auto" for the cluster of this
            machine, or "local" to start one here.
        workers: most tasks at a time; None uses all CPUs.
    """

    address: str
    workers: int | None = None

    @property
    def where(self) -> str:
        """Returns the address, for messages."""
        return f"the Ray cluster {self.address}"

    def as_finished(
        self,
        work: Callable[..., Result],
        items: Iterable[Item],
        *fixed: Any,
        died: Callable[[Item], Result],
    ) -> Iterator[tuple[Item, Result]]:
        """Implements :meth:`Engine.as_finished`."""
        ray = _connected(self.address)
        try:
            yield from self._on(ray, work, items, fixed, died)
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise RunAgain(
                f"the Ray cluster {self.address} failed ({first_line(error)}): check it with `ray "
                "status` and start again; finished work is kept"
            ) from error
        finally:
            ray.shutdown()  # ends this job's tasks, too

    def _on(
        self,
        ray: Any,
        work: Callable[..., Result],
        items: Iterable[Item],
        fixed: tuple[Any, ...],
        died: Callable[[Item], Result],
    ) -> Iterator[tuple[Item, Result]]:
        task = ray.remote(num_cpus=1, max_retries=_RETRIES)(_in_task)
        shared = ray.put((work, fixed, _stamp()))
        running: dict[Any, Item] = {}
        waiting = iter(items)
        room, read = 0, float("-inf")
        while True:
            if self.workers is not None:
                room = self.workers
            elif time.monotonic() - read > _RESIZE_S:
                read = time.monotonic()
                room = _IN_FLIGHT * max(1, int(ray.cluster_resources().get("CPU", 1)))
            for item in itertools.islice(waiting, max(0, room - len(running))):
                running[task.remote(item, [shared])] = item  # in a list, Ray does not fetch it
            if not running:
                return
            refs = list(running)
            # All that are finished, so that the cost of a wait, which grows with the tasks in
            # flight, is not paid for each.
            ray.wait(refs, num_returns=1)
            done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
            for ref in done:
                item = running.pop(ref)
                try:
                    result, error = ray.get(ref)
                except (  # also in all retries
                    ray.exceptions.WorkerCrashedError,
                    ray.exceptions.OutOfMemoryError,
                ):
                    yield item, died(item)
                    continue
                if error is not None:
                    raise error
                yield item, result


def _connected(address: str) -> Any:
    """Imports Ray and connects to a cluster."""
    os.environ.setdefault("RAY_task_oom_retries", str(_MEMORY_RETRIES))  # read by the import
    try:
        import ray
    except ImportError:
        raise InputError(f"--engine ray requires Ray: {versions.install('ray')}") from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # for a cluster that is started here
    more: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **more)
    except ConnectionError as error:
        raise InputError(
            f"--ray-address {address}: no Ray cluster found ({first_line(error)}): start one with "
            "`ray start --head`, or pass --ray-address HOST:PORT, or local"
        ) from error
    except (ValueError, RuntimeError) as error:  # a malformed address, or other versions
        raise InputError(f"--ray-address {address}: {first_line(error)}") from error
    return ray


@functools.lru_cache(maxsize=1)
def _fetched(reference: Any) -> tuple[Any, ...]:
    """Fetches what all tasks share, once per worker: a list of files may be long."""
    import ray

    return ray.get(reference)


def _in_task(item: Any, shared: list[Any]) -> tuple[Any, Exception | None]:
    """Processes an item in a Ray worker; returns its result, or the error.

    Ray would wrap the error in one of its own.
    """
    os.environ["JAX_PLATFORMS"] = "cpu"  # this task has no accelerator
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # tasks already use all cores
    work, fixed, stamp = _fetched(shared[0])
    if stamp != _stamp():
        return None, InputError(
            f"the Ray node {socket.gethostname()} has {_stamp()}, but this command has {stamp}: "
            "install the same versions, because they determine the results"
        )
    try:
        return work(item, *fixed), None
    except Exception as error:
        return None, error


@functools.cache
def _stamp() -> str:
    """Returns the versions that determine the results."""
    found = {}
    for name in ("jaxtrain", "av", "numpy", "tokenizers"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # jaxtrain, run from a checkout
            found[name] = "of a checkout"
    return ", ".join(f"{name} {version}" for name, version in found.items())
