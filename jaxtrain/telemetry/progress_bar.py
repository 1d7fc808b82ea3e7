"""Shows the progress of a long task: a bar on a terminal, elsewhere a line every 30 seconds.

If a run already has a live line on the terminal, the bar is part of that line.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from jaxtrain import terminal

SAY_EVERY_S = 30.0

Say = Callable[[str], None]


@contextlib.contextmanager
def metered(
    what: str, total_mb: float, done_mb: float, say: Say
) -> Iterator[Callable[[float], None]]:
    """Shows progress while the block runs.

    Args:
        what: name of the task, such as "tokenizing".
        total_mb: total megabytes; may be an estimate.
        done_mb: megabytes that an earlier start completed.
        say: prints the plain lines.

    Yields:
        A function that takes the megabytes completed so far, including ``done_mb``.
    """
    start = terminal.Work(what, done_mb, total_mb)
    display = terminal.taken()
    if display is not None:
        try:
            display.working(start)
            yield lambda done: display.working(start._replace(done=done))
        finally:
            display.working(None)
        return
    if terminal.lively(sys.stderr):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        ) as bar:
            task = bar.add_task(what, total=total_mb, amount=start.amount)
            bar.update(task, completed=done_mb)
            yield lambda done: bar.update(
                task, completed=done, amount=start._replace(done=done).amount
            )
        return
    began = printed = time.monotonic()

    def update(done: float) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed >= SAY_EVERY_S:
            printed = now
            rate = (done - done_mb) / (now - began)
            say(
                f"{what}: {start._replace(done=done).amount}, {rate:.1f} MB/s, "
                f"{_left(total_mb - done, rate)}"
            )

    yield update


@contextlib.contextmanager
def counted(
    what: str, things: str, total: int, before: int, say: Say, failing: str = "failed"
) -> Iterator[Callable[[int, int], None]]:
    """Shows how many things are done while the block runs, how fast, and how many failed.

    On a terminal this is one line that is rewritten in place.

    Args:
        what: name of the task, such as "cutting".
        things: what is counted, such as "videos".
        total: their number.
        before: how many an earlier start completed.
        say: prints the plain lines.
        failing: names those that failed, such as "dropped".

    Yields:
        A function that takes how many are done, including ``before``, and how many of them failed.
    """
    began = printed = time.monotonic()

    def line(done: int, failed: int, now: float) -> str:
        passed = now - began
        rate = (done - before) / passed if passed > 0 else 0.0
        left = _left(total - done, rate)
        return (
            f"{what}: {done:,} of {total:,} {things}, {rate:,.1f}/s, {left}, {failed:,} {failing}"
        )

    if terminal.taken() is None and terminal.lively(sys.stderr):
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        with Live(
            Text(what),
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
    """Returns how long the rest takes at a rate per second."""
    from jaxtrain.telemetry.console import duration  # with rich, which workers do not need

    return f"about {duration(max(0.0, remaining) / rate)} left" if rate > 0 else "no rate yet"
