"""Describes every metric that a run records; docs/reference/metrics.md is generated from it."""

from typing import Literal, NamedTuple

Group = Literal["training", "validation", "speed", "hardware"]


class Metric(NamedTuple):
    """A metric, without the ``train/`` or ``val/`` in front of its name.

    Attributes:
        groups: where it is recorded: with the training step, by validations, or as a measurement
            between two records.
        models: which models have it.
        unit: "" for a number without one; "fraction" is shown in percent.
        meaning: one phrase.
    """

    groups: tuple[Group, ...]
    models: str
    unit: str
    meaning: str


_BOTH: tuple[Group, ...] = ("training", "validation")
_TRAINING: tuple[Group, ...] = ("training",)
_VALIDATION: tuple[Group, ...] = ("validation",)
_VIDEO, _LANGUAGE = "video autoencoder", "language models"

METRICS = {
    "loss": Metric(_BOTH, "all", "", "the loss that is minimized; validation uses no augmentation"),
    "grad_norm": Metric(_TRAINING, "all", "", "global norm of the gradient, before clipping"),
    "learning_rate": Metric(_TRAINING, "all", "", "learning rate of the step"),
    "psnr": Metric(_BOTH, _VIDEO, "dB", "peak signal-to-noise ratio of the reconstruction"),
    "ssim": Metric(_VALIDATION, _VIDEO, "", "structural similarity of the reconstruction"),
    "lpips": Metric(
        _VALIDATION, _VIDEO, "", "perceptual distance, with `model.perceptual.weights`"
    ),
    "reconstruction_loss": Metric(
        _TRAINING, _VIDEO, "", "squared error, before the other losses are added"
    ),
    "perceptual_loss": Metric(_TRAINING, _VIDEO, "", "LPIPS, before weighting"),
    "encoder_loss": Metric(
        _BOTH, _VIDEO, "", "distance to the teacher's latents, before weighting"
    ),
    "adversary_loss": Metric(
        _TRAINING, _VIDEO, "", "distance to the frames as corrected by the discriminator"
    ),
    "discriminator_loss": Metric(_TRAINING, _VIDEO, "", "loss of the discriminator"),
    "discriminator_accuracy": Metric(
        _TRAINING, _VIDEO, "fraction", "accuracy of the discriminator: real or reconstructed"
    ),
    "accuracy": Metric(
        _BOTH, _LANGUAGE, "fraction", "fraction of predictions whose most likely token is correct"
    ),
    "pseudo_perplexity": Metric(_VALIDATION, "masked LM", "", "exp of the mean loss"),
    "bits_per_byte": Metric(
        _VALIDATION,
        "causal LMs",
        "",
        "loss on the held-out text, in bits, divided by its length in bytes; comparable across "
        "tokenizers",
    ),
    "steps_per_second": Metric(("speed",), "all", "1/s", "steps per second"),
    "samples_per_second": Metric(("speed",), "all", "1/s", "examples per second, over all devices"),
    "tokens_per_second": Metric(
        ("speed",), _LANGUAGE, "1/s", "tokens per second, over all devices"
    ),
    "data_wait_fraction": Metric(
        ("speed",), "all", "fraction", "fraction of the time that the loop waited for input"
    ),
    "mfu": Metric(
        ("speed",),
        "all",
        "fraction",
        "model FLOPs utilization: FLOPs that the model needs, without recomputation, divided by "
        "time x devices x the datasheet's dense bf16 rate",
    ),
    "gpu_utilization": Metric(
        ("hardware",),
        "all",
        "fraction",
        "fraction of the time during which a kernel ran, mean over the GPUs in use",
    ),
    "gpu_power_w": Metric(("hardware",), "all", "W", "power of a GPU, mean over the GPUs in use"),
    "gpu_temperature_c": Metric(
        ("hardware",), "all", "\N{DEGREE SIGN}C", "temperature of the hottest GPU in use"
    ),
    "gpu_memory_usage": Metric(
        ("hardware",), "all", "GiB", "peak memory of the device's allocator"
    ),
    "host_memory_gib": Metric(
        ("hardware",), "all", "GiB", "memory of the largest process, including its workers"
    ),
    "shm_gib": Metric(("hardware",), "all", "GiB", "space used in `/dev/shm`, by all processes"),
}
"""By name. ``NAME_std``, where a validation records it, is the standard deviation of ``NAME``."""
