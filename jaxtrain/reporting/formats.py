"""Formats the numbers of the page."""

import datetime
import math

from jaxtrain.telemetry.console import duration

_SIZES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def seconds(value: float) -> str:
    """``0.4 s``, ``6.8 s``, ``45 s``, ``3m20s``, ``30h51m``."""
    if value < 0.05:
        return "0 s"
    if value < 59.5:
        return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"
    return duration(value)


def percent(part: float, total: float) -> str:
    """``12.3%``."""
    return f"{part / total:.1%}" if total > 0 else "\N{EN DASH}"


def short(value: float) -> str:
    """A number without a unit: ``1,234``, ``12.35 M``, ``0.003``, ``3.29e-07``."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    if abs(value) >= 1e6:
        return large(value)
    return f"{value:,.0f}" if abs(value) >= 999.95 else f"{value:.4g}"


def large(value: float, unit: str = "") -> str:
    """A number with a metric prefix: ``1.23 TFLOP/s``, ``7.6 k``."""
    for size, prefix in _SIZES:
        if abs(value) >= size * 0.9995:
            return f"{value / size:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}".strip()


def metric(value: float | None, unit: str) -> str:
    """Formats a metric's value; None as a dash."""
    if value is None:
        return "\N{EN DASH}"
    if not math.isfinite(value):
        return str(value)
    if unit == "fraction":
        return f"{value:.1%}"
    if unit == "GiB" and 0 < abs(value) < 0.1:
        return f"{value * 1024:.3g} MiB"
    if unit in ("", "1/s"):
        return short(value)
    return f"{value:.2f} dB" if unit == "dB" else f"{value:.1f} {unit}"


def moment(seconds_since_1970: float) -> str:
    """``2026-01-31 09:00:00 UTC``."""
    when = datetime.datetime.fromtimestamp(seconds_since_1970, datetime.UTC)
    return when.strftime("%Y-%m-%d %H:%M:%S UTC")


def size(number_of_bytes: float) -> str:
    """``12 KiB``, ``3.4 MiB``, ``1.7 TiB``."""
    if number_of_bytes < 2**10:
        return f"{number_of_bytes:.0f} bytes"
    if number_of_bytes < 2**20:
        return f"{number_of_bytes / 2**10:.0f} KiB"
    for power, unit in ((40, "TiB"), (30, "GiB")):
        if number_of_bytes >= 2**power:
            return f"{number_of_bytes / 2**power:,.1f} {unit}"
    return f"{number_of_bytes / 2**20:.1f} MiB"


def setting(value: object) -> str:
    """Formats a config value the way it is typed on the command line."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return str(value)
