"""Engines run a function over items; tests/jobs/real_ray.py has a real cluster."""

import contextlib
import errno
import functools
import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from jaxtrain import machine
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.jobs import engines, worker_process
from jaxtrain.storage.bucket import Unavailable


def square(plus: int, worker: engines.Worker) -> Callable[[int], int]:
    """The square; the process of item 3 is killed, also when it is tried alone."""

    def process(number: int) -> int:
        if number == 3:
            os._exit(9)
        return number * number + plus

    return process


def wait_and_fail(folder: Path, worker: engines.Worker) -> Callable[[int], int]:
    """Raises an error for item 1, once item 0 is at work."""

    def process(number: int) -> int:
        if number == 0:
            (folder / "started").touch()
        while not (folder / "started").exists():
            time.sleep(0.01)
        if number == 1:
            raise InputError("item 1 is wrong")
        while True:
            worker.check()
            time.sleep(0.01)

    return process


def wait_or_die(folder: Path, worker: engines.Worker) -> Callable[[int], int]:
    """Item 1 kills its worker while item 0 is in progress, and the first time item 2, too."""

    def process(number: int) -> int:
        with open(folder / "tried", "a") as file:
            file.write(f"{number}\n")
        if number == 1 or (number == 2 and (folder / "tried").read_text().count("2") == 1):
            (folder / "dying").touch()
            os._exit(9)
        while not (folder / "dying").exists():
            time.sleep(0.01)
        time.sleep(0.3)
        return number

    return process


def test_what_killed_a_worker_is_tried_alone_once_more(tmp_path: Path) -> None:
    """Other items are processed once, or a death would cost what 64 workers had done."""
    begin = functools.partial(wait_or_die, tmp_path)
    results = list(engines.Processes(2).map(begin, range(4)))
    assert sorted(results[:2]) == [(0, 0), (3, 3)]
    assert results[2:] == [(2, 2), (1, None)]
    assert sorted((tmp_path / "tried").read_text().split()) == ["0", "1", "1", "2", "2", "3"]


def large(worker: engines.Worker) -> Callable[[bytes], int]:
    return len


class Deadly:
    """Ends the process that unpickles it, as a failing import does, or the system."""

    def __init__(self, counted: Path, deaths: int) -> None:
        self._counted, self._deaths = counted, deaths

    def __reduce__(self) -> tuple[Any, ...]:
        return _die, (self._counted, self._deaths)


def _die(counted: Path, deaths: int) -> Any:
    with open(counted, "a") as file:
        file.write("x")
    if counted.stat().st_size <= deaths:
        os._exit(1)
    return large


@pytest.mark.slow
def test_a_worker_may_die_before_it_has_read_its_item(tmp_path: Path) -> None:
    """The item is larger than a pipe, so sending it to a dead process fails."""
    item = bytes(1_000_000)
    begin: Any = Deadly(tmp_path / "once", 1)
    assert list(engines.Processes(1).map(begin, [item])) == [(item, 1_000_000)]
    begin = Deadly(tmp_path / "always", 9)
    with pytest.raises(RunAgain, match="a worker process ended before it began: if it printed"):
        list(engines.Processes(1).map(begin, [item]))


@pytest.mark.parametrize("deaths", [2, 9])
def test_an_item_of_a_worker_that_cannot_begin_was_not_tried(
    deaths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, each of 100,000 videos would cost a process, and two open files to the end."""
    ends = list[Connection]()

    @contextlib.contextmanager
    def start(begin: Any, number: int) -> Iterator[Connection]:
        assert all(end.closed for end in ends[:deaths]), "the pipe of a dead worker is open"
        own_end, worker_end = multiprocessing.Pipe()
        ends.append(own_end)
        if len(ends) > deaths:
            worker_end.send((None, None))
            for _ in range(20):
                worker_end.send(("done", None))
        else:
            worker_end.close()
        yield own_end
        own_end.close()
        worker_end.close()

    monkeypatch.setattr(engines, "_process", start)
    results = engines.Processes(1).map(large, map(bytes, range(20)))
    if deaths == 2:
        assert [item for item, _ in results] == [bytes(number) for number in range(20)]
    else:
        with pytest.raises(RunAgain, match="a worker process ended before it began: if it printed"):
            list(results)
    assert len(ends) == 3


def test_a_process_that_may_start_no_others_works_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "may_start", lambda: False)
    monkeypatch.setattr(engines, "_process", None)
    said: list[str] = []
    results = engines.Processes(3, said.append).map(large, [b"ab", b"c"])
    assert list(results) == [(b"ab", 2), (b"c", 1)]
    (line,) = said
    assert line.endswith("may start no others: it works alone")


@pytest.mark.parametrize(
    ("before", "raised"),
    [((1024, 9999), [(9999, 9999)]), ((1024, 1500), [(1500, 1500)]), ((2**16, -1), [])],
)
def test_many_workers_may_open_their_pipes(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], raised: list[tuple[int, int]]
) -> None:
    """A machine with 192 cores has the limit of others: 1024."""
    limited: list[tuple[int, int]] = []
    monkeypatch.setattr(machine.resource, "getrlimit", lambda kind: before)
    monkeypatch.setattr(machine.resource, "setrlimit", lambda kind, both: limited.append(both))
    assert list(engines.Processes(192).map(functools.partial(square, 0), [])) == []
    assert limited[: len(raised)] == raised
    assert set(limited) == set(raised)


@pytest.mark.parametrize("engine", [engines.Processes(1), engines.Threads(1)])
def test_items_are_read_only_as_fast_as_they_are_processed(engine: engines.Engine) -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for number in itertools.count(10):
            read.append(number)
            yield number

    running = engine.map(functools.partial(square, 0), items())
    assert [next(running) for _ in range(3)] == [(n, n * n) for n in (10, 11, 12)]
    assert len(read) <= 4
    running.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("engine", [engines.Processes(2), engines.Threads(2)])
def test_an_error_ends_the_work(tmp_path: Path, engine: engines.Engine) -> None:
    with pytest.raises(InputError, match="item 1 is wrong"):
        list(engine.map(functools.partial(wait_and_fail, tmp_path), range(9)))


def test_each_thread_begins_once() -> None:
    begun: list[int] = []

    def begin(worker: engines.Worker) -> Callable[[int], int]:
        begun.append(worker.number)
        return lambda item: item

    assert sorted(engines.Threads(3).map(begin, range(50))) == [(n, n) for n in range(50)]
    assert sorted(begun) == list(range(len(begun)))
    assert len(begun) <= 3


# Ray.


def test_ray_is_imported_only_if_chosen() -> None:
    assert "ray" not in sys.modules
    with (
        mock.patch.dict(sys.modules, {"ray": None}),
        pytest.raises(InputError, match=r"--engine ray requires Ray: .*pip install .*ray"),
    ):
        list(engines.Ray("auto").map(functools.partial(square, 0), range(2)))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ConnectionError("refused"), InputError, "no Ray cluster found"),
        (ValueError("malformed"), InputError, r"no Ray cluster found \(malformed\)"),
        (Exception("timed out"), RunAgain, "local: timed out: free memory or CPUs"),
    ],
)
def test_a_cluster_that_does_not_start(
    error: Exception, kind: type[Exception], message: str
) -> None:
    init = mock.Mock(side_effect=error)
    with (
        mock.patch.dict(sys.modules, {"ray": types.SimpleNamespace(init=init)}),
        pytest.raises(kind, match=message),
    ):
        list(engines.Ray("local").map(functools.partial(square, 0), range(2)))


def test_a_cluster_that_nothing_serves_is_reported_at_once() -> None:
    """Ray itself tries for more than ten minutes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    began = time.monotonic()
    ray = types.SimpleNamespace(init=mock.Mock())
    with (
        mock.patch.dict(sys.modules, {"ray": ray}),
        pytest.raises(InputError, match=f"--ray-address {address}: no Ray cluster found"),
    ):
        list(engines.Ray(address).map(functools.partial(square, 0), range(2)))
    assert time.monotonic() - began < 10
    ray.init.assert_not_called()


def test_ray_does_not_handle_sigterm() -> None:
    before = signal.getsignal(signal.SIGTERM)
    ray = mock.MagicMock()
    ray.init.side_effect = lambda **how: signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with mock.patch.dict(sys.modules, {"ray": ray}):
        engines._connected("auto", print)
    assert ray.init.call_count == 1
    after = signal.signal(signal.SIGTERM, before)
    assert after == before


class _MemoryError(Exception):
    """Ray's OutOfMemoryError."""


def _ray() -> Any:
    """Stands in for the module ray; item 2 lacks memory."""
    ray = mock.MagicMock()
    ray.exceptions.RayError = ray.exceptions.WorkerCrashedError = KeyError
    ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError = KeyError, _MemoryError
    ray.cluster_resources.return_value = {"CPU": 2}
    actor = ray.remote.return_value.return_value.remote.return_value
    actor.process.remote = lambda item: item
    ray.wait = lambda references, **limits: (references, [])

    def get(reference: int) -> tuple[int, None]:
        if reference == 2:
            raise _MemoryError
        return reference, None

    ray.get = get
    return ray


def test_a_worker_that_ray_kills_for_lack_of_memory_costs_only_its_item() -> None:
    with mock.patch.dict(sys.modules, {"ray": _ray()}):
        results = dict(engines.Ray("auto", 2).map(functools.partial(square, 0), range(4)))
    assert results == {0: 0, 1: 1, 2: None, 3: 3}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (Unavailable("no answer"), "on node7: no answer"),
        (InputError("--height 7: use 8"), "--height 7: use 8"),
        (OSError(errno.ESTALE, "Stale", "/a"), "[Errno 116] Stale on node7: '/a'"),
    ],
)
def test_an_error_of_a_node_names_the_node(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    monkeypatch.setattr(engines.socket, "gethostname", lambda: "node7")
    passed = pickle.loads(pickle.dumps(engines._of_host(error)))
    assert (type(passed), str(passed)) == (type(error), message)


def test_a_node_with_other_versions_is_refused() -> None:
    with pytest.raises(InputError, match=r"has flax 2, but this command has flax 1: install the"):
        engines._begun(functools.partial(square, 0), "flax 1", "flax 2", 1)


def test_actors_divide_the_processors_of_a_node_by_its_gpus() -> None:
    def each(gpus: float, **resources: float) -> tuple[float, int]:
        nodes = [{"Alive": True, "Resources": resources}] * 2
        return engines.Ray("auto", gpus=gpus)._of_each_actor(
            types.SimpleNamespace(nodes=lambda: nodes)
        )

    assert each(-1, CPU=26, GPU=4) == (1, 6)
    assert each(0.25, CPU=26, GPU=4) == (0.25, 1)
    assert each(-1, CPU=26) == (0, 1)
    assert each(0, CPU=26, GPU=4) == (0, 1)


def test_an_actor_that_sees_no_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with mock.patch.dict(sys.modules, {"ray": mock.MagicMock()}):
        _, error = engines._Actor([None], 1, 1).process(0)
    assert "jax sees only the CPU on the Ray node" in str(error)


SCRIPT = """
import operator
from jaxtrain.jobs import engines

print("started")
begin = operator.attrgetter("__class__")  # of the worker: its class makes a worker of a number
print([result.number for _, result in engines.Processes(1).map(begin, [4, 5])])
"""


def test_a_script_is_not_run_again_in_a_worker(tmp_path: Path) -> None:
    """Although it has no ``if __name__ == "__main__"``."""
    (tmp_path / "script.py").write_text(SCRIPT)
    import program  # loads jax, which workers that import this file do not have

    ended = program.execute(tmp_path, sys.executable, "script.py")
    assert (ended.returncode, ended.stdout) == (0, "started\n[4, 5]\n"), ended.stderr
