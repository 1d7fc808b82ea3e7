"""Times two programs that do the same work, alternately on the same machine."""

import dataclasses
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Protocol, Self

import common_start  # noqa: F401  # a spawned process imports this module before any other
import numpy as np

from jaxtrain.ops import cpu


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Seconds per step of both sides, in the order of measurement."""

    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The speed of ours relative to theirs: the ratio of median times."""
        return float(np.median(self.theirs) / np.median(self.ours))

    @property
    def range(self) -> tuple[float, float]:
        """The smallest and largest ratio of adjacent measurements."""
        ratios = np.divide(self.theirs, self.ours)
        return float(ratios.min()), float(ratios.max())


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of a comparison.

    Attributes:
        step: queues one step.
        finish: waits until all queued steps are done.
    """

    step: Callable[[], object]
    finish: Callable[[], object]

    def seconds(self, steps: int) -> float:
        """Returns the seconds per step of ``steps`` steps, queued back to back as in training."""
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.finish()
        return (time.perf_counter() - began) / steps


class Timed(Protocol):
    """Anything whose steps can be timed."""

    def seconds(self, steps: int) -> float:
        """Returns the seconds per step of ``steps`` steps."""


class Apart:
    """A side in a separate process, which is idle while the other side is timed.

    Args:
        build: creates the side in that process; pickled together with ``args``.
        keep_freed: whether to call :func:`jaxtrain.ops.cpu.keep_freed`, as `jaxtrain` does on CPUs.

    Raises:
        RuntimeError: on the first use, if this system does not support ``keep_freed``.
    """

    def __init__(self, build: Callable[..., Side], *args: object, keep_freed: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, far = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(far, keep_freed, build, args), daemon=True
        )
        self._process.start()
        far.close()

    def seconds(self, steps: int) -> float:
        """Returns the seconds per step of ``steps`` steps.

        Raises:
            RuntimeError: the process has ended; it has printed its own error.
        """
        try:
            self._connection.send(steps)
            return float(self._connection.recv())
        except (EOFError, OSError) as error:
            self._process.join()
            code = self._process.exitcode
            raise RuntimeError(f"the process of one side ended with exit code {code}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._connection.close()
        self._process.join()


def _serve(
    connection: Connection,
    keep_freed: bool,
    build: Callable[..., Side],
    args: tuple[object, ...],
) -> None:
    if keep_freed and not cpu.keep_freed():
        raise RuntimeError("the C library of this system does not support keeping freed memory")
    side = build(*args)
    while True:
        try:
            steps = connection.recv()
        except EOFError:
            return
        connection.send(side.seconds(steps))


def alternate(ours: Timed, theirs: Timed, *, rounds: int, steps: int, warm_up: int) -> Comparison:
    """Times both sides alternately.

    Args:
        ours: one side.
        theirs: the other.
        rounds: measurements per side.
        steps: steps per measurement.
        warm_up: untimed steps per side.
    """
    for side in (ours, theirs):
        side.seconds(warm_up)
    pairs = [(ours.seconds(steps), theirs.seconds(steps)) for _ in range(rounds)]
    return Comparison(*map(tuple, zip(*pairs, strict=True)))


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    """Returns the largest difference between two loss curves, relative to theirs."""
    return float(np.max(np.abs(np.subtract(ours, theirs)) / np.abs(theirs)))
