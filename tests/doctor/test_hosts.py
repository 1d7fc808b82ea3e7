"""Several processes: what one can show of them, and two real ones with a fault each."""

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from examined import all_ok, only_problem, only_warning, subject
from program import CHECKOUT, environment

from jaxtrain.doctor import hosts
from jaxtrain.doctor.exchange import Peers
from jaxtrain.doctor.finding import Finding, ok


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def test_one_process_has_nobody_to_meet(tmp_path: Path) -> None:
    checks = hosts.checks(subject(tmp_path), connect=True)
    found = [one for check in checks.values() for one in check()]
    assert all_ok(found) == "one process: there is nobody to meet"
    assert not hosts.checks(subject(tmp_path), connect=False)
    assert not list(hosts.others(Peers(0, 1, None), []))


def test_a_coordinator_that_nobody_has_started() -> None:
    address = f"127.0.0.1:{free_port()}"
    found = hosts.unreachable(address, first=False, wait_s=0.5)
    assert found is not None
    assert f"nobody answers at the coordinator's {address}" in found.seen
    assert "Connection refused" in found.seen
    assert "firewall" in only_problem([found]).cure
    assert hosts.unreachable(address, first=True) is None  # it will listen there itself


def test_a_coordinator_that_starts_a_little_later() -> None:
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    timer = threading.Timer(0.5, server.listen)
    timer.start()
    try:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert hosts.unreachable(address, first=False, wait_s=30) is None
    finally:
        timer.join()
        server.close()


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("no-such-host.invalid:1234", "no-such-host.invalid has no address here"),
        ("node0", "JAX_COORDINATOR_ADDRESS is 'node0'"),
        ("node0:http", "JAX_COORDINATOR_ADDRESS is 'node0:http'"),
    ],
)
def test_an_address_that_cannot_be(address: str, said: str) -> None:
    for first in (True, False):
        found = hosts.unreachable(address, first=first)
        assert found is not None
        assert said in only_problem([found]).seen


def test_an_unreachable_coordinator_leaves_this_process_alone(tmp_path: Path) -> None:
    variables = {
        "JAX_COORDINATOR_ADDRESS": "no-such-host.invalid:1",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
    }
    examined = subject(tmp_path, environment=variables)
    assert "no address here" in only_problem(hosts.coordinator(examined)).seen
    assert examined.peers.count == 1


class Heard:
    """A coordination service in which the others have spoken already."""

    def __init__(self, said: dict[str, str]) -> None:
        self.said = said

    def key_value_set(self, key: str, value: str) -> None:
        self.said[key] = value

    def blocking_key_value_get(self, key: str, timeout_ms: int) -> str:
        return self.said[key]


def test_what_the_others_found_is_said_once() -> None:
    own = [ok("fine"), Finding(level="problem", seen="both", cure="c", group="g", check="x")]
    theirs = [own[1], Finding(level="warning", seen="mine", cure="d", group="system", check="y")]
    told = json.dumps({"host": "node1", "amiss": [one.as_dict() for one in theirs]})
    client = Heard({"jaxtrain/doctor/findings/1": f"={told}"})
    found = only_warning(hosts.others(Peers(0, 2, client), own))
    assert (found.seen, found.cure) == ("process 1 (node1), system: mine", "d")
    assert "both" in client.said["jaxtrain/doctor/findings/0"]
    assert "fine" not in client.said["jaxtrain/doctor/findings/0"]
    assert "process 0 says" in all_ok(hosts.others(Peers(1, 2, client), own))


def test_all_differences_of_versions_are_named() -> None:
    said = [{"jax": "0.10.2", "av": "18.1"}, {"jax": "0.12.0", "av": "18.1"}, {"jax": "0.10.2"}]
    assert hosts.differing(said) == [
        "av 18.1 on process 0, not installed on process 2",
        "jax 0.10.2 on process 0, 0.12.0 on process 1",
    ]


# One of two real processes, connected as a run's are; prints its findings as JSON.
TWO = """
import json, os, sys, time
from pathlib import Path
import jax
from jaxtrain import processes
from jaxtrain.doctor import exchange, finding, hosts

jax.config.update("jax_platforms", "cpu")
processes.connect(os.environ, 2)
peers = exchange.peers()
hosts.ANSWER_S = 20.0
apart, together = Path(sys.argv[1]), Path(sys.argv[2])
second = peers.index == 1
found = []

def late(seconds):
    return lambda: time.time() + seconds * second

def named(name):
    return exchange.Peers(peers.index, peers.count, Renamed(peers.client, name))

def shared(folder):
    hosts.check_shared(folder, named(folder.name))
    yield finding.ok("shared")

class Renamed:
    "The same service, asked about the same again under other names."
    def __init__(self, client, name):
        self.client, self.name = client, name
    def key_value_set(self, key, value):
        self.client.key_value_set(f"{self.name}/{key}", value)
    def blocking_key_value_get(self, key, timeout_ms):
        return self.client.blocking_key_value_get(f"{self.name}/{key}", timeout_ms)
    def wait_at_barrier(self, name, timeout_ms):
        return self.client.wait_at_barrier(f"{self.name}/{name}", timeout_ms)

def silent():
    if not second:
        peers.all_say("word", "here", 0.2)
    yield finding.ok("not asked")

finding.run_checks("processes", {
    "level": lambda: hosts.clocks(named("level"), late(0.0)),
    "behind": lambda: hosts.clocks(named("behind"), late(-5.0)),
    "far": lambda: hosts.clocks(named("far"), late(100.0)),
    "versions": lambda: hosts.same_versions(peers, {"jax": "0.12.0" if second else "0.10.2"}),
    "config": lambda: hosts.same_config(peers, {"seed": 1 + second}),
    "apart": lambda: shared(apart),
    "together": lambda: shared(together),
    "silent": silent,
}, found.append)
found += list(hosts.others(peers, [finding.warning("mine", "c")] if second else []))
print(json.dumps([one.as_dict() for one in found]))
peers.meet("end", 60)
hosts.leave()
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """Check -> its last finding, of both processes."""
    place = tmp_path_factory.mktemp("hosts")
    folders = [place / "apart", place / "together"]
    for folder in folders:
        folder.mkdir()
    # The second one has a disk of its own where the first of the folders is.
    hide = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"']
    if subprocess.run([*hide, str(folders[0]), "true"], capture_output=True).returncode:
        pytest.skip("this user cannot mount")
    port = free_port()
    program = [sys.executable, "-c", TWO, *map(str, folders)]
    started = [
        subprocess.Popen(
            [*hide, str(folders[0]), *program] if number else program,
            cwd=CHECKOUT,
            env=environment(
                place,
                JAX_COORDINATOR_ADDRESS=f"127.0.0.1:{port}",
                JAX_NUM_PROCESSES="2",
                JAX_PROCESS_ID=str(number),
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        said = [process.communicate(timeout=180) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], said
    assert [list(folder.iterdir()) for folder in folders] == [[], []]
    return [{one["check"]: one for one in json.loads(out.splitlines()[-1])} for out, _ in said]


def of(found: dict[str, Any]) -> Finding:
    return Finding(**found)


@pytest.mark.slow
def test_two_processes_see_their_clocks(two: list[dict[str, Any]]) -> None:
    for process in two:
        assert "clocks are at most 0." in all_ok([of(process["level"])])
        behind = only_warning([of(process["behind"])])
        assert "the clock of process 1 is 5." in behind.seen or "is 4." in behind.seen
        assert "s behind that of process 0" in behind.seen
        far = only_problem([of(process["far"])])
        assert "ahead of that of process 0" in far.seen
        assert "timedatectl set-ntp true" in far.cure


@pytest.mark.slow
def test_two_processes_see_other_versions_and_configs(two: list[dict[str, Any]]) -> None:
    for process in two:
        versions = only_problem([of(process["versions"])])
        assert "jax 0.10.2 on process 0, 0.12.0 on process 1" in versions.seen
        assert "same versions on every host" in versions.cure
        config = only_problem([of(process["config"])])
        assert "process 1 has another config than process 0: seed: 1 -> 2" in config.seen


@pytest.mark.slow
def test_two_processes_see_storage_that_is_not_shared(two: list[dict[str, Any]]) -> None:
    for process in two:
        assert process["together"]["level"] == "ok", process["together"]
        apart = only_problem([of(process["apart"])])
        assert "apart is not shared: process 0 does not see the file of process 1" in apart.seen
        assert "give --output-dir a place that every host mounts" in apart.seen


@pytest.mark.slow
def test_a_process_that_says_nothing_is_named(two: list[dict[str, Any]]) -> None:
    silent = only_problem([of(two[0]["silent"])])
    assert "process 1 did not say its word within 0 s" in silent.seen
    assert two[1]["silent"]["level"] == "ok"


@pytest.mark.slow
def test_process_zero_says_what_the_other_found(two: list[dict[str, Any]]) -> None:
    assert two[0][""]["seen"].startswith("process 1 (")
    assert two[0][""]["seen"].endswith("mine")
    assert two[1][""]["level"] == "ok"
