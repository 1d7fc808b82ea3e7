"""Compares the video input pipeline with a torch DataLoader that produces the same clips.

    python benchmarks/input_vs_dataloader.py [--rounds N] [--section.field value ...]

Both sides use the same number of workers (data.workers) and of prefetched batches, and draw file,
frame distance, start and crop from the same distributions. The other side decodes like most
loaders: it seeks to the key frame before the clip, decodes, converts to RGB, crops, and resizes
with antialiasing. The files are those of data.path, a folder of intact videos without cuts, or else
the scenes that `demo` renders. Ours are cut into pieces first, which is not timed.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common_start  # noqa: F401  before jax and torch
import numpy as np
import results
import side_by_side
import torch
import torch.utils.data

os.environ["JAX_PLATFORMS"] = "cpu"  # neither side copies to a GPU

from jaxtrain import config
from jaxtrain.data import pipeline
from jaxtrain.data.quarantine import Quarantine
from jaxtrain.data.video import demo_videos
from jaxtrain.storage import cache

BATCHES = 8  # per measurement, after the prefetched batches, which are not timed


class RandomClips(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Yields endless random clips, uint8 [T, H, W, 3].

    Args:
        paths: video files with their numbers of frames.
        frames, height, width: size of a clip.
        largest_delta: maximum distance between two frames.
        least_scale: minimum width of a crop, as a fraction of the largest that fits.
    """

    def __init__(
        self,
        paths: list[tuple[str, int]],
        frames: int,
        height: int,
        width: int,
        largest_delta: int,
        least_scale: float,
    ) -> None:
        self.paths, self.frames, self.height, self.width = paths, frames, height, width
        self.largest_delta, self.least_scale = largest_delta, least_scale

    def __iter__(self) -> Iterator[torch.Tensor]:
        information = torch.utils.data.get_worker_info()
        rng = np.random.default_rng(information.seed if information else 0)
        torch.set_num_threads(1)
        while True:
            path, count = self.paths[rng.integers(len(self.paths))]
            delta = min(int(rng.integers(1, self.largest_delta + 1)), (count - 1) // self.frames)
            delta = max(delta, 1)
            start = int(rng.integers(0, count - (self.frames - 1) * delta))
            yield self._cut(self._decode(path, start, delta), rng)

    def _decode(self, path: str, start: int, delta: int) -> np.ndarray:
        import av

        wanted = range(start, start + self.frames * delta, delta)
        with av.open(path) as container:
            stream = container.streams.video[0]
            stream.thread_type = "NONE"
            rate, base = stream.average_rate, stream.time_base
            assert rate is not None
            assert base is not None
            first = stream.start_time or 0
            container.seek(first + int(start / rate / base), stream=stream)
            found = []
            for frame in container.decode(stream):
                assert frame.pts is not None
                number = round((frame.pts - first) * base * rate)
                if number in wanted:
                    found.append(frame.to_ndarray(format="rgb24"))
                if number >= wanted[-1]:
                    break
        while len(found) < self.frames:  # a file whose last frames have no timestamps
            found.append(found[-1])
        return np.stack(found)

    def _cut(self, video_THWC: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
        high, wide = video_THWC.shape[1:3]
        aspect = self.width / self.height
        scale = rng.uniform(self.least_scale, 1)
        piece_w = min(wide, int(min(wide, high * aspect) * scale))
        piece_h = min(high, int(piece_w / aspect))
        top, left = rng.integers(high - piece_h + 1), rng.integers(wide - piece_w + 1)
        piece = video_THWC[:, top : top + piece_h, left : left + piece_w]
        if rng.random() < 0.5:
            piece = piece[:, :, ::-1]
        x = torch.from_numpy(np.ascontiguousarray(piece)).permute(0, 3, 1, 2)
        x = torch.nn.functional.interpolate(
            x, (self.height, self.width), mode="bilinear", antialias=True
        )
        return x.permute(0, 2, 3, 1).contiguous()


def main() -> None:
    """Runs the comparison, prints it, and records it if requested."""
    flags, overrides = results.arguments(__doc__)
    if results.repeated(flags):
        return
    run = config.load("demo", ["--data.workers", "2", *overrides])
    sources = run.data.open(run.model, seed=run.seed, say=print)
    ready = 2 * max(run.data.workers, 1) * run.data.prefetch + 2
    pairs = [
        (_seconds(_ours(run, sources), ready), _seconds(_theirs(run, sources), ready))
        for _ in range(flags.rounds)
    ]
    compared = side_by_side.Comparison(*map(tuple, zip(*pairs, strict=True)))
    clips = BATCHES * run.data.batch_size
    results.record_comparison(
        flags,
        f"input {run.model.frames}x{run.model.height}x{run.model.width} of {len(sources.train)} "
        f"files, {run.data.workers} workers, against torch DataLoader {torch.__version__}",
        {"": compared},
        examples=clips,
        unit="clips/s",
        same_work="same decoding, cropping and resizing, but different random clips",
    )


def _seconds(batches: Iterator[Any], ready: int) -> float:
    """Returns the seconds for :data:`BATCHES` batches, without the prefetched ones.

    Uses new workers each time, so that those of the other side have ended.
    """
    try:
        for _ in range(ready):
            next(batches)
        began = time.perf_counter()
        for _ in range(BATCHES):
            next(batches)
        return time.perf_counter() - began
    finally:
        if isinstance(batches, pipeline.TrainingBatches):
            batches.close()


def _ours(run: config.Run, sources: Any) -> pipeline.TrainingBatches:
    import tempfile

    import jax
    from jax.sharding import AxisType

    from jaxtrain.sharding import AXES

    return pipeline.TrainingBatches(
        sources.train,
        jax.make_mesh((1, 1), AXES, axis_types=(AxisType.Auto,) * 2),
        run.sent_spec(run.data.batch_size),
        start=0,
        seed=run.seed,
        workers=run.data.workers,
        prefetch=run.data.prefetch,
        quarantine=Quarantine.open(Path(tempfile.mkdtemp()), 0),
    )


def _theirs(run: config.Run, sources: Any) -> Iterator[torch.Tensor]:
    model, data = run.model, run.data
    root = Path(data.path) if data.path else demo_videos.prepare(cache.root(data.cache_dir), print)
    clips = RandomClips(
        [
            (str(root / video.name), sum(piece.frames for piece in video.pieces))
            for video in sources.train.videos
        ],
        model.frames,
        model.height,
        model.width,
        data.max_frame_delta,
        data.min_crop_scale,
    )
    loader = torch.utils.data.DataLoader(
        clips,
        batch_size=data.batch_size,
        num_workers=data.workers,
        prefetch_factor=data.prefetch if data.workers else None,
        multiprocessing_context="spawn" if data.workers else None,
    )
    return iter(loader)


if __name__ == "__main__":
    main()
