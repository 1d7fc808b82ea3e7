"""Doctor's checks of several processes, as threads; tests/launch/real_ssh.py has real hosts."""

import concurrent.futures
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from distributed.fake_key_value import FakeClient
from doctor.examined import all_ok, only_problem, only_warning, subject
from program import free_port

from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.doctor import hosts
from jaxtrain.doctor.finding import Finding, Level, run_checks


def test_a_single_process_has_nothing_to_synchronize(tmp_path: Path) -> None:
    checks = hosts.checks(subject(tmp_path))
    found = [one for check in checks.values() for one in check()]
    assert all_ok(found) == "single process: nothing to synchronize"
    assert not list(hosts.of_other_processes(KeyValueStore(), []))


def test_without_its_coordinator(tmp_path: Path) -> None:
    second = {
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
        "JAXTRAIN_CONNECT_S": "0.5",
    }
    examined, found = subject(tmp_path, environment=second), list[Finding]()
    run_checks("processes", {"coordinator": lambda: hosts.coordinator(examined)}, found.append)
    assert not examined.connected
    seen = only_problem(found).seen
    for words in ("process 1 on ", "found no process 0 at 127.0.0.1:", "no firewall blocks port"):
        assert words in seen


def test_findings_of_other_processes_are_reported_once() -> None:
    def of(level: Level, seen: str) -> Finding:
        return Finding(level=level, seen=seen, cure="cure", group="system", check="x")

    stores = FakeClient(2).stores()
    own = [of("ok", "fine"), of("problem", "both")]
    theirs = [of("problem", "both"), of("warning", "mine")]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        second = pool.submit(lambda: list(hosts.of_other_processes(stores[1], theirs)))
        found = only_warning(hosts.of_other_processes(stores[0], own))
    assert found.seen.endswith("), system: mine")
    assert found.seen.startswith("process 1 (")
    assert "process 0 reports" in all_ok(second.result())


def on_both(check: Callable[[KeyValueStore], Iterable[Finding]]) -> list[list[Finding]]:
    """Returns what a check finds in each of two processes, which are threads."""

    def findings_of(store: KeyValueStore) -> list[Finding]:
        findings: list[Finding] = []
        run_checks("processes", {"check": lambda: check(store)}, findings.append)
        return findings

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(findings_of, FakeClient(2).stores()))


@pytest.mark.parametrize(
    ("late_s", "expected"),
    [
        (-5.0, r"the clock of process 1 is [45]\.\d s behind that of process 0"),
        (100.0, r"the clock of process 1 is (99|100)\.\d s ahead of that of process 0"),
    ],
)
def test_two_processes_compare_their_clocks(late_s: float, expected: str) -> None:
    def clocks(store: KeyValueStore, late_s: float) -> Iterable[Finding]:
        return hosts.clocks(store, lambda: time.time() + late_s * store.index)

    for found in on_both(lambda store: clocks(store, late_s)):
        warned = only_warning(found)
        assert re.match(expected, warned.seen)
        assert warned.cure.endswith("timedatectl set-ntp true, or chronyc makestep")
    for found in on_both(lambda store: clocks(store, 0.0)):
        assert "clocks are at most 0." in all_ok(found)


def test_two_processes_find_their_differences() -> None:
    def facts(number: int) -> dict[str, dict[str, str]]:
        return {
            "config": {"seed": str(number)},
            "code": {"code": f"abc{number} (commit {number})"},
            "package": {"jax": f"0.{number}"},
        }

    for found in on_both(lambda store: hosts.same(store, facts(1))):
        assert all_ok(found)
    for found in on_both(lambda store: hosts.same(store, facts(1 + store.index))):
        other = only_problem(found)
        for words in (
            "seed is 1 in process 0 and 2 in process 1",
            "code is abc1 (commit 1) in process 0 and abc2 (commit 2) in process 1",
            "jax is 0.1 in process 0 and 0.2 in process 1",
            "install the same packages on every host",
        ):
            assert words in other.seen
