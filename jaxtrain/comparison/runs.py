"""Trains the runs of a comparison, each in a process of its own, and reads their results."""

import dataclasses
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint.pointer import ASIDE, KINDS
from jaxtrain.comparison.side import Facts, Side
from jaxtrain.errors import DONE, INTERRUPTED, RUN_AGAIN, InputError, RunAgain
from jaxtrain.jobs import subprocess_worker
from jaxtrain.jobs.subprocess_worker import SubprocessWorker, WorkerFailed
from jaxtrain.reporting import facts as run_facts
from jaxtrain.reporting import run_files, times
from jaxtrain.storage import lock, run_marker
from jaxtrain.terminal import Say
from jaxtrain.xla import platform

TRIES = 5  # of a run that ends with a temporary failure
_BETWEEN_TRIES_S = 5.0
_EVERY_S = 30.0  # between lines about runs that train
_SAVES_S = 60.0  # that a run has to save when it is stopped, or when the comparison is killed
_ENDS_S = 5.0
_FORGET = {"step", "time"}
_TRAIN, _EXAMINE = "jaxtrain.cli.train:in_worker", "jaxtrain.comparison.side:examine"
_KILLED = -9


@dataclasses.dataclass(frozen=True)
class Result:
    """What a run shows that has ended.

    Attributes:
        value: the metric, of its last validation; None if the run diverged.
        diverged: how it did; "" if it did not.
        seconds: of all its starts, without the time between them.
    """

    value: float | None
    diverged: str
    seconds: float
    directory: Path


class Failed(Exception):
    """A run ended in a way that no further try changes; the message says how."""


def folder_of(facts: Facts, seed: int, runs: Path) -> Path:
    """Returns the directory of a run: the same for the same identity and seed.

    So a comparison that continues finds its runs, and comparisons can share them.
    """
    return runs / f"{facts.name}-seed{seed}-{facts.identity[:10]}"


def read(directory: Path, metric: str) -> Result:
    """Reads the result of a run."""
    run = run_files.read(directory, directory.name)
    account = times.account(run.history)
    seconds = account.total_s if account else math.nan
    end = _end(run)
    if end.get("diverged"):  # by a gate, a canary, or bad steps
        return Result(None, str(end.get("why")), seconds, directory)
    ending = run_facts.ending(run)
    if ending.state != "done":
        raise InputError(f"{directory}: this run is not done ({ending.sentence}): finish it first")
    validations = [record for record in run.records if metric in record]
    if not validations:
        names = sorted({name for record in run.records for name in record if "/" in name})
        raise InputError(f"{directory} has no {metric}: choose --metric from {', '.join(names)}")
    value = validations[-1][metric]
    if value is None or not math.isfinite(value):
        return Result(None, f"{metric} is NaN/Inf at the end", seconds, directory)
    return Result(float(value), "", seconds, directory)


def _end(run: run_files.RecordedRun) -> Mapping[str, Any]:
    """Returns the end of the newest start; {} if it has none."""
    attempts = times.attempts(run.history)
    return (attempts[-1].end if attempts else None) or {}


def has_ended(directory: Path) -> bool:
    """Whether a run has ended with all its steps, or by diverging."""
    if not directory.is_dir():
        return False
    end = _end(run_files.read(directory, directory.name))
    return end.get("code") == DONE or bool(end.get("diverged"))


def is_of(directory: Path, data: str, codes: frozenset[str]) -> bool:
    """Whether all of a run was computed from these data, and by code of these digests."""
    if not directory.is_dir():
        return True
    return all(
        event.get("data") == data and event.get("code") in codes
        for event in run_files.read(directory, directory.name).history
        if event["event"] == "compiled"
    )


def discard(directory: Path) -> None:
    """Deletes the directory of a run.

    Raises:
        RunAgain: a process trains there.
    """
    if not (directory / run_marker.NAME).is_file():
        raise InputError(f"{directory} is not a run: move it away, or choose another --runs")
    if holder := lock.holder(directory):
        raise RunAgain(f"another run is using {directory} ({holder}): wait until it ends")
    shutil.rmtree(directory)


def delete_checkpoints(directory: Path) -> None:
    """Deletes the checkpoints of a finished run; its records stay."""
    if (directory / run_marker.NAME).is_file():
        for name in (*KINDS, ASIDE):
            shutil.rmtree(directory / name, ignore_errors=True)


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
    """Examines sides and trains runs, several beside each other if there are devices for them.

    Enter it: every half minute it prints what is in work, until you leave; then all runs stop.
    """

    def __init__(
        self, environment: Mapping[str, str], simulate_devices: int | None, say: Say
    ) -> None:
        self._environment = dict(environment)
        self._simulate_devices = simulate_devices
        self._say = say
        self._working: dict[SubprocessWorker, tuple[float, Callable[[], str]]] = {}
        self._lock = threading.Lock()
        self._stop, self._left = threading.Event(), threading.Event()

    def __enter__(self) -> "Trainer":
        threading.Thread(target=self._report, name="progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._left.set()
        self.stop()

    @property
    def stopped(self) -> bool:
        """Returns whether a stop has reached the runs."""
        return self._stop.is_set()

    def examine(self, side: Side, label: str, **options: Any) -> Facts:
        """Finds the facts of a side."""
        request = {
            "config": side.config_in_its_code,
            "overrides": [*side.overrides],
            "side": label,
            "simulate_devices": self._simulate_devices,
            **options,
        }
        last: dict[str, Any] = {}
        try:
            for message in self._messages(
                _EXAMINE, request, side.folder, None, lambda: f"examining side {label}"
            ):
                if "say" in message and message["say"].startswith("warning"):
                    self._say(message["say"])
                last = message
        except WorkerFailed as failed:
            if self.stopped:
                raise RunAgain("stopped: the same command continues") from None
            raise InputError(f"side {label} cannot be built: {failed}") from None
        return Facts.from_json(last["facts"])

    def train(
        self, side: Side, facts: Facts, seed: int, directory: Path, gpus: str | None, label: str
    ) -> None:
        """Trains a run to its end, from where it is.

        Args:
            gpus: CUDA_VISIBLE_DEVICES; None does not set it.

        Raises:
            Failed: the run cannot end well, and has not diverged.
            RunAgain: the comparison was stopped, or the run had temporary failures only.
        """
        arguments = [
            "--config",
            side.config_in_its_code,
            *side.overrides,
            *facts.length,
            "--seed",
            str(seed),
        ]
        arguments += ["--output-dir", str(directory), "--resume", "latest"]
        if self._simulate_devices is not None:
            arguments += ["--simulate-devices", str(self._simulate_devices)]
        directory.parent.mkdir(parents=True, exist_ok=True)

        def progress() -> str:
            return f"training {label}, seed {seed}: step {_step(directory)} of {facts.steps}"

        why = ""
        for _ in range(TRIES):
            try:
                code, why = self._once(arguments, side.folder, gpus, progress)
            except InputError as error:
                if has_ended(directory):  # bad steps are an error, too
                    return
                raise Failed(str(error)) from None
            except RunAgain as error:
                code, why = RUN_AGAIN, str(error)
            if code == DONE or has_ended(directory):
                return
            if self.stopped or code == INTERRUPTED:
                raise RunAgain("stopped: the same command continues")
            if code not in (RUN_AGAIN, _KILLED):
                raise Failed(f"ended with {code}: {why}")
            self._stop.wait(_BETWEEN_TRIES_S)
        raise RunAgain(f"{directory} had {TRIES} temporary failures; the last one: {why}")

    def _once(
        self, arguments: list[str], code: Path | None, gpus: str | None, progress: Callable[[], str]
    ) -> tuple[int, str]:
        """Starts a run once; returns its exit code, and the reason if it has one."""
        try:
            request = {"arguments": arguments}
            (message,) = self._messages(_TRAIN, request, code, gpus, progress)
        except WorkerFailed as failed:  # it ended itself, as after a hang
            return failed.code, str(failed)
        return int(message["code"]), ""

    def _messages(
        self,
        function: str,
        request: dict[str, Any],
        code: Path | None,
        gpus: str | None,
        progress: Callable[[], str],
    ) -> Any:
        devices = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
        variables = subprocess_worker.environment(self._environment | devices)
        with self._lock:
            if self.stopped:
                raise RunAgain("stopped: the same command continues")
            # Only a run has something to save.
            grace_s = _SAVES_S if function == _TRAIN else _ENDS_S
            worker = SubprocessWorker(function, request, variables, grace_s, code)
            self._working[worker] = time.monotonic(), progress
        try:
            with worker:
                yield from worker.messages(math.inf)
        finally:
            with self._lock:
                del self._working[worker]

    def stop(self) -> None:
        """Stops all runs after their current step; they save, and no other one starts."""
        self._stop.set()
        with self._lock:
            for worker in self._working:
                worker.terminate()

    def _report(self) -> None:
        while not self._left.wait(_EVERY_S):
            with self._lock:
                lines = [
                    f"  {progress()}, {(time.monotonic() - began) / 60:.1f} min"
                    for began, progress in self._working.values()
                ]
            try:
                for line in lines:
                    self._say(line)
            except OSError:  # the pipe or the terminal is closed, which ends the main thread, too
                return


def _step(directory: Path) -> int:
    try:
        lines = (directory / run_files.METRICS).read_bytes().splitlines()
        return int(json.loads(lines[-1])["step"])
    except (OSError, ValueError, LookupError, TypeError):
        return 0


def slots(mesh: Any, simulate_devices: int | None) -> list[str | None]:
    """Returns the devices of each run that may train beside the others, as CUDA_VISIBLE_DEVICES.

    One run at a time on CPUs, and for a config that takes all devices; then the element is None.
    """
    if simulate_devices is not None or mesh.auto:
        return [None]
    names = platform.visible_gpus(os.environ)
    count = len(names) // mesh.devices
    if count < 2:
        return [None]
    size = mesh.devices
    return [",".join(names[slot * size : (slot + 1) * size]) for slot in range(count)]
