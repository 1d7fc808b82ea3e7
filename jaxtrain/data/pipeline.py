"""From a source to global batches on devices.

``sampler`` says which example comes where; Grain loads this process's rows of each batch in worker
processes, among which ``batch_parts`` divides them; a thread puts the next batch on the devices
while a step runs.
"""

import contextlib
import gc
import math
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Any, cast

import absl.flags
import grain
import jax
import numpy as np

from jaxtrain.data import batch_parts, sampler, worker_process
from jaxtrain.data.quarantine import Quarantine, too_many
from jaxtrain.data.source import Source, Sources
from jaxtrain.errors import InputError
from jaxtrain.sharding import batch_sharding, local_rows

Arrays = dict[str, np.ndarray]
Spec = dict[str, jax.ShapeDtypeStruct]

# Smaller arrays come through a pipe: making, mapping and freeing shared memory costs more. But the
# batches that a worker holds ready have to fit into the pipe (64 KiB): when the run stops, nobody
# reads them, and Grain waits 25 s for a worker that cannot get rid of them.
_WORTH_SHARING_BYTES = 2**12

# Grain is never let come to an end, only closed: where its iterators end by themselves, the last
# batches stay in a cycle of exception and frames, and when Python collects that, two threads close
# the same file descriptor (0.2.18). The order has no end anyway.
_MORE_BATCHES_THAN_EVER = 2**40

# The run's directory may lie on a network: not for each step.
_LOOK_EVERY_S = 5.0


class BadShare:
    """Watches how many of the input files are broken.

    Args:
        sources: what was found when the data was opened.
        quarantine: what is found from then on.
        largest: share of all input files that the run puts up with.
        clock: seconds, monotonic.
        say: takes a line about files that were found broken since the data was opened.
    """

    def __init__(
        self,
        sources: Sources,
        quarantine: Quarantine,
        largest: float,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._sources = sources
        self._say = say
        self._told = frozenset(one.path for one in sources.bad)
        self._quarantine = quarantine
        self._largest = largest
        self._clock = clock
        self._size: int | None = None
        self._complaint: str | None = None
        self._looked_at = -math.inf

    def complaint(self) -> str | None:
        """Why the run should stop, or None while few files are broken; it looks now and then."""
        now = self._clock()
        if now - self._looked_at < _LOOK_EVERY_S:
            return self._complaint
        self._looked_at = now
        try:
            size = self._quarantine.size()
            if size != self._size:
                self._size, self._complaint = size, self._look()
        except OSError:  # the run's disk is away: it looks again
            pass
        return self._complaint

    def _look(self) -> str | None:
        bad = self._quarantine.found() | {one.path for one in self._sources.bad}
        if new := sorted(bad - self._told):
            more = f" and {len(new) - 1} more" if len(new) > 1 else ""
            self._say(f"broken input: {new[0]}{more}; {self._quarantine.path} says why")
            self._told = bad
        complaint = too_many(len(bad), self._sources.files, self._largest)
        return complaint and (
            f"{complaint}: {self._quarantine.path} lists them; mend or remove them, or raise "
            "--data.max_bad_share"
        )


class TrainingBatches(Iterator[dict[str, jax.Array]]):
    """Global batches without end, from any number of examples seen.

    Args:
        source: the training split.
        mesh: rows of a batch go over all its devices.
        spec: the model's ``batch_spec`` of the global batch; what comes must match it.
        start: examples seen.
        seed: of the order.
        workers: processes that load; 0 loads in this one.
        prefetch: parts of batches that each worker holds ready (:func:`batch_parts.buffered`).
        quarantine: where broken examples are recorded.

    Attributes:
        wait_s: seconds that the caller has waited for batches so far.
        ids: this process's example indices in the batch given last.
        ahead: batches that may lie ready before the caller asks for the first.
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
    ) -> None:
        batch_size = _batch_size(spec)
        span = local_rows(mesh, batch_size)
        rows = sampler.TrainingRows(
            source,
            sampler.of(source, seed),
            start,
            batch_size,
            span.start,
            span.stop - span.start,
            _MORE_BATCHES_THAN_EVER,
            quarantine,
        )
        self.wait_s = 0.0
        self.ids = np.empty(0, np.int64)
        self._place = _Placement(mesh, spec)
        devices = len(mesh.local_devices)
        length = batch_parts.Runs(rows, 1).length
        self.ahead = math.ceil(batch_parts.held(rows.rows, length, workers, prefetch, devices))
        self._host = _training(rows, length, workers, prefetch, devices)
        # One batch in the queue, one in the thread's hand, one in the step: double buffering.
        self._ready: queue.Queue[Any] = queue.Queue(maxsize=1)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._feed, name="batches", daemon=True)
        self._thread.start()

    def __next__(self) -> dict[str, jax.Array]:
        began = time.perf_counter()
        item = self._ready.get()
        self.wait_s += time.perf_counter() - began
        if isinstance(item, BaseException):
            self._ready.put(item)  # whoever asks again gets the same answer
            raise item
        arrays, self.ids = item
        return cast(dict[str, jax.Array], arrays)

    def close(self) -> None:
        """Stops the thread and the workers."""
        self._closed.set()
        while self._thread.is_alive():
            self._drop_ready()
            self._thread.join(timeout=0.05)
        self._drop_ready()  # what it put there last would keep Grain's shared memory
        close = getattr(self._host, "close", None)
        if close is not None:  # Grain prints errors at exit about iterators left open
            close()
        self._host = iter(())  # the closed ones may still hold batches
        # jax lets go of the last arrays that it was given when Python collects garbage.
        gc.collect()
        _await_freed_memory()

    def _drop_ready(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._ready.get_nowait()

    def _feed(self) -> None:
        # Ctrl-C in a terminal reaches the workers too, also while they start. They are started here
        # and inherit what this thread does not hear; starting Python's tracker of shared memory
        # would unblock SIGINT again.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            # No variable here holds a batch: it would keep Grain's shared memory to the end.
            while self._offer(self._item(next(self._host))):
                pass
        except BaseException as error:  # the main thread raises it
            self._offer(error)

    def _item(self, local: list[Arrays]) -> tuple[dict[str, jax.Array], np.ndarray]:
        ids = np.concatenate([part.pop(sampler.ID) for part in local])
        return self._place(local), ids

    def _offer(self, item: Any) -> bool:
        while not self._closed.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False


class ValidationBatches:
    """The same few global batches again and again, held in host memory after the first reading.

    Args:
        source: the validation split.
        mesh: rows of a batch go over all its devices.
        spec: the model's ``batch_spec`` of the global batch.
        examples: how many to use, at most; the split may hold fewer.
        seed: of what is random in an example (masks).
        threads: that load, the first time.
        quarantine: where broken examples are recorded.
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
    ) -> None:
        batch_size = _batch_size(spec)
        span = local_rows(mesh, batch_size)
        self._rows = sampler.ValidationRows(
            source,
            seed,
            min(examples, len(source)),
            batch_size,
            span.start,
            span.stop - span.start,
            _Blank({name: (part.shape[1:], str(part.dtype)) for name, part in spec.items()}),
            quarantine,
        )
        self.spec = spec
        self._threads = max(1, threads)
        self._place = _Placement(mesh, spec)
        self._held: list[Arrays] = []
        self._unread: Iterator[Arrays] | None = None

    def __len__(self) -> int:
        return len(self._rows) // self._rows.rows

    def __iter__(self) -> Iterator[dict[str, jax.Array]]:
        """One after the other: whoever breaks off has waited for one batch at most."""
        for number in range(len(self)):
            if self._unread is None:
                self._unread = _read(
                    self._rows, self._rows.rows, workers=0, prefetch=1, threads=self._threads
                )
            if number == len(self._held):
                self._held.append(next(self._unread))
            yield self._place([self._held[number]])


class _Blank:
    """Makes an example of zeros."""

    def __init__(self, fields: dict[str, tuple[tuple[int, ...], str]]) -> None:
        self._fields = fields

    def __call__(self) -> Arrays:
        return {name: np.zeros(shape, dtype) for name, (shape, dtype) in self._fields.items()}


class _Placement:
    """Local rows, in parts -> global arrays, checked against what the model wants."""

    def __init__(self, mesh: jax.sharding.Mesh, spec: Spec) -> None:
        self._sharding = batch_sharding(mesh)
        self._spec = spec
        self._first = local_rows(mesh, _batch_size(spec)).start
        # A CPU's arrays would go on using Grain's shared memory, and free it too late at exit.
        self._own = np.array if mesh.devices.flat[0].platform == "cpu" else np.asarray

    def __call__(self, local: Sequence[Arrays]) -> dict[str, jax.Array]:
        given = {name: (part.shape[1:], str(part.dtype)) for name, part in local[0].items()}
        wanted = {name: (part.shape[1:], str(part.dtype)) for name, part in self._spec.items()}
        if given != wanted:
            raise InputError(f"the data gives examples {given}, the model wants {wanted}")
        return {
            name: self._placed(part.shape, [one[name] for one in local])
            for name, part in self._spec.items()
        }

    def _placed(self, shape: tuple[int, ...], parts: Sequence[np.ndarray]) -> jax.Array:
        def of_device(where: tuple[slice, ...] | None) -> np.ndarray:
            assert where is not None, "rows lie over all devices"
            begin, end, _ = where[0].indices(shape[0])
            found = _rows(parts, begin - self._first, end - self._first)
            return self._own(found[0]) if len(found) == 1 else np.concatenate(found)

        return jax.make_array_from_callback(shape, self._sharding, of_device)


def _rows(parts: Sequence[np.ndarray], begin: int, end: int) -> list[np.ndarray]:
    """Rows ``begin`` to ``end`` of the parts' rows, as views of those parts that have some."""
    found, first = [], 0
    for part in parts:
        found.append(part[max(begin - first, 0) : max(end - first, 0)])
        first += len(part)
    return [view for view in found if len(view)]


def _batch_size(spec: Spec) -> int:
    return int(next(iter(spec.values())).shape[0])


def _training(
    rows: sampler.TrainingRows, length: int, workers: int, prefetch: int, devices: int
) -> Iterator[list[Arrays]]:
    """This process's rows of each batch, on the host, in order."""
    parts = batch_parts.parts(rows.rows, length, workers, devices)
    made = batch_parts.Runs(rows, parts)
    ready = batch_parts.buffered(prefetch, parts, length)
    return batch_parts.Joined(_read(made, None, workers=workers, prefetch=ready), parts)


def _read(
    rows: sampler.ValidationRows | batch_parts.Runs,
    batch: int | None,
    *,
    workers: int,
    prefetch: int,
    threads: int = 0,
) -> Iterator[Any]:
    """Rows in batches, or with None as they are, in order.

    The rows are batched before Grain divides them among workers, so the order does not depend on
    how many there are.
    """
    # Grain reads absl flags in its workers and dies where no program has parsed any (0.2.18).
    if not absl.flags.FLAGS.is_parsed():
        absl.flags.FLAGS.mark_as_parsed()
    read = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=max(threads, 1))
    examples = grain.MapDataset.source(cast(Any, rows))
    data = (examples if batch is None else examples.batch(batch)).to_iter_dataset(read)
    if workers:
        options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=prefetch)
        data = data.mp_prefetch(options, worker_init_fn=worker_process.prepare)
        data = grain.experimental.WithOptionsIterDataset(
            data, grain.experimental.DatasetOptions(min_shm_size=_WORTH_SHARING_BYTES)
        )
    return iter(data)


def _await_freed_memory() -> None:
    """Waits until Grain's thread has freed the shared memory that it was told to free.

    What is left to that thread when Python ends stays, until Python's resource tracker finds it and
    prints a warning of leaked shared memory below the run's last words.
    """
    thread = grain.multiprocessing.SharedMemoryArray._del_thread_pool  # no public way to wait
    if thread is not None:
        thread.apply(lambda: None)  # its only thread takes what it is given in turn
