"""Engines run a function over items; commands that share a folder divide the work."""

import errno
import itertools
import os
import pickle
import re
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from jaxtrain.data import engine, worker_count
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.storage.bucket import Unavailable


def square(number: int, plus: int) -> int:
    """The square; the process of item 3 is killed, also when it is retried."""
    if number == 3:
        os._exit(9)
    return number * number + plus


def wait_and_fail(number: int, folder: Path) -> int:
    """Raises an error for item 1, once item 0 is at work."""
    if number == 0:
        (folder / "started").touch()
    while not (folder / "started").exists():
        time.sleep(0.01)
    if number == 1:
        raise InputError("item 1 is wrong")
    return number


def wait_or_die(number: int, folder: Path) -> int:
    """Item 1 kills its worker while item 0 is in progress."""
    with open(folder / "tried", "a") as file:
        file.write(f"{number}\n")
    if number == 1:
        (folder / "dying").touch()
        os._exit(9)
    while not (folder / "dying").exists():
        time.sleep(0.01)
    time.sleep(0.3)
    return number


def test_an_item_that_kills_its_worker_costs_only_itself() -> None:
    found = dict(engine.Local(1).as_finished(square, range(5), 7, died=lambda number: -number))
    assert found == {0: 7, 1: 8, 2: 11, 3: -3, 4: 23}


def test_other_items_than_the_one_that_kills_are_processed_once(tmp_path: Path) -> None:
    """Else a death on a machine with 64 workers would cost what all of them had done."""
    found = list(engine.Local(2).as_finished(wait_or_die, range(4), tmp_path, died=lambda n: -n))
    assert sorted(found[:3]) == [(0, 0), (2, 2), (3, 3)]
    assert found[3:] == [(1, -1)]
    assert sorted((tmp_path / "tried").read_text().split()) == ["0", "1", "1", "2", "3"]


@pytest.mark.parametrize(
    ("limits", "raised"),
    [((1024, 9999), [(4096, 9999)]), ((1024, 1500), [(1500, 1500)]), ((4096, -1), [])],
)
def test_many_workers_may_open_their_pipes(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], raised: list[tuple[int, int]]
) -> None:
    """A machine with 192 cores has the limit of others: 1024."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(worker_count.resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(worker_count.resource, "setrlimit", lambda kind, both: found.append(both))
    assert list(engine.Local(192).as_finished(square, [], 0, died=int)) == []
    assert found == raised


def test_what_killed_its_worker_is_tried_by_ever_fewer_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds: list[tuple[int, list[int]]] = []

    def kill(self: Any, work: Any, waiting: Any, fixed: Any, workers: int, killed: Any) -> Any:
        rounds.append((workers, list(waiting)))
        killed += rounds[-1][1][1:]
        yield rounds[-1][1][0], "done"

    monkeypatch.setattr(engine.Local, "_by_workers", kill)
    found = list(engine.Local(64).as_finished(square, range(7), 0, died=lambda n: -n))
    assert rounds == [
        (64, [*range(7)]),
        (16, [*range(1, 7)]),
        (4, [2, 3, 4, 5, 6]),
        (1, [3, 4, 5, 6]),
    ]
    assert found[:4] == [(n, "done") for n in range(4)]
    assert found[4:] == [(4, -4), (5, -5), (6, -6)]


def test_items_are_read_only_as_fast_as_they_are_processed() -> None:
    read: list[int] = []

    def items() -> Iterator[int]:
        for number in itertools.count(10):
            read.append(number)
            yield number

    running = engine.Local(1).as_finished(square, items(), 0, died=int)
    assert [next(running) for _ in range(3)] == [(n, n * n) for n in (10, 11, 12)]
    assert len(read) <= 4
    running.close()  # type: ignore[attr-defined]


def test_an_error_ends_the_work(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="item 1 is wrong"):
        list(engine.Local(2).as_finished(wait_and_fail, range(9), tmp_path, died=int))


def test_ray_is_imported_only_if_chosen() -> None:
    assert "ray" not in sys.modules
    with (
        mock.patch.dict(sys.modules, {"ray": None}),
        pytest.raises(InputError, match=r"--engine ray requires Ray: .*pip install .*ray"),
    ):
        list(engine.Ray("auto").as_finished(square, range(2), 0, died=int))


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (ConnectionError("refused"), InputError, "no Ray cluster found"),
        (ValueError("malformed"), InputError, "--ray-address local: malformed"),
        (Exception("timed out"), RunAgain, "local: timed out: free memory or CPUs"),
    ],
)
def test_a_cluster_that_does_not_start(error: Exception, kind: type[Exception], said: str) -> None:
    init = mock.Mock(side_effect=error)
    with (
        mock.patch.dict(sys.modules, {"ray": types.SimpleNamespace(init=init)}),
        pytest.raises(kind, match=said),
    ):
        engine.Ray("local").room()


class _MemoryError(Exception):
    """Ray's OutOfMemoryError."""


def _get(reference: int) -> tuple[int, None]:
    if reference == 2:
        raise _MemoryError
    return reference, None


def test_a_task_that_ray_kills_for_lack_of_memory_costs_only_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_task_oom_retries", raising=False)
    ray = mock.MagicMock()  # real_ray.py has the real one
    ray.exceptions.RayError = Exception
    ray.exceptions.WorkerCrashedError = KeyError
    ray.exceptions.OutOfMemoryError = _MemoryError
    ray.nodes.return_value = [{"Alive": True, "Resources": {"CPU": 2}}]
    ray.available_resources.return_value = {"CPU": 2}
    ray.remote.return_value.return_value.remote = lambda item, shared: item
    ray.wait = lambda references, **limits: (references, [])
    ray.get = _get
    with mock.patch.dict(sys.modules, {"ray": ray}):
        found = dict(
            engine.Ray("auto", 2).as_finished(square, range(4), 0, died=lambda item: -item)
        )
    assert found == {0: 0, 1: 1, 2: -2, 3: 3}
    assert os.environ.pop("RAY_task_oom_retries") == "10"  # else Ray repeats it forever


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RunAgain("the disk is full"), "on node7: the disk is full"),
        (Unavailable("no answer"), "on node7: no answer"),
        (InputError("--height 7: use 8"), "--height 7: use 8"),
        (
            OSError(errno.ESTALE, "Stale file handle", "/out/a"),
            "[Errno 116] Stale file handle on node7: '/out/a'",
        ),
    ],
)
def test_an_error_of_a_node_names_the_node(
    monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    def fail(item: int) -> None:
        raise error

    monkeypatch.setattr(engine.socket, "gethostname", lambda: "node7")
    monkeypatch.setattr(engine, "_fetched", lambda reference: (fail, (), engine._stamp()))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    result, found = engine._in_task(1, [None])
    assert result is None
    assert type(found) is type(error)
    assert str(pickle.loads(pickle.dumps(found))) == said


def test_where_the_work_runs_is_printed_once() -> None:
    """Commands connect for each step of their work."""
    said: list[str] = []
    ray = mock.MagicMock()
    ray.exceptions.RayError = Exception
    ray.nodes.return_value = [{"Alive": True, "Resources": {"CPU": 2}}]
    with mock.patch.dict(sys.modules, {"ray": ray}):
        cluster = engine.Ray("auto", say=said.append)
        assert cluster.room() == cluster.room() == (2, 1)
    assert said == ["joining the Ray cluster of this machine"]


def test_ray_does_not_handle_sigterm() -> None:
    before = signal.getsignal(signal.SIGTERM)
    ray = mock.MagicMock()
    ray.init.side_effect = lambda **how: signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with mock.patch.dict(sys.modules, {"ray": ray}):
        engine._connected("auto")
    assert ray.init.call_count == 1
    found = signal.signal(signal.SIGTERM, before)
    assert found == before


class _RayError(Exception):
    """Ray's classes are different ones, of which none is another's base class except this."""


class _RayActorError(_RayError):
    pass


class _WorkerCrashedError(_RayError):
    pass


class _OutOfMemoryError(_RayError):
    pass


class _Reference(tuple):  # type: ignore[type-arg]
    """Can be a key whatever it contains."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class _Cluster:
    """Stands in for the module ray: two nodes, whose actors run here.

    Item 2 kills its actor in each try, and item 3 in the first one. Ray reports each death in
    another way.

    Attributes:
        options: of the actors.
        tries: the items in the order in which actors received them.
        actors: how many were started.
        together: for each try, whether it was the first of its item, and likewise for the other
            items of its actor.
        free: resources that are available at each question, the last ones forever; [] for all.
    """

    exceptions = types.SimpleNamespace(
        RayError=_RayError,
        RayActorError=_RayActorError,
        WorkerCrashedError=_WorkerCrashedError,
        OutOfMemoryError=_OutOfMemoryError,
    )

    def __init__(self, **resources: float) -> None:
        self.resources, self.options = resources, dict[str, float]()
        self.tries: list[int] = []
        self.actors = 0
        self.together: list[tuple[bool, ...]] = []
        self.free: list[dict[str, float]] = []
        self._deaths = itertools.cycle((_RayActorError, _WorkerCrashedError, _OutOfMemoryError))

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": self.resources}] * 2

    def available_resources(self) -> dict[str, float]:
        if not self.free:
            return self.resources
        return self.free.pop(0) if len(self.free) > 1 else self.free[0]

    def put(self, value: Any) -> Any:
        return value

    def remote(self, **options: float) -> Any:
        self.options = options

        def start(holder: type) -> Any:
            return types.SimpleNamespace(remote=lambda: self.actor(holder()))

        return start

    def actor(self, made: Any) -> Any:
        self.actors += 1
        first: dict[int, bool] = {}  # by try
        dead: list[int] = []

        def process(item: int) -> Any:
            number = len(self.tries)
            first[number] = item not in self.tries
            self.tries.append(item)
            self.together.append(tuple(first.values()))

            def finish() -> Any:
                if item == 2 or (item == 3 and self.tries.count(3) == 1):
                    dead.append(item)
                del first[number]
                return None if dead else made.process(item)

            return _Reference((number, finish))

        begin = types.SimpleNamespace(remote=lambda *a: _Reference((-1, [made.begin(*a)])))
        return types.SimpleNamespace(begin=begin, process=types.SimpleNamespace(remote=process))

    def wait(self, references: list[Any], **limits: float) -> Any:
        return references[:1], references[1:]

    def get(self, reference: tuple[int, Any]) -> Any:
        if reference[0] < 0:
            return reference[1][0]
        result = reference[1]()
        if result is None:
            raise next(self._deaths)
        return result

    def shutdown(self) -> None:
        pass


def _begin(cpus: int, plus: int) -> Callable[[int], int]:
    return lambda item: item * item + plus + 1000 * cpus


JOINING = "joining the Ray cluster of this machine"


def _with_models(
    monkeypatch: pytest.MonkeyPatch,
    cluster: _Cluster,
    gpus: float | None = None,
    at_once: int | None = 1,
    items: int = 5,
    fetched: Callable[[Any], Any] = lambda shared: shared,
    say: Callable[[str], None] = print,
) -> dict[int, int]:
    monkeypatch.setattr(engine, "_connected", lambda address: cluster)
    monkeypatch.setattr(engine, "_fetched", fetched)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return dict(
        engine.Ray("auto", gpus=gpus, say=say).with_models(
            _begin, range(items), 7, died=lambda item: -item, at_once=at_once
        )
    )


def test_an_item_moves_to_another_worker_if_its_own_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = _Cluster(CPU=3)
    assert _with_models(monkeypatch, cluster) == {0: 1007, 1: 1008, 2: -2, 3: 1016, 4: 1023}
    assert cluster.options == {"num_cpus": 1, "num_gpus": 0, "max_concurrency": 1}
    assert set(map(len, cluster.together)) == {1}
    assert [cluster.tries.count(item) for item in range(5)] == [1, 1, 4, 2, 1]
    assert cluster.actors <= 5 + 5  # one for each of the first items, and for each that was lost


def test_items_that_were_with_one_that_kills_their_worker_are_processed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = _Cluster(CPU=1)  # on each of two nodes
    found = _with_models(monkeypatch, cluster, at_once=3, items=9)
    assert found == {item: -2 if item == 2 else item * item + 1007 for item in range(9)}
    assert cluster.options["max_concurrency"] == 3
    assert max(map(len, cluster.together)) == 3
    assert all(all(tries) for tries in cluster.together if len(tries) > 1)
    assert (False,) in cluster.together
    assert {cluster.tries.count(item) for item in range(9) if item != 2} == {1, 2}


def test_a_few_items_are_divided_among_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = _Cluster(CPU=1)
    assert len(_with_models(monkeypatch, cluster, at_once=4, items=2)) == 2
    assert cluster.together == [(True,), (True,)]


def test_workers_divide_the_processors_of_a_node_by_its_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "_check_gpu", lambda: None)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "")
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
    cluster = _Cluster(CPU=26, GPU=4)
    assert _with_models(monkeypatch, cluster)[1] == 6008
    assert cluster.options == {"num_cpus": 6, "num_gpus": 1, "max_concurrency": 1}
    _with_models(monkeypatch, cluster, 0.25)
    assert cluster.options == {"num_cpus": 1, "num_gpus": 0.25, "max_concurrency": 1}
    _with_models(monkeypatch, cluster, at_once=None)
    assert cluster.options["max_concurrency"] == 6
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.225"


@pytest.mark.parametrize("freed", [False, True])
def test_a_full_cluster_is_reported(monkeypatch: pytest.MonkeyPatch, freed: bool) -> None:
    """Unless it is full only for a moment."""
    monkeypatch.setattr(engine, "_check_gpu", lambda: None)
    monkeypatch.setattr(engine, "_PATIENCE_S", 60.0 if freed else 0.0)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "")
    cluster, said = _Cluster(CPU=8, GPU=2), list[str]()
    cluster.free = [{"CPU": 8, "GPU": 0.1}, {"CPU": 8, "GPU": 2}] if freed else [{"CPU": 1}]
    assert len(_with_models(monkeypatch, cluster, say=said.append)) == 5
    waiting = (
        "waiting for room in the Ray cluster auto: a worker needs 4 CPUs and 1 GPU; the cluster "
        "has 16 CPUs and 4 GPUs; free: 1 CPU. Wait until other jobs end, stop them (`ray status` "
        "shows what is used), or add nodes"
    )
    assert said == [JOINING] if freed else [JOINING, waiting]


def test_a_wait_for_the_first_worker_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """For 50 s, no worker starts."""
    clock = [0.0]
    monkeypatch.setattr(engine.time, "monotonic", lambda: clock[0])
    cluster, said = _Cluster(CPU=8), list[str]()
    ready = cluster.wait

    def wait(references: list[Any], **limits: float) -> Any:
        if clock[0] < 50.0:
            clock[0] += limits["timeout"]
            return [], references
        return ready(references)

    monkeypatch.setattr(cluster, "wait", wait)
    assert len(_with_models(monkeypatch, cluster, say=said.append)) == 5
    first = "waiting for the first Ray worker to load the model: 30 s so far"
    assert said == [JOINING, first]


def test_a_wait_for_the_first_result_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(engine.time, "monotonic", lambda: clock[0])
    ray, said = mock.MagicMock(), list[str]()
    ray.exceptions.RayError = ray.exceptions.WorkerCrashedError = KeyError
    ray.exceptions.OutOfMemoryError = KeyError
    ray.nodes.return_value = [{"Alive": True, "Resources": {"CPU": 2}}]
    ray.available_resources.return_value = {"CPU": 2}
    ray.remote.return_value.return_value.remote = lambda item, shared: item
    ray.get = lambda reference: (reference, None)

    def wait(references: list[int], num_returns: int, timeout: float | None = None) -> Any:
        if clock[0] < 120.0:
            assert timeout is not None
            clock[0] += timeout
            return [], references
        return references, []

    ray.wait = wait
    monkeypatch.setattr(engine, "_connected", lambda address: ray)
    cluster = engine.Ray("10.0.0.1:6379", workers=2, say=said.append)
    assert len(list(cluster.as_finished(square, range(5), 0, died=int))) == 5
    assert said == [
        "joining the Ray cluster 10.0.0.1:6379",
        *(f"waiting for the first result of the Ray workers: {s} s so far" for s in (30, 60, 120)),
    ]


class _Autoscaling(_Cluster):
    """A cluster whose autoscaler starts larger nodes some time after a worker waits.

    Attributes:
        seconds: of the wait, so far.
    """

    def __init__(self, after_s: float, larger: dict[str, float], **resources: float) -> None:
        super().__init__(**resources)
        self._after_s, self._larger = after_s, larger
        self.seconds = 0.0

    def wait(self, references: list[Any], **limits: float) -> Any:
        if self.seconds >= self._after_s:
            return super().wait(references)
        self.seconds += limits["timeout"]
        if self.seconds >= self._after_s:
            self.resources = self._larger
        return [], references


SMALL = (
    "no node of the Ray cluster {} is large enough: a worker needs 1 CPU and 2 GPUs, and the "
    "nodes have {}"
)
LARGER = "start a larger node, or lower --ray-gpus 2 (0 uses CPUs)"


@pytest.mark.parametrize(
    ("resources", "has"),
    [({"memory": 1.0}, "0 CPUs"), ({"CPU": 4, "GPU": 1}, "4 CPUs and 1 GPU")],
    ids=["none yet", "too small"],
)
@pytest.mark.parametrize("starts", [True, False])
def test_nodes_that_an_autoscaler_starts_are_waited_for(
    monkeypatch: pytest.MonkeyPatch, resources: dict[str, float], has: str, starts: bool
) -> None:
    """For ten minutes."""
    cluster = _Autoscaling(90.0 if starts else 1e9, {"CPU": 12, "GPU": 4}, **resources)
    monkeypatch.setattr(engine.time, "monotonic", lambda: cluster.seconds)
    monkeypatch.setattr(engine, "_check_gpu", lambda: None)
    said = list[str]()
    waiting = SMALL.format("auto", has)
    if starts:
        assert len(_with_models(monkeypatch, cluster, 2, say=said.append)) == 5
        assert cluster.options == {"num_cpus": 6, "num_gpus": 2, "max_concurrency": 1}
    else:
        with pytest.raises(InputError) as found:
            _with_models(monkeypatch, cluster, 2, say=said.append)
        assert str(found.value) == f"{waiting}: {LARGER}"
        assert cluster.seconds == 600.0
    assert said == [
        JOINING,
        f"{waiting}. Waiting for an autoscaler to start one; without one, {LARGER}",
        *(
            f"waiting for a node that is large enough: {seconds} s so far"
            for seconds in ((30, 60) if starts else (30, 60, 120, 240, 480))
        ),
    ]


def test_a_worker_that_no_node_of_this_machine_has_room_for_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cluster that is started here has no autoscaler."""
    monkeypatch.setattr(engine, "_connected", lambda address: _Cluster(CPU=4, GPU=1))
    small = re.escape(f"{SMALL.format('local', '4 CPUs and 1 GPU')}: {LARGER}")
    with pytest.raises(InputError, match=small):
        list(engine.Ray("local", gpus=2).with_models(square, range(2), 0, died=int))
    monkeypatch.setattr(engine, "_connected", lambda address: _Cluster(memory=1.0))
    with pytest.raises(InputError, match=r"needs 1 CPU, and the nodes have 0 CPUs: start a larger"):
        list(engine.Ray("local").as_finished(square, range(2), 0, died=int))


def test_a_worker_on_a_machine_whose_gpu_jax_does_not_see_ends_the_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(InputError, match="jax sees only the CPU on the Ray node"):
        _with_models(monkeypatch, _Cluster(CPU=1, GPU=1))


def test_a_worker_with_other_versions_does_not_receive_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stamp, stamps = engine._stamp, iter(("flax 1", "flax 2"))
    monkeypatch.setattr(engine, "_stamp", lambda *more: f"{next(stamps)}, {stamp(*more)}")
    with pytest.raises(InputError, match=r"has flax 2, .*, but this command has flax 1.* jaxlib "):
        _with_models(monkeypatch, _Cluster(CPU=1), fetched=mock.Mock(side_effect=AttributeError))


def test_a_task_rejects_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_fetched", lambda reference: reference)
    assert engine._in_task(5, [(square, (1,), engine._stamp())]) == (26, None)
    result, error = engine._in_task(5, [(square, (1,), "av 0.1")])
    assert result is None
    assert "but this command has av 0.1: install the same versions" in str(error)
