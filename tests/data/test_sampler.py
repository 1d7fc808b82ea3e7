"""The order of groups is a pure function; each example comes once, in its own batch."""

import collections
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import toy

from jaxtrain.data import batch_parts, pipeline, sampler
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.errors import BadExample

GROUP, SPREAD, SIZE = 3, 8, 39


@dataclasses.dataclass
class Groups:
    """Example i contains i, its own random number and its group's; counts decodings."""

    size: int = SIZE
    group: int = GROUP
    spread: int = SPREAD
    broken: frozenset[int] = frozenset()
    fingerprint: str = "groups"
    made: list[int] = dataclasses.field(default_factory=list)

    def __len__(self) -> int:
        return self.size

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        if index in self.broken:
            raise BadExample(f"file-{index}", "broken on purpose")
        return {"x": np.float32([index, rng.random(), 0])}

    def together(
        self, indices: list[int], rngs: list[np.random.Generator], shared: np.random.Generator
    ) -> list[dict[str, np.ndarray] | BadExample]:
        self.made.append(len(indices))
        common = shared.random()
        assert len({index // self.group for index in indices}) == 1
        found: list[dict[str, np.ndarray] | BadExample] = []
        for index, rng in zip(indices, rngs, strict=True):
            try:
                example = self.example(index, rng)
                example["x"][2] = common
                found.append(example)
            except BadExample as bad:
                found.append(bad)
        return found


def rows_of(directory: Path, source: Groups | None = None, **place: int) -> sampler.TrainingRows:
    how = {"start": 0, "batch_size": SPREAD, "first": 0, "rows": SPREAD, "batches": 2**20} | place
    source = source or Groups()
    return sampler.TrainingRows(
        source,
        sampler.order_of(source, 3),
        **how,
        quarantine=Quarantine(directory / "quarantine.jsonl"),
    )


def batches_of(rows: sampler.TrainingRows, workers: int, count: int) -> np.ndarray:
    """Returns the batches for a number of workers, without worker processes."""
    parts = batch_parts.parts(
        rows.rows, batch_parts.Runs(rows, 1).length, workers, devices=rows.rows
    )
    made = batch_parts.Runs(rows, parts)
    joined = batch_parts.Joined((made[i] for i in range(len(made))), parts)
    return np.concatenate([part["x"] for _ in range(count) for part in next(joined)])


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """The first 120 examples, one by one: five blocks, more than three epochs."""
    rows = rows_of(tmp_path_factory.mktemp("straight"))
    return np.stack([rows[row]["x"] for row in range(120)])


@pytest.mark.parametrize("size", [GROUP, 24, SIZE])
def test_an_epoch_of_groups_has_each_example_once(size: int) -> None:
    """At each block boundary, no example is more than one epoch ahead of another."""
    groups = sampler.GroupedOrder(size, 3, GROUP, SPREAD)
    blocks = [groups(position) for position in range(size * SPREAD)]
    of_epoch = collections.defaultdict(list)
    for position, index in enumerate(blocks):
        of_epoch[groups.group_of(position)[0] // (size // GROUP)].append(index)
    assert len(of_epoch) == SPREAD
    for examples in of_epoch.values():
        assert sorted(examples) == list(range(size))
    seen = np.zeros(size, int)
    for start in range(0, len(blocks), GROUP * SPREAD):
        np.add.at(seen, blocks[start : start + GROUP * SPREAD], 1)
        assert np.ptp(seen) <= 1


def test_a_group_is_spread_over_consecutive_batches_in_the_same_row() -> None:
    groups = sampler.GroupedOrder(48, 3, GROUP, SPREAD)
    for block in range(4):
        begin = block * GROUP * SPREAD
        table = np.array([groups(begin + i) for i in range(GROUP * SPREAD)]).reshape(GROUP, SPREAD)
        assert (table // GROUP == table[0] // GROUP).all()
        assert len(set(table[0] // GROUP)) == SPREAD, "two examples of a group are in one batch"
        assert (np.sort(table % GROUP, axis=0) == np.arange(GROUP)[:, None]).all()


def test_the_order_of_groups_differs_by_epoch_and_seed() -> None:
    def groups(seed: int) -> list[int]:
        made = sampler.GroupedOrder(48, seed, GROUP, SPREAD)
        return [made(position) for position in range(96)]

    assert groups(3) == groups(3)
    assert groups(3)[:48] != groups(3)[48:]
    assert groups(3) != groups(4)


def test_a_source_without_groups_keeps_its_order() -> None:
    assert sampler.order_of(Groups(group=1), 3) == sampler.Order(SIZE, 3)


def test_the_order_can_be_pickled(straight: np.ndarray) -> None:
    groups = sampler.GroupedOrder(SIZE, 3, GROUP, SPREAD)
    groups(5)
    again = pickle.loads(pickle.dumps(groups))
    assert [again(i) for i in range(120)] == straight[:, 0].astype(int).tolist()


@pytest.mark.parametrize("workers", [0, 2, 3, 4, 12])
def test_the_number_of_workers_changes_nothing(
    workers: int, straight: np.ndarray, tmp_path: Path
) -> None:
    found = batches_of(rows_of(tmp_path), workers, 12)
    np.testing.assert_array_equal(found, straight[:96])


@pytest.mark.parametrize(("processes", "workers"), [(2, 0), (2, 2), (2, 3), (4, 2)])
def test_processes_divide_each_batch_by_rows(
    processes: int, workers: int, straight: np.ndarray, tmp_path: Path
) -> None:
    rows = SPREAD // processes
    parts = [
        batches_of(rows_of(tmp_path, first=rows * process, rows=rows), workers, 6)
        for process in range(processes)
    ]
    batches = np.concatenate([part.reshape(6, rows, 3) for part in parts], axis=1)
    np.testing.assert_array_equal(batches.reshape(-1, 3), straight[:48])


@pytest.mark.parametrize("seen", [0, 1, 16, 24, 31])
@pytest.mark.parametrize("batch_size", [4, 8, 16, 6])
def test_a_run_resumes_at_any_number_of_examples_with_any_batch_size(
    seen: int, batch_size: int, straight: np.ndarray, tmp_path: Path
) -> None:
    rows = rows_of(tmp_path, start=seen, batch_size=batch_size, rows=batch_size)
    count = 60 // batch_size
    found = batches_of(rows, 2, count)
    np.testing.assert_array_equal(found, straight[seen : seen + count * batch_size])


@pytest.mark.parametrize("workers", [0, 2, 6, 16])
@pytest.mark.parametrize("seen", [0, 8, 16])
def test_each_group_is_decoded_once(workers: int, seen: int, tmp_path: Path) -> None:
    """Also when a run resumes within a block, except for the groups decoded before."""
    source = Groups()
    found = batches_of(rows_of(tmp_path, source, start=seen), workers, 9)
    left = -(seen // SPREAD) % GROUP
    assert len(found) == 72
    complete = [size for size in source.made if size == GROUP]
    assert len(source.made) - len(complete) == (SPREAD if left else 0)


def test_broken_groups_are_replaced_by_single_examples_and_the_others_unchanged(
    straight: np.ndarray, tmp_path: Path
) -> None:
    source = Groups(broken=frozenset({6, 7, 8, 20}))
    found = batches_of(rows_of(tmp_path, source), 2, 12)
    whole = ~np.isin(straight[:96, 0], [6, 7, 8, 20])
    np.testing.assert_array_equal(found[whole], straight[:96][whole])
    assert not np.isin(found[:, 0], [6, 7, 8, 20]).any()
    np.testing.assert_array_equal(found, batches_of(rows_of(tmp_path, source), 4, 12))


@pytest.mark.parametrize(("prefetch", "workers", "rows"), [(2, 8, 128), (1, 2, 8), (3, 4, 2)])
def test_workers_prefetch_about_as_many_batches_as_without_groups(
    prefetch: int, workers: int, rows: int
) -> None:
    length = batch_parts.run_length(GROUP, rows, rows)
    parts = batch_parts.parts(rows, length, workers, devices=8)
    held = workers * batch_parts.buffered(prefetch, parts, length) * length / parts
    assert held <= max(workers * prefetch, workers * length / parts)


@pytest.mark.parametrize(
    ("workers", "devices", "parts"),
    [(8, 8, 8), (48, 8, 8), (12, 8, 4), (11, 8, 1), (0, 8, 1), (8, 1, 8), (6, 1, 2)],
)
def test_workers_divide_a_batch(workers: int, devices: int, parts: int) -> None:
    assert batch_parts.parts(128, 1, workers, devices) == parts
    under_way = batch_parts.held(128, 1, workers, 2, devices) - batch_parts.held(
        128, 1, 0, 2, devices
    )
    assert under_way == pytest.approx(3 * workers / parts)


@pytest.mark.long
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_the_pipeline_uses_the_same_order(
    workers: int, straight: np.ndarray, tmp_path: Path
) -> None:
    spec: dict[str, Any] = {
        name: jax.ShapeDtypeStruct((SPREAD, *shape), np.float32)
        for name, shape in (("x", (3,)), ("weight", ()))
    }
    batches = pipeline.TrainingBatches(
        Groups(),
        toy.mesh_of(2, 4),
        spec,
        start=8,
        seed=3,
        workers=workers,
        prefetch=1,
        quarantine=Quarantine(tmp_path / "quarantine.jsonl"),
    )
    try:
        found = [np.asarray(next(batches)["x"]) for _ in range(7)]
        np.testing.assert_array_equal(batches.ids, found[-1][:, 0])
    finally:
        batches.close()
    np.testing.assert_array_equal(np.concatenate(found), straight[8:64])
