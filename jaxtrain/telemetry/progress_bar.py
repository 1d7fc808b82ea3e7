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
    display = terminal.taken()
    if display is not None:
        try:
            display.working(terminal.Work(what, done_mb, total_mb))
            yield lambda done: display.working(terminal.Work(what, done, total_mb))
        finally:
            display.working(None)
        return
    if terminal.lively(sys.stderr):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} MB"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        ) as bar:
            task = bar.add_task(what, total=total_mb)
            bar.update(task, completed=done_mb)
            yield lambda done: bar.update(task, completed=done)
        return
    began = printed = time.monotonic()

    def update(done: float) -> None:
        nonlocal printed
        now = time.monotonic()
        if now - printed >= SAY_EVERY_S:
            printed = now
            rate = (done - done_mb) / (now - began)
            left_min = max(0.0, total_mb - done) / rate / 60 if rate > 0 else float("inf")
            say(
                f"{what}: {done:,.0f} of {total_mb:,.0f} MB, {rate:.1f} MB/s, "
                f"about {left_min:.0f} min left"
            )

    yield update
