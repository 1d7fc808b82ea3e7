"""Trains the runs of a comparison, each in a process of its own, and reads their results."""

import dataclasses
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from jaxtrain import config, versions
from jaxtrain.errors import DONE, INTERRUPTED, RUN_AGAIN, InputError, RunAgain
from jaxtrain.reporting import facts, run_files, times
from jaxtrain.xla import platform

TRIES = 5  # of a run that ends with a temporary failure
_BETWEEN_TRIES_S = 5.0
_LAST_LINES = 3
_FORGET = {"step", "time"}


@dataclasses.dataclass(frozen=True)
class Result:
    """What a finished run shows.

    Attributes:
        value: the metric, of its last validation.
        step: of that validation.
        seconds: of all its starts, without the time between them.
    """

    value: float
    step: int
    seconds: float


class Failed(Exception):
    """A run ended in a way that no further try changes; the message says how."""


def folder_of(run: config.Run, runs: Path, simulate_devices: int | None) -> Path:
    """Returns the directory of a run: the same for the same config and versions.

    So a comparison that continues finds its runs, and comparisons can share them.
    """
    identity = [config.to_dict(run), versions.versions(), simulate_devices]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode())
    return runs / f"{run.name}-seed{run.seed}-{digest.hexdigest()[:10]}"


def read(directory: Path, metric: str) -> Result:
    """Reads the result of a run.

    Raises:
        InputError: the run has not ended, or has no such metric.
    """
    run = run_files.read(directory, directory.name)
    ending = facts.ending(run)
    if ending.word != "done":
        raise InputError(f"{directory}: this run is not done ({ending.sentence}): finish it first")
    validations = [record for record in run.records if metric in record]
    if not validations:
        names = sorted({name for record in run.records for name in record if "/" in name})
        raise InputError(f"{directory} has no {metric}: choose --metric from {', '.join(names)}")
    account = times.account(run.history)
    seconds = account.total_s if account else math.nan
    last = validations[-1]
    value = last[metric]
    return Result(math.nan if value is None else float(value), int(last["step"]), seconds)


def is_done(directory: Path) -> bool:
    """Whether a run has ended with all its steps."""
    history = run_files.read(directory, directory.name).history if directory.is_dir() else ()
    attempts = times.attempts(history)
    end = attempts[-1].end if attempts else None
    return end is not None and end.get("code") == DONE


def are_identical(first: Path, second: Path) -> bool:
    """Whether two runs have recorded the same losses, norms, and validations, to the bit.

    Rates and the use of the hardware are measurements of the machine, and differ.
    """
    learned = []
    for directory in (first, second):
        run = run_files.read(directory, directory.name)
        learned.append([_learned(run, record) for record in run.records])
    return bool(learned[0]) and learned[0] == learned[1]


def _learned(run: run_files.RecordedRun, record: Mapping[str, object]) -> dict[str, object]:
    kept: dict[str, object] = {"step": record["step"]}
    for name, value in record.items():
        metric = run.metrics.get(name.partition("/")[2])
        if name not in _FORGET and (
            metric is None or {"training", "validation"} & set(metric.groups)
        ):
            kept[name] = value
    return kept


class Trainer:
    """Trains runs, several beside each other if there are devices for them.

    Args:
        environment: variables of the runs.
        simulate_devices: as the flag of a run.

    Attributes:
        stopped: whether a stop has reached the runs.
    """

    def __init__(self, environment: Mapping[str, str], simulate_devices: int | None) -> None:
        self._environment = dict(environment)
        self._simulate_devices = simulate_devices
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()

    @property
    def stopped(self) -> bool:
        """Returns whether a stop has reached the runs."""
        return self._stop.is_set()

    def train(self, run: config.Run, directory: Path, gpus: str | None) -> None:
        """Trains a run to its end, from where it is.

        Args:
            run: the config.
            directory: of the run.
            gpus: CUDA_VISIBLE_DEVICES; None does not set it.

        Raises:
            Failed: the run cannot end well.
            RunAgain: the comparison was stopped, or the run had temporary failures only.
        """
        words = config.equivalent_arguments(run)
        assert words, "the config was loaded from a file"
        command = [sys.executable, "-m", "jaxtrain.main", *words]
        command += ["--output-dir", str(directory), "--resume", "latest"]
        if self._simulate_devices is not None:
            command += ["--simulate-devices", str(self._simulate_devices)]
        environment = self._environment | ({} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus})
        directory.parent.mkdir(parents=True, exist_ok=True)
        printed = directory.parent / f"{directory.name}.txt"
        for _ in range(TRIES):
            code = self._once(command, environment, printed)
            if code == DONE:
                printed.unlink(missing_ok=True)
                return
            if self.stopped or code == INTERRUPTED:
                raise RunAgain("stopped: the same command continues")
            if code not in (RUN_AGAIN, -signal.SIGKILL):
                lines = printed.read_text(errors="replace").strip().splitlines()
                raise Failed(f"ended with {code}: {' / '.join(lines[-_LAST_LINES:])}")
            self._stop.wait(_BETWEEN_TRIES_S)
        raise RunAgain(f"{directory} had {TRIES} temporary failures; {printed} has the last output")

    def _once(self, command: list[str], environment: dict[str, str], printed: Path) -> int:
        with printed.open("wb") as output:
            with self._lock:
                if self.stopped:
                    return INTERRUPTED
                # In a session of its own: Ctrl-C reaches it once, through stop().
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._running.add(process)
            try:
                return process.wait()
            finally:
                with self._lock:
                    self._running.discard(process)

    def stop(self) -> None:
        """Stops all runs after their current step; they save, and no other one starts."""
        self._stop.set()
        with self._lock:
            for process in self._running:
                process.send_signal(signal.SIGTERM)


def slots(run: config.Run, simulate_devices: int | None) -> list[str | None]:
    """Returns the devices of each run that may train beside the others, as CUDA_VISIBLE_DEVICES.

    One run at a time on CPUs, and for a config that takes all devices; then the element is None.
    """
    if simulate_devices is not None or run.mesh.auto:
        return [None]
    names = platform.visible_gpus(os.environ)
    count = len(names) // run.mesh.devices
    if count < 2:
        return [None]
    size = run.mesh.devices
    return [",".join(names[slot * size : (slot + 1) * size]) for slot in range(count)]
