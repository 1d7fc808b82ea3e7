"""Quality of one or several autoencoders on the same clips, measured on the device.

Shapes: B clips, T frames, H height, W width.
"""

import collections
import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.data.video.fixed_clips import Clip
from jaxtrain.errors import BadExample, InputError
from jaxtrain.inference import intervals
from jaxtrain.inference.intervals import Difference, Estimate
from jaxtrain.inference.video import Autoencoder
from jaxtrain.models.video_ae import quality, timing

Measure = Callable[[jax.Array, jax.Array], jax.Array]
"""(video, reconstruction), float32 [B, T, H, W, 3] in [0, 1] -> [B, T], one number a frame, or
[B], one a clip."""

MEASURES: dict[str, Measure] = {
    "psnr": quality.psnr,
    "ssim": quality.ssim,
    "temporal_consistency": quality.temporal_consistency,
    "flicker_ratio": quality.flicker_ratio,
}
"""What is always measured; whoever has more (a perceptual distance) adds to these."""
_ALWAYS_A_NUMBER = "psnr"  # others mean nothing on some clips, as the flicker of a still picture
_READ_AHEAD = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One clip.

    Attributes:
        video: name of the file.
        place: of the clip in it, 0 to 1.
        values: for each autoencoder, metric -> value; a metric that means nothing here (flicker of
            a still picture) is left out of all.
    """

    video: str
    place: float
    values: tuple[dict[str, float], ...]


class Meter:
    """Runs clips through autoencoders and compares frame i with frame i.

    Args:
        models: the autoencoders.
        measures: name -> measure.
        frames, height, width: of a clip.

    Attributes:
        compared: frames of a clip that all of them reconstruct: the decoder gives fewer than went
            in where it drops the first ones.

    Raises:
        InputError: a model does not take this size, or has nothing to be compared with.
    """

    def __init__(
        self,
        models: Sequence[Autoencoder],
        measures: Mapping[str, Measure],
        *,
        frames: int,
        height: int,
        width: int,
    ) -> None:
        for model in models:
            model.require_whole()
            factor = model.model.space_factor
            if height % factor or width % factor:
                raise InputError(
                    f"--height {height} and --width {width} must be multiples of {factor}, for "
                    f"{model.source}"
                )
        if min(height, width) < quality.SSIM_WINDOW:
            raise InputError(
                f"--height {height} and --width {width}: use at least 16 for each (SSIM looks at "
                f"windows of {quality.SSIM_WINDOW})"
            )
        decoded = [model.model.timing.decoded(timing.latent_frames(frames)) for model in models]
        self.compared = min(frames, *decoded)
        self._sources = [model.source for model in models]
        self._programs = [_program(model, measures, self.compared) for model in models]

    def __call__(self, clips: Sequence[Clip], say: Callable[[str], None]) -> Iterator[Measured]:
        """Measures clips in turn; says which cannot be read, and goes on without them."""
        for clip, video in _read(clips, say):
            found = [program(video[None]) for program in self._programs]
            values = [
                {name: float(np.mean(value)) for name, value in one.items()}
                for one in jax.device_get(found)
            ]
            self._check_numbers(clip, values)
            told = [name for name in values[0] if not any(np.isnan(one[name]) for one in values)]
            yield Measured(
                video=clip.entry.name,
                place=clip.place,
                values=tuple({name: one[name] for name in told} for one in values),
            )

    def _check_numbers(self, clip: Clip, values: Sequence[Mapping[str, float]]) -> None:
        """Raises InputError where a reconstruction is not finite: its weights are broken."""
        for source, one in zip(self._sources, values, strict=True):
            if not np.isfinite(one[_ALWAYS_A_NUMBER]):
                raise InputError(
                    f"{source} makes pictures that are not finite (psnr {one[_ALWAYS_A_NUMBER]} on "
                    f"{clip.entry.name}): its weights are broken; take an earlier checkpoint"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What the clips say of all videos.

    Several clips of a video tell less than as many videos would; so the values that count are the
    videos' own, each the mean of its clips.

    Attributes:
        videos, clips: how many were measured.
        estimates: metric -> one for each autoencoder.
        differences: metric -> {(i, j): autoencoder j minus autoencoder i}.
    """

    videos: int
    clips: int
    estimates: dict[str, tuple[Estimate, ...]]
    differences: dict[str, dict[tuple[int, int], Difference]]


def compare(measured: Sequence[Measured], names: Sequence[str]) -> Comparison:
    """Sums up; ``measured`` has at least one clip.

    Args:
        measured: the clips.
        names: of the metrics, in the order of the table.
    """
    models = len(measured[0].values)
    estimates: dict[str, tuple[Estimate, ...]] = {}
    differences: dict[str, dict[tuple[int, int], Difference]] = {}
    for name in names:
        of_video: dict[str, list[list[float]]] = {}
        for clip in measured:
            if name in clip.values[0]:
                values = [one[name] for one in clip.values]
                of_video.setdefault(clip.video, []).append(values)
        if not of_video:
            continue  # it means something nowhere
        table = np.array([np.mean(values, axis=0) for values in of_video.values()])
        estimates[name] = tuple(intervals.estimate(column) for column in table.T)
        differences[name] = {
            (i, j): intervals.difference(table[:, i], table[:, j])
            for i in range(models)
            for j in range(i + 1, models)
        }
    return Comparison(
        videos=len({one.video for one in measured}),
        clips=len(measured),
        estimates=estimates,
        differences=differences,
    )


def _program(
    model: Autoencoder, measures: Mapping[str, Measure], compared: int
) -> Callable[[np.ndarray], dict[str, jax.Array]]:
    """uint8 [B, T, H, W, 3] -> metric -> its numbers."""
    graph, arrays = nnx.split(model.module)
    return functools.partial(_measure, graph, tuple(measures.items()), compared, arrays)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _measure(
    graph: Any,
    measures: tuple[tuple[str, Measure], ...],
    compared: int,
    arrays: Any,
    video_BTHW3: jax.Array,
) -> dict[str, jax.Array]:
    """Compiled once for all checkpoints of one model."""
    module = nnx.merge(graph, arrays)
    video = video_BTHW3.astype(jnp.float32) / 255
    target = module.timing.target(video)[:, :compared]
    found = module.decode(module.encode(video)).astype(jnp.float32)[:, :compared]
    return {name: of(target, jnp.clip(found, 0, 1)) for name, of in measures}


def _read(clips: Sequence[Clip], say: Callable[[str], None]) -> Iterator[tuple[Clip, np.ndarray]]:
    """Clips and their pictures, read a little ahead."""
    waiting: collections.deque[tuple[Clip, concurrent.futures.Future[np.ndarray]]]
    waiting = collections.deque()
    coming = iter(clips)
    with concurrent.futures.ThreadPoolExecutor(_READ_AHEAD) as pool:
        while True:
            while len(waiting) < 2 * _READ_AHEAD and (clip := next(coming, None)) is not None:
                waiting.append((clip, pool.submit(clip.read)))
            if not waiting:
                return
            clip, video = waiting.popleft()
            try:
                pixels = video.result()
            except BadExample as bad:
                say(f"left out: {bad}")
                continue
            yield clip, pixels
