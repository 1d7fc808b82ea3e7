"""Shows the progress of a long task: one line on a terminal, elsewhere a line every 30 seconds."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from jaxtrain import terminal
from jaxtrain.formats import duration
from jaxtrain.terminal import Say

SAY_EVERY_S = 30.0


@contextlib.contextmanager
def counted(
    task: str, things: str, total: int, before: int, say: Say
) -> Iterator[Callable[[int, int], None]]:
    """Shows how many things are done while the block runs, how fast, and how many failed, if any.

    On a terminal this is one line that is rewritten in place. If a run already has a live line
    there, the count is part of that line.

    Args:
        before: how many an earlier start completed.
        say: prints the plain lines.

    Yields:
        A function that takes how many are done, including ``before``, and how many of them failed.
    """
    began = printed = time.monotonic()

    def line(done: int, failed: int, now: float) -> str:
        passed = now - began
        rate = (done - before) / passed if passed > 0 else 0.0
        left = _left(total - done, rate)
        rate_text = f"{rate:,.1f}" if rate >= 1 else f"{rate:.2g}"
        text = f"{task}: {done:,} of {total:,} {things}, {rate_text}/s, {left}"
        return f"{text}, {failed:,} failed" if failed else text

    display = terminal.taken()
    if display is not None:
        work = terminal.Work(task, before, total, things)
        try:
            display.working(work)
            yield lambda done, failed: display.working(work._replace(done=done))
        finally:
            display.working(None)
        return
    if terminal.lively(sys.stderr):
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        with Live(
            Text(task),
            console=Console(stderr=True),
            redirect_stdout=sys.stdout.isatty(),  # a file or pipe still receives every line
            transient=True,
        ) as live:
            yield lambda done, failed: live.update(Text(line(done, failed, time.monotonic())))
        return

    def update(done: int, failed: int) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed >= SAY_EVERY_S:
            printed = now
            say(line(done, failed, now))

    yield update


def _left(remaining: float, rate: float) -> str:
    return f"about {duration(max(0.0, remaining) / rate)} left" if rate > 0 else "no rate yet"
