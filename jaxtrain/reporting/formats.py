"""Numbers as the page writes them."""

import datetime
import math

from jaxtrain.telemetry.console import duration

_SIZES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_UNITS = {"memory_usage": "GiB", "_gib": "GiB", "_w": "W", "_c": "\N{DEGREE SIGN}C"}
_SHARES = ("accuracy", "mfu", "data_wait_fraction", "gpu_utilization")


def seconds(value: float) -> str:
    """``0.4 s``, ``6.8 s``, ``45 s``, ``3m20s``, ``30h51m``."""
    if value < 0.05:
        return "0 s"
    if value < 59.5:
        return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"
    return duration(value)


def share(part: float, whole: float) -> str:
    """``12.3%``."""
    return f"{part / whole:.1%}" if whole > 0 else "\N{EN DASH}"


def short(value: float) -> str:
    """A pure number: ``1,234``, ``12.35M``, ``0.003``, ``3.29e-07``."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    if abs(value) >= 1e6:
        return large(value)
    return f"{value:,.0f}" if abs(value) >= 999.95 else f"{value:.4g}"


def large(value: float, unit: str = "") -> str:
    """With the prefix of a unit: ``1.23 TFLOP/s``, ``7.6 k``."""
    for size, prefix in _SIZES:
        if abs(value) >= size * 0.9995:
            return f"{value / size:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}".strip()


def metric(name: str, value: float | None) -> str:
    """A value of a metric with its unit.

    Args:
        name: ``train/psnr``.
        value: None is a dash.
    """
    last = name.rpartition("/")[2]
    if value is None:
        return "\N{EN DASH}"
    if not math.isfinite(value):
        return str(value)
    if last in _SHARES:
        return f"{value:.1%}"
    if last in ("psnr", "psnr_std"):
        return f"{value:.2f} dB"
    for ending, unit in _UNITS.items():
        if last.endswith(ending):
            return f"{value:.1f} {unit}"
    return short(value)


def is_share(name: str) -> bool:
    """Whether a metric is a share of one, which the page writes in percent."""
    return name.rpartition("/")[2] in _SHARES


def moment(seconds_since_1970: float) -> str:
    """``2026-01-31 09:00:00 UTC``."""
    when = datetime.datetime.fromtimestamp(seconds_since_1970, datetime.UTC)
    return when.strftime("%Y-%m-%d %H:%M:%S UTC")


def size(number_of_bytes: int) -> str:
    """Bytes in KiB or MiB."""
    if number_of_bytes < 2**20:
        return f"{number_of_bytes / 2**10:.0f} KiB"
    return f"{number_of_bytes / 2**20:.1f} MiB"


def setting(value: object) -> str:
    """A value of a config as one would type it."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)
