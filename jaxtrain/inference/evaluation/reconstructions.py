"""Measures the quality of one or several autoencoders on the same clips, on the device.

Shapes: B clips, T frames, H height, W width.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.errors import BadExample, InputError
from jaxtrain.inference.evaluation import frechet, i3d, intervals
from jaxtrain.inference.evaluation.evaluation_clips import Clip
from jaxtrain.inference.evaluation.intervals import Difference, Estimate
from jaxtrain.inference.video.autoencoder import Autoencoder
from jaxtrain.jobs import engines
from jaxtrain.models.reconstruction import lpips, quality, samples

Measure = Callable[[jax.Array, jax.Array], jax.Array]
"""(video, reconstruction), float32 [B, T, H, W, 3] in [0, 1] -> [B, T], one number per frame, or
[B], one per clip."""

MEASURES: dict[str, Measure] = {
    "psnr": quality.psnr,
    "ssim": quality.ssim,
    "temporal_consistency": quality.temporal_consistency,
    "flicker_ratio": quality.flicker_ratio,
    "static_flicker": quality.static_flicker,
}
"""The standard measures; callers may add others, such as a perceptual distance."""
LIMITS = {
    "ssim": (-1.0, 1.0),
    "temporal_consistency": (0.0, 1.0),
    **dict.fromkeys(("lpips", "flicker_ratio", "static_flicker"), (0.0, math.inf)),
}
"""The smallest and the largest possible value of measures that have one."""
_FEATURES = "features"
_ALWAYS_A_NUMBER = "psnr"  # others are NaN for some clips, such as the flicker of a still image
_READ_AHEAD = 2
_WORST = 3  # clips that are drawn


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClipMetrics:
    """The metrics of one clip.

    Attributes:
        video: name of the file.
        place: position of the clip in the file, 0 to 1.
        values: for each autoencoder, metric -> value; a metric that is undefined for the clip, such
            as the flicker of a still image, is missing in all of them.
    """

    video: str
    place: float
    values: tuple[dict[str, float], ...]


@dataclasses.dataclass(frozen=True)
class Result:
    """What one clip adds to the result.

    Attributes:
        features: for each autoencoder, those of the original and of the reconstruction, [2, K]; ()
            without features.
    """

    measured: ClipMetrics
    features: tuple[np.ndarray, ...]


class Meter:
    """Reconstructs clips with autoencoders and compares each frame with its original.

    Args:
        measures: name -> measure.
        frames, height, width: size of a clip.
        features: of originals and reconstructions, for :meth:`rfvd`; None computes none.

    Attributes:
        compared: frames per clip that all models reconstruct; a decoder that drops the first frames
            returns fewer than were encoded.
    """

    def __init__(
        self,
        models: Sequence[Autoencoder],
        measures: Mapping[str, Measure],
        *,
        frames: int,
        height: int,
        width: int,
        features: i3d.Features | None = None,
    ) -> None:
        for model in models:
            factor = model.model.space_factor
            if height % factor or width % factor:
                raise InputError(
                    f"--height {height} and --width {width} must be multiples of {factor}, for "
                    f"{model.source}"
                )
        if min(height, width) < quality.SSIM_WINDOW:
            raise InputError(
                f"--height {height} and --width {width}: use at least 16 for each (SSIM window: "
                f"{quality.SSIM_WINDOW} pixels)"
            )
        decoded = [
            model.model.timing.decoded(model.model.timing.latent_frames(frames)) for model in models
        ]
        self.compared = min(frames, *decoded)
        self.models, self.names = tuple(models), tuple(measures)
        self.columns = tuple(model.source for model in models)
        if features is not None:
            measures = {**measures, _FEATURES: functools.partial(_of_both, features)}
        self._programs = [_program(model, measures, self.compared) for model in models]
        self._features: list[list[np.ndarray]] = [[] for _ in models]  # of each clip, [2, K]

    def measure(
        self,
        clips: Sequence[Clip],
        say: Callable[[str], None],
        each_clip: Callable[[], None] = lambda: None,
    ) -> list[ClipMetrics]:
        """Measures each clip; reports and skips unreadable ones.

        Args:
            say: receives a line for each clip that is skipped.
            each_clip: called for each measured clip, in any order.
        """
        # Results are combined in the order of the clips, because sums depend on the order.
        results: dict[int, Result] = {}
        reading = engines.Threads(_READ_AHEAD).map(lambda worker: _read, enumerate(clips))
        for (number, clip), video in reading:
            if isinstance(video, np.ndarray):
                results[number] = self.result_of(clip, video)
                each_clip()
            else:
                say(f"skipped: {video}")
        for number in sorted(results):
            for of_model, features in zip(self._features, results[number].features, strict=False):
                of_model.append(features)
        return [results[number].measured for number in sorted(results)]

    def result_of(self, clip: Clip, video: np.ndarray) -> Result:
        """Measures one clip with these pixels, uint8 [T, H, W, 3]."""
        of_models = jax.device_get([program(video[None]) for program in self._programs])
        features = tuple(of.pop(_FEATURES)[:, 0] for of in of_models if _FEATURES in of)
        values = [{name: float(np.mean(value)) for name, value in of.items()} for of in of_models]
        self._check_numbers(clip, values)
        measured = ClipMetrics(
            video=clip.frame_range.name, place=clip.place, values=defined(values)
        )
        return Result(measured, features)

    def worst(self, clips: Sequence[Clip], measured: Sequence[ClipMetrics]) -> list["Drawn"]:
        """Draws the measured clips with the lowest PSNR, the mean over the models; worst first."""
        by_place = {(clip.frame_range.name, clip.place): clip for clip in clips}
        ranked = sorted(
            measured, key=lambda metrics: float(np.mean([of["psnr"] for of in metrics.values]))
        )
        return [
            self._drawn(by_place[metrics.video, metrics.place], metrics)
            for metrics in ranked[:_WORST]
        ]

    def _drawn(self, clip: Clip, measured: ClipMetrics) -> "Drawn":
        rows = list[jax.Array]()
        labels = list[str]()
        video = clip.read()[None]
        for number, (model, values) in enumerate(zip(self.models, measured.values, strict=True)):
            graph, arrays = nnx.split(model.module)
            panel = _beside(graph, self.compared, arrays, video)
            rows.append(panel if not number else panel[:, 1:])
            of_model = f" {number + 1}" if len(self.models) > 1 else ""
            own = (f"reconstruction{of_model}, {values['psnr']:.1f} dB", f"error{of_model}")
            labels += [samples.ROWS[0], *own] if not number else own
        image = np.asarray(samples.in_a_row(jnp.concatenate(rows, axis=1)))
        return Drawn(clip.frame_range.name, clip.place, image, tuple(labels))

    def rfvd(self) -> list[float]:
        """Returns each model's Fréchet video distance over measured clips; [] without features."""
        return [
            frechet.distance(*np.stack(of_model, axis=1)) for of_model in self._features if of_model
        ]

    def _check_numbers(self, clip: Clip, values: Sequence[Mapping[str, float]]) -> None:
        """Raises InputError if a reconstruction has NaN/Inf, which means broken weights."""
        for source, numbers in zip(self.columns, values, strict=True):
            if not np.isfinite(numbers[_ALWAYS_A_NUMBER]):
                raise InputError(
                    f"{source} reconstructs {clip.frame_range.name} with NaN/Inf (psnr "
                    f"{numbers[_ALWAYS_A_NUMBER]}): its weights are broken; use an earlier "
                    "checkpoint"
                )


def defined(columns: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], ...]:
    """Returns the metrics of a clip without those that it does not define, which are NaN."""
    names = [name for name in columns[0] if not any(np.isnan(column[name]) for column in columns)]
    return tuple({name: column[name] for name in names} for column in columns)


def measures(lpips_weights: Path | None) -> dict[str, Measure]:
    """Returns the standard measures, and LPIPS if its weights are given."""
    if lpips_weights is None:
        return MEASURES
    network, distance = lpips.measure(lpips_weights)
    return {**MEASURES, f"lpips/{network}": distance}


def _read(numbered: tuple[int, Clip]) -> np.ndarray | BadExample:
    try:
        return numbered[1].read()
    except BadExample as bad:
        return bad


class Drawn(NamedTuple):
    """A clip, its reconstructions, and their errors.

    Attributes:
        place: position of the clip in the file, 0 to 1.
        image: uint8 [H, W, 3], a few frames from left to right.
        rows: what its rows show.
    """

    video: str
    place: float
    image: np.ndarray
    rows: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Statistics over the measured videos.

    Clips of one video are not independent, so the sample is the videos, and those of ``prepare
    clips`` belong to the video from which they were cut; the value of a video is the mean of its
    clips.

    Attributes:
        estimates: metric -> one for each autoencoder.
        differences: metric -> {(i, j): autoencoder j minus autoencoder i}.
    """

    videos: int
    estimates: dict[str, tuple[Estimate, ...]]
    differences: dict[str, dict[tuple[int, int], Difference]]


def evaluation(measured: Sequence[ClipMetrics], names: Sequence[str]) -> Evaluation:
    """Computes the statistics of measured clips.

    Args:
        measured: the clips, at least one.
        names: the metrics, in the order of the table.
    """
    models = len(measured[0].values)
    estimates: dict[str, tuple[Estimate, ...]] = {}
    differences: dict[str, dict[tuple[int, int], Difference]] = {}
    for name in names:
        of_video: dict[str, list[list[float]]] = {}
        for clip in measured:
            if name in clip.values[0]:
                values = [of_model[name] for of_model in clip.values]
                of_video.setdefault(clip.video, []).append(values)
        if not of_video:
            continue  # undefined for every clip
        table = np.array([np.mean(values, axis=0) for values in of_video.values()])
        # A distance is named after its network, too: lpips/alex.
        limits = LIMITS.get(name.partition("/")[0], (-math.inf, math.inf))
        estimates[name] = tuple(intervals.estimate(column, limits) for column in table.T)
        differences[name] = {
            (i, j): intervals.difference(table[:, i], table[:, j])
            for i in range(models)
            for j in range(i + 1, models)
        }
    return Evaluation(
        videos=len({clip.video for clip in measured}),
        estimates=estimates,
        differences=differences,
    )


def _program(
    model: Autoencoder, measures: Mapping[str, Measure], compared: int
) -> Callable[[np.ndarray], dict[str, jax.Array]]:
    """Returns a function from uint8 [B, T, H, W, 3] to metric -> values."""
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
    """Measures a batch; compiled once for all checkpoints of a model."""
    target, decoded = _reconstructed(graph, compared, arrays, video_BTHW3)
    return {name: of(target, decoded) for name, of in measures}


@functools.partial(jax.jit, static_argnums=(0, 1))
def _beside(graph: Any, compared: int, arrays: Any, video_BTHW3: jax.Array) -> jax.Array:
    """Stacks originals, reconstructions, and errors; see :func:`samples.beside`."""
    return samples.beside(*_reconstructed(graph, compared, arrays, video_BTHW3))


def _reconstructed(
    graph: Any, compared: int, arrays: Any, video_BTHW3: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns originals and reconstructions, in [0, 1]."""
    module = nnx.merge(graph, arrays)
    video = video_BTHW3.astype(jnp.float32) / 255
    target = module.timing.target(video)[:, :compared]
    decoded = module.decode(module.encode(video)).astype(jnp.float32)[:, :compared]
    return target, jnp.clip(decoded, 0, 1)


def _of_both(features: i3d.Features, video: jax.Array, other: jax.Array) -> jax.Array:
    """Returns the features of the originals and of the reconstructions, [2, B, K]."""
    return jnp.stack([features(video), features(other)])
