"""Estimates what ``prepare latents`` takes, from a sample of the videos.

All videos of the sample are indexed, and a few batches of their clips are encoded.
"""

import dataclasses
import math
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxtrain.data import cache
from jaxtrain.data.estimate import SAMPLE, Estimate, MeasuredFile, from_sample, spread
from jaxtrain.data.video import demo_videos, files, index, latents
from jaxtrain.data.video.clips import Clips
from jaxtrain.data.video.config import Config
from jaxtrain.data.video.file_table import FileTable
from jaxtrain.data.video.files import Found
from jaxtrain.data.video.index import Entry
from jaxtrain.errors import BadExample
from jaxtrain.telemetry.progress_bar import Say

_BATCHES = 4  # of the sample, at least if it has so many clips
_HEADER = 128  # bytes of a file of latents


def estimate(
    data: Config,
    model: Any,
    teacher: latents.Teacher,
    *,
    batch_size: int,
    threads: int,
    say: Say,
    most: int = SAMPLE,
) -> Estimate:
    """Estimates time and space from a sample; writes nothing to the cache.

    The seconds are those of this machine with all its devices. The teacher is compiled before they
    are measured, and they do not include it.

    Args:
        data: the config of the data, with fixed windows.
        model: that of the model.
        teacher: encodes the windows.
        batch_size, threads: see :func:`jaxtrain.data.video.latents.prepare`.
        say: prints a message.
        most: videos in the sample.

    Raises:
        InputError: there are no videos, or the teacher's latents have the wrong shape.
    """
    where = data.cache_dir
    target = latents.store(cache.path_of(where), model, teacher.name, cache.bucket_of(where))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        clips = data.clips(model, FileTable(folder, 0), train=False)
        todo = _todo(data, clips, target, folder, say)
        sample = [found for _, found in spread(todo, lambda one: one[0], most)]
        began = time.monotonic()
        decode_all = data.verify == "index"
        entries = index.build(sample, folder, decode_all=decode_all, say=lambda line: None)
        verified_s = time.monotonic() - began
        reasons = [_unusable(data, entry, model.frames) for entry in entries]
        good = [entry for entry, why in zip(entries, reasons, strict=True) if why is None]
        part = _Part(clips, math.ceil(_BATCHES * batch_size / max(1, len(good))))
        seconds, batches, bad = 0.0, 1, []
        if good:
            teacher.encode(np.zeros((batch_size, *_shape(clips)), np.float32))  # compiles
            store = dataclasses.replace(target, folder=folder / "latents", bucket=None)
            store.folder.mkdir()
            encoder = latents.Encoder(teacher, store, batch_size, threads)
            began = time.monotonic()
            made = list(encoder.videos([(part, entry) for entry in good]))
            seconds, batches = time.monotonic() - began, len(made)
            bad = [
                BadExample(
                    one.path, f"no latents for {one.windows} of {one.of} clips: {one.reason}"
                )
                for batch in made
                for one in batch.bad
            ]
    size = max(1, sum(entry.size for entry in entries))
    windows = [0 if why else clips.windows(one) for one, why in zip(entries, reasons, strict=True)]
    found = from_sample(
        [
            MeasuredFile(
                size=max(0, entry.size),
                seconds=verified_s * entry.size / size + count / batch_size * seconds / batches,
                written=count * math.prod(target.shape) * 2 + (_HEADER if count else 0),
                dropped=None if why is None else BadExample(entry.path, why),
            )
            for entry, count, why in zip(entries, windows, reasons, strict=True)
        ],
        len(todo),
        sum(size for size, _ in todo),
    )
    return dataclasses.replace(found, dropped=(*found.dropped, *bad))


def _shape(clips: Clips) -> tuple[int, ...]:
    return clips.frames, clips.height, clips.width, 3


def _todo(
    data: Config, clips: Clips, target: latents.LatentStore, temporary: Path, say: Say
) -> list[tuple[int, Found]]:
    """Returns size and place of each video that may lack latents."""
    root, listed, todo = cache.path_of(data.cache_dir), target.listed(), []
    path = data.path or str(demo_videos.prepare(temporary, say))
    for flag, given in (("--data.path", path), ("--data.val_path", data.val_path)):
        if given is None:
            continue
        found = files.find(given, flag, root, say)
        known = index.look_up(found, index.folder_of(given, root), say)
        for one, (size, entry) in zip(found, known, strict=True):
            if entry is None or not (
                data.unusable(entry, clips.frames)
                or target.finished(entry, clips.windows(entry), listed)
            ):
                todo.append((size, one))
    return todo


def _unusable(data: Config, entry: Entry, frames: int) -> str | None:
    """Returns why no latents can be made of a video, or None."""
    broken = None if entry.verdict is None else entry.verdict.broken
    return data.unusable(entry, frames) or broken


class _Part:
    """The first windows of each video; see :class:`jaxtrain.data.video.latents.Windows`."""

    entries: tuple[Entry, ...] = ()

    def __init__(self, clips: Clips, most: int) -> None:
        self._clips, self._most = clips, most

    def windows(self, entry: Entry) -> int:
        return min(self._most, self._clips.windows(entry))

    def pixels(self, entry: Entry, window: int) -> np.ndarray:
        return self._clips.pixels(entry, window)
