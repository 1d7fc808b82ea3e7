"""Batches are a pure function of the number of examples seen."""

import collections
import dataclasses
import itertools
import multiprocessing
import os
import resource
import signal
import threading
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data.number_source import Numbers
from grain._src.python.ipc import shared_memory_array
from grain.multiprocessing import SharedMemoryArray
from training import toy

from jaxtrain.data import pipeline, placement, sampler
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.errors import InputError, RunAgain

SIZE = 13  # examples: no batch size divides it, so epochs end inside batches


def spec(batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        "x": jax.ShapeDtypeStruct((batch_size, 2), jnp.float32),
        "weight": jax.ShapeDtypeStruct((batch_size,), jnp.float32),
    }


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_the_number_of_workers_changes_nothing(workers: int, tmp_path: Path) -> None:
    order, quarantine = sampler.Order(SIZE, seed=3), Quarantine(tmp_path / "q.jsonl")
    rows = sampler.TrainingRows(Numbers(SIZE), order, 0, 8, 0, 8, 5, quarantine)
    # Each worker takes eight open files, and the usual limit is 1,024.
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(os.listdir("/proc/self/fd")) + 4
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
    batches = training_batches(tmp_path, Numbers(SIZE), workers=workers, start=3)
    try:
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > few
        batch_arrays = [np.asarray(next(batches)["x"]) for _ in range(4)]
    finally:
        batches.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    expected = [rows[row]["x"] for row in range(3, 35)]
    np.testing.assert_array_equal(np.concatenate(batch_arrays), expected)


@dataclasses.dataclass(frozen=True)
class Blocks(Numbers):
    """An example names the process that reads it."""

    block: int = 4

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return super().example(index, rng) | {"x": np.float32([index, os.getpid()])}


@pytest.mark.slow
def test_a_block_is_read_by_one_worker(tmp_path: Path) -> None:
    batches = training_batches(tmp_path, Blocks(20), workers=2)
    try:
        x = np.concatenate([np.asarray(next(batches)["x"]) for _ in range(5)])
    finally:
        batches.close()
    indices, readers = x.reshape(10, 4, 2).astype(int).transpose(2, 0, 1)
    np.testing.assert_array_equal(indices, indices[:, :1] // 4 * 4 + np.arange(4))
    np.testing.assert_array_equal(readers, np.broadcast_to(readers[:, :1], (10, 4)))
    assert len(np.unique(readers)) == 2


@pytest.mark.parametrize(("begin", "end"), [(0, 4), (4, 8), (2, 6), (0, 12), (11, 12)])
def test_the_rows_of_a_device_come_from_the_right_parts(begin: int, end: int) -> None:
    whole = np.arange(24).reshape(12, 2)
    parts = np.split(whole, 3)
    found = placement._rows(parts, begin, end)
    np.testing.assert_array_equal(np.concatenate(found), whole[begin:end])
    assert len(found) == (end - 1) // 4 - begin // 4 + 1
    assert all(view.base is not None for view in found), "copies"


@pytest.mark.parametrize(
    ("name", "ids", "refused"),
    [
        ("tokens", [0, 49], None),
        ("tokens", [3, 50], 50),
        ("tokens", [-1, 3], -1),
        ("targets", [-1, 49], None),
        ("targets", [-2, 49], -2),
    ],
)
def test_ids_beyond_the_vocabulary_are_refused_where_batches_enter(
    name: str, ids: list[int], refused: int | None
) -> None:
    """On the devices, `jnp.take` would give NaN for them, or the last row."""
    spec = {name: jax.ShapeDtypeStruct((1, 2), np.int32)}
    place = placement.Placement(toy.mesh_of(1, 1), spec, {name: 50})
    local = [{name: np.asarray([ids], np.int32)}]
    if refused is None:
        assert place(local)[name].shape == (1, 2)
        return
    with pytest.raises(InputError, match=rf"{name} has the index {refused} .* 50 \(0 to 49\)"):
        place(local)


def training_batches(
    directory: Path,
    source: Numbers,
    *,
    workers: int,
    start: int = 0,
    continues: bool = False,
    **wide: Any,
) -> pipeline.TrainingBatches:
    return pipeline.TrainingBatches(
        source,
        toy.mesh_of(2, 4),
        spec(8) | wide,
        start=start,
        seed=3,
        workers=workers,
        prefetch=1,
        quarantine=Quarantine(directory / "quarantine.jsonl"),
        continues=continues,
    )


class Computing:
    """A result that is ready a second after the clock's start."""

    def __init__(self, seconds: float) -> None:
        self._ready_at = time.perf_counter() + seconds

    def is_ready(self) -> bool:
        return time.perf_counter() >= self._ready_at


@dataclasses.dataclass(frozen=True)
class Slow(Numbers):
    """Each batch of eight takes 0.4 seconds."""

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        time.sleep(0.05)
        return super().example(index, rng)


def test_the_devices_wait_for_data_only_after_they_have_computed(tmp_path: Path) -> None:
    batches = training_batches(tmp_path, Slow(SIZE), workers=0)

    def waited_s(computes_s: float) -> float:
        before, began = batches.wait_s, time.perf_counter()
        batches.note_pending({"loss": Computing(computes_s)})
        next(batches)
        assert batches.wait_s - before <= max(0.0, time.perf_counter() - began - computes_s)
        return batches.wait_s - before

    try:
        for _ in range(2):  # those made ahead
            next(batches)
        assert waited_s(0.0) > 0.2
        waited_s(0.2)
        assert waited_s(60.0) == 0.0
        assert waited_s(0.0) > 0.2
    finally:
        batches.close()


def test_closing_ends_a_thread_that_waits_for_a_batch(tmp_path: Path) -> None:
    batches = training_batches(tmp_path, Numbers(SIZE), workers=0)
    last = collections.deque[Any](maxlen=1)
    thread = threading.Thread(target=last.extend, args=(batches,), daemon=True)
    thread.start()
    batches.close()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_batches_are_global_arrays_over_all_devices(tmp_path: Path) -> None:
    batches = training_batches(tmp_path, Numbers(SIZE), workers=0)
    batch = next(batches)
    batches.close()
    assert batch.keys() == {"x", "weight"}
    assert len(batch["x"].addressable_shards) == 8
    assert batch["x"].addressable_shards[0].data.shape == (1, 2)
    np.testing.assert_array_equal(batch["weight"], np.ones(8))
    np.testing.assert_array_equal(batches.ids, np.asarray(batch["x"])[:, 0])


def test_an_error_in_loading_reaches_the_caller(tmp_path: Path) -> None:
    source = Numbers(SIZE, broken=frozenset(range(SIZE)))
    batches = training_batches(tmp_path, source, workers=0)
    for _ in range(2):  # the second call must not wait forever
        with pytest.raises(InputError, match="in a row"):
            next(batches)
    batches.close()


@pytest.mark.parametrize("continues", [False, True])
def test_only_batches_that_continue_outlive_their_workers(
    continues: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A measurement of the fallback would pass for one of the pipeline."""
    read = pipeline._read

    threads = list[int]()

    def killed(rows: Any, part: int, *, workers: int, **more: Any) -> Any:
        threads.append(more.get("threads", 0))
        parts = read(rows, part, workers=0, **more)
        yield from itertools.islice(parts, 8 // part)  # the first batch
        if workers:
            raise RuntimeError("Worker 0 terminated unexpectedly with exit code -9")
        yield from parts

    monkeypatch.setattr(pipeline, "_read", killed)
    batches = training_batches(tmp_path, Numbers(SIZE), workers=2, continues=continues)
    ids = [next(batches) and batches.ids]
    if continues:
        ids += [next(batches) and batches.ids for _ in range(2)]
    else:
        with pytest.raises(RunAgain, match=r"was killed \(SIGKILL\)"):
            next(batches)
    batches.close()
    order = sampler.Order(SIZE, seed=3)
    assert np.concatenate(ids).tolist() == [order(n) for n in range(8 * len(ids))]
    assert batches.lost
    assert threads == [0, 2][: 1 + continues], "the last batches would take twice as long each"


def validation_batches(
    directory: Path, source: Numbers, spec: dict[str, jax.ShapeDtypeStruct], examples: int
) -> pipeline.ValidationBatches:
    return pipeline.ValidationBatches(
        source,
        toy.mesh_of(1, 8),
        spec,
        examples=examples,
        seed=0,
        threads=2,
        quarantine=Quarantine(directory / "quarantine.jsonl"),
    )


def test_examples_that_do_not_match_the_model_are_rejected(tmp_path: Path) -> None:
    wrong = spec(8) | {"x": jax.ShapeDtypeStruct((8, 3), jnp.float32)}
    with pytest.raises(InputError, match=r"\(2,\).*\(3,\)"):
        next(iter(validation_batches(tmp_path, Numbers(SIZE), wrong, 8)))


def test_validation_examples_are_evenly_spaced_and_padded_with_weight_zero(
    tmp_path: Path,
) -> None:
    source = Numbers(SIZE, broken=frozenset({1}))
    batches = validation_batches(tmp_path, source, spec(8), 11)
    first, again = [list(batches) for _ in range(2)]
    x = np.concatenate([np.asarray(batch["x"]) for batch in first])
    weight = np.concatenate([np.asarray(batch["weight"]) for batch in first])
    np.testing.assert_array_equal(weight, [1, 0] + [1] * 9 + [0] * 5)
    indices = [0, 2, 3, 4, 5, 7, 8, 9, 10, 11]
    np.testing.assert_array_equal(x[weight > 0, 0], indices)
    drawn = [np.float32(sampler.generator(0, index).random()) for index in indices]
    np.testing.assert_array_equal(x[weight > 0, 1], drawn, "seed and index, in this order")
    for left, right in zip(first, again, strict=True):
        np.testing.assert_array_equal(left["x"], right["x"])
    assert Quarantine(tmp_path / "quarantine.jsonl").recorded() == {"file-1"}


class Wide(Numbers):
    """Examples so large that a few fill a pipe (64 KiB)."""

    def example(self, index: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        return super().example(index, rng) | {"x": np.zeros(8192, np.float32)}


@pytest.mark.slow
def test_closing_leaves_no_shared_memory_and_does_not_wait_for_blocked_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, freed = [], []
    free, take = shared_memory_array._del_shm, SharedMemoryArray.unlink_on_del

    def free_slowly(memory: SharedMemory, unlink: bool) -> None:
        time.sleep(0.3)
        free(memory, unlink)
        freed.append(memory.name)

    def take_over(array: SharedMemoryArray) -> None:
        opened.append(array.metadata.name)
        take(array)

    monkeypatch.setattr(shared_memory_array, "_del_shm", free_slowly)
    monkeypatch.setattr(SharedMemoryArray, "unlink_on_del", take_over)
    wide = jax.ShapeDtypeStruct((8, 8192), jnp.float32)
    batches = training_batches(tmp_path, Wide(SIZE), workers=2, x=wide)
    for _ in range(3):
        next(batches)
    time.sleep(1)  # the workers prefetch more
    began = time.monotonic()
    batches.close()
    assert time.monotonic() - began < 15  # Grain gives up after 25 s
    assert len(opened) >= 3
    assert sorted(freed) == sorted(opened)


@pytest.mark.slow
def test_a_killed_worker_ends_the_workers_and_no_example_is_lost(tmp_path: Path) -> None:
    """What it held in shared memory is freed: otherwise, Python warns at exit."""
    wide = jax.ShapeDtypeStruct((8, 8192), jnp.float32)
    batches = training_batches(tmp_path, Wide(SIZE), workers=1, continues=True, x=wide)
    try:
        ids = [next(batches) and batches.ids for _ in range(2)]
        assert list(Path("/dev/shm").glob(f"{batches._prefix[1:]}*"))
        (worker,) = (p for p in multiprocessing.active_children() if "grain" in p.name)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGKILL)
        while not batches.lost:
            ids += [next(batches) and batches.ids]
        ids += [next(batches) and batches.ids for _ in range(3)]
    finally:
        batches.close()
    order = sampler.Order(SIZE, seed=3)
    assert np.concatenate(ids).tolist() == [order(n) for n in range(8 * len(ids))]
    assert batches.lost.startswith("one of 1 processes that load examples was killed (SIGKILL): ")
    assert not list(Path("/dev/shm").glob(f"{batches._prefix[1:]}*"))
