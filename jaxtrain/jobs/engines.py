"""Runs a function over many items: in processes or threads of this machine, or on a Ray cluster.

The function and its results are the same on all of them. Items finish in any order, and a result
must not depend on where or how often its item was processed: Ray repeats it if its node is lost. An
item that kills its worker, most likely for lack of memory, is tried alone once more. Ray is an
extra, and is imported only if it is chosen.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar, cast

from jaxtrain import machine, terminal, versions
from jaxtrain.errors import InputError, RunAgain, first_line
from jaxtrain.jobs import worker_process

Item = TypeVar("Item")
Result = TypeVar("Result")

# Ray restarts a worker that dies, or whose node is lost, so often, and repeats its items.
_RETRIES = 3
_STARTS = 3  # workers of this machine in a row that end before they begin
_POLL_S = 10.0  # how often the size of the cluster is read, as nodes come and go
_REACH_S = 30.0  # of a connection to the cluster
_REPORT_S = 30.0  # of a wait for the first result, before it is reported
# Of the memory of a GPU that several workers share, for all of them together.
_GPU_MEMORY = 0.9
# Ray's error does not say that the cluster refused this process.
_TOKEN = (
    "; if the cluster has a token (InvalidAuthToken), set RAY_AUTH_MODE=token and copy "
    "~/.ray/auth_token from one of its machines"
)


def _never() -> None:
    """Never stops: workers of other processes are killed instead."""


@dataclasses.dataclass(frozen=True)
class Worker:
    """What a worker is told when it begins.

    Attributes:
        number: counts the workers of this process, from 0.
        check: raises an exception once the command has failed or is stopped. Threads call it often.
    """

    number: int
    cpus: int = 1
    check: Callable[[], None] = _never


Begin = Callable[[Worker], Callable[[Item], Result]]
"""Prepares a worker, for example loads a model, and returns what processes an item there."""


class Engine(Protocol):
    """Where a function runs."""

    def map(
        self, begin: Begin[Item, Result], items: Iterable[Item]
    ) -> Iterator[tuple[Item, Result | None]]:
        """Yields items and their results in the order in which they are finished.

        Reads ``items`` only as fast as they are processed, so memory does not grow with them.

        Args:
            begin: called once in each worker. Can be pickled, and its function never returns None.

        Yields:
            An item and its result, or None if the item killed its worker twice.

        Raises:
            Exception: the first one that a worker raises; results after it are lost.
            RunAgain: the cluster is unavailable.
        """


@dataclasses.dataclass(frozen=True)
class Threads:
    """Threads of this process, for work that waits for its devices."""

    workers: int

    def map(
        self, begin: Begin[Item, Result], items: Iterable[Item]
    ) -> Iterator[tuple[Item, Result | None]]:
        """Implements :meth:`Engine.map`; an item that kills its worker ends the command."""
        stopped, numbers, local = threading.Event(), itertools.count(), threading.local()

        def check() -> None:
            if stopped.is_set():
                raise _Stopped

        def process(item: Item) -> Result:
            check()
            try:
                if not hasattr(local, "process"):
                    local.process = begin(Worker(next(numbers), check=check))
                return local.process(item)
            except BaseException:
                stopped.set()  # at once, before the main thread sees the error
                raise

        pool = concurrent.futures.ThreadPoolExecutor(self.workers)
        running: dict[concurrent.futures.Future[Result], Item] = {}
        waiting = iter(items)
        try:
            while True:
                for item in itertools.islice(waiting, self.workers - len(running)):
                    running[pool.submit(process, item)] = item
                if not running:
                    return
                done = concurrent.futures.wait(
                    running, return_when=concurrent.futures.FIRST_COMPLETED
                ).done
                for future in done:
                    item = running.pop(future)
                    # Another thread has failed, whose error follows.
                    with contextlib.suppress(_Stopped):
                        yield item, future.result()
        finally:
            stopped.set()
            pool.shutdown(cancel_futures=True)


class _Stopped(BaseException):  # no error of an item, so its function must not catch it
    """Another thread failed, or the user stopped the command."""


@dataclasses.dataclass(frozen=True)
class Processes:
    """Worker processes on this machine; a thread in a process that may start no others."""

    workers: int
    say: Callable[[str], None] = terminal.say

    def map(
        self, begin: Begin[Item, Result], items: Iterable[Item]
    ) -> Iterator[tuple[Item, Result | None]]:
        """Implements :meth:`Engine.map`."""
        if not worker_process.may_start():
            self.say("this process is a worker of a pool, and may start no others: it works alone")
            yield from Threads(1).map(begin, items)
            return
        killed: list[Item] = []
        yield from self._map_once(begin, iter(items), self.workers, killed)
        again: list[Item] = []
        # Alone, because the system may have killed them for the memory that others had.
        yield from self._map_once(begin, iter(killed), 1, again)
        yield from ((item, None) for item in again)

    def _map_once(
        self, begin: Begin[Item, Result], waiting: Iterator[Item], workers: int, killed: list[Item]
    ) -> Iterator[tuple[Item, Result | None]]:
        """Yields the results of items that do not kill their workers.

        Each worker has a pipe of its own, which closes if the worker dies. In a pool of Python's,
        the death of one ends the others, too, and what they were processing would be lost.

        Raises:
            RunAgain: workers end before they begin, and so before they try their items.
        """
        machine.allow_files()
        idle: list[Connection] = []
        starting = set[Connection]()
        running: dict[Connection, Item] = {}
        ends: dict[Connection, contextlib.ExitStack] = {}
        untried: list[Item] = []
        not_begun = 0  # workers in a row
        with contextlib.ExitStack() as stack:
            numbers = itertools.count()
            while True:
                while len(running) < workers:
                    try:
                        item = untried.pop() if untried else next(waiting)
                    except StopIteration:
                        break
                    if idle:
                        worker = idle.pop()
                        try:
                            worker.send(item)
                        except OSError:  # it died after its last item
                            ends.pop(worker).close()
                            untried.append(item)
                            continue
                    else:
                        end = stack.enter_context(contextlib.ExitStack())
                        worker = end.enter_context(_process(begin, next(numbers)))
                        ends[worker] = end
                        starting.add(worker)
                    running[worker] = item
                if not running:
                    return
                for ready in multiprocessing.connection.wait(list(running)):
                    worker = cast(Connection, ready)
                    item = running.pop(worker)
                    try:
                        result, error = worker.recv()
                        if worker in starting:  # it was told that the worker has begun
                            starting.remove(worker)
                            not_begun = 0
                            worker.send(item)
                            running[worker] = item
                            continue
                    except (EOFError, OSError) as ended:
                        ends.pop(worker).close()  # its files
                        if worker not in starting:
                            killed.append(item)
                            continue
                        starting.remove(worker)
                        untried.append(item)
                        not_begun += 1
                        if not_begun == _STARTS:
                            raise RunAgain(
                                "a worker process ended before it began: if it printed an error, "
                                "correct that; if memory was short, free some"
                            ) from ended
                        continue
                    if error is not None:
                        raise error
                    idle.append(worker)
                    yield item, result


@contextlib.contextmanager
def _process(begin: Begin[Any, Any], number: int) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    own_end, worker_end = context.Pipe()
    process = context.Process(target=_serve, args=(worker_end, begin, number), daemon=True)
    # A Ctrl-C in the worker would print a traceback. To start the resource tracker unblocks it.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
    try:
        with worker_process.started_by_us():
            process.start()
    except OSError as error:
        raise machine.refused(error, number + 1, "--workers") or error from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    worker_end.close()
    try:
        yield own_end
    finally:
        process.kill()  # an item may take minutes, and its result is lost
        process.join()
        own_end.close()


def _serve(pipe: Connection, begin: Begin[Any, Any], number: int) -> None:
    """Processes items in a worker process. It ends with its parent, even if that is killed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers already use all cores
    worker_process.end_with_parent()
    process = None
    pipe.send((None, None))  # it has begun
    while True:
        item = pipe.recv()
        result: Any = None
        failure: Exception | None = None
        try:
            process = process or begin(Worker(number))
            result = process(item)
        except Exception as error:
            failure = error
        pipe.send((result, failure))


@dataclasses.dataclass(frozen=True)
class Ray:
    """A Ray cluster, which schedules the work and repeats what a lost node was doing.

    All nodes must see the input and the output under the same paths, and have the same versions of
    jaxtrain and of the packages that determine its results.

    Attributes:
        address: as for ``ray.init``: HOST:PORT, ``ray://HOST:PORT``, "auto" for the cluster of this
            machine, or "local" to start one here.
        workers: most items at a time; with a model, items of each worker at a time. None is one per
            CPU.
        gpus: None for work without a model, in workers with one CPU. A number is for work that
            loads a model: each worker has so many GPUs, such as 0.25, and an equal part of a node's
            CPUs. -1 is one, or none if the cluster has none.
    """

    address: str
    workers: int | None = None
    gpus: float | None = None
    say: Callable[[str], None] = terminal.say

    def map(
        self, begin: Begin[Item, Result], items: Iterable[Item]
    ) -> Iterator[tuple[Item, Result | None]]:
        """Implements :meth:`Engine.map`."""
        ray = _connected(self.address, self.say)
        try:
            killed: list[Item] = []
            yield from self._map_once(ray, begin, iter(items), killed)
            again: list[Item] = []
            yield from self._map_once(ray, begin, iter(killed), again, alone=True)
            yield from ((item, None) for item in again)
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise RunAgain(
                f"the Ray cluster {self.address} failed ({first_line(error)}): check it with `ray "
                "status` and start again; finished work is kept"
            ) from error
        finally:
            ray.shutdown()  # ends the workers, too

    def _map_once(
        self,
        ray: Any,
        begin: Begin[Item, Result],
        waiting: Iterator[Item],
        killed: list[Item],
        alone: bool = False,
    ) -> Iterator[tuple[Item, Result | None]]:
        """Yields the results of items that do not kill their workers, and appends the others.

        Workers are Ray's actors. Ray restarts those of a lost node, and repeats their items, once
        another node has room for them. At the end, actors without an item end, which makes room.
        """
        gpus, cpus = self._of_each_actor(ray)
        has_model, limit = self.gpus is not None, self.workers
        slots = 1 if alone or not has_model else limit or cpus
        max_actors = 1 if alone else math.inf if has_model or limit is None else limit
        actor_class = ray.remote(
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=_RETRIES,
            max_task_retries=_RETRIES,
            max_concurrency=slots,
        )(_Actor)
        more = ("jax", "jaxlib", "flax") if has_model else ()
        shared = ray.put((begin, more, _stamp(*more)))
        running: dict[Any, tuple[Any, Item]] = {}
        actors, free = 0, collections.deque[Any]()  # a handle for each item that may be added
        report_at = time.monotonic() + _REPORT_S
        following = next(waiting, None)
        while following is not None or running:
            total = ray.cluster_resources()
            fit = total.get("GPU", 0) / gpus if gpus else total.get("CPU", 1) / cpus
            while following is not None and actors < max(1, min(max_actors, int(fit))):
                # In a list, Ray does not fetch it.
                handle = actor_class.remote([shared], gpus, cpus)
                free.extendleft([handle] * slots)  # new actors first, so that they begin
                actors += 1
            while following is not None and free:
                handle = free.popleft()
                running[handle.process.remote(following)] = handle, following
                following = next(waiting, None)
            if following is None:
                free.clear()
            references = list(running)
            ray.wait(references, num_returns=1, timeout=_POLL_S)
            # All that are finished, so that the cost of a wait, which grows with the tasks in
            # flight, is not paid for each.
            done, _ = ray.wait(references, num_returns=len(references), timeout=0)
            if done:
                report_at = math.inf
            elif time.monotonic() > report_at:
                report_at = math.inf
                self.say(
                    f"the Ray cluster has no result after {_REPORT_S:.0f} s: a worker needs "
                    f"{cpus} CPUs and {gpus:g} GPUs; wait for other jobs, or add nodes (`ray "
                    "status`)"
                )
            for reference in done:
                handle, item = running.pop(reference)
                result = _result(ray, reference)
                if result is None:
                    killed.append(item)
                    # Ray may have given the actor up: its other items end in the same way.
                    actors -= not any(handle is other for other, _ in running.values())
                    continue
                free.append(handle)
                yield item, result

    def _of_each_actor(self, ray: Any) -> tuple[float, int]:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = self.gpus or 0.0
        if gpus < 0:
            gpus = 1.0 if any(node.get("GPU") for node in nodes) else 0.0
        cores = [int(node.get("CPU", 0) * gpus / node["GPU"]) for node in nodes if node.get("GPU")]
        return gpus, max(1, min(cores, default=1)) if gpus else 1


def _result(ray: Any, reference: Any) -> Any:
    """Returns the result of an item; None if its worker was killed each time."""
    lost = (
        ray.exceptions.WorkerCrashedError,
        ray.exceptions.OutOfMemoryError,
        ray.exceptions.RayActorError,
    )
    try:
        result, error = ray.get(reference)
    except lost:
        return None
    if error is not None:
        raise error
    return result


def _begun(begin: Begin[Any, Any], stamp: str, installed: str, cpus: int) -> Callable[[Any], Any]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # workers already use all cores
    if stamp != installed:
        raise InputError(
            f"the Ray node {socket.gethostname()} has {installed}, but this command has {stamp}: "
            "install the same versions, because they determine the results"
        )
    return begin(Worker(0, cpus))


class _Actor:
    """Begins once in a Ray actor. Its method returns errors, which Ray would wrap."""

    def __init__(self, shared: list[Any], gpus: float, cpus: int) -> None:
        self._arguments, self._begun = (shared, gpus, cpus), threading.Lock()
        self._process: Callable[[Any], Any] | None = None

    def process(self, item: Any) -> tuple[Any, Exception | None]:
        """Returns the result of an item, or the error."""
        try:
            with self._begun:
                if self._process is None:
                    self._process = self._begin(*self._arguments)
            return self._process(item), None
        except Exception as error:
            return None, _of_host(error)

    def _begin(self, shared: list[Any], gpus: float, cpus: int) -> Callable[[Any], Any]:
        import ray

        if not gpus:
            os.environ["JAX_PLATFORMS"] = "cpu"
        elif gpus < 1:
            os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", f"{_GPU_MEMORY * gpus:.3f}")
        if gpus:
            import jax

            if jax.default_backend() == "cpu":
                raise InputError(
                    f"jax sees only the CPU on the Ray node {socket.gethostname()}, which has "
                    f"GPUs: {versions.install('cuda12')} there, or pass --ray-gpus 0 to use CPUs"
                )
        begin, more, stamp = ray.get(shared[0])
        return _begun(begin, stamp, _stamp(*more), cpus)


def _connected(address: str, say: Callable[[str], None]) -> Any:
    try:
        import ray
    except ImportError:
        raise InputError(f"--engine ray requires Ray: {versions.install('ray')}") from None
    begins = {
        "local": "starting Ray on this machine",
        "auto": "joining the Ray cluster of this machine",
    }
    say(begins.get(address, f"joining the Ray cluster {address}"))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # for a cluster that is started here
    more: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    on_stop = signal.getsignal(signal.SIGTERM)
    try:
        _check_reachable(address)
        with warnings.catch_warnings():
            # To start a cluster, Ray forks only to execute another program.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **more)
    except (OSError, ValueError, RuntimeError) as error:  # a malformed address, or other versions
        token = "" if os.environ.get("RAY_AUTH_MODE") else _TOKEN
        raise InputError(
            f"--ray-address {address}: no Ray cluster found ({first_line(error)}): start one with "
            f"`ray start --head`, or pass --ray-address HOST:PORT, or local{token}"
        ) from error
    except Exception as error:  # Ray has no class for a node that starts too slowly
        raise RunAgain(
            f"--ray-address {address}: {first_line(error)}: free memory or CPUs of this machine, "
            "and start again"
        ) from error
    finally:
        if on_stop is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_stop)  # with Ray's own handler, SIGTERM is an abort
    return ray


def _check_reachable(address: str) -> None:
    """Raises OSError if nothing listens there: Ray tries for many minutes, and ignores Ctrl-C."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()


def _of_host(error: Exception) -> Exception:
    """Adds this host to an error of its disks or of its network, which other hosts may not have."""
    host = socket.gethostname()
    if isinstance(error, OSError) and error.strerror:
        return OSError(error.errno, f"{error.strerror} on {host}", error.filename)
    if isinstance(error, RunAgain):
        error.args = (f"on {host}: {error}",)
    return error


@functools.cache
def _stamp(*more: str) -> str:
    """Returns the versions that determine the results, also of further packages."""
    installed = {}
    for name in ("jaxtrain", "av", "numpy", "tokenizers", *more):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # jaxtrain, run from a checkout
            installed[name] = "of a checkout"
    return ", ".join(f"{name} {version}" for name, version in installed.items())
