"""Counting cores and memory under a container's limits, and choosing the number of workers."""

import dataclasses
import math
import multiprocessing
import re
import resource
from pathlib import Path
from typing import Any

import pytest

from jaxtrain import config
from jaxtrain.data import worker_count

MACHINE = 64


@pytest.fixture(autouse=True)
def all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the process use all 64 cores of a machine, so that the files decide."""
    monkeypatch.setattr(worker_count.os, "sched_getaffinity", lambda _: set(range(MACHINE)))


def cores(place: Path, own: str, files: dict[str, str], processes: int = 1) -> int:
    for name, text in files.items():
        path = place / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (place / "own").write_text(own)
    return worker_count.cores(processes, place / "cgroup", place / "own", MACHINE)


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
    monkeypatch.setattr(worker_count.os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert cores(tmp_path, "0::/\n", limited, processes=4) == 3  # SLURM has divided the host


@pytest.mark.parametrize("set_to", [None, 0, 4])
def test_a_worker_of_a_pool_loads_examples_itself_and_says_so(
    set_to: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config.load("demo_gpt")
    data = dataclasses.replace(run.data, workers=set_to)
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
    choice = worker_count.choose(data, run.model, rows=8, devices=1, on_cpu=True)
    assert choice.number == 0
    assert ("a worker of a pool, and may start no others" in choice.sentence) == (set_to != 0)


GIB = 2**30
AVAILABLE = "MemTotal: 67108864 kB\nMemAvailable:    33554432 kB\n"  # 32 GiB
CACHE = f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file {GIB}\n"


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
    machine = tmp_path / "meminfo"
    machine.write_text(AVAILABLE)
    found = worker_count.memory(tmp_path / "cgroup", tmp_path / "own", machine)
    assert found == (expected * GIB, limited)


def test_a_system_without_these_files_has_unknown_memory(tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert worker_count.memory(none, none, none) == (math.inf, False)


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
        ("", {}, 0.0),
    ],
)
def test_the_time_for_which_limits_stopped_the_process(
    tmp_path: Path, own: str, files: dict[str, str], expected: float
) -> None:
    cores(tmp_path, own, files)
    assert worker_count.throttled_s(tmp_path / "cgroup", tmp_path / "own") == expected


VIDEO = config.load("h100_8").data


def chosen(cores: int, devices: int = 8, rows: int = 128, **more: object) -> int:
    settings = {"rows": rows, "devices": devices, "on_cpu": False} | more
    return worker_count.chosen(VIDEO, cores, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cores", "devices", "more", "expected"),
    [
        (208, 8, {}, 200),  # 206 are free
        (96, 8, {}, 88),
        (26, 8, {}, 24),
        (10, 8, {}, 8),
        (8, 8, {}, 6),  # fewer than devices: two parts of a batch
        (26, 1, {}, 24),  # eight parts of 128 clips
        (2, 1, {}, 1),
        (1, 1, {}, 1),
        # Steps on CPUs keep half of the cores.
        (8, 1, {"on_cpu": True}, 4),
        (2, 1, {"on_cpu": True}, 1),
        # Of batches in shared memory, eight workers hold 6, and 16 hold 9.
        (96, 8, {"batches": 9.0}, 16),
        (96, 8, {"batches": 6.0}, 8),
        (96, 8, {"batches": 0.5}, 8),  # none fits: doctor reports it
        # Each worker needs 0.3 GiB of memory.
        (26, 8, {"memory": 3.1 * GIB}, 8),  # ten fit; a multiple of the devices
        (26, 8, {"memory": -1.0}, 1),  # doctor reports it
    ],
)
def test_workers_use_the_cores_and_memory_that_the_loop_leaves(
    cores: int, devices: int, more: dict[str, Any], expected: int
) -> None:
    assert chosen(cores, devices, **more) == expected


def test_every_choice_is_between_one_and_the_free_cores() -> None:
    for cores in range(1, 65):
        for devices in (1, 2, 3, 4, 8):
            number = chosen(cores, devices, rows=24 * devices)
            free = max(1, cores - worker_count.LOOP_CORES)
            assert 3 * free <= 4 * number <= 4 * free


@pytest.mark.parametrize(
    ("block", "batches", "expected"),
    [
        *((1, math.inf, 20), (32, math.inf, 20)),  # four parts; of 22, two
        (64, math.inf, 22),  # two parts
        (48, math.inf, 22),  # a batch is one part
        *((1, 9.0, 16), (32, 9.0, 8), (48, 9.0, 2)),  # with fewer parts, workers hold more
    ],
)
def test_workers_load_complete_blocks(block: int, batches: float, expected: int) -> None:
    data = dataclasses.replace(VIDEO, crop=(64, 64), crops_per_clip=block)
    found = worker_count.chosen(data, 24, rows=128, devices=1, on_cpu=False, batches=batches)
    assert found == expected


def test_text_needs_few_workers() -> None:
    text = config.load("mlm_h200_8").data
    assert worker_count.chosen(text, 208, rows=768, devices=8, on_cpu=False) == text.most_workers


def test_workers_and_their_batches_fit_into_memory() -> None:
    batch = 0.5 * GIB
    held = worker_count.most_batches(128, 24, VIDEO.prefetch, 8, 1)
    assert chosen(26, memory=24 * 0.3 * GIB + held * batch, batch=batch) == 24
    less = chosen(26, memory=23.9 * 0.3 * GIB + held * batch, batch=batch)
    assert 16 <= less < 24


@pytest.mark.parametrize("limited", [False, True])
def test_a_small_host_gets_fewer_workers(monkeypatch: pytest.MonkeyPatch, limited: bool) -> None:
    monkeypatch.setattr(worker_count, "cores", lambda processes: 26)
    monkeypatch.setattr(worker_count, "_free", lambda folder: 1e12)
    monkeypatch.setattr(worker_count, "memory", lambda: (8.0 * GIB, limited))
    run = config.load("demo", ["--data.workers", "None"])
    found = worker_count.choose(run.data, run.model, rows=4, devices=1, on_cpu=False)
    # 0.8 x 8 GiB - 2 GiB for the main process = 14 workers, and their small batches.
    assert 10 <= found.number <= 14
    where = "the container's limit leaves" if limited else "this host has"
    assert f"{where} 8.0 GiB of memory free, too little for 24 workers" in found.sentence


def test_a_number_in_the_config_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_count, "cores", lambda processes: 26)
    monkeypatch.setattr(worker_count, "_free", lambda folder: 1e12)
    monkeypatch.setattr(worker_count, "memory", lambda: (1e12, False))
    for workers, expected in (("None", 24), ("3", 3), ("0", 0)):
        run = config.load("h100_8", ["--data.workers", workers])
        found = worker_count.choose(run.data, run.model, rows=128, devices=8, on_cpu=False)
        assert found.number == expected
        assert f"data.workers {expected}" in found.sentence
    monkeypatch.setattr(worker_count, "_free", lambda folder: 64 * 2**20)  # Docker's default
    run = config.load("h100_8")
    found = worker_count.choose(run.data, run.model, rows=128, devices=8, on_cpu=False)
    assert "26 CPU cores, and /dev/shm has no space for the batches of 24 workers" in found.sentence
    monkeypatch.setattr(worker_count, "_free", lambda folder: 1.5e10)
    shared = worker_count.choose(run.data, run.model, rows=16, devices=1, on_cpu=False, processes=8)
    alone = worker_count.choose(run.data, run.model, rows=16, devices=1, on_cpu=False)
    monkeypatch.setattr(worker_count, "_free", lambda folder: 1.5e10 / 8)
    part = worker_count.choose(run.data, run.model, rows=16, devices=1, on_cpu=False)
    assert shared.number == part.number < alone.number


def limit(monkeypatch: pytest.MonkeyPatch, files: int = 2**20, free: float = 1e12) -> None:
    """Sets the system's limits of this process."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, files))
    monkeypatch.setattr(worker_count, "memory", lambda: (free, False))


@pytest.mark.parametrize(
    ("limits", "workers", "text"),
    [
        ({"files": 80}, 8, "136 open files, and the hard limit of a process (ulimit -Hn) is 80: "),
        ({"free": 64 * GIB}, 100_000, "3,200,000 MiB of memory, and this host has 65,536 free: "),
    ],
)
def test_more_workers_than_the_system_allows_are_refused(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, Any], workers: int, text: str
) -> None:
    limit(monkeypatch, **limits)
    found = worker_count.too_many(workers, 0) or ""
    assert found.startswith(f"--data.workers {workers} needs about {text}")
    most = int(re.findall("use at most ([0-9,]+) worker", found)[0].replace(",", ""))
    assert worker_count.too_many(most, 0) is None
    # The advice for memory is for workers that need more than the least.
    assert "free" in limits or worker_count.too_many(most + 1, 0) is not None
    assert ("docker run --ulimit nofile=N" in found) == ("files" in limits)


def test_few_open_files_leave_fewer_chosen_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """h100_8 has 200 workers on 208 cores, which need more than 1,024 files."""
    monkeypatch.setattr(worker_count, "cores", lambda processes: 208)
    monkeypatch.setattr(worker_count, "_free", lambda folder: 1e12)
    run = config.load("h100_8")
    for files, expected in ((4096, 200), (1024, 48)):
        limit(monkeypatch, files=files)
        found = worker_count.choose(run.data, run.model, rows=128, devices=8, on_cpu=False)
        assert found.number == expected
        assert ("(ulimit -Hn) is 1,024, which is enough for 55" in found.sentence) == (
            files == 1024
        )
        assert worker_count.too_many(found.number, 8) is None
    assert worker_count.most_allowed(208, 0) == 119  # of ``prepare``
