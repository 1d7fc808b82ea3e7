"""All that a run tells, opened and closed together: the screen, the log, the metrics, the history.

Whatever ends the run, an error, a signal or the watchdog, each of them hears of it.
"""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import jax

from jaxtrain import config, versions
from jaxtrain.config.run_length import Position
from jaxtrain.distributed.heartbeat import Heartbeat
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.distributed.watchdog import Watchdog
from jaxtrain.errors import InputError
from jaxtrain.telemetry import recorder as metrics
from jaxtrain.telemetry.console import Screen
from jaxtrain.telemetry.phases import Phases
from jaxtrain.telemetry.timeline import History
from jaxtrain.training import run_directory


class Journal:
    """Shows the run on the screen while it is entered; :meth:`open` adds the files.

    Args:
        phases: where the run is.
        signals: may end the process in the midst of a call.
        heartbeat: tells the other processes of an end.
        watchdog: may end the process, too.

    Attributes:
        recorder: of metrics, samples and the log; from :meth:`open` on.
        history: from :meth:`open` on.
    """

    recorder: metrics.Recorder
    history: History

    def __init__(
        self, phases: Phases, signals: StopSignals, heartbeat: Heartbeat, watchdog: Watchdog
    ) -> None:
        self._phases = phases
        self._signals = signals
        self._heartbeat = heartbeat
        self._watchdog = watchdog
        self._screen = Screen(phases, jax.process_index())
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._screen)
        self._signals.before_exit = self._leave
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def open(
        self,
        run: config.Run,
        directory: Path,
        start_from: Path | None,
        position: Position,
        arguments: Sequence[str],
        before: run_directory.Before,
    ) -> None:
        """From here on what is told is kept, too.

        Args:
            run: the config.
            directory: of the run.
            start_from: the checkpoint that the run goes on from; None: from its beginning.
            position: there.
            arguments: of the command line.
            before: what there was of the directory; the rest goes if nothing comes of the run.
        """

        def discard(kind: type[BaseException] | None, *_: object) -> None:
            # A launcher starts a crashed run again in a named directory: its log is of use there.
            if not before.named or (kind is not None and issubclass(kind, InputError)):
                run_directory.discard_unused(directory, before)

        self._stack.push(discard)
        process, processes = jax.process_index(), jax.process_count()
        self.recorder = metrics.Recorder(directory, process, processes, self._screen.say)
        self._stack.callback(self.recorder.close)
        self._screen.report_to(self.recorder)
        say = self.recorder.say
        say(f"run directory {directory}")
        kind = jax.devices()[0].device_kind
        say(f"{run.name}: {jax.device_count()} x {kind}, {versions.line()}")
        self._stack.push(self.recorder.log_error)
        self.history = History(
            self.recorder, directory, self._phases, run, start_from, position, arguments
        )
        self._stack.push(self.history.failed)
        self._watchdog.report_to(directory, self.history.said_last(say, self._screen.close))
        self._signals.before_exit = self.history.cut_off(self._leave)

    def _leave(self, code: int) -> None:
        self._screen.close()
        self._heartbeat.leave(code)
