"""The order is a pure function of seed and position; each example comes once per epoch."""

import itertools
import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
from data.number_source import Numbers

from jaxtrain.data import sampler, worker_count
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.errors import InputError

BATCH, SIZE = 8, 39


def rows_of(
    directory: Path, source: Numbers | None = None, **position: int
) -> sampler.TrainingRows:
    how = {"start": 0, "batch_size": BATCH, "first_row": 0, "rows_per_batch": BATCH} | position
    how["batches"] = 2**20
    source = source or Numbers(SIZE)
    quarantine = Quarantine(directory / "quarantine.jsonl")
    return sampler.TrainingRows(source, sampler.order_of(source, 3), **how, quarantine=quarantine)


def batches_of(rows: sampler.TrainingRows, count: int) -> np.ndarray:
    return np.stack([rows[row]["x"] for row in range(count * rows.rows_per_batch)])


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The first 120 examples, one by one: more than three epochs."""
    return batches_of(rows_of(tmp_path_factory.mktemp("straight")), 15)


def test_an_epoch_has_each_example_once(straight: np.ndarray) -> None:
    epochs = straight[: 3 * SIZE, 0].reshape(3, SIZE)
    assert (np.sort(epochs) == np.arange(SIZE)).all()
    assert (epochs[0] != epochs[1]).any()


def test_the_order_differs_by_seed_and_can_be_pickled() -> None:
    order = sampler.Order(SIZE, 3)
    first = [order(position) for position in range(SIZE)]
    again = pickle.loads(pickle.dumps(order))
    assert [again(position) for position in range(SIZE)] == first
    other = sampler.Order(SIZE, 4)
    assert [other(position) for position in range(SIZE)] != first


@pytest.mark.parametrize("processes", [1, 4])
def test_processes_divide_each_batch_by_rows(
    processes: int, straight: np.ndarray, tmp_path: Path
) -> None:
    rows = BATCH // processes
    parts = [
        batches_of(rows_of(tmp_path, first_row=rows * process, rows_per_batch=rows), 6)
        for process in range(processes)
    ]
    batches = np.concatenate([part.reshape(6, rows, 2) for part in parts], axis=1)
    np.testing.assert_array_equal(batches.reshape(-1, 2), straight[:48])


@pytest.mark.parametrize(("seen", "batch_size"), [(0, 16), (1, 8), (24, 4), (31, 6)])
def test_a_run_resumes_at_any_number_of_examples_with_any_batch_size(
    seen: int, batch_size: int, straight: np.ndarray, tmp_path: Path
) -> None:
    rows = rows_of(tmp_path, start=seen, batch_size=batch_size, rows_per_batch=batch_size)
    count = 60 // batch_size
    np.testing.assert_array_equal(
        batches_of(rows, count), straight[seen : seen + count * batch_size]
    )


def test_broken_examples_are_replaced_and_the_others_unchanged(
    straight: np.ndarray, tmp_path: Path
) -> None:
    broken = [6, 7, 8, 20]
    source = Numbers(SIZE, broken=frozenset(broken))
    found = batches_of(rows_of(tmp_path, source), 12)
    intact = ~np.isin(straight[:96, 0], broken)
    np.testing.assert_array_equal(found[intact], straight[:96][intact])
    assert not np.isin(found[:, 0], broken).any()
    np.testing.assert_array_equal(found, batches_of(rows_of(tmp_path, source), 12))
    resumed = batches_of(rows_of(tmp_path, source, start=40), 7)
    np.testing.assert_array_equal(found[40:], resumed)
    lines = [json.loads(line) for line in (tmp_path / "quarantine.jsonl").read_text().splitlines()]
    assert {line["path"] for line in lines} == {f"file-{index}" for index in broken}
    assert (lines[0]["reason"], lines[0]["found"]) == ("broken on purpose", "training")


def test_a_source_of_broken_examples_stops_the_run_and_names_the_quarantine(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, Numbers(SIZE, broken=frozenset(range(SIZE))))
    with pytest.raises(InputError, match=r"32 examples in a row.*quarantine.jsonl"):
        rows[0]


@pytest.mark.parametrize(
    ("workers", "devices", "block", "parts"),
    [
        *((8, 8, 1, 8), (48, 8, 1, 8), (12, 8, 1, 4), (11, 8, 1, 1)),
        *((0, 8, 1, 1), (8, 1, 1, 8), (6, 1, 1, 2)),
        *((8, 8, 16, 8), (8, 8, 32, 4), (8, 1, 32, 4), (12, 1, 32, 4), (8, 1, 3, 1), (8, 8, 3, 1)),
    ],
)
def test_workers_divide_a_batch(workers: int, devices: int, block: int, parts: int) -> None:
    assert worker_count.parts_per_batch(128, workers, devices, block) == parts
    ready_and_loading = worker_count.most_batches(128, workers, 2, devices, block)
    in_main_process = worker_count.most_batches(128, 0, 2, devices, block)
    assert ready_and_loading - in_main_process == pytest.approx(3 * workers / parts)


def test_a_block_is_read_once_if_batches_have_complete_blocks() -> None:
    for devices, of_a_device, workers, block in itertools.product(
        (1, 2, 8), (1, 2, 3, 16), (1, 2, 3, 8, 16), (1, 2, 3, 4, 6, 32)
    ):
        rows = devices * of_a_device
        part, rest = divmod(rows, worker_count.parts_per_batch(rows, workers, devices, block))
        assert rest == 0
        positions = np.arange(math.lcm(rows, block))  # of several batches or processes
        reads = set(zip(positions // part, positions // block, strict=True))
        per_block = len(reads) * block / len(positions)
        assert per_block == pytest.approx(
            worker_count.reads_per_block(rows, workers, devices, block)
        )
        assert per_block == 1 or rows % block
