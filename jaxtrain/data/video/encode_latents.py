"""``jaxtrain prepare latents``: encodes fixed windows of all videos, or crops, with a teacher.

A video is an item of :mod:`jaxtrain.jobs.resumable`. Threads of this process decode the windows and
share the batches of one teacher, because a prepared clip has only a few windows. On a Ray cluster,
each actor loads the teacher and encodes a video at a time.
"""

import collections
import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxtrain.data.video.clips import Clips
from jaxtrain.data.video.latents import LatentStore, Shape
from jaxtrain.data.video.sets import Video
from jaxtrain.errors import BadExample, InputError
from jaxtrain.jobs import resumable
from jaxtrain.jobs.engines import Ray, Threads, Worker
from jaxtrain.storage import disks
from jaxtrain.terminal import Say


class Teacher(Protocol):
    """An encoder whose latents are training targets.

    Attributes:
        name: identifies its parameters and settings; valid as a folder name.
        about: a description for the cache.
    """

    name: str
    about: str

    def encode(self, video_BTHW3: np.ndarray) -> np.ndarray:
        """Encodes float32 clips with values in [0, 1] to float32 latents [B, L, h, w, C]."""


def prepare(
    splits: Sequence[Clips],
    load: Callable[[], Teacher],
    about: str,
    target: LatentStore,
    *,
    engine: Threads | Ray,
    batch_size: int,
    say: Say,
    part: resumable.Part = resumable.ALL,
) -> resumable.Outcome:
    """Computes the latents that do not exist yet.

    Args:
        splits: the windows; all have crops of one size, or none has.
        load: loads the teacher, which encodes them, once in this process or each worker of a
            cluster; can be pickled for one.
        about: describes the teacher.
        target: stores the latents; for a cluster, in a bucket or a folder that all nodes share.
        engine: runs the work. While some threads wait for their latents, others decode.
        batch_size: the teacher's batch size; the last batch is padded.
        say: prints a message.
        part: which of the videos to encode.

    Returns:
        What happened; its totals are ``windows`` and ``lacking``, those that cannot be decoded.

    Raises:
        InputError: the teacher's latents have the wrong shape, or are NaN, Inf or too large; or as
            :func:`jaxtrain.jobs.resumable.run`.
        RunAgain: see :func:`jaxtrain.jobs.resumable.run`.
    """
    begin: resumable.Begin
    if isinstance(engine, Threads):
        shared = Batches(load(), target.shape, batch_size, waiting=engine.workers)
        begin = functools.partial(functools.partial, _encode, tuple(splits), shared, target)
    else:
        begin = functools.partial(_begin, tuple(splits), load, target, batch_size)
    items = {
        item.output: item  # a video in both splits is encoded once
        for number, split in enumerate(splits)
        for item in (_item(number, video, target) for video in split.videos)
    }
    outcome = resumable.run(
        items.values(),
        begin,
        target.location,
        engine=engine,
        say=say,
        part=part,
        doing="encoding",
        things="videos",
    )
    if outcome.made or outcome.skipped:
        target.describe(about)
    return outcome


def _item(number: int, video: Video, target: LatentStore) -> resumable.Item:
    """Returns the item of a video. Its name has what the output depends on, but not its place."""
    name = f"{video.name} ({sum(piece.frames for piece in video.pieces):,} frames)"
    return resumable.Item(
        f"{name} {video.digest[:12]}", (video.digest,), target.name(video), (number, video)
    )


def _begin(
    splits: Sequence[Clips],
    load: Callable[[], Teacher],
    target: LatentStore,
    batch_size: int,
    worker: Worker,
) -> resumable.Make:
    batches = Batches(load(), target.shape, batch_size, waiting=batch_size)
    return functools.partial(_encode, splits, batches, target, worker)


def _encode(
    splits: Sequence[Clips],
    batches: "Batches",
    target: LatentStore,
    worker: Worker,
    item: resumable.Item,
    file: Path,
) -> dict[str, Any]:
    """Writes the latents of a video; returns how many windows it has, and how many lack them."""
    number, video = item.value
    split = splits[number]
    places, crops = split.windows(video), split.block
    count = places * crops

    def decode(window: int) -> list[np.ndarray] | BadExample:
        worker.check()
        try:
            return disks.when_readable(functools.partial(split.pixels, video, window))
        except BadExample as bad:
            return bad

    bad = list[BadExample]()

    def encoded() -> Generator[np.ndarray | None, None, None]:
        """Yields latents once they are there: those of an hour may be gigabytes."""
        waiting = collections.deque[Future[np.ndarray] | None]()
        with batches.video(), ThreadPoolExecutor(worker.cpus) as pool:
            for first in range(0, places, worker.cpus):
                for clips in pool.map(decode, range(first, min(first + worker.cpus, places))):
                    if isinstance(clips, BadExample):
                        bad.extend([clips] * crops)
                        waiting.extend([None] * crops)
                    else:
                        waiting.extend(map(batches.add, clips))
                while waiting and ((latents := waiting[0]) is None or latents.done()):
                    yield _result(waiting.popleft())
        yield from map(_result, waiting)

    with contextlib.closing(encoded()) as windows:
        target.save(file, windows)
    for failure in bad:
        if isinstance(failure.__cause__, OSError):  # perhaps the file can be read the next time
            raise resumable.Failed(failure.reason)
    details = {"windows": count - len(bad), "lacking": len(bad)}
    note = f"no latents for {len(bad):,} of {count:,} clips of {bad[0]}" if bad else ""
    return details | ({"notes": [note]} if note else {})


def _result(latents: "Future[np.ndarray] | None") -> np.ndarray | None:
    return None if latents is None else latents.result()


class Batches:
    """Encodes windows that threads add, in batches of one size, so that one is compiled.

    The thread that completes a batch encodes it. The last batch is padded: it is encoded when no
    thread is adding windows.

    Args:
        teacher: encodes the batches.
        shape: shape of a window's latents.
        size: batch size.
        waiting: most windows that wait to be encoded, in addition to a batch.
    """

    def __init__(self, teacher: Teacher, shape: Shape, size: int, waiting: int) -> None:
        self._teacher, self._shape, self._size = teacher, shape, size
        self._free = threading.Semaphore(size + waiting)
        self._device, self._lock = threading.Lock(), threading.Lock()
        self._adding = 0  # threads
        self._waiting: list[tuple[np.ndarray, Future[np.ndarray]]] = []

    @contextlib.contextmanager
    def video(self) -> Iterator[None]:
        """Lets this thread add windows in the block, and wait for their latents after it."""
        with self._lock:
            self._adding += 1
        try:
            yield
        finally:
            with self._lock:
                self._adding -= 1
                batch = [] if self._adding else self._taken()
            self._encode(batch)

    def add(self, clip_THW3: np.ndarray) -> "Future[np.ndarray]":
        """Adds a window, uint8; its latents will be float16 [L, h, w, C]."""
        self._free.acquire()
        latents: Future[np.ndarray] = Future()
        with self._lock:
            self._waiting.append((clip_THW3, latents))
            batch = self._taken() if len(self._waiting) == self._size else []
        self._encode(batch)
        return latents

    def _taken(self) -> list[tuple[np.ndarray, "Future[np.ndarray]"]]:
        batch, self._waiting = self._waiting, []
        return batch

    def _encode(self, batch: list[tuple[np.ndarray, "Future[np.ndarray]"]]) -> None:
        if not batch:
            return
        try:
            with self._device:
                encoded = self._encoded([clip for clip, _ in batch])
        except BaseException as error:
            for _, latents in batch:
                latents.set_exception(error)
            raise
        finally:
            self._free.release(len(batch))
        for (_, latents), window in zip(batch, encoded, strict=True):
            latents.set_result(window)

    def _encoded(self, clips: list[np.ndarray]) -> np.ndarray:
        """Returns the latents of some clips, float16 [B, L, h, w, C]."""
        teacher, shape = self._teacher, self._shape
        video = np.stack(clips + clips[-1:] * (self._size - len(clips))).astype(np.float32) / 255
        exact = np.asarray(teacher.encode(video))[: len(clips)]
        if exact.shape[1:] != shape:
            raise InputError(
                f"teacher {teacher.name} returns latents of shape {exact.shape[1:]} (time, height, "
                f"width, channels), but the model's have {shape}: change model.latent_channels, "
                "model.patch_size, or model.frames"
            )
        with np.errstate(over="ignore"):
            latents = exact.astype(np.float16)
        if not np.isfinite(latents).all():
            raise InputError(
                f"teacher {teacher.name} returns latents with NaN/Inf or magnitudes above 65504 "
                f"(the largest is {np.abs(exact).max():.3g}): check its scaling and its weights"
            )
        return latents
