"""What a run did with its time: ``history.jsonl``, an object a line, over all of its starts.

Process 0 writes it; it only grows. Of addresses it has what :mod:`jaxtrain.storage.addresses` lets
be recorded. Every record has ``event``, ``time`` (seconds since 1970) and
``step`` (completed updates then):

- ``start``: what began, where it goes on, and on what it runs. ``total`` is null where the run
  ended before its length was known.
- ``compiled``: what the training step takes, by the compiler's account and the model's formula.
- ``phase``: at the end of each, ``name`` and ``seconds``; a phase inside another one is not counted
  to that too, and all of them together are the time of the run. ``training`` is cut at each logged
  step, has its ``from_step``, and says how much of it waited for input (``waited_s``). ``start`` is
  also what lies between two phases before the first step, ``end`` what lies behind the last one.
- ``end``: the exit code and why. A process that was killed writes none.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxtrain import config, versions
from jaxtrain.config.run_length import Position
from jaxtrain.distributed.signals import exit_code, why
from jaxtrain.errors import RUN_AGAIN, stop_inside
from jaxtrain.storage import addresses
from jaxtrain.storage.atomic import Appended, drop_torn_line
from jaxtrain.telemetry import hardware
from jaxtrain.telemetry import recorder as metrics
from jaxtrain.telemetry.phases import TRAINING, Phases, Piece

NAME = "history.jsonl"

_CUT_OFF_S = 1.0


class History:
    """Writes the history of this start of a run. In other processes than the first it is silent.

    Nothing reaches the file before :meth:`started`, or the end: what is over by then waits.

    Args:
        recorder: writes in the run's directory, also where a disk fails.
        directory: of the run.
        phases: tells of each phase that is over.
        run: the config.
        start_from: the checkpoint that the run goes on from; None: from its beginning.
        position: there.
        arguments: of the command line.
    """

    def __init__(
        self,
        recorder: metrics.Recorder,
        directory: Path,
        phases: Phases,
        run: config.Run,
        start_from: Path | None,
        position: Position,
        arguments: Sequence[str],
    ) -> None:
        self._recorder = recorder
        self._phases = phases
        self._run = run
        self._from = start_from
        self._position = position
        self._arguments = arguments
        self._ended = False
        self._ending = threading.Lock()
        self._started = False
        self._file = Appended(directory / NAME) if jax.process_index() == 0 else None
        if self._file is not None and self._file.path.is_file():
            recorder.guarded(NAME, lambda: drop_torn_line(directory / NAME))
        phases.at(position.done)

    def started(self, total: int | None) -> None:
        """Writes who started what, and the phases that were over before.

        Args:
            total: updates of the whole run; None where it ends before that is known.
        """
        device = jax.devices()[0]
        self._started = True
        from_where: dict[str, Any] = {"from": None if self._from is None else str(self._from)}
        self._write(
            "start",
            **from_where,
            began=began(),
            seen=self._position.seen,
            total=total,
            host=socket.gethostname(),
            processes=jax.process_count(),
            devices=jax.device_count(),
            device_kind=device.device_kind,
            platform=device.platform,
            driver=hardware.driver().version if device.platform == "gpu" else None,
            versions=versions.versions(),
            config=config.to_dict(self._run),
            arguments=list(self._arguments),
        )
        self._phases.at(self._position.done, total)
        self._phases.when_over(self._over)

    def compiled(self, program: jax.stages.Compiled, *, state_bytes: float, params: int) -> None:
        """Writes what the training step takes.

        Args:
            program: the step.
            state_bytes: of the run's state, on each device.
            params: numbers that are trained.
        """
        kind = jax.devices()[0].device_kind
        found = program.memory_analysis()
        planned = found and (
            found.argument_size_in_bytes
            + found.output_size_in_bytes
            - found.alias_size_in_bytes
            + found.temp_size_in_bytes
        )
        self._write(
            "compiled",
            planned_gib=planned and planned / hardware.GIB,
            state_gib=state_bytes / hardware.GIB,
            params=params,
            flops_per_step=self._run.model.flops_per_example() * self._run.data.batch_size,
            peak_flops=hardware.peak_bf16_flops(kind),
            bandwidth=hardware.memory_bytes_per_second(kind),
        )

    def end(self, code: int, why: str) -> None:
        """Writes how the run ended, once, and the phase that was open.

        Args:
            code: exit code.
            why: in one line.
        """
        with self._ending:
            if self._ended:
                return
            self._ended = True
        if not self._started:
            self.started(None)
        self._phases.cut()
        self._phases.when_over(lambda piece: None)
        self._write("end", code=code, why=why)
        if self._file is not None:
            self._recorder.guarded(NAME, self._file.close)  # no other thread writes meanwhile

    def failed(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Writes the error or the signal that ends the run. For an ExitStack."""
        del kind, trace
        if error is not None:
            told = stop_inside(error) or error
            try:
                self.end(exit_code(told), why(told))
            except Exception as failure:  # what ended the run is to be told, not this
                self._recorder.log(f"warning: {NAME} does not say how the run ended: {failure}")

    def cut_off(self, leave: Callable[[int], None]) -> Callable[[int], None]:
        """For what ends the process while the main thread is in a long call, from another thread.

        Args:
            leave: what it does with the exit code besides.

        Returns:
            The same, after the end of the history; without that where it cannot be written soon, as
            while the main thread is at work on it.
        """

        words = "stopped at once by a signal, in a long call: what no checkpoint holds is lost"

        def write(code: int) -> None:
            self.end(code, words)
            self._recorder.say(words)

        def end(code: int) -> None:
            _soon(write, code)
            leave(code)

        return end

    def said_last(
        self, say: Callable[[str], None], then: Callable[[], None]
    ) -> Callable[[str], None]:
        """What takes the watchdog's last words: says them, and ends the history with them, if soon.

        Args:
            say: takes a line.
            then: called behind that.
        """

        def speak(words: str) -> None:
            try:
                say(words)
                _soon(self.end, RUN_AGAIN, words)
            finally:
                then()

        return speak

    def _over(self, piece: Piece) -> None:
        of_training = {"waited_s": piece.waited_s, "from_step": piece.from_step}
        self._write(
            "phase",
            at=piece.ended,
            step=self._position.done if piece.step is None else piece.step,
            name=piece.name,
            seconds=piece.seconds,
            **(of_training if piece.name == TRAINING else {}),
        )

    def _write(
        self, event: str, *, at: float | None = None, step: int | None = None, **entry: Any
    ) -> None:
        file = self._file
        if file is None:
            return
        now = {
            "time": time.time() if at is None else at,
            "step": self._phases.now.step if step is None else step,
        }
        line = json.dumps({"event": event, **now, **addresses.scrubbed(entry)}) + "\n"
        self._recorder.guarded(NAME, lambda: file.append(line.encode()))


def _soon(action: Callable[..., None], *arguments: object) -> None:
    """Does it, unless a lock that the main thread holds, as on a disk that is gone, forbids it."""
    thread = threading.Thread(target=action, args=arguments, daemon=True)
    thread.start()
    thread.join(_CUT_OFF_S)


_IMPORTED = time.time()


def began() -> float:
    """When this process started, seconds since 1970; where no kernel tells, when it came here."""
    try:
        with open("/proc/self/stat") as file:
            # Behind the name, which may hold anything, the 20th field: ticks since the boot
            # (proc_pid_stat(5)).
            ticks = int(file.read().rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return _IMPORTED
    return time.time() - age_s
