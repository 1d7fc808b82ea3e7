"""Whatever waits says after half a minute what it waits for."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from jaxtrain import terminal

SILENCE_S, AGAIN_S = 30.0, 60.0


@contextlib.contextmanager
def announced(
    what: Callable[[], str], say: Callable[[str], None] = terminal.warn
) -> Iterator[None]:
    """Says what is waited for when the body takes long, and again every minute.

    Args:
        what: what is waited for, such as ``"process 3 of 4"``; called from another thread.
        say: takes a line.
    """
    began, over = time.monotonic(), threading.Event()

    def watch() -> None:
        pause_s = SILENCE_S
        while not over.wait(pause_s):
            say(f"waiting for {what()} ({time.monotonic() - began:.0f} s so far)")
            pause_s = AGAIN_S

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
