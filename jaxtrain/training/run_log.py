"""Logs a run to the console and to the files of its directory.

Whatever ends the run, an error, a signal or the watchdog, its end is logged.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import jax

from jaxtrain import IMPORTED_AT, config, terminal, versions
from jaxtrain.config import invocation, metrics
from jaxtrain.config.run_length import Position
from jaxtrain.distributed.signals import StopSignals, exit_code, why
from jaxtrain.distributed.watchdog import Watchdog
from jaxtrain.errors import HOPELESS, BadSteps, stop_inside
from jaxtrain.telemetry import events, history, sinks
from jaxtrain.telemetry.console import Console
from jaxtrain.telemetry.line import Line
from jaxtrain.telemetry.phases import Phases
from jaxtrain.xla import platform

# The last message may wait for a lock or an unresponsive disk; the process ends anyway after this.
_CUT_OFF_S = 1.0


class RunLog(events.EventLog):
    """The log of one start of a run. Entering it opens the console; :meth:`open` adds the files."""

    def __init__(self, signals: StopSignals, watchdog: Watchdog, *, quiet: bool = False) -> None:
        self._signals = signals
        self._watchdog = watchdog
        self.phases = Phases(watchdog, self.emit)
        self._shown = Console(self.phases, jax.process_index(), quiet=quiet)
        super().__init__(self._shown)
        self._start: Callable[[int | None], events.Started] | None = None
        self._entered = time.time()
        self._from_python = False
        self.directory = Path()
        self._ended = False
        self._logged: BaseException | None = None
        self._ending = threading.Lock()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._shown)
        self._shown.note_in(self)
        self._signals.before_exit(lambda code: self._shown.close())
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def open(
        self,
        run: config.Run,
        directory: Path,
        resumed_from: str | None,
        position: Position,
        arguments: Sequence[str],
        track: Sequence[str] = (),
        described: str = "",
    ) -> None:
        """Opens the files of the run directory, which receive all later events.

        Args:
            resumed_from: the checkpoint that the run resumes from, as it is printed; None for a
                new run.
            described: the directory as it is printed; "" for its path.
        """

        def start(total: int | None) -> events.Started:
            return events.Started(
                step=position.step,
                seen=position.examples_seen,
                total=total,
                resumed_from=resumed_from,
                config=config.to_dict(run),
                arguments=arguments,
                began=IMPORTED_AT if arguments else self._entered,
                added_metrics=metrics.added_by(run.model),
            )

        self._start = start
        self._from_python = not arguments
        self.directory = directory
        self._stack.callback(self.close)
        self._stack.push(self.failed)
        self.phases.at(position.step)
        process, count = jax.process_index(), jax.process_count()
        self.attach(sinks.file_sinks(directory, process, count, track, self.say), directory)
        self.say(f"run directory {described or directory}")
        kind = jax.devices()[0].device_kind
        installed = versions.versions()
        main_versions = ", ".join(
            f"{package} {installed[package]}" for package in ("jaxtrain", "jax")
        )
        self.say(f"{run.name}: {jax.device_count()} x {kind}, {main_versions}")
        self.log(versions.line())  # of all packages: 180 columns
        if jax.default_backend() == "cpu" and platform.lacks_driver():
            self.say("no NVIDIA driver: jax uses the CPU, although its CUDA plugin is installed")
        self._watchdog.report_to(directory, self._say_last)
        self._signals.before_exit(self._cut_off)

    def say(self, text: str | Line) -> None:
        """Prints one line and logs it; a run from Python names arguments instead of flags."""
        if self._from_python and isinstance(text, str):
            text = invocation.with_arguments(text)
        super().say(text)

    def started(self, total: int) -> None:
        """Logs the start of the run, whose length is now known."""
        assert self._start is not None, "open() comes first"
        self.emit(self._start(total))
        self._start = None
        self.phases.at(self.phases.now.step or 0, total)

    def ended(self, code: int, why: str, *, diverged: bool = False) -> None:
        """Logs the open phase and how this start of the run ended; does so once.

        Args:
            diverged: whether bad steps are the reason; a gate or a canary has its exit code.
        """
        with self._ending:
            if self._ended:
                return
            self._ended = True
        if self._start is not None:
            self.emit(self._start(None))
        self.phases.end()
        self.emit(
            events.Ended(self.phases.now.step, code, why, diverged=diverged or code == HOPELESS)
        )

    def failed(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Logs the error or signal that ends the run, once; the command line prints it."""
        del kind, trace
        if error is None or error is self._logged:
            return
        self._logged = error
        reason = stop_inside(error) or error
        try:
            self.ended(exit_code(reason), why(reason), diverged=isinstance(reason, BadSteps))
        except Exception as failure:  # must not hide the reason
            self.log(f"warning: the end of the run is missing in {history.NAME}: {failure}")
        self.log_error(reason)

    def _cut_off(self, code: int) -> None:
        text = "stopped by a signal during a long call: progress since the last checkpoint is lost"

        def write() -> None:
            self.ended(code, text)
            self.say(text)

        _soon(write)

    def _say_last(self, text: str, code: int) -> None:
        try:
            self.say(text)
            if jax.process_index():  # whose console shows nothing else
                terminal.warn(text)
            _soon(self.ended, code, text)
        finally:
            self._shown.close()


def _soon(action: Callable[..., None], *arguments: Any) -> None:
    """Runs an action in a thread, and gives up if it blocks, such as on an unresponsive disk."""
    thread = threading.Thread(target=action, args=arguments, daemon=True)
    thread.start()
    thread.join(_CUT_OFF_S)
