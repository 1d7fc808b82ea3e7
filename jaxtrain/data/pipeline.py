"""Turns a source into global batches on devices.

``sampler`` decides which example is at which position. Grain loads this process's examples of each
batch in worker processes; ``worker_count`` divides them among the workers. A thread puts the next
batch on the devices while a step runs.
"""

import contextlib
import dataclasses
import functools
import gc
import math
import queue
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing import resource_tracker
from typing import Any, cast

import absl.flags
import grain
import jax
import numpy as np

from jaxtrain import machine
from jaxtrain.data import sampler, worker_count
from jaxtrain.data.placement import HostArrays, Placement, Spec, batch_size_of
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.data.source import Source
from jaxtrain.data.validation import Validated
from jaxtrain.data.validation_rows import ValidationRows
from jaxtrain.errors import InputError, RunAgain
from jaxtrain.jobs import worker_process
from jaxtrain.sharding import local_rows

# Grain's iterators are closed, but never exhausted. When they end by themselves, the last batches
# stay in a reference cycle of exception and frames, and when Python collects it, two threads close
# the same file descriptor (0.2.18). The order is endless anyway.
_ENDLESS = 2**40  # batches

_LOOK_EVERY_S = 0.002  # whether the devices still compute, while the loop waits for a batch


class TrainingBatches(Iterator[dict[str, jax.Array]]):
    """Yields global batches without end, from any number of examples seen.

    Args:
        mesh: each batch is divided over all its devices.
        spec: the arrays of a global batch as the workers make them (``Run.sent_spec``).
        start: number of examples seen.
        workers: number of worker processes; 0 loads in this process.
        prefetch: batch parts that each worker holds ready.
        continues: whether batches come from this process once the system has killed a worker, so
            that all processes of a run can agree on its end, and save.
        index_limits: as for :class:`Placement`.

    Attributes:
        wait_s: seconds that the devices had nothing to compute because the next batch was not
            ready (:meth:`note_pending`).
        ids: indices of this process's examples in the last batch returned.
        ahead: largest number of batches that are ready before the caller asks for the first.
        lost: why the workers have ended, if the system has killed one of them; else "".

    Raises:
        InputError: the system does not allow that many workers.
        RunAgain: the system has killed a worker, and the batches do not continue.
    """

    def __init__(
        self,
        source: Source,
        mesh: jax.sharding.Mesh,
        spec: Spec,
        *,
        start: int,
        seed: int,
        workers: int,
        prefetch: int,
        quarantine: Quarantine,
        continues: bool = False,
        index_limits: Mapping[str, int] | None = None,
    ) -> None:
        batch_size = batch_size_of(spec)
        span = local_rows(mesh, batch_size)
        rows = sampler.TrainingRows(
            source,
            sampler.order_of(source, seed),
            start=start,
            batch_size=batch_size,
            first_row=span.start,
            rows_per_batch=span.stop - span.start,
            batches=_ENDLESS,
            quarantine=quarantine,
        )
        self.wait_s = 0.0
        self._results: list[Any] = []
        self.workers, self.lost, self._continues = workers, "", continues
        self._prefix = worker_process.shared_prefix()
        self.ids = np.empty(0, np.int64)
        self._to_devices = Placement(mesh, spec, index_limits)
        devices = len(mesh.local_devices)
        if workers and (text := machine.too_many(workers)):
            raise InputError(text)
        machine.allow_files()
        worker_process.ignore_unstarted()
        local, block = rows.rows_per_batch, rows.order.block
        batches_held = worker_count.most_batches(local, workers, prefetch, devices, block)
        self.ahead = math.ceil(batches_held)
        self._parts = worker_count.parts_per_batch(local, workers, devices, block)
        # The order of the parts is that of the rows.
        part_rows = local // self._parts
        self._rows, self._part_rows, self._made = rows, part_rows, 0
        self._host = _read(rows, part_rows, workers=workers, prefetch=prefetch, prefix=self._prefix)
        # Three batches are on the devices: in the step, in the queue, and with the thread.
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=1)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._feed, name="batches", daemon=True)
        self._thread.start()

    def note_pending(self, results: Any) -> None:
        """Remembers the outputs of the step that uses the last batch, which may not be ready yet.

        The devices become idle when they are ready. The loop asks for the next batch before that,
        and only the time after it counts as waiting for data.
        """
        self._results = jax.tree.leaves(results)

    def __next__(self) -> dict[str, jax.Array]:
        results, self._results = self._results, []
        idle_since = None
        while True:
            if idle_since is None and all(array.is_ready() for array in results):
                idle_since, results = time.perf_counter(), []
            try:
                item = self._ready.get(timeout=_LOOK_EVERY_S if results else None)
                break
            except queue.Empty:
                continue
        if idle_since is not None:
            self.wait_s += time.perf_counter() - idle_since
        if isinstance(item, BaseException):
            self._ready.put(item)  # a second call raises the same error
            raise item
        arrays, self.ids = item
        return cast(dict[str, jax.Array], arrays)

    def close(self) -> None:
        """Stops the thread and the workers."""
        self._closed.set()
        while self._thread.is_alive():
            self._drop_ready()
            self._thread.join(timeout=0.05)
        self._drop_ready()  # the last batch in the queue would keep Grain's shared memory alive
        self._ready.put(StopIteration())  # ends a thread that waits for a batch
        self._close_host()
        # jax releases the last host arrays it received only when Python collects garbage.
        gc.collect()
        worker_process.await_freed_memory()
        if self.lost:
            worker_process.free_shared_memory(self._prefix)

    def _close_host(self) -> None:
        close = getattr(self._host, "close", None)
        if close is not None:  # at exit, Grain prints errors about iterators left open
            # It waits also for a worker that the system did not start, which is an error.
            with contextlib.suppress(AssertionError):
                close()
        self._host = iter(())  # the closed iterator may still hold batches

    def _drop_ready(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._ready.get_nowait()

    def _feed(self) -> None:
        # Ctrl-C in a terminal also reaches the workers, even while they start. They are started by
        # this thread and inherit its signal mask. Starting Python's resource tracker would unblock
        # SIGINT again, so it is started first.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            # No variable here may hold a batch: it would keep Grain's shared memory to the end.
            while self._offer(self._item(self._local())):
                pass
        except (InputError, RunAgain) as error:  # the main thread raises it, and prints one line
            # The traceback would keep parts of a batch, and so Grain's shared memory, to the end.
            self._offer(error.with_traceback(None))
        except OSError as error:
            refused = machine.refused(error, self.workers) if self.workers else None
            self._offer(refused or error)
        except BaseException as error:
            self._offer(error)

    def _local(self) -> list[HostArrays]:
        """Returns the parts of the next batch."""
        try:
            return self._parts_of_next()
        except RuntimeError as error:
            self.lost = self.lost or worker_process.why_lost(error, self.workers)
            if not self.lost:
                raise
            if not self._continues:
                raise RunAgain(self.lost) from None
        self._close_host()
        delivered = self._made * self._rows.batch_size
        remaining = dataclasses.replace(self._rows, start=self._rows.start + delivered)
        self._host = _read(remaining, self._part_rows, workers=0, prefetch=1, threads=self.workers)
        return self._parts_of_next()

    def _parts_of_next(self) -> list[HostArrays]:
        local = [next(self._host) for _ in range(self._parts)]
        self._made += 1
        return local

    def _item(self, local: list[HostArrays]) -> tuple[dict[str, jax.Array], np.ndarray]:
        ids = np.concatenate([part.pop(sampler.ID) for part in local])
        return self._to_devices(local), ids

    def _offer(self, item: Any) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False


class ValidationBatches:
    """Yields the same few global batches each time, from host memory after the first pass.

    Args:
        examples: largest number of examples to use; the split may have fewer.
        seed: seed of the randomness in an example, such as masks.
        threads: number of threads that load during the first pass.
    """

    def __init__(
        self,
        source: Source,
        mesh: jax.sharding.Mesh,
        spec: Spec,
        *,
        examples: int,
        seed: int,
        threads: int,
        quarantine: Quarantine,
        index_limits: Mapping[str, int] | None = None,
    ) -> None:
        batch_size = batch_size_of(spec)
        span = local_rows(mesh, batch_size)
        self._rows = ValidationRows(
            source,
            seed,
            min(examples, len(source)),
            batch_size=batch_size,
            first_row=span.start,
            rows_per_batch=span.stop - span.start,
            spec=spec,
            quarantine=quarantine,
        )
        self.spec = spec
        self._threads = max(1, threads)
        self._to_devices = Placement(mesh, spec, index_limits)
        self._loaded: list[HostArrays] = []
        self._unread: Iterator[HostArrays] | None = None

    def __len__(self) -> int:
        return len(self._rows) // self._rows.rows_per_batch

    @property
    def chosen(self) -> Validated:
        """Returns the examples."""
        return self._rows.chosen

    def groups(self, batch: int) -> np.ndarray:
        """Returns the group of each row of a global batch, such as its video; -1 for none."""
        return self._rows.groups(batch)

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        """Yields one batch at a time: a caller that stops early has loaded only what it used."""
        for number in range(len(self)):
            if self._unread is None:
                self._unread = _read(
                    self._rows,
                    self._rows.rows_per_batch,
                    workers=0,
                    prefetch=1,
                    threads=self._threads,
                )
            if number == len(self._loaded):
                self._loaded.append(next(self._unread))
            yield self._to_devices([self._loaded[number]])


def _read(
    rows: sampler.TrainingRows | ValidationRows,
    batch: int,
    *,
    workers: int,
    prefetch: int,
    threads: int = 0,
    prefix: str = "",
) -> Iterator[HostArrays]:
    """Yields ``batch`` rows at a time, in order.

    The rows are batched before Grain divides them among workers, so the order does not depend on
    the number of workers, whose shared memory has names with ``prefix``.
    """
    # Grain reads absl flags in its workers and crashes if none have been parsed (0.2.18).
    if not absl.flags.FLAGS.is_parsed():
        absl.flags.FLAGS.mark_as_parsed()
    read = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(threads, 1))
    examples = grain.MapDataset.source(cast(Any, rows))
    data = examples.batch(batch).to_iter_dataset(read)
    if workers:
        options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=prefetch)
        prepare = functools.partial(worker_process.prepare, prefix)
        data = data.mp_prefetch(options, worker_init_fn=prepare)
        data = grain.experimental.WithOptionsIterDataset(
            data, grain.experimental.DatasetOptions(min_shm_size=worker_count.MIN_SHARED_BYTES)
        )
    return iter(data)
