"""An event log with the sinks of a run directory and a console that prints plain lines."""

from pathlib import Path

from jaxtrain.distributed.heartbeat import Heartbeat
from jaxtrain.distributed.key_value import KeyValueStore
from jaxtrain.distributed.signals import StopSignals
from jaxtrain.distributed.watchdog import Watchdog
from jaxtrain.telemetry.console import Console
from jaxtrain.telemetry.events import EventLog
from jaxtrain.telemetry.phases import Phases
from jaxtrain.telemetry.sinks import file_sinks


def phases() -> Phases:
    """Phases of a single-process run whose watchdog is off."""
    return Phases(Watchdog(None, Heartbeat(KeyValueStore(), StopSignals())))


def attached(directory: Path, process: int = 0, process_count: int = 1) -> EventLog:
    """The log of a process after its run directory is set."""
    log = EventLog(Console(phases(), process))
    log.attach(file_sinks(directory, process, process_count), directory)
    return log
