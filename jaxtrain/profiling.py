"""A trace of some steps, for TensorBoard's profile page or Perfetto."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from jaxtrain.errors import InputError


def span(text: str | None) -> tuple[int, int] | None:
    """``"10:15"`` -> (10, 15): the steps between which a trace is taken.

    Raises:
        InputError: it does not read so.
    """
    if text is None:
        return None
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise InputError(f"--profile {text} is not START:STOP with START < STOP, as in 10:15")
    return int(first), int(last)


def check(steps: tuple[int, int] | None, done: int, total: int, say: Callable[[str], None]) -> None:
    """A trace has to begin within the run; a resumed run may have passed it, and says so.

    Raises:
        InputError: it begins after the end.
    """
    if steps is None:
        return
    if steps[0] >= total:
        raise InputError(
            f"--profile {steps[0]}:{steps[1]} begins after the end of the run ({total} steps): "
            "take a smaller START, or raise --loop.steps"
        )
    if steps[0] < done:
        say(f"--profile {steps[0]}:{steps[1]}: no trace, {done} updates are done already")


@contextlib.contextmanager
def profiler(steps: tuple[int, int] | None, directory: Path) -> Iterator[Callable[[int], None]]:
    """Gives a function to call before each step; it starts and stops the trace."""
    running = began = False

    def before_step(done: int) -> None:
        nonlocal running, began
        if steps is None:
            return
        if done == steps[0] and not began:  # a bad update is tried again
            jax.profiler.start_trace(directory)
            running = began = True
        elif done == steps[1] and running:
            jax.profiler.stop_trace()
            running = False

    try:
        yield before_step
    finally:
        if running:
            jax.profiler.stop_trace()
