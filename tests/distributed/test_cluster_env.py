"""Finding the processes of a run in the environment; recorded environments where possible."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxtrain.distributed import cluster_env
from jaxtrain.errors import InputError

ADDRESS, COUNT, INDEX = cluster_env.ADDRESS, cluster_env.COUNT, cluster_env.INDEX
ALL = {ADDRESS: "host:1234", COUNT: "3", INDEX: "0"}
WORLD = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
HERE = Path(__file__).parents[1] / "fixtures" / "launch"


def recorded(name: str) -> dict[str, str]:
    """Reads the environment that a real launcher set (SLURM 22.05, Open MPI 4.1, MPICH 4.0)."""
    lines = (HERE / f"{name}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


def find(environment: dict[str, str]) -> tuple[Any, ...] | None:
    one = cluster_env.find(environment)
    return one and (one.coordinator, one.count, one.index, one.hosts, one.devices)


@pytest.mark.parametrize(
    "given", [[ADDRESS], [COUNT], [INDEX], [ADDRESS, COUNT], [ADDRESS, INDEX], [COUNT, INDEX]]
)
def test_an_error_names_the_missing_ones_of_three_variables(given: list[str]) -> None:
    for unset in ({}, dict.fromkeys(ALL, "")):
        with pytest.raises(InputError) as error:
            cluster_env.find(unset | {name: ALL[name] for name in given})
        is_set, _, missing = str(error.value).partition(" set, but not")
        for name in ALL:
            assert (name in is_set, name in missing) == (name in given, name not in given)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {COUNT: "1"},
        {COUNT: "1", ADDRESS: "host:1234", INDEX: "0"},
        {COUNT: "1", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"},
        # Left by a notebook's pod or by torchrun, and not meant for jaxtrain.
        {"WORLD_SIZE": "1"},
        {"WORLD_SIZE": "1", "RANK": "5", "MASTER_ADDR": "x", "MASTER_PORT": "y"},
        {"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        {"JOB_COMPLETION_INDEX": "3", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        {"PMI_SIZE": "1", "PMI_RANK": "0"},
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"},
        # one task within a larger allocation
        recorded("slurm-step.1") | {"SLURM_STEP_NUM_TASKS": "1"},
    ],
)
def test_one_process_is_alone(environment: dict[str, str]) -> None:
    assert cluster_env.find(environment) is None


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (ALL, ("host:1234", 3, 0, None, [])),
        (ALL | {ADDRESS: "[fd00::2]:1234"}, ("[fd00::2]:1234", 3, 0, None, [])),
        (ALL | {"JAX_LOCAL_DEVICE_IDS": "2,3"}, ("host:1234", 3, 0, None, [2, 3])),
        (ALL | recorded("slurm-two.1"), ("host:1234", 3, 0, None, [])),
        # As set by launch/k8s-jobset.yaml.
        (
            {ADDRESS: "run-nodes-0-0.run:12345", COUNT: "2", "JOB_COMPLETION_INDEX": "1"},
            ("run-nodes-0-0.run:12345", 2, 1, 2, []),
        ),
        (recorded("slurm-two.0"), ("n1:61441", 2, 0, 2, [])),
        (recorded("slurm-two.1"), ("n1:61441", 2, 1, 2, [])),
        (recorded("slurm-two.1") | {"SLURM_RESTART_COUNT": "1"}, ("n1:61830", 2, 1, 2, [])),
        (recorded("slurm-two.1") | {ADDRESS: "10.0.0.9:99"}, ("10.0.0.9:99", 2, 1, 2, [])),
        # Two tasks on one node: each gets a part of the GPUs.
        (recorded("slurm-step.1"), ("vm:61441", 2, 1, 1, [1])),
        (
            recorded("slurm-step.1") | {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"},
            ("vm:61441", 2, 1, 1, [4, 5, 6, 7]),
        ),
        (recorded("slurm-step.1") | {"SLURM_GPUS_PER_TASK": "4"}, ("vm:61441", 2, 1, 1, [])),
        (ALL | recorded("open-mpi"), ("host:1234", 3, 0, None, [])),
        (WORLD, ("10.0.0.1:29500", 2, 1, 2, [])),
        (WORLD | {"MASTER_ADDR": "fd00::2"}, ("[fd00::2]:29500", 2, 1, 2, [])),
        (WORLD | {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}, ("10.0.0.1:29500", 2, 1, 1, [1])),
        (WORLD | {COUNT: "", INDEX: "", ADDRESS: ""}, ("10.0.0.1:29500", 2, 1, 2, [])),
    ],
)
def test_each_scheme_is_read(environment: dict[str, str], expected: tuple[Any, ...]) -> None:
    assert find(environment) == expected


def without(environment: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name not in names}


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (ALL | {COUNT: "two"}, f"{COUNT} is 'two'; it must be an integer, at least 1"),
        (ALL | {COUNT: "0"}, f"{COUNT} is '0'"),
        (ALL | {INDEX: "first"}, f"{INDEX} is 'first'; .* from 0 to 2, because {COUNT} is 3"),
        (ALL | {INDEX: "3"}, f"{INDEX} is '3'; .* from 0 to 2, because {COUNT} is 3"),
        (ALL | {INDEX: "-1"}, f"{INDEX} is '-1'"),
        (ALL | {ADDRESS: "host"}, f"{ADDRESS} is 'host'; it must be HOST:PORT"),
        (ALL | {ADDRESS: "host:99999"}, f"{ADDRESS} is 'host:99999'"),
        (ALL | {ADDRESS: "fd00::2"}, f"{ADDRESS} is 'fd00::2'"),
        (ALL | {"JAX_LOCAL_DEVICE_IDS": "all"}, "JAX_LOCAL_DEVICE_IDS is 'all'"),
        (recorded("slurm-batch"), "SLURM_NTASKS is 2, but srun did not start .*with srun"),
        (recorded("slurm-two.batch"), "srun did not start this process.* or set JAX_NUM_PROC"),
        (
            without(recorded("slurm-two.batch"), "SLURM_NTASKS"),
            "SLURM_JOB_NUM_NODES is 2, but srun did not start this process",
        ),
        (without(recorded("slurm-two.1"), "SLURM_PROCID"), "SLURM_PROCID is not set: start .*srun"),
        (recorded("slurm-two.1") | {"SLURM_PROCID": "2"}, "SLURM_PROCID is '2'; .* from 0 to 1"),
        (recorded("open-mpi"), f"OMPI_COMM_WORLD_SIZE is 2, but MPI.* set {ADDRESS}, {COUNT},"),
        (recorded("slurm-two.batch") | recorded("open-mpi"), "OMPI_COMM_WORLD_SIZE is 2, but MPI"),
        (recorded("mpich"), "PMI_SIZE is 2, but MPI's processes are not detected: use a launcher"),
        # mpiexec within a step of one task
        (
            recorded("slurm-step.1") | recorded("mpich") | {"SLURM_STEP_NUM_TASKS": "1"},
            "PMI_SIZE is 2, but MPI",
        ),
        (without(WORLD, "RANK"), "WORLD_SIZE is 2, but RANK is not set: .* or unset WORLD_SIZE"),
        (
            {"WORLD_SIZE": "2"},
            "RANK and MASTER_ADDR and MASTER_PORT are not set",
        ),
        (WORLD | {"RANK": "2"}, "RANK is '2'; .* from 0 to 1, because WORLD_SIZE is 2"),
        (WORLD | {"MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        (WORLD | {"WORLD_SIZE": "auto"}, "WORLD_SIZE is 'auto'; .*unset it to train with one"),
    ],
)
def test_an_error_names_the_variable_its_value_and_the_fix(
    environment: dict[str, str], message: str
) -> None:
    with pytest.raises(InputError, match=message) as error:
        cluster_env.find(environment)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("node[001-003,7],gpu1", "node001"),
        ("a[3,5-6]", "a3"),
        ("rack[1-2]n[04-08]-ib", "rack1n04-ib"),
    ],
)
def test_the_first_host_of_a_slurm_node_list(nodes: str, first: str) -> None:
    one = cluster_env.find(recorded("slurm-two.1") | {"SLURM_STEP_NODELIST": nodes})
    assert one is not None
    assert one.host == first


def resolving(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> None:
    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.mark.parametrize("address", ["127.0.1.1", "127.0.0.1", "::1", "0.0.0.0"])
def test_a_loopback_coordinator_is_refused_for_several_hosts(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolving(monkeypatch, address)
    for environment in (recorded("slurm-two.0"), recorded("slurm-two.1"), WORLD):
        one = cluster_env.find(environment)
        assert one is not None
        with pytest.raises(
            InputError, match=rf"{one.source}.* is {address} on .* 2 hosts: .* fix /"
        ):
            cluster_env.check_address(one, {})
    # Several processes of one host may meet there.
    for environment in (ALL, recorded("slurm-step.1")):
        one = cluster_env.find(environment)
        assert one is not None
        cluster_env.check_address(one, {})
    # One address that the other hosts reach is enough.
    resolving(monkeypatch, address, "10.0.0.1")
    one = cluster_env.find(WORLD)
    assert one is not None
    cluster_env.check_address(one, {})


def test_a_name_without_an_address_is_refused_but_kubernetes_gets_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = cluster_env.find(ALL)
    assert one is not None
    waits: list[float] = []
    clock = iter(range(0, 100_000, 10))
    fake = SimpleNamespace(monotonic=lambda: float(next(clock)), sleep=waits.append)
    monkeypatch.setattr(cluster_env, "time", fake)  # other threads keep the real one
    resolving(monkeypatch)
    with pytest.raises(InputError, match=r"'host' \(from JAX_COORDINATOR_ADDRESS\) has no address"):
        cluster_env.check_address(one, {})
    assert not waits
    with pytest.raises(InputError):
        cluster_env.check_address(one, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    assert len(waits) >= 8
    waits.clear()
    with pytest.raises(InputError):
        cluster_env.check_address(
            one, {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JAXTRAIN_CONNECT_S": "25"}
        )
    assert len(waits) <= 3  # the shorter patience also limits the wait for a name


@pytest.mark.parametrize(
    ("host", "hosts", "bind"),
    [
        ("127.0.0.1", None, "127.0.0.1:1234"),
        ("127.0.0.1", 1, "127.0.0.1:1234"),
        ("127.0.0.7", None, "127.0.0.7:1234"),
        ("localhost", None, "127.0.0.1:1234"),
        ("0.0.0.0", None, "127.0.0.1:1234"),
        ("[::1]", None, "[::1]:1234"),
        ("[::]", None, "[::1]:1234"),
        ("10.0.0.1", 1, "[::]:1234"),
        ("10.0.0.1", None, "[::]:1234"),
        # Debian maps the host's own name to 127.0.1.1; other hosts may resolve it differently.
        ("debian", None, "[::]:1234"),
        ("debian", 1, "127.0.1.1:1234"),
    ],
)
def test_process_0_listens_where_the_others_are(
    host: str, hosts: int | None, bind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = socket.getaddrinfo

    def known(name: str, *arguments: Any, **more: Any) -> Any:
        return real("127.0.1.1" if name == "debian" else name, *arguments, **more)

    monkeypatch.setattr(socket, "getaddrinfo", known)
    cluster = cluster_env.Cluster(
        scheme="test",
        coordinator=f"{host}:1234",
        source="TEST",
        count=2,
        index=0,
        hosts=hosts,
        devices=[],
    )
    assert cluster_env.bind_address(cluster, {}) == bind
    assert cluster_env.bind_address(cluster, {cluster_env.BIND: ""}) == bind
    assert cluster_env.bind_address(cluster, {cluster_env.BIND: "10.1.1.1:99"}) == "10.1.1.1:99"
