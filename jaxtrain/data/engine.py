"""Runs a function over many items: in processes of this machine, or on a Ray cluster.

The function, its arguments, and its results are the same on both. They finish in any order, and a
result must not depend on where or how often its item was processed: a Ray task is repeated if its
node is lost. Ray is an extra, and is imported only if it is chosen.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.metadata
import itertools
import logging
import multiprocessing
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol, TypeVar

from jaxtrain import terminal, versions
from jaxtrain.data import worker_count
from jaxtrain.errors import InputError, RunAgain, first_line

Item = TypeVar("Item")
Result = TypeVar("Result")

NAMES = ("local", "ray")
KILLS = (
    "kills the worker that processes it: if it lacks memory, use fewer workers or larger machines"
)
"""Why an item has no result: its worker died each time."""
# A task whose worker dies is repeated, because its node may be lost. After that, the item is at
# fault.
_RETRIES = 3
# The same for a task that Ray kills because its node lacks memory. Ray's default is to repeat it
# forever. It may kill a small task beside a large one, so this number is larger.
_MEMORY_RETRIES = 10
# Tasks in flight for each CPU of the cluster: the next one starts without waiting for the driver.
_IN_FLIGHT = 2
_REPORT_S = 30.0  # of a wait for the first worker, before it is reported
_PATIENCE_S = 10.0  # of a start on a cluster that other jobs fill, before it says so
# Of a wait for an autoscaler. A node with GPUs takes minutes, until its image is there.
_AUTOSCALER_S = 600.0
_RESIZE_S = 10.0  # how often the number of CPUs is read, as nodes come and go
# Packages that determine what a model computes, and how it is sent.
_MODELS = ("jax", "jaxlib", "flax")
# Ray's error does not say that the cluster refused this process.
_TOKEN = (
    "; if the cluster has a token (InvalidAuthToken), set RAY_AUTH_MODE=token and copy "
    "~/.ray/auth_token from one of its machines"
)
# Of the memory of a GPU that several workers share, for all of them together.
_GPU_MEMORY = 0.9


class Engine(Protocol):
    """Where a function runs.

    Attributes:
        where: names it for messages, such as "2 processes".
    """

    @property
    def where(self) -> str:
        """Returns where the work runs, for messages."""

    def room(self) -> tuple[int, int]:
        """Returns how many items are processed at a time, and on how many machines.

        Raises:
            RunAgain: the cluster is unavailable.
        """

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

    def room(self) -> tuple[int, int]:
        """Implements :meth:`Engine.room`."""
        return self.workers, 1

    def as_finished(
        self,
        work: Callable[..., Result],
        items: Iterable[Item],
        *fixed: Any,
        died: Callable[[Item], Result],
    ) -> Iterator[tuple[Item, Result]]:
        """Implements :meth:`Engine.as_finished`.

        Items that kill their workers are retried at the end by a quarter of the workers, and so on
        to one worker: the system may have killed it for the memory that the others had.
        """
        waiting, workers, last = iter(items), self.workers, False
        while True:
            killed: list[Item] = []
            yield from self._by_workers(work, waiting, fixed, workers, killed)
            if last:
                yield from ((item, died(item)) for item in killed)
            if last or not killed:
                return
            waiting, workers = iter(killed), max(1, workers // 4)
            last = workers == 1

    def _by_workers(
        self,
        work: Callable[..., Result],
        waiting: Iterator[Item],
        fixed: tuple[Any, ...],
        workers: int,
        killed: list[Item],
    ) -> Iterator[tuple[Item, Result]]:
        """Yields the results of items that do not kill their workers.

        Each worker has a pool of its own. If one of a pool dies, Python ends the others, too, and
        what they were processing would be lost.

        Args:
            work: the function.
            waiting: items.
            fixed: its further arguments.
            workers: number of processes.
            killed: receives the items that kill their workers.
        """
        worker_count.allow_files(worker_count.files_needed(workers, 0))
        with contextlib.ExitStack() as stack:
            idle: list[concurrent.futures.Executor] = []
            running: dict[
                concurrent.futures.Future[Result], tuple[Item, concurrent.futures.Executor]
            ] = {}

            def fresh() -> concurrent.futures.Executor:
                return stack.enter_context(_pool(1, work, fixed))

            def fill() -> None:
                for item in itertools.islice(waiting, workers - len(running)):
                    pool = idle.pop() if idle else fresh()
                    try:
                        future = pool.submit(_call, item)
                    except BrokenProcessPool:  # it died after its last item
                        pool = fresh()
                        future = pool.submit(_call, item)
                    running[future] = item, pool

            fill()
            while running:
                done, _ = concurrent.futures.wait(
                    running, return_when=concurrent.futures.FIRST_COMPLETED
                )
                for future in done:
                    item, pool = running.pop(future)
                    try:
                        result = future.result()
                    except BrokenProcessPool:
                        killed.append(item)
                        fill()
                        continue
                    idle.append(pool)
                    yield item, result
                    fill()


class _Pool(concurrent.futures.ProcessPoolExecutor):
    """Kills the workers after an error or a stop: an item may take minutes, and its result is lost.

    Executor.kill_workers is in Python 3.14.
    """

    def submit(self, *arguments: Any, **named: Any) -> concurrent.futures.Future[Any]:
        """Starts workers with SIGINT blocked: a Ctrl-C during their imports prints a traceback."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            return super().submit(*arguments, **named)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __exit__(self, kind: type[BaseException] | None, *rest: Any) -> bool | None:
        if kind is not None:
            for process in list((self._processes or {}).values()):
                process.kill()
        return super().__exit__(kind, *rest)


def _pool(
    workers: int, work: Callable[..., Any], fixed: tuple[Any, ...]
) -> concurrent.futures.Executor:
    """Starts workers, which receive the fixed arguments once."""
    return _Pool(
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
        gpus: GPUs of each worker that holds a model, such as 0.25; None is 1, or 0 if the cluster
            has none.
        say: prints a message.
    """

    address: str
    workers: int | None = None
    gpus: float | None = None
    say: Callable[[str], None] = terminal.say
    _said: list[str] = dataclasses.field(default_factory=list, init=False, compare=False)

    @property
    def where(self) -> str:
        """Returns the address, for messages."""
        return f"the Ray cluster {self.address}"

    def room(self) -> tuple[int, int]:
        """Implements :meth:`Engine.room`."""
        ((cpus, nodes),) = self._connected(_cpus)
        return cpus if self.workers is None else min(cpus, self.workers), nodes

    def as_finished(
        self,
        work: Callable[..., Result],
        items: Iterable[Item],
        *fixed: Any,
        died: Callable[[Item], Result],
    ) -> Iterator[tuple[Item, Result]]:
        """Implements :meth:`Engine.as_finished`."""
        yield from self._connected(self._in_tasks, work, items, fixed, died)

    def with_models(
        self,
        begin: Callable[..., Callable[[Item], Result]],
        items: Iterable[Item],
        *fixed: Any,
        died: Callable[[Item], Result],
        at_once: int | None = 1,
    ) -> Iterator[tuple[Item, Result]]:
        """Yields (item, ``begin(cpus, *fixed)(item)``) in the order in which items are finished.

        Each worker calls ``begin`` once, which may take long, for example to load a model. A
        worker is a Ray actor with :attr:`gpus` and an equal part of a node's CPUs, or with one CPU.

        Args:
            begin: a module-level function; receives the number of CPUs of its worker.
            items, fixed, died: see :meth:`Engine.as_finished`.
            at_once: items that a worker processes at once, in threads; None is one per CPU.

        Raises:
            Exception: the first one that a worker raises; results after it are lost.
            InputError: the cluster has too few GPUs, or jax does not see them.
            RunAgain: the cluster is unavailable, or no worker can start.
        """
        yield from self._connected(self._in_actors, begin, items, fixed, died, at_once)

    def _connected(self, run: Callable[..., Iterator[Any]], *arguments: Any) -> Iterator[Any]:
        """Connects to the cluster while results are read."""
        begins = {
            "local": "starting Ray on this machine",
            "auto": "joining the Ray cluster of this machine",
        }
        if not self._said:  # a command connects for each step of its work
            self._said.append(begins.get(self.address, f"joining the Ray cluster {self.address}"))
            self.say(self._said[0])
        ray = _connected(self.address)
        try:
            yield from run(ray, *arguments)
        except (ray.exceptions.RayError, ConnectionError) as error:
            raise RunAgain(
                f"the Ray cluster {self.address} failed ({first_line(error)}): check it with `ray "
                "status` and start again; finished work is kept"
            ) from error
        finally:
            ray.shutdown()  # ends this job's tasks, too

    def _in_tasks(
        self,
        ray: Any,
        work: Callable[..., Result],
        items: Iterable[Item],
        fixed: tuple[Any, ...],
        died: Callable[[Item], Result],
    ) -> Iterator[tuple[Item, Result]]:
        self._check_room(ray, 1, 0)
        task = ray.remote(num_cpus=1, max_retries=_RETRIES)(_in_task)
        shared = ray.put((work, fixed, _stamp()))
        running: dict[Any, Item] = {}
        waiting = iter(items)
        first: _Wait | None = _Wait("the first result of the Ray workers", self.say)
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
            while first is not None:
                if ray.wait(refs, num_returns=1, timeout=first.left_s())[0]:
                    first = None
                else:
                    first.report()
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

    def _in_actors(
        self,
        ray: Any,
        begin: Callable[..., Callable[[Item], Result]],
        items: Iterable[Item],
        fixed: tuple[Any, ...],
        died: Callable[[Item], Result],
        at_once: int | None,
    ) -> Iterator[tuple[Item, Result]]:
        """See :meth:`with_models`.

        Ray could restart a lost actor by itself, but would keep its item waiting while other actors
        hold all CPUs that are left. So another actor takes over the item, and processes it alone:
        it may have killed the first one, and would kill others' items, too.
        """
        gpus, cpus = self._of_each_actor(ray)
        self._check_room(ray, cpus, gpus)
        slots = at_once or cpus
        holder = ray.remote(num_cpus=cpus, num_gpus=gpus, max_concurrency=slots)(_Holder)
        shared, stamp = ray.put((begin, (cpus, *fixed))), _stamp(*_MODELS)
        lost = (
            ray.exceptions.RayActorError,
            ray.exceptions.WorkerCrashedError,
            ray.exceptions.OutOfMemoryError,
        )
        waiting = iter(items)
        ahead: collections.deque[tuple[Item, int]] = collections.deque()  # and how often it died
        starting: dict[Any, _Actor] = {}  # by reference
        running: dict[Any, tuple[_Actor, Item, int]] = {}
        ready: list[_Actor] = []
        first: _Wait | None = _Wait("the first Ray worker to load the model", self.say)
        room, read, failed_starts = 0, float("-inf"), 0
        while True:
            if len(ahead) < max(1, room):
                ahead.extend((item, 0) for item in itertools.islice(waiting, 1))
            if not ahead:
                ready = [one for one in ready if one.used]  # ends the others: frees their devices
                if not running:
                    return
            elif ready:
                actor = min(ready, key=lambda one: one.used)
                item, deaths = ahead[0]
                needed = slots if deaths else 1
                # The first actors must not take what those that are starting will process.
                spare = not actor.used or len(ahead) > len(starting)
                if spare and actor.used + needed <= slots:
                    ahead.popleft()
                    actor.used += needed
                    running[actor.handle.process.remote(item)] = actor, item, deaths
                    continue
            if time.monotonic() - read > _RESIZE_S:
                read, room = time.monotonic(), self._actors(ray, gpus, cpus)
            if len(starting) < len(ahead) and len(starting) + len(ready) < room:
                actor = _Actor(holder.remote())
                starting[actor.handle.begin.remote([shared], gpus, stamp)] = actor
                continue
            refs = [*starting, *running]
            done, _ = ray.wait(refs, num_returns=1, timeout=_RESIZE_S)
            if first is not None and not done:
                first.report()
            for ref in done:
                if ref in starting:
                    actor = starting.pop(ref)
                    try:
                        error = ray.get(ref)
                    except lost as problem:
                        failed_starts += 1
                        if failed_starts > _RETRIES:
                            raise RunAgain(
                                f"workers of the Ray cluster {self.address} end while they start "
                                f"({first_line(problem)}): check its nodes' memory, and start again"
                            ) from problem
                        continue
                    if error is not None:
                        raise error
                    ready.append(actor)
                    first = None
                    failed_starts = 0
                    continue
                actor, item, deaths = running.pop(ref)
                try:
                    result, error = ray.get(ref)
                except lost:
                    ready = [one for one in ready if one is not actor]
                    if deaths < _RETRIES:
                        ahead.appendleft((item, deaths + 1))
                    else:
                        yield item, died(item)
                    read = float("-inf")
                    continue
                if error is not None:
                    raise error
                actor.used -= slots if deaths else 1
                yield item, result

    def _check_room(self, ray: Any, cpus: int, gpus: float) -> None:
        """Says so if a worker must wait for others' jobs.

        Raises:
            InputError: no node is large enough.
        """
        self._await_node(ray, cpus, gpus)
        each = _resources({"CPU": cpus, "GPU": gpus})
        nodes = _nodes(ray)
        end = time.monotonic() + _PATIENCE_S  # also for jobs that have just ended
        while True:
            free = ray.available_resources()
            if free.get("CPU", 0) >= cpus and free.get("GPU", 0) >= gpus:
                return
            if time.monotonic() >= end:
                break
            time.sleep(min(1.0, _PATIENCE_S))
        total = {name: sum(node.get(name, 0) for node in nodes) for name in ("CPU", "GPU")}
        self.say(
            f"waiting for room in the Ray cluster {self.address}: a worker needs {each}; the "
            f"cluster has {_resources(total)}; free: {_resources(free)}. Wait until other jobs "
            "end, stop them (`ray status` shows what is used), or add nodes"
        )

    def _await_node(self, ray: Any, cpus: int, gpus: float) -> None:
        """Waits until a node is large enough for a worker.

        An autoscaler may have started no node yet, and Ray 2.60 has no public way to ask whether
        there is one. A task that needs as much as a worker makes it start a node.

        Raises:
            InputError: no node is large enough, and none was started in ten minutes.
        """

        def fits() -> bool:
            return any(
                node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in _nodes(ray)
            )

        if fits():
            return
        has = "; ".join(sorted({_resources(node) for node in _nodes(ray)})) or "no nodes"
        needs = (
            f"no node of the Ray cluster {self.address} is large enough: a worker needs "
            f"{_resources({'CPU': cpus, 'GPU': gpus})}, and the nodes have {has}"
        )
        fix = "start a larger node"
        if gpus:
            fix += f", or lower --ray-gpus {gpus:g} (0 uses CPUs)"
        if self.address != "local":  # which has no autoscaler
            self.say(f"{needs}. Waiting for an autoscaler to start one; without one, {fix}")
            end = time.monotonic() + _AUTOSCALER_S
            wait = _Wait("a node that is large enough", self.say)
            probe = ray.remote(num_cpus=cpus, num_gpus=gpus)(_nothing).remote()
            while time.monotonic() < end:
                done, _ = ray.wait([probe], num_returns=1, timeout=_RESIZE_S)
                if done or fits():
                    return
                wait.report()
        raise InputError(f"{needs}: {fix}")

    def _of_each_actor(self, ray: Any) -> tuple[float, int]:
        """Returns the GPUs and CPUs that a worker with a model reserves."""
        there = any(node.get("GPU", 0) for node in _nodes(ray))
        gpus = (1 if there else 0) if self.gpus is None else self.gpus
        if not gpus:
            return 0, 1
        self._await_node(ray, 1, gpus)
        parts = [
            int(node.get("CPU", 0) * gpus / node["GPU"])
            for node in _nodes(ray)
            if node.get("GPU", 0) >= gpus
        ]
        return gpus, max(1, min(parts, default=1))

    def _actors(self, ray: Any, gpus: float, cpus: int) -> int:
        """Returns how many workers with models the cluster has room for."""
        room = 0
        for node in _nodes(ray):
            fit = int(node.get("CPU", 0) / cpus)
            room += min(fit, int(node.get("GPU", 0) / gpus)) if gpus else fit
        return max(1, room if self.workers is None else min(room, self.workers))


class _Wait:
    """Reports how long something has taken: after 30 s, and whenever that has doubled."""

    def __init__(self, what: str, say: Callable[[str], None]) -> None:
        self._what, self._say = what, say
        self._began, self._next_s = time.monotonic(), _REPORT_S

    def left_s(self) -> float:
        """Returns the seconds until the next report."""
        return max(0.0, self._began + self._next_s - time.monotonic())

    def report(self) -> None:
        """Prints the time so far, if it is time for that."""
        if not self.left_s():
            self._say(f"waiting for {self._what}: {self._next_s:.0f} s so far")
            self._next_s *= 2


def _nothing() -> None:
    """Does nothing: a task that only asks the autoscaler for room."""


def _nodes(ray: Any) -> list[dict[str, float]]:
    """Returns the resources of each node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _resources(found: Mapping[str, float]) -> str:
    """Returns CPUs and, if there are any, GPUs, such as "1 CPU and 0.25 GPUs"."""
    cpus, gpus = found.get("CPU", 0), found.get("GPU", 0)
    text = f"{cpus:g} CPU{'' if cpus == 1 else 's'}"
    return f"{text} and {gpus:g} GPU{'' if gpus == 1 else 's'}" if gpus else text


def _cpus(ray: Any) -> Iterator[tuple[int, int]]:
    """Yields the number of CPUs of the cluster, and of its nodes with any."""
    found = [int(node.get("CPU", 0)) for node in _nodes(ray)]
    yield max(1, sum(found)), sum(count > 0 for count in found)


@dataclasses.dataclass(eq=False)
class _Actor:
    """A worker with a model.

    Attributes:
        handle: of the Ray actor.
        used: how many of its threads are in use.
    """

    handle: Any
    used: int = 0


class _Holder:
    """Holds a model in a Ray actor. Its methods return errors, which Ray would wrap."""

    def begin(self, shared: list[Any], gpus: float, stamp: str) -> Exception | None:
        """Loads the model; returns an error or None."""
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        if not gpus:
            os.environ["JAX_PLATFORMS"] = "cpu"
        elif gpus < 1:
            os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", f"{_GPU_MEMORY * gpus:.3f}")
        try:
            _check_stamp(stamp, _stamp(*_MODELS))  # others may be unable to unpickle the model
            if gpus:
                _check_gpu()
            begin, fixed = _fetched(shared[0])
            self._process = begin(*fixed)
        except Exception as error:
            return _of_host(error)
        return None

    def process(self, item: Any) -> tuple[Any, Exception | None]:
        """Processes an item; returns its result, or an error."""
        try:
            return self._process(item), None
        except Exception as error:
            return None, _of_host(error)


def _check_gpu() -> None:
    import jax

    if jax.default_backend() == "cpu":
        raise InputError(
            f"jax sees only the CPU on the Ray node {socket.gethostname()}, which has GPUs: "
            f"{versions.install('cuda12')} there, or pass --ray-gpus 0 to use CPUs"
        )


def _connected(address: str) -> Any:
    """Imports Ray and connects to a cluster."""
    os.environ.setdefault("RAY_task_oom_retries", str(_MEMORY_RETRIES))  # read by the import
    try:
        import ray
    except ImportError:
        raise InputError(f"--engine ray requires Ray: {versions.install('ray')}") from None
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # for a cluster that is started here
    more: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    on_stop = signal.getsignal(signal.SIGTERM)
    try:
        with warnings.catch_warnings():
            # To start a cluster, Ray forks only to execute another program.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, **more)
    except ConnectionError as error:
        token = "" if os.environ.get("RAY_AUTH_MODE") else _TOKEN
        raise InputError(
            f"--ray-address {address}: no Ray cluster found ({first_line(error)}): start one with "
            f"`ray start --head`, or pass --ray-address HOST:PORT, or local{token}"
        ) from error
    except (ValueError, RuntimeError) as error:  # a malformed address, or other versions
        raise InputError(f"--ray-address {address}: {first_line(error)}") from error
    except Exception as error:  # Ray has no class for a node that starts too slowly
        raise RunAgain(
            f"--ray-address {address}: {first_line(error)}: free memory or CPUs of this machine, "
            "and start again"
        ) from error
    finally:
        if on_stop is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_stop)  # with Ray's own handler, SIGTERM is an abort
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
    try:
        _check_stamp(stamp, _stamp())
        return work(item, *fixed), None
    except Exception as error:
        return None, _of_host(error)


def _of_host(error: Exception) -> Exception:
    """Adds this host to an error of its disks or of its network, which other hosts may not have."""
    host = socket.gethostname()
    if isinstance(error, OSError) and error.strerror:
        return OSError(error.errno, f"{error.strerror} on {host}", error.filename)
    if isinstance(error, RunAgain):
        error.args = (f"on {host}: {error}",)
    return error


def _check_stamp(wanted: str, found: str) -> None:
    if wanted != found:
        raise InputError(
            f"the Ray node {socket.gethostname()} has {found}, but this command has {wanted}: "
            "install the same versions, because they determine the results"
        )


@functools.cache
def _stamp(*more: str) -> str:
    """Returns the versions that determine the results, also of further packages."""
    found = {}
    for name in ("jaxtrain", "av", "numpy", "tokenizers", *more):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # jaxtrain, run from a checkout
            found[name] = "of a checkout"
    return ", ".join(f"{name} {version}" for name, version in found.items())
