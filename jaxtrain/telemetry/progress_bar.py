"""How far a long piece of work is: a bar on a terminal, a plain line now and then elsewhere.

Where a run shows itself on the terminal already, the bar is a part of that.
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
        what: is done, as "tokenising".
        total_mb: megabytes of the whole work; an estimate will do.
        done_mb: of them that were done before.
        say: takes the plain lines.

    Yields:
        Takes the megabytes done so far, those done before included.
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
    began = told = time.monotonic()

    def tell(done: float) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= SAY_EVERY_S:
            told = now
            rate = (done - done_mb) / (now - began)
            left_min = max(0.0, total_mb - done) / rate / 60 if rate > 0 else float("inf")
            say(
                f"{what}: {done:,.0f} of {total_mb:,.0f} MB, {rate:.1f} MB/s, "
                f"about {left_min:.0f} min to go"
            )

    yield tell
