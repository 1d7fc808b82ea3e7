"""Starts the processes of a run, restarts them, and stops all of them: what ``launch/`` runs.

``python -m jaxtrain.supervisor KIND ...``; the scripts in ``launch/`` describe the kinds::

    local N ARGUMENT...     N processes on this machine
    platform ARGUMENT...    this node's process, on clouds that start a launcher on every node
    ssh FILE ARGUMENT...    a process on each host that FILE lists; "serve" is its part on a host
    slurm ARGUMENT...       a process on each node of this SLURM job, which is requeued
    pod ARGUMENT...         this pod's process; JobSet restarts all pods

Exit codes of a run (jaxtrain/errors.py): 0 done, 2 wrong use or input, 4 a gate or canary,
and 130 Ctrl-C or loop.max_hours end the launcher. After 75 (temporary failure) and all others (a
crash, a SIGKILL) it ends all processes and runs the same command again with ``--resume latest``.

With ``--doctor`` among its arguments, a launcher does not train. It runs ``doctor`` once on every
host and ends with the highest exit code: 0 if a run can start, 1 if there are problems.

Settings, from the environment:

- PYTHON: the interpreter (default: .venv/bin/python if it exists, else python)
- MAX_RESTARTS: restarts in a row without a new checkpoint before giving up (5)
- RESTART_DELAY_S: seconds before a restart (2); four times as long before each next one in a row,
  up to five minutes: a full disk or a lost mount may take a while
- SAVE_S: seconds that the other processes may take after one has ended with 0, 4, 75 or 130,
  because they may still be saving (300)
- GRACE_S: the same after one has crashed (10)
- KILL_S: seconds between SIGTERM and SIGKILL after that (20)
- BEAT_S, SILENCE_S: of ssh, seconds between heartbeats to each host (10), and without one until a
  host ends its process (60)

It loads no jax, and for ssh nothing but Python and this package: a machine that only starts runs
on others needs nothing installed.
"""

import contextlib
import importlib.util
import json
import os
import queue
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, NoReturn

from jaxtrain import terminal
from jaxtrain.checkpoint import pointer
from jaxtrain.errors import HOPELESS, INTERRUPTED, RUN_AGAIN, WRONG_USE, InputError, one_line
from jaxtrain.storage.atomic import expanded
from jaxtrain.xla import platform

Newest = int | str
"""The step of the newest checkpoint, or else one of these words."""
NOTHING = "nothing"  # the run directory does not exist
NONE = "none"  # it has no checkpoints
UNUSABLE = "unusable"  # a resume has moved all of them aside
UNREACHABLE = "unreachable"  # the host with the run does not respond

_LIMITS = {"MAX_RESTARTS": 5, "RESTART_DELAY_S": 2, "SAVE_S": 300, "GRACE_S": 10, "KILL_S": 20}
_LIMITS |= {"BEAT_S": 10, "SILENCE_S": 60}
_LONGEST_DELAY_S = 300
# Of pod 0: the other pods wait for process 0 for little more than twice as long.
_LONGEST_POD_DELAY_S = 120
_TICK_S = 0.1
_SWEEP_S = 5.0  # for workers of an ended process, which notice that and free their shared memory
_NEEDED = ("jax", "flax", "optax", "orbax", "grain", "tokenizers")
MARK = "JAXTRAIN_STARTED_BY_SSH"
"""The variable by which a host finds a process that was left."""
_NO_FOLDER = 97  # exit code of the command on a host if REMOTE_DIR is missing
_LATEST = ["--resume", "latest"]  # overrides the user's --resume: the last one counts


def option(name: str, arguments: Sequence[str]) -> str | None:
    """Returns the value of the last ``--name VALUE`` or ``--name=VALUE``; None without one."""
    value = None
    for number, argument in enumerate(arguments):
        if argument == name:
            value = "".join(arguments[number + 1 : number + 2])
        elif argument.startswith(f"{name}="):
            value = argument.partition("=")[2]
    return value


def run_directory(arguments: Sequence[str]) -> tuple[Path, bool]:
    """Returns where this host has a run's files, and whether the run is in a bucket.

    Raises:
        InputError: it is not the URL of a bucket, or the config cannot be loaded.
    """
    output = option("--output-dir", arguments) or ""
    if not re.match(r"(s3|gs|gcs):/", output):
        return expanded(output), False
    from jaxtrain.checkpoint import remote
    from jaxtrain.data import cache
    from jaxtrain.storage.bucket import normalized

    cache_dir = option("--data.cache_dir", arguments)
    name = option("--config", arguments)
    if name is None and arguments[:1] == ["train"]:
        name = "".join(arguments[1:2])
    if cache_dir is None and name:
        from jaxtrain import config  # loads jax, because it runs the config file

        cache_dir = config.named(name).data.cache_dir
    root = cache.path_of(None if cache_dir == "None" else cache_dir)
    return remote.stage(normalized(output, "--output-dir"), root), True


def newest_checkpoint(directory: Path) -> Newest:
    """Returns the newest checkpoint of a run on this host."""
    with contextlib.suppress(OSError):  # a disk that does not respond is as good as none
        if steps := pointer.steps(directory / "checkpoints"):
            return steps[-1]
        if (directory / pointer.ASIDE).is_dir():
            return UNUSABLE
        if directory.is_dir():
            return NONE
    return NOTHING


def make_directory(directory: Path) -> list[Path]:
    """Creates a run directory; returns the folders that were missing, the deepest first.

    Raises:
        InputError: it cannot be created.
    """
    try:
        missing = [path for path in (directory, *directory.parents) if not path.exists()]
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot create the run directory ({error.filename}: {error.strerror}): pass another "
            "--output-dir"
        ) from error
    return missing


def remove_empty(folders: Sequence[Path]) -> None:
    """Removes folders, up to the first one that is not empty."""
    with contextlib.suppress(OSError):
        for folder in folders:
            if folder.exists():
                folder.rmdir()


class Process:
    """A started process, in a process group of its own: a Ctrl-C reaches it through the launcher.

    Args:
        command: its command line.
        environment: its variables, if they are not the launcher's.
        output: where all its output goes: a file, or ``subprocess.PIPE``.
        orders: ``subprocess.PIPE`` if it reads any.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        output: IO[bytes] | int | None = None,
        orders: int = subprocess.DEVNULL,
    ) -> None:
        error = None if output is None else subprocess.STDOUT
        self.popen = subprocess.Popen(
            command, env=environment, stdin=orders, stdout=output, stderr=error, process_group=0
        )

    def code(self) -> int | None:
        """Returns the exit code as a shell has it, 128 and more for signals; None while it runs."""
        code = self.popen.poll()
        return code if code is None or code >= 0 else 128 - code

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        self.popen.send_signal(number)

    def tick(self) -> None:
        """Does what is due while it runs."""

    def sweep(self, seconds: float = _SWEEP_S) -> None:
        """Waits for the end of its group, and then kills what is left of it."""
        _sweep(self.popen.pid, seconds, self.code)


def _sweep(group: int, seconds: float, reap: Callable[[], object] = int) -> None:
    """Does that for a process group; ``reap`` collects children, which otherwise seem to run."""
    end = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < end:
            reap()
            os.killpg(group, 0)
            time.sleep(_TICK_S)
        os.killpg(group, signal.SIGKILL)


class Launcher:
    """Starts the processes of a run, waits for their end, and judges whether to start them again.

    Args:
        script: the launcher's name in messages.
        arguments: for ``jaxtrain``.
        restarts: how often an outer launcher has restarted this one.
        python: the interpreter of the run, if it is another one.

    Attributes:
        directory: of the run on this host.
        size: number of processes.
        running: the processes by index, and ``codes`` of those that have ended.
        before: the newest checkpoint before the current start.
        in_vain: starts in a row that made no new one.
        checks: how often the last of them looked again for the run's disk or host.
        stopped_by: the first stop signal; those in ``received`` are not forwarded yet.
        made: folders to remove after a rejected start or a check, the deepest first.
    """

    size = 1
    alone = True  # whether no other launcher may be about to write into the run directory
    code_without_directory = 1
    host = ""  # that is asked for checkpoints

    def __init__(
        self,
        script: str,
        arguments: Sequence[str],
        restarts: str = "0",
        python: str = sys.executable,
    ) -> None:
        self.script, self.python = script, python
        self.doctor = "--doctor" in arguments
        run_arguments = [argument for argument in arguments if argument != "--doctor"]
        self.arguments = ["doctor", *run_arguments] if self.doctor else run_arguments
        self.limits = {name: _whole(name, str(value)) for name, value in _LIMITS.items()}
        self.restarts = _whole("RESTARTS", restarts)
        self.output = option("--output-dir", arguments)
        if not self.output:
            raise InputError(
                "--output-dir is missing: a restart resumes from the checkpoints in it"
            )
        self.before: Newest = NOTHING
        self.in_vain = self.checks = 0
        self.stopped_by: signal.Signals | None = None
        self.received: list[signal.Signals] = []
        self.made: list[Path] = []
        self.running: dict[int, Process] = {}
        self.codes: dict[int, int] = {}
        self.find_directory()

    def find_directory(self) -> None:
        """Sets ``directory``.

        Raises:
            InputError: this interpreter cannot run jaxtrain.
        """
        self.directory, self.in_bucket = run_directory(self.arguments)
        lacking = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
        python = shutil.which(self.python)
        # A crash at each start would look like a bad host.
        if lacking and python and os.path.samefile(python, sys.executable):
            raise InputError(
                f"'{self.python}' has no {', '.join(lacking)}: activate the environment of "
                "jaxtrain, or set PYTHON to its interpreter, for example PYTHON=.venv/bin/python"
            )

    def run(self) -> int:
        """Returns the launcher's exit code once the run has ended."""
        code = 1
        try:
            if not self.enter():
                code = self.code_without_directory
            elif self.doctor:
                self.run_once(self.arguments)
                code = max(self.codes.values(), default=self.code_of_stop())
            else:
                code = self.until_done()
        finally:
            for process in self.running.values():  # the launcher itself has failed
                process.signal(signal.SIGKILL)
            if code == WRONG_USE or self.doctor:
                self.remove_made()
        return code

    def enter(self) -> bool:
        """Creates the run directory; later starts wait for it. Returns whether it is there."""
        if self.restarts == 0 or self.in_bucket:
            made = make_directory(self.directory)
            self.made = made if self.alone else []
            return True
        start, self.before, self.in_vain = f"this is restart {self.restarts}, and", NONE, 1
        newest = self.await_disk(start, self.newest())
        if self.is_lost(newest):
            self.say(f"{start} {self._lost(newest, ' still')}: giving up")
        self.in_vain = 0
        return not self.is_lost(newest)

    def remove_made(self) -> None:
        """Removes the folders that were made for a run that did not start."""
        remove_empty(self.made)

    def until_done(self) -> int:
        """Runs all processes until the run has ended; returns the exit code."""
        self.before = self.newest()
        resume = self.resume()
        while True:
            code = self.run_once([*self.arguments, *resume])
            if code in (0, WRONG_USE, HOPELESS):
                return code
            if self.stopped_by is None:
                if code == INTERRUPTED:
                    return code
                end = f"giving up; see the log in {self.output}"
                newest = self.start_ended(code, end)
                if newest is None:
                    # 75 would ask an outer launcher for another start
                    return 1 if code == RUN_AGAIN else code
                if not self.checks:
                    self.say(f"ended with {_named(code)}: {self.counted(newest)}")
                    self.wait(self.delay_s())
                self.before, resume = newest, _LATEST
            if self.stopped_by is not None:
                return self.code_of_stop()

    def run_once(self, arguments: Sequence[str]) -> int:
        """Runs all processes; returns the code of the first that failed, or 0."""
        self.note_signals()
        self.codes.clear()
        for index in range(self.size):
            if self.stopped_by is None:
                self.running[index] = self.start(index, arguments)
        code: int | None = None
        ended_at, sent = 0.0, None
        while self.running:
            while self.received:
                number = self.received.pop(0)
                self.send(signal.SIGTERM if number == signal.SIGHUP else number)
            ended = self._ended()
            ended_at = ended_at or (time.monotonic() if ended else 0.0)
            if ended and not code:
                code = max(ended, key=_weight)
            if code is not None:
                sent = self._end_the_others(int(time.monotonic() - ended_at), code, sent)
            for process in self.running.values():
                process.tick()
            time.sleep(_TICK_S)
        return self.code_of_stop() if not code and len(self.codes) < self.size else code or 0

    def start(self, index: int, arguments: Sequence[str]) -> Process:
        """Starts a process of the run."""
        return Process(self.program(arguments))

    def program(self, arguments: Sequence[str]) -> list[str]:
        """Returns the command line of a process."""
        return _program(self.python, arguments)

    def _ended(self) -> list[int]:
        """Returns the codes of processes that have ended since."""
        ended = []
        for index, process in list(self.running.items()):
            if (code := process.code()) is not None:
                del self.running[index]
                self.codes[index] = code
                ended.append(code)
                if code:
                    self.say(f"process {index} ended with {_named(code)}")
                process.sweep()
        return ended

    def _end_the_others(
        self, waited_s: int, code: int, sent: signal.Signals | None
    ) -> signal.Signals | None:
        """Sends SIGTERM after a while, and then SIGKILL; returns the last of them."""
        saving = self.doctor or code in (0, HOPELESS, RUN_AGAIN, INTERRUPTED)
        over_s = waited_s - self.limits["SAVE_S" if saving else "GRACE_S"]
        if not self.running or over_s < 0:
            return None
        due = signal.SIGTERM if over_s < self.limits["KILL_S"] else signal.SIGKILL
        if due != sent:
            self.send(due)
            self.say(
                f"the other processes are still running after {waited_s} s: sending {due.name}"
            )
        return due

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to all processes."""
        for process in self.running.values():
            process.signal(number)

    def note_signals(self) -> None:
        """Notes stop signals from now on, to forward them; SIGHUP not under ``nohup``."""

        def note(number: int, frame: object) -> None:
            self.received.append(signal.Signals(number))
            self.stopped_by = self.stopped_by or self.received[0]

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, note)

    def code_of_stop(self) -> int:
        """Returns the exit code after a stop signal."""
        return INTERRUPTED if self.stopped_by == signal.SIGINT else RUN_AGAIN

    def newest(self) -> Newest:
        """Returns the run's newest checkpoint."""
        return newest_checkpoint(self.directory)

    def resume(self) -> list[str]:
        """Returns ``--resume latest``; the first start uses the user's own ``--resume``."""
        has_resume = option("--resume", self.arguments) is not None
        return [] if has_resume and self.restarts == 0 else _LATEST

    def start_ended(self, code: int, end: str) -> Newest | None:
        """Counts a start, and waits while the run's disk or host is unavailable.

        Args:
            code: the exit code.
            end: what happens after too many starts in vain.

        Returns:
            The newest checkpoint; None if this was the last start.
        """
        newest = self.newest()
        self.count(newest)
        start = f"ended with {_named(code)}, and"
        newest = self.await_disk(start, newest)
        if self.in_vain <= self.limits["MAX_RESTARTS"]:
            return newest
        why = self.in_a_row(newest)
        if self.checks and self.is_lost(newest):
            times = "one check" if self.checks == 1 else f"{self.checks} checks"
            why = f"after {times} {self._lost(newest, ' still')}"
        self.say(f"{start} {why}: {end}")
        return None

    def count(self, newest: Newest) -> None:
        """Counts a start; only a later checkpoint is progress, not any change."""
        if isinstance(newest, int) and not (isinstance(self.before, int) and newest <= self.before):
            self.in_vain = 0
        self.in_vain += 1

    def counted(self, newest: Newest) -> str:
        """Returns the number of a restart."""
        most, without = self.limits["MAX_RESTARTS"], f"a new checkpoint (newest: {newest})"
        return f"restart {self.in_vain} of at most {most} without {without}"

    def in_a_row(self, newest: Newest) -> str:
        """Returns why there is no other restart."""
        most = self.limits["MAX_RESTARTS"]
        return f"{most} restarts in a row produced no new checkpoint (newest: {newest})"

    def is_lost(self, newest: Newest) -> bool:
        """Whether there was more before: the disk or the host may be unavailable."""
        if self.in_bucket:  # a resume fetches it
            return False
        if newest == NOTHING:
            return self.before not in (NOTHING, UNREACHABLE)
        return newest == UNREACHABLE or (newest == NONE and isinstance(self.before, int))

    def await_disk(self, start: str, newest: Newest) -> Newest:
        """Waits while the run's disk or host is unavailable; returns the newest checkpoint.

        Another start would create the run directory below the empty mount point and train from
        scratch.
        """
        self.checks, most = 0, self.limits["MAX_RESTARTS"]
        was = f" (before: checkpoint {self.before})" if isinstance(self.before, int) else ""
        while self.is_lost(newest) and self.in_vain <= most and self.stopped_by is None:
            ask = "." if newest == UNREACHABLE else f"{was}: is its disk mounted?"
            self.say(
                f"{start} {self._lost(newest)} now{ask} Not starting from scratch; checking again, "
                f"{self.in_vain} of at most {most} times"
            )
            self.wait(self.delay_s())
            newest = self.newest()
            self.checks += 1
            self.in_vain += self.is_lost(newest)
        return newest

    def _lost(self, newest: Newest, still: str = "") -> str:
        if newest == UNREACHABLE:
            return f"{self.host}{still} cannot be reached"
        state = "does not exist" if newest == NOTHING else "has no checkpoint"
        return f"{self.directory}{still} {state}"

    def delay_s(self) -> int:
        """Returns the seconds before this restart in a row."""
        return min(self.limits["RESTART_DELAY_S"] * 4 ** (self.in_vain - 1), _LONGEST_DELAY_S)

    def wait(self, seconds: float) -> None:
        """Waits, but not beyond a stop signal."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.stopped_by is None:
            time.sleep(_TICK_S)

    def say(self, text: str) -> None:
        """Prints a line on standard error."""
        terminal.warn(f"{self.script}: {one_line(text)}")

    def read_count(self, path: Path) -> None:
        """Reads ``before`` and ``in_vain`` as an earlier start has left them, if it has."""
        with contextlib.suppress(OSError, ValueError):
            newest, count = path.read_text().split()
            self.in_vain = int(count)
            self.before = int(newest) if newest.isdecimal() else newest

    def write_count(self, path: Path, newest: Newest) -> None:
        """Leaves both for the next start."""
        try:
            path.write_text(f"{newest} {self.in_vain}\n")
        except OSError as error:
            why = f"{path} cannot be written: {error.strerror}"
            self.say(f"restart {self.in_vain} is not counted: {why}")


def _program(python: str, arguments: Sequence[str]) -> list[str]:
    return [python, "-m", "jaxtrain.main", *arguments]


def _whole(name: str, default: str) -> int:
    text = os.environ.get(name) or default
    if not text.isdecimal():
        raise InputError(f"{name} is '{text}': set it to a whole number")
    return int(text)


def _named(code: int) -> str:
    """Returns an exit code, with the name of its signal."""
    with contextlib.suppress(ValueError):
        if code > 128:
            return f"{code} ({signal.Signals(code - 128).name})"
    return str(code)


def _weight(code: int) -> int:
    """Returns the priority of a code among processes that ended first, at the same moment."""
    if code in (WRONG_USE, HOPELESS, INTERRUPTED):
        return 2  # a restart cannot help, and the others failed because of it
    if code > 128:
        return 3  # a signal comes from outside, and the others failed because of it
    return min(code, 1)


class Local(Launcher):
    """Processes on this machine: one uses all GPUs, several share them evenly."""

    def __init__(self, script: str, arguments: Sequence[str]) -> None:
        usage = f"launch/{script} N --config NAME --output-dir DIR ..."
        if not arguments:
            raise InputError(f"how many processes? {usage}")
        count, *arguments = arguments
        if not re.fullmatch("[1-9][0-9]*", count):
            raise InputError(f"'{count}' is not a number of processes: {usage}")
        super().__init__(script, arguments)
        self.size, gpus = int(count), self._gpus()
        if gpus % self.size:
            raise InputError(
                f"{gpus} GPUs cannot be shared by {count} processes: use 1 or a divisor of {gpus}"
            )
        self._share = gpus // self.size if self.size > 1 else 0

    def _gpus(self) -> int:
        """Returns how many GPUs the processes share."""
        simulated = option("--simulate-devices", self.arguments) is not None
        return 0 if simulated else len(platform.visible_gpus(os.environ))

    def start(self, index: int, arguments: Sequence[str]) -> Process:
        """Starts a process. The output of process 0 is shown, the others have files."""
        if index == 0:  # a new port for each start: a process that is ending may use the last one
            with socket.socket() as probe:
                probe.bind(("", 0))
                self._coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
        variables = _of_process(self._coordinator, self.size, index)
        if self._share:
            devices = range(index * self._share, (index + 1) * self._share)
            variables["JAX_LOCAL_DEVICE_IDS"] = ",".join(map(str, devices))
        command, environment = self.program(arguments), os.environ | variables
        if index == 0:
            return Process(command, environment)
        log = self.directory / f"{'doctor' if self.doctor else 'log'}.{index}.txt"
        with log.open("ab") as file:
            return Process(command, environment, file)


def _of_process(coordinator: str, size: int, index: int) -> dict[str, str]:
    return {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": str(size),
        "JAX_PROCESS_ID": str(index),
    }


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout


class Platform(Launcher):
    """This node's process, which uses all its GPUs; the nodes meet again at the same address."""

    def __init__(self, script: str, arguments: Sequence[str]) -> None:
        super().__init__(script, arguments)
        nodes = os.environ.get("WORLD_SIZE") or "1"
        if not re.fullmatch("[1-9][0-9]*", nodes):
            raise InputError(f"WORLD_SIZE is '{nodes}': set it to the number of nodes")
        self.alone = nodes == "1"


class Slurm(Launcher):
    """The tasks of a SLURM job, requeued after a preemption, the time limit, or a crash."""

    def __init__(self, script: str, arguments: Sequence[str]) -> None:
        self._requeued = os.environ.get("SLURM_RESTART_COUNT")
        # PYTHON may run in a container, where srun is missing, and this does not.
        python = os.environ.get("PYTHON") or sys.executable
        super().__init__(script, arguments, self._requeued or "0", python)
        self._job = os.environ.get("SLURM_JOB_ID") or ""
        if not self._job:
            raise InputError("not running in a SLURM job: use sbatch launch/slurm.sbatch ...")

    def until_done(self) -> int:
        """Runs the tasks once, and requeues the job if another start may help."""
        self.before, file = self.newest(), self.directory / ".slurm-restarts"
        if self._requeued is not None:
            self.read_count(file)
        code = self.run_once([*self.arguments, *self.resume()])
        if code in (0, WRONG_USE, HOPELESS, INTERRUPTED):
            return code
        shown = _output(["scontrol", "show", "job", self._job])
        state = "".join(re.findall("^ *JobState=([A-Z_]*)", shown, re.MULTILINE)[:1])
        if state != "RUNNING":
            self.say(f"ended with {_named(code)}, and the job is {state}: not requeued")
            return code
        self.stopped_by = None  # a signal ends the wait below; then the next start waits
        newest = self.start_ended(code, "not requeued")
        if newest is None:
            return 1 if code == RUN_AGAIN else code
        newest = self.before if self.is_lost(newest) else newest
        self.write_count(file, newest)
        self.say(f"ended with {_named(code)}: requeued, {self.counted(newest)}")
        return subprocess.run(["scontrol", "requeue", self._job]).returncode

    def start(self, index: int, arguments: Sequence[str]) -> Process:
        """Starts all tasks."""
        options = (
            "--export=ALL",  # even after "sbatch --export=NONE": tasks need NCCL_ variables
            "--cpu-bind=none",  # otherwise SLURM binds the task to one core
            "--kill-on-bad-exit=0",
            f"--wait={self.limits['SAVE_S']}",  # seconds after the first task's end
        )
        return Process(["srun", *options, *self.program(arguments)])

    def send(self, number: signal.Signals) -> None:
        """Sends a stop signal to the tasks: srun itself would end them without time to save."""
        self.say(f"{number.name}: forwarded to the tasks")
        subprocess.run(["scancel", "--signal", number.name[3:], self._job])


class Pod(Launcher):
    """This pod's process, once. Pod 0 counts restarts, because JobSet cannot see progress.

    The exit code 2 ends the run; after all others JobSet restarts all pods.
    """

    code_without_directory = WRONG_USE

    def __init__(self, script: str, arguments: Sequence[str]) -> None:
        super().__init__(script, arguments, os.environ.get("RESTARTS") or "0")
        self.alone = os.environ.get("JAX_NUM_PROCESSES", "1") == "1"

    def run(self) -> int:
        """Returns doctor's exit code; JobSet would run it again after 1."""
        code = super().run()
        return WRONG_USE if self.doctor and code not in (0, INTERRUPTED, RUN_AGAIN) else code

    def until_done(self) -> int:
        """Becomes the process, or returns 2 after too many restarts without a new checkpoint."""
        newest, file = self.newest(), self.directory / ".pod-restarts"
        if os.environ.get("JOB_COMPLETION_INDEX", "0") == "0":
            if self.restarts:
                self.read_count(file)
                self.count(newest)
                if self.in_vain > self.limits["MAX_RESTARTS"]:
                    self.say(f"{self.in_a_row(newest)}: giving up")
                    return WRONG_USE
                self.say(self.counted(newest))
            # Before the start, because a pod that is evicted or out of memory can no longer count.
            self.write_count(file, newest)
            if self.restarts:
                time.sleep(min(self.delay_s(), _LONGEST_POD_DELAY_S))
        command = self.program([*self.arguments, *self.resume()])
        return os.execvp(command[0], command)


class Ssh(Launcher):
    """A process on each host, with all its GPUs. The first host has process 0.

    Each host runs :func:`serve`, which gets its task and then orders and heartbeats through stdin.
    """

    def __init__(self, script: str, arguments: Sequence[str]) -> None:
        if not arguments:
            usage = f"launch/{script} hosts.txt --config NAME --output-dir DIR ..."
            raise InputError(f"which hosts? {usage}")
        self._hosts = _read_hosts(arguments[0], script)
        self.size, self.host = len(self._hosts), self._hosts[0]
        super().__init__(script, arguments[1:], python=os.environ.get("PYTHON") or "python")
        self._folder = os.environ.get("REMOTE_DIR") or os.getcwd()
        settings = ("BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=15")
        options = shlex.split(os.environ.get("SSH_OPTIONS") or "")
        self._ssh = ["ssh", *options, *(word for setting in settings for word in ("-o", setting))]
        self._made: dict[str, list[str]] = {}

    def find_directory(self) -> None:
        """Leaves that to the hosts: this machine may not see the run directory."""
        self.directory, self.in_bucket = Path(str(self.output)), False

    def enter(self) -> bool:
        """Checks all hosts in parallel, and finds the address of the first one.

        Raises:
            InputError: has a line for each host that fails.
        """
        name = re.search("^hostname (.+)$", _output([*self._ssh, "-T", "-G", self.host]), re.M)
        last = name[1] if name else self.host.rpartition("@")[2]
        task = {"do": "check", "arguments": self.arguments, "name": last}
        answers = self._ask_all(dict.fromkeys(self._hosts, task))
        self._made = {host: answer.get("made", []) for host, answer in answers.items()}
        failed = [
            f"{host}: {answer['problem']}"
            for host, answer in answers.items()
            if "problem" in answer
        ]
        if failed:
            self.remove_made()
            raise InputError(*failed)
        self.in_bucket = answers[self.host]["in_bucket"]
        address = answers[self._hosts[-1]]["address"] if self.size > 1 else "127.0.0.1"
        self._address = os.environ.get("COORDINATOR_HOST") or address
        where = f"process 0 is on {self.host}, found at {self._address}"
        self.say(f"{self.size} hosts; {where}")
        return True

    def remove_made(self) -> None:
        """Removes the folders that the check made on the hosts."""
        made = {host: folders for host, folders in self._made.items() if folders}
        self._ask_all({host: {"do": "remove", "folders": made[host]} for host in made})

    def _ask_all(self, tasks: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        """Runs a short task on each host; returns their answers, or what the problem was."""
        with ThreadPoolExecutor(max(len(tasks), 1)) as pool:
            answers = pool.map(self._ask, tasks, tasks.values())
            return dict(zip(tasks, answers, strict=True))

    def _ask(self, host: str, task: Mapping[str, Any]) -> dict[str, Any]:
        done = subprocess.run(
            self._command(host),
            input=f"{json.dumps(task)}\n",
            capture_output=True,
            text=True,
            errors="replace",
        )
        with contextlib.suppress(ValueError, IndexError):
            return dict(json.loads(done.stdout.splitlines()[-1]))
        last = "".join((done.stdout + done.stderr).strip().splitlines()[-1:])
        problems = {
            255: last,  # ssh's own
            _NO_FOLDER: f"the folder {self._folder} does not exist: set REMOTE_DIR",
            127: f"'{self.python}' was not found: set PYTHON",
        }
        other = f"{self.python} cannot import jaxtrain ({last}): install it there"
        newest = UNREACHABLE if done.returncode == 255 else NOTHING
        return {"problem": problems.get(done.returncode, other), "newest": newest}

    def _command(self, host: str) -> list[str]:
        remote = shlex.join([self.python, "-m", "jaxtrain.supervisor", "serve"])
        folder = shlex.quote(self._folder)
        return [*self._ssh, host, f"cd {folder} || exit {_NO_FOLDER}; exec {remote}"]

    def newest(self) -> Newest:
        """Asks the first host, because this machine may not see the directory."""
        answer = self._ask(self.host, {"do": "newest", "arguments": self.arguments})
        newest: Newest = answer["newest"]
        return newest

    def start(self, index: int, arguments: Sequence[str]) -> Process:
        """Starts a process on its host."""
        if index == 0:
            port = os.environ.get("COORDINATOR_PORT") or random.randrange(61440, 65536)
            address = f"[{self._address}]" if ":" in self._address else self._address
            self._coordinator = f"{address}:{port}"
        variables = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("NCCL_", "XLA_")) or name in ("JAXTRAIN_CONNECT_S", "JAX_PLATFORMS")
        }
        variables |= _of_process(self._coordinator, self.size, index)
        variables[MARK] = f"{self._folder} {self.output} {index}"
        program = {"arguments": arguments, "variables": variables}
        host = self._hosts[index]
        return Connection(self._command(host), host, program, self.limits)


def _read_hosts(path: str, script: str) -> list[str]:
    """Reads one host per line; text after # is a comment.

    Raises:
        InputError: the file cannot be read, or a line is not a host.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError):
        raise InputError(
            f"cannot read the hosts file '{path}': launch/{script} hosts.txt ..."
        ) from None
    hosts: list[str] = []
    for host in (line.partition("#")[0].strip() for line in lines):
        if host.startswith("-") or len(host.split()) > 1:
            raise InputError(f"{path}: '{host}' is not a host name: write one host per line")
        if host in hosts:
            raise InputError(f"{path}: {host} is listed twice: remove one")
        hosts += [host] if host else []
    if not hosts:
        raise InputError(f"{path} lists no hosts: write one host per line")
    return hosts


class Connection(Process):
    """A process on a host, through ssh. Each line of its output begins with the host's name.

    Args:
        command: of ssh.
        host: its name.
        program: what :func:`serve` starts.
        limits: seconds.
    """

    def __init__(
        self,
        command: Sequence[str],
        host: str,
        program: Mapping[str, Any],
        limits: Mapping[str, int],
    ) -> None:
        super().__init__(command, output=subprocess.PIPE, orders=subprocess.PIPE)
        self._beat_s, self._beat_at = limits["BEAT_S"], 0.0
        self._kill_at: float | None = None
        self._tell(json.dumps({"do": "run", "limits": limits, **program}))
        self._printer = _printing(self.popen.stdout, f"[{host}] ".encode())

    def _tell(self, line: str) -> None:
        assert self.popen.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            os.write(self.popen.stdin.fileno(), f"{line}\n".encode())

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal through the host to the process there."""
        self._tell(number.name)
        if number == signal.SIGKILL:
            # A host that does not respond: without its connection the process there ends itself.
            self._kill_at = time.monotonic() + _SWEEP_S

    def tick(self) -> None:
        """Sends a heartbeat if it is due."""
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + self._beat_s
            self._tell("beat")
        if self._kill_at is not None and now >= self._kill_at:
            super().signal(signal.SIGKILL)

    def sweep(self, seconds: float = _SWEEP_S) -> None:
        """Waits for the rest of the output."""
        super().sweep(seconds)
        self._printer.join(seconds)


_print_lock = threading.Lock()


def _printing(stream: IO[bytes] | None, prefix: bytes = b"") -> threading.Thread:
    """Prints each line of a stream after a prefix; reads on if its own output is closed."""

    def work() -> None:
        for line in stream or ():
            with _print_lock, contextlib.suppress(OSError):
                sys.stdout.buffer.write(prefix + line.removesuffix(b"\n") + b"\n")
                sys.stdout.buffer.flush()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def serve() -> int:
    """Does on a host what ``ssh`` asks for in the first line of stdin, a JSON object."""
    task = json.loads(sys.stdin.readline() or "{}")
    answer: dict[str, Any] = {}
    try:
        match task.get("do"):
            case "run":
                return _serve_run(task["arguments"], task["variables"], task["limits"])
            case "check":
                launcher = Launcher("", task["arguments"])
                made = [str(path.absolute()) for path in make_directory(launcher.directory)]
                answer = {"made": made, "in_bucket": launcher.in_bucket, "address": task["name"]}
                with contextlib.suppress(OSError):
                    # Numeric, because on the first host its name may resolve to 127.0.1.1.
                    answer["address"] = socket.getaddrinfo(task["name"], None)[0][4][0]
            case "newest":
                answer["newest"] = newest_checkpoint(run_directory(task["arguments"])[0])
            case "remove":
                remove_empty([Path(folder) for folder in task["folders"]])
    except InputError as error:
        answer = {"problem": str(error), "newest": NOTHING}
    terminal.out(json.dumps(answer))
    return 0


def _serve_run(
    arguments: Sequence[str], variables: Mapping[str, str], limits: Mapping[str, int]
) -> int:
    """Runs a process, and obeys orders until it ends; without heartbeats, it ends the process."""
    # A process left by a broken connection would write into the same directory.
    for group in _left(f"{MARK}={variables[MARK]}".encode()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(group, signal.SIGTERM)
        _sweep(group, limits["KILL_S"])
    process = Process(
        _program(sys.executable, arguments), os.environ | dict(variables), subprocess.PIPE
    )
    printer = _printing(process.popen.stdout)
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    heard, lost = time.monotonic(), False
    while (code := process.code()) is None:
        order = "" if time.monotonic() - heard < limits["SILENCE_S"] else "lost"
        with contextlib.suppress(queue.Empty):
            order = orders.get(timeout=_TICK_S)
            heard = time.monotonic()
        if order == "lost":  # the launcher is gone, or the connection
            lost = True
            process.signal(signal.SIGTERM)
            process.sweep(limits["SAVE_S"])
        elif order == "SIGKILL":
            process.sweep(0)
        elif order.startswith("SIG"):
            process.signal(signal.Signals[order])
    process.sweep()
    printer.join(_SWEEP_S)
    return RUN_AGAIN if lost else code


def _listen(orders: "queue.SimpleQueue[str]") -> None:
    """Reads orders, one per line, and the end of the connection."""
    for line in sys.stdin:
        orders.put(line.strip())
    orders.put("lost")


def _left(mark: bytes) -> list[int]:
    """Returns this user's process groups whose leader was started with a variable."""
    left = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's process, or gone
            leads = os.getpgid(int(folder.name)) == int(folder.name)
            if leads and mark in (folder / "environ").read_bytes().split(b"\0"):
                left.append(int(folder.name))
    return left


_LAUNCHERS: dict[str, tuple[str, Callable[[str, Sequence[str]], Launcher]]] = {
    "local": ("local.sh", Local),
    "platform": ("platform.sh", Platform),
    "ssh": ("ssh.sh", Ssh),
    "slurm": ("slurm.sbatch", Slurm),
    "pod": ("pod.sh", Pod),
}


def main(arguments: Sequence[str]) -> int:
    """Runs a launcher and returns its exit code."""

    def stop(number: int, frame: object) -> NoReturn:
        sys.exit(INTERRUPTED if number == signal.SIGINT else RUN_AGAIN)

    for number in (signal.SIGTERM, signal.SIGINT):  # until there are processes to forward them to
        signal.signal(number, stop)
    try:
        if arguments[:1] == ["serve"]:
            return serve()
        if not arguments or arguments[0] not in _LAUNCHERS:
            raise InputError(f"which launcher? {', '.join(_LAUNCHERS)}")
        script, launcher = _LAUNCHERS[arguments[0]]
        return launcher(script, arguments[1:]).run()
    except InputError as error:
        terminal.fail(error)
        return WRONG_USE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
