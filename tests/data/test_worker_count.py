"""Counting CPU cores under a container's limits, and choosing the number of workers."""

from pathlib import Path

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
        # Version 2: a container sees its own limit at the root.
        ("0::/\n", {"cpu.max": "800000 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "max 100000\n"}, MACHINE),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),  # half a core runs no worker
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/../../other\n", {"cpu.max": "400000 100000\n"}, 4),
        # The limits of the groups that contain this one hold, too.
        (
            "0::/pod/container\n",
            {"pod/cpu.max": "600000 100000", "pod/container/cpu.max": "max 100000"},
            6,
        ),
        # Version 1, with the controllers mounted together or alone.
        (
            "4:cpu,cpuacct:/docker/abc\n2:memory:/docker/abc\n",
            {
                "cpu/docker/abc/cpu.cfs_quota_us": "1600000\n",
                "cpu/docker/abc/cpu.cfs_period_us": "100000\n",
            },
            16,
        ),
        (
            "4:cpu,cpuacct:/docker/abc\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            3,  # the host's path is not visible in the container
        ),
        (
            "4:cpu:/\n",
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
            MACHINE,
        ),
        # Nothing to read, or nothing that makes sense.
        ("", {}, MACHINE),
        ("0::/\n", {"cpu.max": "much\n"}, MACHINE),
        ("0::/\n", {"cpu.max": "100000 0\n"}, MACHINE),
        ("4:cpuset:/\n", {"cpuset/cpu.cfs_quota_us": "100000"}, MACHINE),
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
    monkeypatch.setattr(worker_count.os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert cores(tmp_path, "0::/\n", limited, processes=4) == 3  # SLURM has divided the host


VIDEO = config.load("h100_8").data


def chosen(cores: int, devices: int = 8, rows: int = 128, **more: object) -> int:
    settings = {"rows": rows, "devices": devices, "on_cpu": False} | more
    return worker_count.chosen(VIDEO, cores, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cores", "devices", "expected"),
    [
        (208, 8, 200),  # 206 are free
        (96, 8, 88),
        (26, 8, 24),
        (10, 8, 8),
        (8, 8, 6),  # fewer than devices: two parts of a batch
        (26, 1, 24),  # eight parts of 128 clips
        (2, 1, 1),
        (1, 1, 1),
    ],
)
def test_workers_use_the_cores_that_the_loop_leaves(
    cores: int, devices: int, expected: int
) -> None:
    assert chosen(cores, devices) == expected


def test_steps_on_cpus_keep_half_of_the_cores() -> None:
    assert chosen(8, 1, on_cpu=True) == 4
    assert chosen(2, 1, on_cpu=True) == 1


def test_every_choice_is_between_one_and_the_free_cores() -> None:
    for cores in range(1, 65):
        for devices in (1, 2, 3, 4, 8):
            number = chosen(cores, devices, rows=24 * devices)
            free = max(1, cores - worker_count.LOOP_CORES)
            assert 3 * free <= 4 * number <= 4 * free


def test_text_needs_few_workers() -> None:
    text = config.load("mlm_h200_8").data
    assert worker_count.chosen(text, 208, rows=768, devices=8, on_cpu=False) == text.most_workers


def test_batches_fit_into_shared_memory() -> None:
    """Eight workers hold 6 batches of 8 devices, 16 hold 9."""
    assert chosen(96, room=9.0) == 16
    assert chosen(96, room=6.0) == 8
    assert chosen(96, room=0.5) == 8  # none fits: doctor reports it


def test_a_number_in_the_config_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_count, "cores", lambda processes: 26)
    monkeypatch.setattr(worker_count, "_free", lambda folder: 1e12)
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
