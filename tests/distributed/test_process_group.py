"""How processes connect and agree, as far as one process can test it."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from distributed.fake_key_value import FakeClient
from distributed.test_rendezvous import listeners
from program import free_port
from training import toy

from jaxtrain.distributed import process_group
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.errors import InputError, RunAgain

ALL = {
    "JAX_COORDINATOR_ADDRESS": "host:1234",
    "JAX_NUM_PROCESSES": "3",
    "JAX_PROCESS_ID": "0",
}


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Records the calls of ``jax.distributed.initialize``, which does nothing here."""
    calls: list[Any] = []

    def initialize(
        *args: Any,
        local_device_ids: Any,
        initialization_timeout: int,
        heartbeat_timeout_seconds: int,
        coordinator_bind_address: str,
    ) -> None:
        calls.append((*args, local_device_ids, coordinator_bind_address))

    def join(cluster: Any, environment: Any) -> None:
        calls.append(f"rendezvous of process {cluster.index}")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(process_group.rendezvous, "join", join)
    reachable = lambda cluster, environment: None  # noqa: E731
    monkeypatch.setattr(process_group.cluster_env, "check_address", reachable)
    return calls


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Records what jax is configured with, without changing it."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(jax.config, "update", found.__setitem__)
    return found


def test_processes_join_after_the_rendezvous(joined: list[Any]) -> None:
    process_group.connect({}, None)
    assert not joined
    process_group.connect(ALL | {"JAX_LOCAL_DEVICE_IDS": "0,1"}, None)
    assert joined == ["rendezvous of process 0", ("host:1234", 3, 0, [0, 1], "[::]:1234")]
    process_group.connect(ALL | {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1234"}, None)
    assert joined[-1] == ("127.0.0.1:1234", 3, 0, [], "127.0.0.1:1234")
    process_group.connect(ALL | {"JAX_COORDINATOR_BIND_ADDRESS": "10.0.0.1:99"}, None)
    assert joined[-1] == ("host:1234", 3, 0, [], "10.0.0.1:99")


def test_processes_that_are_connected_do_not_connect_again(
    joined: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    connected = lambda: KeyValueStore(0, 3, FakeClient(3))  # noqa: E731
    monkeypatch.setattr(process_group.key_value, "of_run", connected)
    process_group.connect(ALL, None)
    assert not joined


def test_a_service_that_does_not_start_is_a_temporary_failure(
    joined: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def initialize(*args: Any, **_: Any) -> None:
        raise jax.errors.JaxRuntimeError("UNKNOWN: Failed to start RPC server")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with pytest.raises(RunAgain, match=r"host:1234 .*Failed to start"):
        process_group.connect(ALL, None)


@pytest.mark.parametrize(("devices", "environment"), [(8, ALL), (0, {}), (2, ALL)])
def test_simulated_devices_that_the_processes_do_not_divide_are_refused(
    devices: int, environment: dict[str, str], joined: list[Any], settings: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match=f"--simulate-devices {devices} cannot be divided among"):
        process_group.connect(environment, devices)
    assert not joined
    assert not settings


def test_simulated_devices_are_divided_among_the_processes(
    joined: list[Any], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # restores what connect() changes
    process_group.connect(ALL, 12)
    assert joined[1:] == [("host:1234", 3, 0, [], "[::]:1234")]
    assert settings == {
        "jax_platforms": "cpu",
        "jax_num_cpu_devices": 4,
        "jax_enable_preemption_service": False,
        "jax_cpu_collectives_implementation": "gloo",
    }


CONNECTS = """
import os, sys
from jaxtrain.distributed import key_value, process_group as processes
from jaxtrain.distributed.heartbeat import Heartbeat
from jaxtrain.errors import InputError, RunAgain
try:
    processes.connect(os.environ, None)
except (InputError, RunAgain) as error:
    sys.exit(f"{type(error).__name__}: {error}")
print("met", flush=True)
sys.stdin.read()
processes.end(0, Heartbeat(key_value.of_run(), None))
"""


@pytest.mark.long
def test_a_run_on_one_machine_listens_on_loopback_only() -> None:
    """One process too many learns that the run is complete: jax's service answers it."""
    port = free_port()

    def started(index: int, patience_s: str) -> "subprocess.Popen[str]":
        variables = {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(index),
            "JAX_PLATFORMS": "cpu",
            "JAXTRAIN_CONNECT_S": patience_s,
            "PYTHONPATH": str(Path(process_group.__file__).parents[2]),
        }
        return subprocess.Popen(
            [sys.executable, "-c", CONNECTS],
            env=os.environ | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    with started(0, "200") as first, started(1, "200") as second:
        try:
            for one in (first, second):
                assert one.stdout is not None
                assert one.stdout.readline() == "met\n"
            assert listeners(port) == {"0100007F"}
            with started(1, "4") as third:
                _, err = third.communicate(timeout=100)
            assert third.returncode == 1
            assert f"RunAgain: 127.0.0.1:{port}" in err
            assert "another process is process 1 too" in err
        finally:
            for one in (first, second):
                one.kill()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Simulates an NVIDIA driver on a machine where jax found only the CPU."""
    monkeypatch.setattr(Path, "exists", lambda path: path == Path("/proc/driver/nvidia/version"))
    asked = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)
    yield
    jax.config.update("jax_platforms", asked)


@pytest.mark.usefixtures("driver")
def test_a_gpu_that_jax_cannot_see_is_refused_with_the_fix() -> None:
    for environment in ({}, {"JAX_PLATFORMS": ""}, {"JAX_PLATFORMS": "cuda"}):
        with pytest.raises(InputError, match=r"pip install -e '\.\[cuda12\]'.*JAX_PLATFORMS=cpu"):
            process_group.check_accelerator(environment)


@pytest.mark.usefixtures("driver")
def test_machines_without_a_gpu_or_set_to_the_cpu_are_accepted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process_group.check_accelerator({"JAX_PLATFORMS": "cpu"})
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", lambda path: False)
        process_group.check_accelerator({})
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        process_group.check_accelerator({})
    jax.config.update("jax_platforms", "cpu")  # as --simulate-devices does
    process_group.check_accelerator({})


def test_one_process_agrees_at_once() -> None:
    exchange = process_group.Exchange(toy.mesh_of(1, 8), largest=["wish"])
    for reduced in (exchange.delayed, exchange.now):
        assert [reduced({"wish": wish})["wish"] for wish in (0, 2, 0, 1)] == [0, 2, 0, 1]


@pytest.fixture
def eight_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process is a device here, and has 0, 1, ... 7 times the values; the first has none."""

    def placed(sharding: Any, local: np.ndarray, shape: tuple[int, ...]) -> jax.Array:
        assert local.shape == shape
        values = local * np.arange(8, dtype=local.dtype)[:, None]
        values[0] = np.nan
        return jax.device_put(values, sharding)

    monkeypatch.setattr(jax, "process_count", lambda: 8)
    monkeypatch.setattr(jax, "make_array_from_process_local_data", placed)


@pytest.mark.usefixtures("eight_processes")
def test_several_processes_agree_one_call_later() -> None:
    exchange = process_group.Exchange(toy.mesh_of(2, 4), largest=["wish"])
    assert not exchange.delayed({"wish": 2})  # nothing is known yet
    assert [exchange.delayed({"wish": wish})["wish"] for wish in (0, 1, 0)] == [14, 0, 7]
    assert exchange.now({"wish": 3}) == {"wish": 21}
    exchange = process_group.Exchange(
        toy.mesh_of(2, 4), mean=["share", "power"], largest=["heat", "memory"]
    )
    assert exchange.delayed({"heat": 10.0, "power": 100.0}) == {}
    assert exchange.delayed({}) == {"power": 400.0, "heat": 70.0}
    assert exchange.delayed({}) == {}


def of_two(monkeypatch: pytest.MonkeyPatch, work: Callable[[], Any]) -> list[Any]:
    """Returns what the function returns in each of two processes, which are threads here."""
    here = threading.local()

    def run(store: KeyValueStore) -> Any:
        here.store = store
        return work()

    monkeypatch.setattr(process_group.key_value, "of_run", lambda: here.store)
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, FakeClient().stores()))


def test_all_different_values_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def check() -> str:
        process = process_group.key_value.of_run().index
        process_group.check_same("data", "c1", "do so")
        with pytest.raises(InputError) as caught:
            process_group.check_same("data", "ab"[process] + "1", "do so")
        return str(caught.value)

    message = "the processes see different data (process 0: a1, process 1: b1): do so"
    assert of_two(monkeypatch, check) == [message, message]


@pytest.mark.parametrize(("process", "order"), [(0, ["action", "waits"]), (1, ["waits", "action"])])
def test_process_zero_acts_first_and_the_others_never_wait_in_vain(
    process: int, order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even if its action fails: after a wrong path the others would wait forever."""
    events: list[str] = []

    def action(error: Exception | None) -> str:
        events.append("action")
        if error:
            raise error
        return "made"

    monkeypatch.setattr(process_group.key_value, "of_run", lambda: KeyValueStore(process, 2))
    monkeypatch.setattr(process_group, "wait_for_all", lambda name: events.append("waits"))
    assert process_group.process_zero_first(lambda: action(None), "data") == "made"
    assert events == order
    events.clear()
    with pytest.raises(InputError, match="no such folder"):
        process_group.process_zero_first(lambda: action(InputError("no such folder")), "data")
    assert events == order


@pytest.mark.parametrize(
    ("environment", "driver", "on_cpu"),
    [({}, False, True), ({}, True, False), ({"JAX_PLATFORMS": "cpu"}, True, True)],
)
def test_a_driver_indicates_a_gpu(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], driver: bool, on_cpu: bool
) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: driver)
    assert process_group.will_use_cpu(environment) is on_cpu
