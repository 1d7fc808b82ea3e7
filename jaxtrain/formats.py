"""Formats numbers for people: durations, rates, sizes, counts, and values of metrics."""

import datetime
import math
from collections.abc import Container, Sequence

GIB = 2**30
"""Bytes of memory are in this unit, as in nvidia-smi."""
_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def duration(seconds: float) -> str:
    """``45s``, ``3m20s``, ``30h51m``, ``4d06h``: the two largest units; days from 72 hours on."""
    rounded = round(seconds)
    if rounded < 60:
        return f"{rounded}s"
    if rounded < 3600:
        return f"{rounded // 60}m{rounded % 60:02d}s"
    minutes = round(seconds / 60)
    if minutes < 72 * 60:
        return f"{minutes // 60}h{minutes % 60:02d}m"
    hours = round(seconds / 3600)
    return f"{hours // 24}d{hours % 24:02d}h"


def seconds(value: float) -> str:
    """``0.4 s``, ``6.8 s``, ``45 s``, ``3m20s``, ``30h51m``."""
    if value < 0.05:
        return "0 s"
    if value < 59.5:
        return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"
    return duration(value)


def hours(low: float, high: float) -> str:
    """``45 s``, ``30 min to 1.2 h``, ``54.2 to 136 h``: a range of hours, in three digits."""

    def split(value: float) -> tuple[str, str]:
        if value < 1 / 30:
            return f"{value * 3600:.3g}", "s"
        return (f"{value * 60:.3g}", "min") if value < 2 else (f"{value:,.3g}", "h")

    (shortest, unit), (longest, other) = split(low), split(high)
    if (shortest, unit) == (longest, other):
        return f"{longest} {unit}"
    return f"{shortest}{'' if unit == other else f' {unit}'} to {longest} {other}"


def moment(seconds_since_1970: float) -> str:
    """``2026-01-31 09:00:00 UTC``."""
    when = datetime.datetime.fromtimestamp(seconds_since_1970, datetime.UTC)
    return when.strftime("%Y-%m-%d %H:%M:%S UTC")


def rate(value: float, digits: int) -> str:
    """Formats a rate with ``digits`` decimals, or two significant digits if that shows more."""
    return f"{value:.{digits}f}" if value >= 10.0 ** (1 - digits) else f"{value:.2g}"


def thousands(value: float) -> str:
    """A rate with one decimal and a metric prefix: ``2.1k``."""
    for scale, prefix in _PREFIXES:
        if value >= scale * 0.9995:
            return f"{value / scale:.1f}{prefix}"
    return rate(value, 0)


def size(count: float) -> str:
    """Formats bytes in binary units, like nvidia-smi and ls -h."""
    for unit, scale in (("TiB", 2**40), ("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} bytes"


def counted(number: int, noun: str) -> str:
    """Formats "1 worker", "2 workers"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def columns(rows: Sequence[Sequence[str]], left: Container[int]) -> str:
    """Formats a table; the columns whose numbers are in ``left`` are flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            f"{cell:{width}}" if number in left else f"{cell:>{width}}"
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def percent(value: float, total: float) -> str:
    """``12.3%``."""
    return f"{value / total:.1%}" if total > 0 else "\N{EN DASH}"


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
    for scale, prefix in _PREFIXES:
        if abs(value) >= scale * 0.9995:
            return f"{value / scale:.4g} {prefix}{unit}"
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
