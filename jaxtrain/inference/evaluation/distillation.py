"""Compares a student with the teacher whose latents it learned: encoders, decoders, and latents.

Both encoders and both decoders are combined, so that a fault shows where it is: in the encoder, the
decoder, or both. Everything is measured against the original, and against the teacher alone.

Shapes: B clips, T frames, H height, W width; latents L in time, h x w in space, C channels.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.errors import InputError
from jaxtrain.inference.evaluation.evaluation_clips import Clip
from jaxtrain.inference.evaluation.reconstructions import (
    ClipMetrics,
    Drawn,
    Measure,
    Meter,
    Result,
    defined,
)
from jaxtrain.inference.teachers import Teacher
from jaxtrain.inference.video.autoencoder import Autoencoder
from jaxtrain.models.reconstruction import quality, samples
from jaxtrain.models.reconstruction.timing import Timing

CELLS = ("teacher > teacher", "student > teacher", "teacher > student", "student > student")
"""Encoder > decoder."""
TEACHER, STUDENT = 0, 3
"""Which of them are the teacher and the student alone."""
AGAINST_TEACHER = "to teacher: "
"""What the names of metrics against the teacher alone begin with."""
NOISE = (0.05, 0.1, 0.2, 0.5)
"""Noise that is added to the teacher's latents, in standard deviations of each channel: it stands
for the error of a diffusion model."""
_SMALLER = (2, 4)  # by which the sides of the additional, smaller clips are divided
_BORDER = 8  # the border is this part of a side
_LEAST_CHROMA = 0.01
_LEVELS = 255


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudentMetrics(ClipMetrics):
    """The metrics of one clip for each of :data:`CELLS`.

    Attributes:
        alone: more metrics, of the teacher alone and of the student alone: with noise on the
            teacher's latents, of smaller clips, and of the latents.
    """

    alone: tuple[dict[str, float], dict[str, float]]


class Latents(NamedTuple):
    """How the student's latents depend on the teacher's, for each channel.

    Attributes:
        slope, offset: of the least-squares line; the offset in standard deviations of the teacher.
        correlation: -1 to 1.
    """

    slope: np.ndarray
    offset: np.ndarray
    correlation: np.ndarray


class StudentMeter(Meter):
    """Measures a student and its teacher on the same clips.

    Args:
        measures: name -> measure.
        frames, height, width: size of a clip.
    """

    def __init__(
        self,
        student: Autoencoder,
        teacher: Teacher,
        measures: Mapping[str, Measure],
        *,
        frames: int,
        height: int,
        width: int,
    ) -> None:
        super().__init__([student], measures, frames=frames, height=height, width=width)
        self.columns = CELLS
        self.teacher = teacher
        factor = student.model.space_factor
        smallest = max(factor, 2 * quality.SSIM_WINDOW)
        sides = ((height // by, width // by) for by in _SMALLER)
        self._sizes = [(h - h % factor, w - w % factor) for h, w in sides if min(h, w) >= smallest]
        self._student = nnx.split(student.module)
        to_teacher = {name: of for name, of in measures.items() if name in ("psnr", "ssim")}
        to_teacher |= {name: of for name, of in measures.items() if name.startswith("lpips")}
        timing = student.model.timing
        placed = by_place(timing, timing.latent_frames(frames), self.compared)
        self._against = (
            tuple({**measures, **placed, "saturation": saturation}.items()),
            tuple((f"{AGAINST_TEACHER}{name}", of) for name, of in to_teacher.items()),
        )
        self.names = tuple(name for measures in self._against for name, _ in measures)
        self._features = [[]]  # statistics of latents

    def result_of(self, clip: Clip, video: np.ndarray) -> Result:
        """Measures one clip; see :meth:`Meter.result_of`."""
        original = video[None].astype(np.float32) / _LEVELS
        latents, (of_teacher, *others) = self._cells(original)
        target = self._student_target(original)
        values = []
        for decoded in (of_teacher, *others):
            values.append(_measured(self._against, target, of_teacher, decoded))
        self._check_numbers(clip, values)
        teacher, student = defined(self._alone(original, *latents))
        metrics = StudentMetrics(
            video=clip.frame_range.name,
            place=clip.place,
            values=defined(values),
            alone=(teacher, student),
        )
        return Result(metrics, (_sums(*latents),))

    def latents(self) -> Latents:
        """Returns how the latents of all measured clips depend on the teacher's."""
        count, t, s, tt, ts, ss = np.sum(self._features[0], axis=0)
        t, s = t / count, s / count
        var_t, cov, var_s = tt / count - t * t, ts / count - t * s, ss / count - s * s
        with np.errstate(divide="ignore", invalid="ignore"):
            slope, correlation = cov / var_t, cov / np.sqrt(var_t * var_s)
            return Latents(slope, (s - slope * t) / np.sqrt(var_t), correlation)

    def _alone(
        self, original: np.ndarray, of_teacher: np.ndarray, of_student: np.ndarray
    ) -> tuple[dict[str, float], dict[str, float]]:
        target, alone = self._student_target(original), (dict[str, float](), dict[str, float]())
        deviation = of_teacher.std((0, 1, 2, 3))
        noise = np.random.default_rng(0).standard_normal(of_teacher.shape, np.float32)
        for sigma in NOISE:
            noisy = of_teacher + sigma * deviation * noise
            decoded = [self._compared_frames(self.teacher.decode(noisy)), self._decoded(noisy)]
            for column, frames in zip(alone, decoded, strict=True):
                numbers = _measured(_SHORT, target, decoded[0], frames)
                column |= {f"noise {sigma:g}: {name}": value for name, value in numbers.items()}
        for height, width in self._sizes:
            top, left = (original.shape[2] - height) // 2, (original.shape[3] - width) // 2
            crop = original[:, :, top : top + height, left : left + width]
            target = self._student_target(crop)
            decoded = [
                self._compared_frames(self.teacher.decode(self.teacher.encode(crop))),
                self._decoded(self._encoded(crop)),
            ]
            for column, frames in zip(alone, decoded, strict=True):
                numbers = _measured(_SHORT, target, decoded[0], frames)
                column |= {f"{height}x{width}: {n}": value for n, value in numbers.items()}
        for column, latents in zip(alone, (of_teacher, of_student), strict=True):
            column |= _agreement(of_teacher, latents)
        return alone

    def _cells(self, original: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], list[jax.Array]]:
        """Returns the latents of the teacher and of the student, and the frames of each cell."""
        of_teacher, of_student = self.teacher.encode(original), self._encoded(original)
        if of_teacher.shape != of_student.shape:
            raise InputError(
                f"teacher {self.teacher.name} makes latents of shape {of_teacher.shape[1:]} (time, "
                f"height, width, channels), but the student's have {of_student.shape[1:]}: use "
                "another --frames"
            )
        latents = of_teacher, of_student
        cells = [self._compared_frames(self.teacher.decode(each)) for each in latents]
        return latents, cells + [self._decoded(each) for each in latents]

    def _encoded(self, video: np.ndarray) -> np.ndarray:
        return np.asarray(_encode(*self._student, video))

    def _decoded(self, latents: np.ndarray) -> jax.Array:
        return self._compared_frames(_decode(*self._student, latents))

    def _compared_frames(self, frames: np.ndarray | jax.Array) -> jax.Array:
        return jnp.clip(jnp.asarray(frames[:, : self.compared], jnp.float32), 0, 1)

    def _student_target(self, original: np.ndarray) -> jax.Array:
        timing: Timing = self.models[0].model.timing
        return timing.target(jnp.asarray(original))[:, : self.compared]

    def _drawn(self, clip: Clip, measured: ClipMetrics) -> Drawn:
        original = clip.read()[None].astype(np.float32) / _LEVELS
        target = self._student_target(original)
        rows = [samples.beside(target, cell) for cell in self._cells(original)[1]]
        labels = [samples.ROWS[0]]
        for name, values in zip(CELLS, measured.values, strict=True):
            labels += [f"{name}, {values['psnr']:.1f} dB", "error"]
        panels = [rows[0], *(each[:, 1:] for each in rows[1:])]
        image = np.asarray(samples.in_a_row(jnp.concatenate(panels, axis=1)))
        return Drawn(clip.frame_range.name, clip.place, image, tuple(labels))


def by_place(timing: Timing, latents: int, frames: int) -> dict[str, Measure]:
    """Returns measures of some of the first `frames` frames of a clip, and of parts of each.

    ``psnr, frame k of F`` is of the frames that are the k-th of their latent's F, and ``motion
    error`` the mean absolute difference, in levels of 255, between the changes from the frame
    before.
    """
    measures: dict[str, Measure] = {"psnr, first frame": lambda x, y: quality.psnr(x, y)[:, :1]}
    numbers = np.array(positions(timing, latents)[:frames])
    if timing.factor > 1:
        for k in sorted(set(numbers[1:].tolist())):
            at, label = 1 + np.flatnonzero(numbers[1:] == k), f"frame {k + 1} of {timing.factor}"
            measures[f"psnr, {label}"] = functools.partial(_psnr_at, at)
            measures[f"motion error, {label}"] = functools.partial(_motion_error, at)
    return measures | {
        "psnr, border": functools.partial(_region_psnr, True),
        "psnr, center": functools.partial(_region_psnr, False),
    }


def positions(timing: Timing, latents: int) -> list[int]:
    """Returns the number of each decoded frame among the frames of its latent, from 0."""
    numbers = [k for latent in range(latents) for k in range(timing.group(latent))]
    later = set(timing.dropped_later(range(latents)))
    return [k for place, k in enumerate(numbers) if place not in later][timing.dropped(latents) :]


def saturation(video_BTHW3: jax.Array, other_BTHW3: jax.Array) -> jax.Array:
    """Computes how colorful `other` is, relative to `video`: 1.05 is 5% more.

    The chroma of a pixel is the difference between its largest and its smallest color.

    Returns:
        float32 [B]; NaN for a gray video.
    """
    chroma, other = ((x.max(-1) - x.min(-1)).mean((1, 2, 3)) for x in (video_BTHW3, other_BTHW3))
    return jnp.where(chroma > _LEAST_CHROMA, other / chroma, jnp.nan)


_Measures = tuple[tuple[str, Measure], ...]
_SHORT: tuple[_Measures, _Measures] = (
    (("psnr", quality.psnr), ("ssim", quality.ssim), ("saturation", saturation)),
    (("ssim to teacher", quality.ssim),),
)
"""Measures against the original, and against the teacher."""


def _psnr_at(frames: np.ndarray, video: jax.Array, other: jax.Array) -> jax.Array:
    return quality.psnr(video[:, frames], other[:, frames])


def _motion_error(frames: np.ndarray, video: jax.Array, other: jax.Array) -> jax.Array:
    error = jnp.abs(jnp.diff(video, axis=1) - jnp.diff(other, axis=1))
    return _LEVELS * error[:, frames - 1].mean((2, 3, 4))


def _region_psnr(border: bool, video: jax.Array, other: jax.Array) -> jax.Array:
    """Computes the PSNR of the border, an eighth of each side, or of the rest."""
    height, width = video.shape[2:4]
    outside = np.ones((height, width), bool)
    rows, columns = max(1, height // _BORDER), max(1, width // _BORDER)
    outside[rows:-rows, columns:-columns] = False
    b, t, h, w, c = video.shape
    chosen = np.flatnonzero(outside == border)
    pixels = (x.reshape(b, t, h * w, 1, c)[:, :, chosen] for x in (video, other))
    return quality.psnr(*pixels)


def _measured(
    against: tuple[_Measures, _Measures],
    target: jax.Array,
    of_teacher: jax.Array,
    decoded: jax.Array,
) -> dict[str, float]:
    """Measures frames against the original, and against the teacher's; see :data:`_SHORT`."""
    measured = jax.device_get(_compiled(against, target, of_teacher, decoded))
    return {name: float(np.mean(value)) for name, value in measured.items()}


@functools.partial(jax.jit, static_argnums=0)
def _compiled(
    against: tuple[_Measures, _Measures],
    target: jax.Array,
    of_teacher: jax.Array,
    decoded: jax.Array,
) -> dict[str, jax.Array]:
    pairs = zip(against, (target, of_teacher), strict=True)
    return {name: of(other, decoded) for measures, other in pairs for name, of in measures}


def _agreement(of_teacher: np.ndarray, latents: np.ndarray) -> dict[str, float]:
    """Returns the cosine between the latents of a clip, and the relative squared error."""
    t, s = (x.astype(np.float64).reshape(-1, x.shape[-1]) for x in (of_teacher, latents))
    cosine = (t * s).sum() / max(np.sqrt((t * t).sum() * (s * s).sum()), 1e-12)
    error = np.square(t - s).sum() / max(np.square(t - t.mean(0)).sum(), 1e-12)
    return {"latents: cosine": float(cosine), "latents: relative squared error": float(error)}


def _sums(of_teacher: np.ndarray, of_student: np.ndarray) -> np.ndarray:
    """Returns the sums of 1, t, s, t^2, t s, and s^2 for each channel, float64 [6, C]."""
    t, s = (x.astype(np.float64).reshape(-1, x.shape[-1]) for x in (of_teacher, of_student))
    return np.stack([x.sum(0) for x in (np.ones_like(t), t, s, t * t, t * s, s * s)])


@functools.partial(jax.jit, static_argnums=0)
def _encode(graph: Any, arrays: Any, video: jax.Array) -> jax.Array:
    return nnx.merge(graph, arrays).encode(video).astype(jnp.float32)


@functools.partial(jax.jit, static_argnums=0)
def _decode(graph: Any, arrays: Any, latents: jax.Array) -> jax.Array:
    return nnx.merge(graph, arrays).decode(latents).astype(jnp.float32)


def alone(measured: Sequence[ClipMetrics]) -> list[ClipMetrics]:
    """Returns the metrics of the teacher alone and of the student alone."""
    return [
        ClipMetrics(video=clip.video, place=clip.place, values=clip.alone)
        for clip in measured
        if isinstance(clip, StudentMetrics)
    ]
