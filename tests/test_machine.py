"""What a process may use of its machine, also in a container."""

import errno
import math
import os
import resource
from pathlib import Path

import pytest

from jaxtrain import machine

MACHINE = 64


@pytest.fixture(autouse=True)
def all_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the process use all 64 cores of a machine, so that the files decide."""
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(MACHINE)))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: MACHINE)
    for name, file in (("_CGROUPS", "cgroup"), ("_OWN_CGROUPS", "own"), ("_MEMORY", "meminfo")):
        monkeypatch.setattr(machine, name, tmp_path / file)


def cores(place: Path, own: str, files: dict[str, str], processes: int = 1) -> int:
    for name, text in files.items():
        path = place / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (place / "own").write_text(own)
    return machine.cores(processes)


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        # A container sees its own limit at the root.
        ("0::/\n", {"cpu.max": "800000 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),  # half a core runs no worker
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/../../other\n", {"cpu.max": "400000 100000\n"}, 4),
        # The limits of the groups that contain this one hold, too.
        (
            "0::/pod/container\n",
            {"pod/cpu.max": "600000 100000", "pod/container/cpu.max": "max 100000"},
            6,
        ),
        # A cpuset of the container, as of docker run --cpuset-cpus.
        ("0::/\n", {"cpuset.cpus.effective": "0-15,32-47,50\n"}, 33),
        # Version 1 has a hierarchy for each resource; a container sees its own limits at the root.
        (
            "4:cpu,cpuacct:/pod/c\n1:name=systemd:/x\n",
            {
                "cpu,cpuacct/pod/cpu.cfs_quota_us": "600000\n",
                "cpu,cpuacct/pod/cpu.cfs_period_us": "100000\n",
                "cpu,cpuacct/pod/c/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/pod/c/cpu.cfs_period_us": "100000\n",
            },
            6,
        ),
        ("9:cpuset:/docker/12\n", {"cpuset/cpuset.effective_cpus": "0-15,32-47,50\n"}, 33),
        # Nothing to read, or nothing that makes sense.
        ("", {}, MACHINE),
        ("0::/\n", {"cpu.max": "100000 0\n"}, MACHINE),
    ],
)
def test_the_limits_of_containers(
    tmp_path: Path, own: str, files: dict[str, str], expected: int
) -> None:
    assert cores(tmp_path, own, files) == expected


def test_affinity_and_other_processes_of_the_host_leave_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = {"cpu.max": "3200000 100000"}
    assert cores(tmp_path, "0::/\n", limited, processes=4) == 8
    assert cores(tmp_path, "0::/\n", {"cpu.max": "max 100000"}, processes=8) == 8
    cpuset = {"cpu.max": "max 100000", "cpuset.cpus.effective": "0-31"}
    assert cores(tmp_path, "0::/\n", cpuset, processes=8) == 4
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert cores(tmp_path, "0::/\n", limited, processes=4) == 3  # SLURM has divided the host


GIB = 2**30
AVAILABLE = "MemTotal: 67108864 kB\nMemAvailable:    33554432 kB\n"  # 32 GiB
CACHE = f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}\n"

CACHE_V1 = f"total_inactive_file {2 * GIB}\ntotal_active_file {GIB}\n"


@pytest.mark.parametrize(
    ("own", "files", "expected", "limited"),
    [
        ("0::/\n", {}, 32, False),
        ("0::/\n", {"memory.max": "max\n", "memory.current": f"{GIB}\n"}, 32, False),
        (  # files in the kernel's cache are dropped when memory is needed
            "0::/\n",
            {
                "memory.max": f"{8 * GIB}",
                "memory.current": f"{7 * GIB}",
                "memory.stat": CACHE,
            },
            4,
            True,
        ),
        ("0::/\n", {"memory.max": f"{GIB}", "memory.current": f"{2 * GIB}"}, 0, True),
        (  # version 1 counts the groups below, too
            "3:memory:/slurm/job\n",
            {
                "memory/slurm/job/memory.limit_in_bytes": f"{8 * GIB}\n",
                "memory/slurm/job/memory.usage_in_bytes": f"{7 * GIB}\n",
                "memory/slurm/job/memory.stat": f"active_file 9\n{CACHE_V1}",
                "memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
                "memory/memory.usage_in_bytes": f"{9 * GIB}\n",
            },
            4,
            True,
        ),
        (  # the limit of a group that contains this one
            "0::/pod/container\n",
            {
                "pod/memory.max": f"{6 * GIB}",
                "pod/memory.current": f"{4 * GIB}",
                "pod/container/memory.max": "max",
                "pod/container/memory.current": f"{GIB}",
            },
            2,
            True,
        ),
    ],
)
def test_the_memory_that_machine_and_containers_leave(
    tmp_path: Path, own: str, files: dict[str, str], expected: int, limited: bool
) -> None:
    cores(tmp_path, own, files)
    (tmp_path / "meminfo").write_text(AVAILABLE)
    assert machine.memory() == (expected * GIB, limited)


def test_a_system_without_these_files_has_unknown_memory() -> None:
    assert machine.memory() == (math.inf, False)


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {"cpu.stat": "usage_usec 9\nnr_throttled 4\nthrottled_usec 2500000\n"}, 2.5),
        # The limit of a group that contains this one holds, too.
        (
            "0::/a/b\n",
            {"a/cpu.stat": "throttled_usec 3000000\n", "a/b/cpu.stat": "throttled_usec 0\n"},
            3.0,
        ),
        ("4:cpu,cpuacct:/\n", {"cpu,cpuacct/cpu.stat": "throttled_time 1500000000\n"}, 1.5),
        ("", {}, 0.0),
    ],
)
def test_the_time_for_which_limits_stopped_the_process(
    tmp_path: Path, own: str, files: dict[str, str], expected: float
) -> None:
    cores(tmp_path, own, files)
    assert machine.throttled_s() == expected


def test_more_workers_than_the_memory_allows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory", lambda: (64.0 * GIB, False))
    text = (
        "--data.workers 100000 needs about 3,200,000 MiB of memory, and this host has 65,536 free"
    )
    assert machine.too_many(100_000) == f"{text}: use at most 213 workers"
    assert machine.too_many(213) is None


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [(1024, 2**20, (2**16, 2**20)), (1024, 4096, (4096, 4096)), (1024, -1, (2**16, -1))],
)
def test_as_many_files_as_the_hard_limit_allows_may_be_open(
    soft: int, hard: int, raised: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    said: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: said.append(limits))
    machine.allow_files()
    assert said == [raised]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2**16, hard))
    machine.allow_files()
    assert said == [raised]


def test_a_system_that_starts_no_more_processes_is_named() -> None:
    for number in (errno.EMFILE, errno.EAGAIN):
        error = machine.refused(OSError(number, os.strerror(number)), 8)
        text = f"--data.workers 8: the system refuses so many processes ({os.strerror(number)}): "
        assert str(error).startswith(f"{text}use fewer, or raise the hard limits")
    assert machine.refused(FileNotFoundError(errno.ENOENT, "no"), 8) is None
