"""Ends a hung run: a stuck process would block all the others forever.

The runtime's own time limits do not fire while a process is alive but stuck
(https://github.com/jax-ml/jax/issues/38503), so a thread beside the main one watches it.
"""

import contextlib
import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self, TextIO

from jaxtrain import terminal
from jaxtrain.distributed.heartbeat import Heartbeat
from jaxtrain.errors import RUN_AGAIN

# Compiling, saving or restoring may be slow, but an hour is a hang. The first preparation of data
# may take even longer, and has no limit.
PAUSE_ALLOWANCE_S = 3600.0
# Writing the report may itself hang (a dead file system): after this the process ends anyway.
REPORT_S = 20.0
# A thread that wakes up this much too late was stopped along with its process (SIGSTOP).
OVERSLEPT_S = 1.0
_LONGEST_SLEEP_S = 1.0  # up to this much time spent stopped may still count


class Watchdog:
    """Exits with 75 and writes every thread's stack when no step ends within the limit.

    A context manager that starts and ends the watching thread. The stacks go to
    ``hang-<process>.txt`` in the run directory, or to stderr before :meth:`report_to`.

    Args:
        timeout_s: longest time between two beats; None: only :meth:`end_within` sets a limit.
    """

    def __init__(self, timeout_s: float | None, heartbeat: Heartbeat) -> None:
        self._timeout_s = timeout_s
        self._directory: Path | None = None
        self._say: Callable[[str, int], None] = lambda text, code: terminal.warn(text)
        self._heartbeat = heartbeat
        self._changed = threading.Condition()
        self._pauses: list[tuple[str, float | None]] = []  # name and limit of each open phase
        self._stopped_s = 0.0  # total time for which this process was stopped (SIGSTOP)
        self._last_beat = self._now()
        self._step: int | None = None
        self._end_at: float | None = None
        self._ended = self._ending = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._heartbeat.when_lost(self.end)
        self.beat()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join()

    def report_to(self, directory: Path, say: Callable[[str, int], None]) -> None:
        """Sets the run directory, which gets the stacks, and what prints the last line."""
        self._directory, self._say = directory, say

    def beat(self, step: int | None = None) -> None:
        """Marks the end of a step; the last line will name ``step``."""
        with self._changed:
            self._last_beat = self._now()
            self._step = self._step if step is None else step
        self._publish()

    def end_within(self, seconds: float) -> None:
        """Gives the process this long to end, whatever it does."""
        with self._changed:
            self._end_at = self._now() + seconds
            self._changed.notify()

    def end(self, reason: str, code: int = RUN_AGAIN) -> None:
        """Writes the report and ends the process; only the first call has an effect.

        Args:
            code: the exit code; 2 or 130 if another process has ended with it.
        """
        with self._changed:
            first, self._ending = not self._ending, True
        if not first:
            threading.Event().wait()
        report = threading.Thread(target=self._report, args=(reason, code), daemon=True)
        report.start()
        report.join(REPORT_S)
        self._heartbeat.leave(code)
        os._exit(code)  # sys.exit would only end this thread

    @contextlib.contextmanager
    def pause(self, name: str, allowance_s: float | None = PAUSE_ALLOWANCE_S) -> Iterator[None]:
        """Sets another limit for a phase outside of steps: it must end within ``allowance_s``.

        Args:
            allowance_s: time limit, counted from here or from the last beat; at least the limit of
                a step. None: no limit.
        """
        limit_s = None if allowance_s is None else max(allowance_s, self._timeout_s or 0.0)
        with self._changed:
            self._pauses.append((name, limit_s))
            self._last_beat = self._now()
            self._changed.notify()
        self._publish()
        try:
            yield
        finally:
            with self._changed:
                self._pauses.pop()
                self._last_beat = self._now()
                self._changed.notify()
            self._publish()

    def _publish(self) -> None:
        with self._changed:
            phase = self._pauses[-1][0] if self._pauses else "training"
            self._heartbeat.update(phase, self._step)

    def _now(self) -> float:
        """Returns seconds on a clock that stops while the process is stopped (SIGSTOP)."""
        return time.monotonic() - self._stopped_s

    def _watch(self) -> None:
        reason = None
        with self._changed:
            while reason is None and not self._ended:
                began, nap_s = time.monotonic(), self._nap_s()
                self._changed.wait(nap_s)
                overslept_s = time.monotonic() - began - nap_s
                if overslept_s > OVERSLEPT_S:
                    self._stopped_s += overslept_s
                reason = self._overdue()
            if self._ended:
                return
        assert reason is not None, "the loop ends with a reason"
        self.end(reason)

    def _limit(self) -> tuple[str, float | None]:
        if self._timeout_s is None:
            return "", None
        return self._pauses[-1] if self._pauses else ("", self._timeout_s)

    def _nap_s(self) -> float:
        """Returns the seconds until a limit may expire, at most ``_LONGEST_SLEEP_S``."""
        _, limit_s = self._limit()
        ends = [] if limit_s is None else [self._last_beat + limit_s]
        ends += [] if self._end_at is None else [self._end_at]
        return min(max(min(ends, default=math.inf) - self._now(), 0.01), _LONGEST_SLEEP_S)

    def _overdue(self) -> str | None:
        after = "" if self._step is None else f" after step {self._step}"
        context = f"{after} in process {self._heartbeat.process}"
        if self._end_at is not None and self._now() >= self._end_at:
            return f"the run did not end within loop.stop_timeout_s of the signal{context}"
        name, limit_s = self._limit()
        if limit_s is None or self._now() < self._last_beat + limit_s:
            return None
        event = f"{name} did not end" if name else "no step ended"
        return f"hung: {event} within {limit_s:g} s{context}"

    def _report(self, reason: str, code: int) -> None:
        if code != RUN_AGAIN:  # that process has printed why
            self._say(f"error: {reason}; ending this process, too", code)
            return
        head = "\n".join((reason, *self._heartbeat.table(), "", ""))
        stacks = "stacks of all threads above"
        if self._directory is None:
            _dump(head, sys.stderr)
        else:
            path = self._directory / f"hang-{self._heartbeat.process}.txt"
            stacks = f"stacks of all threads in {path}"
            try:
                with path.open("w") as file:
                    _dump(head, file)
            except OSError as error:
                stacks = f"no stacks: {path} could not be written ({error.strerror})"
        self._say(
            f"{reason}; {stacks}; exit code {code}: run the same command with --resume latest", code
        )


def _dump(head: str, file: TextIO) -> None:
    file.write(head)
    file.flush()
    faulthandler.dump_traceback(file, all_threads=True)
