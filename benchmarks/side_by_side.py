"""Two programs that do the same work, timed in turn: both see one machine."""

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
    """Times of a step of ours and of theirs, s, in the order in which they were measured."""

    ours: tuple[float, ...]
    theirs: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """How many times as long as ours theirs takes: ratio of medians."""
        return float(np.median(self.theirs) / np.median(self.ours))

    @property
    def range(self) -> tuple[float, float]:
        """The least and the largest ratio of neighbours."""
        ratios = np.divide(self.theirs, self.ours)
        return float(ratios.min()), float(ratios.max())


@dataclasses.dataclass(frozen=True)
class Side:
    """One of the two.

    Attributes:
        step: hands over one step's work.
        finish: waits until all that was handed over is done.
    """

    step: Callable[[], object]
    finish: Callable[[], object]

    def seconds(self, steps: int) -> float:
        """Time of one of ``steps`` steps, handed over one behind the other as a loop does."""
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.finish()
        return (time.perf_counter() - began) / steps


class Timed(Protocol):
    """What can be asked for the time of its steps."""

    def seconds(self, steps: int) -> float:
        """Time of one of ``steps`` steps."""


class Apart:
    """A side in a process of its own, which waits while the other one is timed.

    Args:
        build: makes the side there; with ``args`` it is pickled.
        keep_freed: with :func:`jaxtrain.ops.cpu.keep_freed`, as `jaxtrain` trains on a CPU.

    Raises:
        RuntimeError: ``keep_freed`` is not possible on this system; on the first use.
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
        """As :meth:`Side.seconds`.

        Raises:
            RuntimeError: the process has ended; an error it has shown itself.
        """
        try:
            self._connection.send(steps)
            return float(self._connection.recv())
        except (EOFError, OSError) as error:
            self._process.join()
            code = self._process.exitcode
            raise RuntimeError(f"the process of one side has ended, exit code {code}") from error

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
        raise RuntimeError("this system's C library cannot be told to keep freed memory")
    side = build(*args)
    while True:
        try:
            steps = connection.recv()
        except EOFError:
            return
        connection.send(side.seconds(steps))


def alternate(ours: Timed, theirs: Timed, *, rounds: int, steps: int, warm_up: int) -> Comparison:
    """Times both in turn.

    Args:
        ours: one side.
        theirs: the other.
        rounds: measurements of each.
        steps: in a measurement.
        warm_up: steps of each that do not count.
    """
    for side in (ours, theirs):
        side.seconds(warm_up)
    pairs = [(ours.seconds(steps), theirs.seconds(steps)) for _ in range(rounds)]
    return Comparison(*map(tuple, zip(*pairs, strict=True)))


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    """Of two loss curves, relative to theirs."""
    return float(np.max(np.abs(np.subtract(ours, theirs)) / np.abs(theirs)))
