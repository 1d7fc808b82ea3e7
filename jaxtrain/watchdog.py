"""Ends a run that stopped moving: a stuck process would hold all the others for ever.

The time limits of the runtime itself do not fire while a process is alive but stuck
(https://github.com/jax-ml/jax/issues/38503), so this thread watches from outside the main one.
"""

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import jax

from jaxtrain.signals import RUN_AGAIN

# Compiling, saving or evaluating takes as long as it takes; an hour without an end is a hang. The
# first preparation of data may take longer yet, and has no limit.
PAUSE_ALLOWANCE_S = 3600.0
# The last words themselves may hang (a dead file system): the process ends after this anyway.
LAST_WORDS_S = 20.0


class Watchdog:
    """Exits with 75 and writes every thread's stack when no step ends within the limit.

    Enter it to start the watching, leave it to end it. The stacks go to ``hang-<process>.txt``.

    Args:
        timeout_s: longest time between two beats; None switches it off.
        directory: the run's directory.
        say: prints the one line that names the reason.
    """

    def __init__(
        self, timeout_s: float | None, directory: Path, say: Callable[[str], None]
    ) -> None:
        self._timeout_s = timeout_s
        self._directory = directory
        self._say = say
        self._changed = threading.Condition()
        self._pauses: list[tuple[str, float | None]] = []  # name and limit of each open phase
        self._last_beat = time.monotonic()
        self._step: int | None = None
        self._ended = False
        self._thread: threading.Thread | None = None
        self._process = 0

    def __enter__(self) -> Self:
        if self._timeout_s is not None:
            self._process = jax.process_index()
            self.beat()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def beat(self, step: int | None = None) -> None:
        """Says that a step has ended; ``step`` is named in the last line."""
        with self._changed:
            self._last_beat = time.monotonic()
            self._step = self._step if step is None else step

    @contextlib.contextmanager
    def pause(self, name: str, allowance_s: float | None = PAUSE_ALLOWANCE_S) -> Iterator[None]:
        """Another limit for a phase that is no step: it must end within ``allowance_s``.

        Args:
            name: of the phase, for the last line.
            allowance_s: counted from here; never less than the limit of a step. None: no limit.
        """
        limit_s = None if allowance_s is None else max(allowance_s, self._timeout_s or 0.0)
        with self._changed:
            self._pauses.append((name, limit_s))
            self._last_beat = time.monotonic()
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._pauses.pop()
                self._last_beat = time.monotonic()
                self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._ended:
                name, limit_s = self._pauses[-1] if self._pauses else ("", self._timeout_s or 0.0)
                if limit_s is None:
                    self._changed.wait()
                    continue
                left_s = self._last_beat + limit_s - time.monotonic()
                if left_s <= 0:
                    break
                self._changed.wait(left_s)
            if self._ended:
                return
            step = self._step
        assert limit_s is not None, "a phase without a limit never gets here"
        self._exit(name, limit_s, step)

    def _exit(self, phase: str, limit_s: float, step: int | None) -> None:
        last_words = threading.Thread(target=self._last_words, args=(phase, limit_s, step))
        last_words.daemon = True
        last_words.start()
        last_words.join(LAST_WORDS_S)
        os._exit(RUN_AGAIN)  # sys.exit would only end this thread

    def _last_words(self, phase: str, limit_s: float, step: int | None) -> None:
        path = self._directory / f"hang-{self._process}.txt"
        where = f"stacks of all threads in {path}"
        try:
            with path.open("w") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            where = f"no stacks: {path} could not be written ({error.strerror})"
        what = f"{phase} did not end" if phase else "no step ended"
        after = "" if step is None else f" after update {step}"
        self._say(
            f"hung: {what} within {limit_s:g} s{after} in process {self._process}; {where}; exit "
            f"code {RUN_AGAIN}: the same command with --resume latest goes on"
        )
