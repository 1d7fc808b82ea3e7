"""The table of metrics: what each one is, and which direction is better.

docs/reference/metrics.md is generated from it, ``checkpoint.best_metric`` takes its direction from
it, and the report its titles, units and order. A model adds metrics of its own with the method
``metrics`` of its config (:mod:`jaxtrain.models`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Group = Literal["training", "validation", "speed", "hardware"]
Mode = Literal["max", "min"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """A metric, without the ``train/`` or ``val/`` in front of its name.

    Attributes:
        better: whether larger ("max") or smaller ("min") values are better; None if neither is.
        title: of its chart, without the unit; "" for the name with spaces.
        unit: "" for a number without one; "fraction" is shown in percent.
        meaning: one phrase.
        groups: where it is recorded: with the training step, by validations, or as a measurement
            between two records.
        models: which models have it.
    """

    better: Mode | None
    title: str = ""
    unit: str = ""
    meaning: str = ""
    groups: tuple[Group, ...] = ("training", "validation")
    models: str = "all"


_VIDEO, _LANGUAGE = "video autoencoder", "language models"


def _quality(better: Mode, meaning: str, **more: Any) -> Metric:
    return Metric(better=better, meaning=meaning, **more)


def _training(meaning: str, **more: Any) -> Metric:
    return Metric(better=None, meaning=meaning, groups=("training",), **more)


def _speed(meaning: str, **more: Any) -> Metric:
    return Metric(better=None, meaning=meaning, groups=("speed",), **more)


def _hardware(meaning: str, **more: Any) -> Metric:
    return Metric(better=None, meaning=meaning, groups=("hardware",), **more)


_VALIDATION: tuple[Group, ...] = ("validation",)

METRICS = {
    "loss": _quality("min", "the loss that is minimized; validation uses no augmentation"),
    "accuracy": _quality(
        "max",
        "fraction of predictions whose most likely token is correct",
        unit="fraction",
        models=_LANGUAGE,
    ),
    "psnr": _quality(
        "max",
        "peak signal-to-noise ratio of the reconstruction",
        title="PSNR",
        unit="dB",
        models=_VIDEO,
    ),
    "ssim": _quality(
        "max",
        "structural similarity of the reconstruction (Gaussian windows, sigma 1.5)",
        title="SSIM",
        groups=_VALIDATION,
        models=_VIDEO,
    ),
    "lpips": _quality(
        "min",
        "perceptual distance by AlexNet, with `model.perceptual.weights`",
        title="LPIPS",
        groups=_VALIDATION,
        models=_VIDEO,
    ),
    "pseudo_perplexity": _quality(
        "min", "exp of the mean loss", groups=_VALIDATION, models="masked LM"
    ),
    "bits_per_byte": _quality(
        "min",
        "loss on the held-out text, in bits, divided by its length in bytes; comparable across "
        "tokenizers",
        groups=_VALIDATION,
        models="causal LMs",
    ),
    "encoder_loss": _quality(
        "min", "distance to the teacher's latents, before weighting", models=_VIDEO
    ),
    "encoder_feature_loss": _quality(
        "min", "distance of what the decoder's first layers make of the latents", models=_VIDEO
    ),
    "feature_loss": _quality(
        "min", "error of the decoder's features; 1 is that of zeros", models=_VIDEO
    ),
    "reconstruction_loss": _quality(
        "min",
        "squared or absolute error, before the other losses are added",
        groups=("training",),
        models=_VIDEO,
    ),
    "perceptual_loss": _quality(
        "min", "LPIPS, before weighting", groups=("training",), models=_VIDEO
    ),
    # The two networks of the adversary work against each other: neither value shows quality.
    "adversary_loss": _training(
        "distance to the frames as corrected by the discriminator", models=_VIDEO
    ),
    "discriminator_loss": _training("loss of the discriminator", models=_VIDEO),
    "discriminator_accuracy": _training(
        "accuracy of the discriminator: real or reconstructed", unit="fraction", models=_VIDEO
    ),
    "learning_rate": _training("learning rate of the step"),
    "grad_norm": _training("global norm of the gradient, before clipping", title="gradient norm"),
    # These three rates have the same shape, so the report draws only the first that was recorded.
    "tokens_per_second": _speed(
        "tokens per second, over all devices", unit="1/s", models=_LANGUAGE
    ),
    "samples_per_second": _speed(
        "examples per second, over all devices", title="examples per second", unit="1/s"
    ),
    "steps_per_second": _speed("steps per second", unit="1/s"),
    "mfu": _speed(
        "model FLOPs utilization: FLOPs of the matrix products and convolutions that the loss and "
        "its gradient need, divided by time x devices x the datasheet's dense bf16 rate; keys in "
        "the windows of attention, a teacher in the step, LPIPS, and the adversary (also before it "
        "begins) count, recomputation and the optimizer do not",
        title="MFU (model / datasheet FLOP/s)",
        unit="fraction",
    ),
    "data_wait_fraction": _speed(
        "fraction of the time in which the devices waited for input",
        title="data wait (fraction of the time)",
        unit="fraction",
    ),
    "gpu_utilization": _hardware(
        "fraction of the time during which a kernel ran, mean over the GPUs in use",
        title="GPU utilization",
        unit="fraction",
    ),
    "gpu_power_w": _hardware(
        "power of a GPU, mean over the GPUs in use", title="GPU power", unit="W"
    ),
    "gpu_temperature_c": _hardware(
        "temperature of the hottest GPU in use",
        title="GPU temperature",
        unit="\N{DEGREE SIGN}C",
    ),
    "gpu_memory_usage": _hardware(
        "peak memory of the device's allocator", title="GPU memory", unit="GiB"
    ),
    "host_memory_gib": _hardware(
        "memory of the largest process, including its workers", title="host memory", unit="GiB"
    ),
    "shm_gib": _hardware(
        "space used in `/dev/shm`, by all processes", title="/dev/shm", unit="GiB"
    ),
}
"""By name, in the order in which they are shown. ``NAME_std``, where a validation records it, is
the standard deviation of ``NAME`` over videos."""

RATES = ("tokens_per_second", "samples_per_second", "steps_per_second")
_STD = "_std"


def table(added: Mapping[str, Metric] | None = None) -> dict[str, Metric]:
    """Returns all metrics by name, in the order in which they are shown.

    Args:
        added: a model's own metrics, which follow the measures of quality.
    """
    quality = {name: metric for name, metric in METRICS.items() if metric.better}
    return quality | dict(added or {}) | METRICS


def added_by(model: Any) -> dict[str, Metric]:
    """Returns the metrics that a model's config adds with its method ``metrics``."""
    return dict(model.metrics())


def describe(name: str, metrics: Mapping[str, Metric] = METRICS) -> Metric:
    """Returns what is known about a metric, such as ``val/psnr``, with a title in any case.

    An unknown metric has no direction.
    """
    last = name.rpartition("/")[2]
    metric = metrics.get(last, Metric(better=None))
    if last.endswith(_STD) and last not in metrics:
        unit = metrics.get(last.removesuffix(_STD), metric).unit
        metric = dataclasses.replace(metric, unit=unit)
    return dataclasses.replace(metric, title=metric.title or last.replace("_", " "))


def position(name: str, metrics: Mapping[str, Metric] = METRICS) -> tuple[int, bool, str]:
    """Returns a key that sorts metrics in the order of the table; unknown ones before the rates."""
    names, last = list(metrics), name.rpartition("/")[2]
    known = last in metrics
    return names.index(last if known else "learning_rate"), known, last
