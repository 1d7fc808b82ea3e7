"""Doctor's checks of several processes: in one process, and in two real ones with faults."""

import concurrent.futures
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed.fake_key_value import FakeClient
from doctor.examined import all_ok, only_problem, only_warning, subject
from program import CHECKOUT, environment

from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.doctor import hosts
from jaxtrain.doctor.finding import Finding, Level, run_checks
from jaxtrain.doctor.subject import Subject


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


PATIENT_S = "0.5"


def second_of_two(patience_s: str) -> dict[str, str]:
    return {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
        "JAXTRAIN_CONNECT_S": patience_s,
    }


def test_a_single_process_has_nothing_to_synchronize(tmp_path: Path) -> None:
    checks = hosts.checks(subject(tmp_path))
    found = [one for check in checks.values() for one in check()]
    assert all_ok(found) == "single process: nothing to synchronize"
    assert not list(hosts.others(KeyValueStore(), []))


def connecting(examined: Subject) -> Finding:
    """Returns the problem of a process that does not find the others."""
    found: list[Finding] = []
    run_checks("processes", {"coordinator": lambda: hosts.coordinator(examined)}, found.append)
    assert not examined.connected
    return only_problem(found)


def test_without_its_coordinator(tmp_path: Path) -> None:
    found = connecting(subject(tmp_path, environment=second_of_two(PATIENT_S)))
    assert "process 1 on " in found.seen
    assert "found no process 0 at 127.0.0.1:" in found.seen
    assert "no firewall blocks port" in found.seen


def test_findings_of_other_processes_are_reported_once() -> None:
    def of(level: Level, seen: str) -> Finding:
        return Finding(level=level, seen=seen, cure="cure", group="system", check="x")

    stores = FakeClient(2).stores()
    own = [of("ok", "fine"), of("problem", "both")]
    theirs = [of("problem", "both"), of("warning", "mine")]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        second = pool.submit(lambda: list(hosts.others(stores[1], theirs)))
        found = only_warning(hosts.others(stores[0], own))
    assert found.seen.endswith("), system: mine")
    assert found.seen.startswith("process 1 (")
    assert "process 0 reports" in all_ok(second.result())


# One of two real, connected processes; prints its findings as JSON.
TWO = """
import dataclasses, json, os, sys, time, types
from pathlib import Path
from jaxtrain.distributed import key_value, process_group
from jaxtrain.doctor import finding, hosts

process_group.connect(os.environ, 2)
everyone = key_value.of_run()
hosts.ANSWER_S = 20.0
apart, together = Path(sys.argv[1]), Path(sys.argv[2])
second = everyone.index == 1
found = []

def late(seconds):
    return lambda: time.time() + seconds * second

def shared(folder):
    subject = types.SimpleNamespace(store=everyone, base=folder, url=None)
    yield from hosts.shared_storage(subject)
    assert subject.shared

def facts(one):
    return {
        "config": {"seed": str(one)},
        "code": {"code": f"abc{one} (commit {one})"},
        "package": {"jax": f"0.{one}"},
    }

def silent():
    if not second:
        everyone.gather("answer", "here", 0.2)
    yield finding.ok("published nothing")

finding.run_checks("processes", {
    "level": lambda: hosts.clocks(everyone, late(0.0)),
    "behind": lambda: hosts.clocks(everyone, late(-5.0)),
    "ahead": lambda: hosts.clocks(everyone, late(100.0)),
    "same": lambda: hosts.same(everyone, facts(1)),
    "other": lambda: hosts.same(everyone, facts(2 if second else 1)),
    "apart": lambda: shared(apart),
    "together": lambda: shared(together),
    "silent": silent,
}, found.append)
found += list(hosts.others(everyone, [finding.warning("mine", "c")] if second else []))
print(json.dumps([dataclasses.asdict(one) for one in found]))
everyone.barrier("end", 60)
hosts.leave()
"""


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Any]]]:
    """Returns check -> its last finding, for both processes."""
    place = tmp_path_factory.mktemp("hosts")
    folders = [place / "apart", place / "together"]
    for folder in folders:
        folder.mkdir()
    # The second process has a disk of its own at the first folder.
    for user in ([], ["--map-root-user"]):  # as root, and where users have namespaces of their own
        hide = ["unshare", "--mount", *user, "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"']
        if not subprocess.run([*hide, str(folders[0]), "true"], capture_output=True).returncode:
            break
    else:
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
        outputs = [process.communicate(timeout=180) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], outputs
    assert [list(folder.iterdir()) for folder in folders] == [[], []]
    return [{one["check"]: one for one in json.loads(out.splitlines()[-1])} for out, _ in outputs]


def of(found: dict[str, Any]) -> Finding:
    return Finding(**found)


@pytest.mark.long
def test_two_processes_compare_their_clocks(two: list[dict[str, Any]]) -> None:
    for process in two:
        assert "clocks are at most 0." in all_ok([of(process["level"])])
        behind = only_warning([of(process["behind"])])
        assert "the clock of process 1 is 5." in behind.seen or "is 4." in behind.seen
        assert "s behind that of process 0" in behind.seen
        ahead = only_warning([of(process["ahead"])])
        assert "ahead of that of process 0" in ahead.seen
        assert ahead.cure.endswith("timedatectl set-ntp true, or chronyc makestep")


@pytest.mark.long
def test_two_processes_find_their_differences(two: list[dict[str, Any]]) -> None:
    for process in two:
        assert process["same"]["level"] == "ok", process["same"]
        other = only_problem([of(process["other"])])
        for one in (
            "seed is 1 in process 0 and 2 in process 1",
            "code is abc1 (commit 1) in process 0 and abc2 (commit 2) in process 1",
            "jax is 0.1 in process 0 and 0.2 in process 1",
            "install the same packages on every host",
        ):
            assert one in other.seen


@pytest.mark.slow
def test_two_processes_find_storage_that_is_not_shared(two: list[dict[str, Any]]) -> None:
    for process in two:
        assert process["together"]["level"] == "ok", process["together"]
        apart = only_problem([of(process["apart"])])
        assert "apart is not the same folder for all processes: process 0 (on " in apart.seen
        assert ") does not see what process 1 wrote" in apart.seen
        assert "set --output-dir to storage that every host sees" in apart.seen


@pytest.mark.slow
def test_a_process_that_does_not_answer_is_named(two: list[dict[str, Any]]) -> None:
    silent = only_problem([of(two[0]["silent"])])
    assert "process 1 did not publish its answer within 0 s" in silent.seen
    assert two[1]["silent"]["level"] == "ok"


@pytest.mark.slow
def test_process_zero_reports_the_others_findings(two: list[dict[str, Any]]) -> None:
    assert two[0][""]["seen"].startswith("process 1 (")
    assert two[0][""]["seen"].endswith("mine")
    assert two[1][""]["level"] == "ok"
