"""Estimates how long data takes to prepare, and how large the result is, from a measured sample.

Time and bytes are in proportion to the bytes of the files. The sample is spread evenly over the
files by size.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from jaxtrain.errors import BadExample

SAMPLE = 16
"""Most files in a sample."""

File = TypeVar("File")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredFile:
    """A file of a sample that was processed.

    Attributes:
        size: size of the file in bytes.
        seconds: what it took one worker.
        written: bytes of its result.
        dropped: why it has none.
    """

    size: int
    seconds: float
    written: float
    dropped: BadExample | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What the files take that are not done yet.

    Attributes:
        files: their number.
        sampled: number of those in the sample.
        seconds: what they take one worker like those that processed the sample.
        serial: seconds of work after it that only one process does.
        error: standard error of ``seconds`` and ``out_bytes`` as a fraction of them; None for a
            sample of one file.
        in_bytes: size of the files.
        out_bytes: size of the results.
        dropped: sampled files that would be dropped, with reasons.
        refused: why the command would end with an error, by what the sample shows; else None.
    """

    files: int
    sampled: int
    seconds: float
    serial: float = 0.0
    error: float | None
    in_bytes: int
    out_bytes: float
    dropped: tuple[BadExample, ...]
    refused: str | None = None


def spread(files: Iterable[File], size: Callable[[File], int], most: int = SAMPLE) -> list[File]:
    """Returns a sample of at most ``most`` files, spread evenly over all, sorted by size."""
    ordered = sorted(files, key=size)
    count = min(most, len(ordered))
    return [ordered[(2 * n + 1) * len(ordered) // (2 * count)] for n in range(count)]


def from_sample(sample: Sequence[MeasuredFile], files: int, in_bytes: int) -> Estimate:
    """Estimates what ``files`` files of ``in_bytes`` in total take.

    The relative standard error is that of a ratio estimate (Cochran 1977, 6.4).
    """
    sizes = [one.size for one in sample]
    seconds, written = [one.seconds for one in sample], [one.written for one in sample]
    scale = in_bytes / sum(sizes) if sum(sizes) else 0.0
    errors = [_ratio_error(parts, sizes) for parts in (seconds, written)] if len(sample) > 1 else []
    return Estimate(
        files=files,
        sampled=len(sample),
        seconds=sum(seconds) * scale,
        error=max(errors, default=None),
        in_bytes=in_bytes,
        out_bytes=sum(written) * scale,
        dropped=tuple(one.dropped for one in sample if one.dropped is not None),
    )


def _ratio_error(parts: Sequence[float], sizes: Sequence[float]) -> float:
    """Returns the standard error of sum(parts) / sum(sizes), relative to it."""
    if not sum(parts) or not sum(sizes):
        return 0.0
    count, ratio = len(parts), sum(parts) / sum(sizes)
    squares = sum((part - ratio * size) ** 2 for part, size in zip(parts, sizes, strict=True))
    return math.sqrt(squares * count / (count - 1)) / sum(parts)


class Stopwatch:
    """Measures what work takes a worker, from the moment it is created."""

    def __init__(self) -> None:
        self._began, self._busy = time.monotonic(), time.process_time()

    def seconds(self) -> float:
        """Returns the time, or the CPU time if that is more: threads of FFmpeg use idle cores."""
        return max(time.monotonic() - self._began, time.process_time() - self._busy)
