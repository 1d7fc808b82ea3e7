"""Choosing the number of workers."""

import dataclasses
import math
import multiprocessing
import re
from typing import Any

import pytest

from jaxtrain import config, machine
from jaxtrain.data import worker_count

GIB = 2**30


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
    monkeypatch.setattr(machine, "cores", lambda processes: 26)
    monkeypatch.setattr(worker_count, "_free", lambda folder: 1e12)
    monkeypatch.setattr(machine, "memory", lambda: (8.0 * GIB, limited))
    run = config.load("demo", ["--data.workers", "None"])
    found = worker_count.choose(run.data, run.model, rows=4, devices=1, on_cpu=False)
    # 0.8 x 8 GiB - 2 GiB for the main process = 14 workers, and their small batches.
    assert 10 <= found.number <= 14
    where = "the container's limit leaves" if limited else "this host has"
    assert f"{where} 8.0 GiB of memory and 931.3 GiB of /dev/shm free" in found.sentence
    assert found.sentence.endswith(", too little for 24 workers")


def test_a_number_in_the_config_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "cores", lambda processes: 26)
    monkeypatch.setattr(worker_count, "_free", lambda folder: 1e12)
    monkeypatch.setattr(machine, "memory", lambda: (1e12, False))
    for workers, expected in (("None", 24), ("3", 3), ("0", 0)):
        run = config.load("h100_8", ["--data.workers", workers])
        found = worker_count.choose(run.data, run.model, rows=128, devices=8, on_cpu=False)
        assert found.number == expected
        assert f"data.workers {expected}" in found.sentence
    monkeypatch.setattr(worker_count, "_free", lambda folder: 64 * 2**20)  # Docker's default
    run = config.load("h100_8", ["--data.workers", "24"])
    found = worker_count.choose(run.data, run.model, rows=128, devices=8, on_cpu=False)
    assert re.match(r"warning: data.workers 24 needs up to \d+.\d GiB of /dev/shm", found.sentence)
    run = config.load("h100_8")
    found = worker_count.choose(run.data, run.model, rows=128, devices=8, on_cpu=False)
    assert "26 CPU cores, and " in found.sentence
    assert "0.1 GiB of /dev/shm free, too little for 24 workers" in found.sentence
    monkeypatch.setattr(worker_count, "_free", lambda folder: 1.5e10)
    shared = worker_count.choose(run.data, run.model, rows=16, devices=1, on_cpu=False, processes=8)
    alone = worker_count.choose(run.data, run.model, rows=16, devices=1, on_cpu=False)
    monkeypatch.setattr(worker_count, "_free", lambda folder: 1.5e10 / 8)
    part = worker_count.choose(run.data, run.model, rows=16, devices=1, on_cpu=False)
    assert shared.number == part.number < alone.number
