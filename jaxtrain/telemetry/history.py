"""Writes ``history.jsonl``: how a run spent its time, over all of its starts, one object per line.

Process 0 writes it; it only grows. :mod:`jaxtrain.storage.addresses` removes credentials from URLs.
Every record has ``event``, ``time`` (seconds since 1970) and ``step`` (completed steps at that
time):

- ``start``: config, arguments, versions, hardware, and the checkpoint that it resumes from.
  ``total`` is null if the run ended before its length was known.
- ``compiled``: the prediction of ``plan`` for the training step on these devices: memory
  (``planned_gib``), and the least and the most seconds to compute it (``planned_step_s``) and to
  load its batch (``planned_input_s``), null for devices that are not in the table of cards; FLOPs
  that the model needs, and digests of the source files and of the data.
- ``phase``: written at the end of each phase, with ``name`` and ``seconds``. The time of a nested
  phase does not count for the outer one, so all phases add up to the time of the run. ``training``
  is split at each logged step; it also has ``from_step`` and the time it waited for data
  (``waited_s``). ``start`` includes the time between phases before the first step, ``end`` the time
  after the last step.
- ``end``: the exit code and the reason; ``diverged`` if that is a gate, a canary, or bad steps. A
  killed process writes none.
"""

import dataclasses
import socket
import time
from pathlib import Path
from typing import Any

import jax

from jaxtrain import versions
from jaxtrain.cost import cards
from jaxtrain.formats import GIB
from jaxtrain.storage import addresses
from jaxtrain.storage.json_lines import JsonLines
from jaxtrain.telemetry import hardware
from jaxtrain.telemetry.events import Ended, PhaseEnded, Started, StepCompiled
from jaxtrain.telemetry.phases import TRAINING

NAME = "history.jsonl"


class History:
    """Writes the history of this start of a run; process 0 only.

    Phases that end before :class:`Started` are written after it.
    """

    name = NAME
    takes = (Started, StepCompiled, PhaseEnded, Ended)

    def __init__(self, directory: Path) -> None:
        self._file = JsonLines(directory / NAME)
        self._waiting: list[PhaseEnded] = []
        self._start: Started | None = None

    def handle(self, event: Started | StepCompiled | PhaseEnded | Ended) -> None:
        """Appends an event."""
        if isinstance(event, Started):
            start = _line("start", time.time(), event.step, _start(event))
            waiting = [_phase(phase, event) for phase in self._waiting]
            self._start, self._waiting = event, []
            self._file.add(start, *waiting)
        elif isinstance(event, StepCompiled):
            self._file.add(_line("compiled", time.time(), event.step, _compiled(event)))
        elif isinstance(event, Ended):
            entry: dict[str, Any] = {"code": event.code, "why": event.why}
            if event.diverged:
                entry["diverged"] = True
            self._file.add(_line("end", time.time(), event.step, entry))
        elif self._start is None:
            self._waiting.append(event)
        else:
            self._file.add(_phase(event, self._start))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _phase(phase: PhaseEnded, start: Started) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": phase.name, "seconds": phase.seconds}
    if phase.name == TRAINING:
        entry |= {"waited_s": phase.waited_s, "from_step": phase.from_step}
    return _line("phase", phase.ended, start.step if phase.step is None else phase.step, entry)


def _line(event: str, when: float, step: int | None, entry: dict[str, Any]) -> dict[str, Any]:
    return {"event": event, "time": when, "step": step, **addresses.scrubbed(entry)}


def _start(event: Started) -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "from": event.resumed_from,
        "began": event.began,
        "seen": event.seen,
        "total": event.total,
        "host": socket.gethostname(),
        "processes": jax.process_count(),
        "devices": jax.device_count(),
        "device_kind": device.device_kind,
        "platform": device.platform,
        "driver": hardware.driver().version if device.platform == "gpu" else None,
        "versions": versions.versions(),
        "config": event.config,
        "arguments": list(event.arguments),
        "metrics": {
            name: dataclasses.asdict(metric) for name, metric in event.added_metrics.items()
        },
    }


def _compiled(event: StepCompiled) -> dict[str, Any]:
    kind = jax.devices()[0].device_kind
    return {
        **event.planned,
        "state_gib": event.state_bytes / GIB,
        "params": event.params,
        "code": event.code,
        "data": event.data,
        "flops_per_step": event.cost.model_flops,
        "peak_flops": cards.rates(kind)[0],
    }
