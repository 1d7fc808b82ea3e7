"""Starts the processes of a run, restarts them, and stops all of them: what ``launch/`` runs.

``python -m jaxtrain.supervisor KIND ...``; the scripts in ``launch/`` describe the kinds::

    local N ARGUMENT...     N processes on this machine
    platform ARGUMENT...    this node's process; ssh.sh, or a cloud, starts a launcher on every node
    slurm ARGUMENT...       a process on each node of this SLURM job, which is requeued
    pod ARGUMENT...         this pod's process; JobSet restarts all pods

Exit codes of a run (jaxtrain/errors.py): 0 done, 2 wrong use or input, 4 a gate or canary,
and 130 Ctrl-C or loop.max_hours end the launcher. After 75 (temporary failure) and all others (a
crash, a SIGKILL) it ends all processes and runs the same command again.

The arguments are passed on unchanged, with ``--again`` where the run may have started before: then
the run continues what it has begun. Your own ``--resume`` is different, as a start that is killed
early has recorded nothing, and the next one must do the same. So all starts of a launch have one
name in JAXTRAIN_LAUNCH, such as that of SLURM's job, which the run records and compares. Where the
name is unknown, all starts with ``--resume`` but the first have ``--again``.

With ``--doctor`` among its arguments, a launcher does not train. It runs ``doctor`` once on every
host and ends with the highest exit code: 0 if a run can start, 1 if there are problems.

Settings, from the environment:

- PYTHON: the interpreter (default: .venv/bin/python if it exists, else python)
- MAX_RESTARTS: restarts in a row without a new checkpoint before giving up (5)
- RESTART_DELAY_S: seconds before a restart (2); four times as long before each next one in a row,
  up to five minutes: a full disk or a lost mount may take a while
- SAVE_S: seconds that the other processes may take after one has ended with 0, 4, 75 or 130,
  because they may still be saving (300); another run in the directory may take as long to end
- GRACE_S: the same after one has crashed (10)
- KILL_S: seconds between SIGTERM and SIGKILL after that (20)

It loads no jax.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, NoReturn

from jaxtrain import terminal
from jaxtrain.checkpoint import store
from jaxtrain.checkpoint.own_files import LAUNCH, RESTARTS
from jaxtrain.errors import (
    DONE,
    HOPELESS,
    INTERRUPTED,
    RUN_AGAIN,
    WRONG_USE,
    InputError,
    RunAgain,
    one_line,
)
from jaxtrain.storage import lock, run_marker
from jaxtrain.storage.atomic import expanded
from jaxtrain.xla import platform

Newest = int | str
"""The step of the newest checkpoint, or else one of these words."""
NOTHING = "nothing"  # the run directory does not exist
NONE = "none"  # it has no checkpoints
UNUSABLE = "unusable"  # a resume has moved all of them aside

_LIMITS = {"MAX_RESTARTS": 5, "RESTART_DELAY_S": 2, "SAVE_S": 300, "GRACE_S": 10, "KILL_S": 20}
_LONGEST_DELAY_S = 300
# Of pod 0: the other pods wait for process 0 for little more than twice as long.
_LONGEST_POD_DELAY_S = 120
_TICK_S = 0.1
_SWEEP_S = 5.0  # for workers of an ended process, which notice that and free their shared memory
_NEEDED = ("jax", "flax", "optax", "orbax", "grain", "tokenizers")
_AGAIN = "--again"


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
    in_bucket = re.match(r"(s3|gs|gcs):/", output) is not None
    if not in_bucket or not _has("obstore"):
        return expanded(output), in_bucket
    from jaxtrain.checkpoint import remote
    from jaxtrain.storage import cache
    from jaxtrain.storage.bucket import normalized

    cache_dir = option("--data.cache_dir", arguments) or option("--data.cache-dir", arguments)
    name = option("--config", arguments)
    if name is None and arguments[:1] == ["train"]:
        name = "".join(arguments[1:2])
    if cache_dir is None and name:
        from jaxtrain import config  # loads jax, because it runs the config file

        cache_dir = config.named(name).data.cache_dir
    root = cache.path_of(None if cache_dir == "None" else cache_dir)
    return remote.stage(normalized(output, "--output-dir"), root), True


def newest_checkpoint(place: store.Place) -> Newest:
    """Returns the newest checkpoint of a run that exists."""
    checkpoints = store.CheckpointStore(place)
    if steps := checkpoints.steps():
        return steps[-1]
    return UNUSABLE if checkpoints.has_unusable() else NONE


@dataclasses.dataclass(frozen=True)
class Count:
    """What a launcher knows of the starts before.

    Attributes:
        in_vain: how often in a row there was no later one: after a start, or while the run's disk
            was unavailable.
    """

    newest: Newest = NOTHING
    in_vain: int = 0

    def lost(self, newest: Newest) -> str:
        """Returns what the run lacks now, if there was more before: its disk may be unavailable."""
        if newest == NOTHING and self.newest != NOTHING:
            return "does not exist"
        return "has no checkpoint" if newest == NONE and isinstance(self.newest, int) else ""

    def after(self, newest: Newest, *, started: bool = True) -> "Count":
        """Returns the count after a start, or after another look at a run that was lost.

        Only a later checkpoint is progress, not any change.
        """
        lost = bool(self.lost(newest))
        later = isinstance(newest, int) and not (
            isinstance(self.newest, int) and newest <= self.newest
        )
        in_vain = 1 if later else self.in_vain + (started or lost)
        return Count(self.newest if lost else newest, in_vain)


def make_directory(directory: Path) -> list[Path]:
    """Creates a run directory; returns the folders that were missing, the deepest first."""
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
    """A started process in a process group of its own: a Ctrl-C reaches it through the launcher."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        output: IO[bytes] | None = None,
    ) -> None:
        error = None if output is None else subprocess.STDOUT
        self.popen = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=error,
            process_group=0,
        )

    def code(self) -> int | None:
        """Returns the exit code as a shell has it, 128 and more for signals; None while it runs."""
        code = self.popen.poll()
        return code if code is None or code >= 0 else 128 - code

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        self.popen.send_signal(number)

    def sweep(self) -> None:
        """Waits for the end of its group, and then kills what is left of it."""
        end = time.monotonic() + _SWEEP_S
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < end:
                self.code()  # reaps it: until then it seems to run
                os.killpg(self.popen.pid, 0)
                time.sleep(_TICK_S)
            os.killpg(self.popen.pid, signal.SIGKILL)


class Launcher:
    """Starts the processes of a run, waits for their end, and judges whether to start them again.

    Args:
        restarts: how often an outer launcher has restarted this one.

    Attributes:
        directory: of the run on this host.
        running: the processes by index, and ``codes`` of those that have ended.
        place: of its checkpoints; None if this interpreter cannot read the bucket.
        stopped_by: the first stop signal; those in ``received`` are not forwarded yet.
        made: folders to remove after a rejected start or a check, the deepest first.
    """

    size = 1
    alone = True  # whether no other launcher may be about to write into the run directory
    has_first = True  # whether it starts process 0
    code_without_directory = 1

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
        self.limits = {name: _whole_number(name, str(value)) for name, value in _LIMITS.items()}
        self.restarts = _whole_number("RESTARTS", restarts)
        self.output = option("--output-dir", arguments)
        if not self.output:
            raise InputError(
                "--output-dir is missing: a restart resumes from the checkpoints in it"
            )
        self.count = Count()
        self.stopped_by: signal.Signals | None = None
        self.received: list[signal.Signals] = []
        self.made: list[Path] = []
        self.running: dict[int, Process] = {}
        self.codes: dict[int, int] = {}
        self.find_directory()

    def find_directory(self) -> None:
        """Sets ``directory``."""
        lacking = [name for name in _NEEDED if not _has(name)]
        python = shutil.which(self.python)
        # A crash at each start would look like a bad host.
        if lacking and python and os.path.samefile(python, sys.executable):
            raise InputError(
                f"'{self.python}' has no {', '.join(lacking)}: activate the environment of "
                "jaxtrain, or set PYTHON to its interpreter, for example PYTHON=.venv/bin/python"
            )
        self.directory, self.in_bucket = run_directory(self.arguments)
        self.place = self._place()

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
                remove_empty(self.made)
        return code

    def _place(self) -> store.Place | None:
        if not self.in_bucket:
            return store.Folder(self.directory)
        if not _has("obstore"):
            self.say(
                f"'{sys.executable}' has no obstore, so restarts of a run in a bucket are not "
                "counted: install obstore for it"
            )
            return None
        from jaxtrain.storage.bucket import Bucket, normalized

        return store.BucketFolder(Bucket(normalized(str(self.output), "--output-dir")))

    def enter(self) -> bool:
        """Creates the run directory; later starts wait for it. Returns whether it is there."""
        if self.place is None:
            return True
        if self.restarts == 0 or self.in_bucket:
            made = make_directory(self.directory)
            self.made = made if self.alone else []
            if not self.in_bucket and not run_marker.is_run(self.directory):  # before logs are
                names = os.listdir(self.directory)
                if refusal := run_marker.refusal(str(self.output), "--output-dir", names):
                    raise InputError(refusal)
            return True
        start, self.count = f"this is restart {self.restarts}, and", Count(NONE)
        if lost := self.look(start, started=False):
            self.say(f"{start} {self.output} still {lost}: giving up")
        return not lost

    def refuse_second(self) -> None:
        """Waits for the end of another run in the directory, which may be saving.

        Otherwise each start would be refused by the run, and the checkpoints of the other one would
        count as progress.
        """
        end, waits = time.monotonic() + self.limits["SAVE_S"], False
        while self.stopped_by is None and (other := lock.holder(self.directory)):
            if time.monotonic() >= end:
                raise InputError(
                    f"another run is using {self.output} ({other}): wait until it ends, or stop it"
                )
            if not waits:
                self.say(f"waiting until the run in {self.output} ends ({other})")
            waits = True
            self.wait(1)

    def until_done(self) -> int:
        """Runs all processes until the run has ended; returns the exit code."""
        self.count = Count(self.newest())
        again = self.restarts > 0
        if not again:  # else the name of the starts before is unknown
            os.environ.setdefault(LAUNCH, f"{self.script}-{secrets.token_hex(8)}")
        while True:
            if self.has_first:
                self.refuse_second()
            code = self.run_once(self.arguments_of_start(again=again))
            if code in (0, WRONG_USE, HOPELESS):
                return code
            if self.stopped_by is None:
                if code == INTERRUPTED:
                    return code
                if not self.may_start(code, f"giving up; see the log in {self.output}"):
                    # 75 would ask an outer launcher for another start
                    return 1 if code == RUN_AGAIN else code
                self.say(f"ended with {_named(code)}: {self.counted()}")
                self.wait(self.delay_s())
            if self.stopped_by is not None:
                return self.code_of_stop()
            again = True

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
            time.sleep(_TICK_S)
        return self.code_of_stop() if not code and len(self.codes) < self.size else code or 0

    def start(self, index: int, arguments: Sequence[str]) -> Process:
        """Starts a process of the run."""
        return Process(self.program(arguments))

    def program(self, arguments: Sequence[str]) -> list[str]:
        """Returns the command line of a process."""
        return _program(self.python, arguments)

    def _ended(self) -> list[int]:
        ended = []
        for index, process in list(self.running.items()):
            if (code := process.code()) is not None:
                del self.running[index]
                self.codes[index] = code
                ended.append(code)
                if code:
                    name = f"process {index}" if self.size > 1 else "the process"
                    self.say(f"{name} ended with {_named(code)}")
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
        """Returns the run's newest checkpoint; the last known one if its bucket is unavailable."""
        if self.place is None:
            return NONE
        try:
            if self.in_bucket or self.directory.is_dir():
                return newest_checkpoint(self.place)
        except (InputError, RunAgain) as error:
            self.say(f"cannot look for checkpoints: {error}")
            return NONE if self.count.newest == NOTHING else self.count.newest
        except OSError:  # a disk that does not respond is as good as none
            pass
        return NOTHING

    def arguments_of_start(self, *, again: bool) -> list[str]:
        """Returns the user's arguments, with ``--again`` if that is right for each start."""
        has_resume = option("--resume", self.arguments) is not None
        knows = has_resume and (not again or bool(os.environ.get(LAUNCH)))
        return [*self.arguments, *([] if knows or _AGAIN in self.arguments else [_AGAIN])]

    def may_start(self, code: int, end: str) -> bool:
        """Counts a start that has ended; returns whether another one may help."""
        start = f"ended with {_named(code)}, and"
        lost = self.look(start)
        if self.count.in_vain <= self.limits["MAX_RESTARTS"]:
            return True
        why = f"{self.output} still {lost}" if lost else self.in_a_row()
        self.say(f"{start} {why}: {end}")
        return False

    def look(self, start: str, *, started: bool = True) -> str:
        """Counts a start, and waits while the run is lost.

        Another start would create the run directory below the empty mount point and train from
        scratch.

        Returns:
            What the run lacks; "" if nothing.
        """
        newest, max_restarts = self.newest(), self.limits["MAX_RESTARTS"]
        lost, self.count = self.count.lost(newest), self.count.after(newest, started=started)
        mounted = "" if self.in_bucket else ": is its disk mounted?"
        while lost and self.count.in_vain <= max_restarts and self.stopped_by is None:
            before = self.count.newest
            was = f" (before: checkpoint {before})" if isinstance(before, int) else ""
            self.say(
                f"{start} {self.output} {lost} now{was}{mounted or '.'} Not starting from scratch; "
                f"checking again, {self.count.in_vain} of at most {max_restarts} times"
            )
            self.wait(self.delay_s())
            newest = self.newest()
            lost, self.count = self.count.lost(newest), self.count.after(newest, started=False)
        return lost

    def counted(self) -> str:
        """Returns the number of a restart."""
        max_restarts, newest = self.limits["MAX_RESTARTS"], self.count.newest
        number = f"restart {self.count.in_vain} of at most {max_restarts}"
        return f"{number} without a new checkpoint (newest: {newest})"

    def in_a_row(self) -> str:
        """Returns why there is no other restart."""
        max_restarts, newest = self.limits["MAX_RESTARTS"], self.count.newest
        return f"{max_restarts} restarts in a row produced no new checkpoint (newest: {newest})"

    def delay_s(self) -> int:
        """Returns the seconds before this restart in a row."""
        return min(self.limits["RESTART_DELAY_S"] * 4 ** (self.count.in_vain - 1), _LONGEST_DELAY_S)

    def wait(self, seconds: float) -> None:
        """Waits, but not beyond a stop signal."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.stopped_by is None:
            time.sleep(_TICK_S)

    def say(self, text: str) -> None:
        """Prints a line on standard error."""
        terminal.warn(f"{self.script}: {one_line(text)}")

    def read_count(self) -> None:
        """Reads the count of an earlier start of this launch, if there is one."""
        self.count = Count(self.newest())
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError, InputError, RunAgain):
            content = self.place.get(RESTARTS) if self.place is not None else None
            record = json.loads(content or b"{}")
            if record["launch"] == os.environ.get(LAUNCH, ""):
                self.count = Count(record["newest"], int(record["in_vain"]))

    def forget_count(self) -> None:
        """Deletes the count of another launch."""
        with contextlib.suppress(OSError, InputError, RunAgain):
            if self.place is not None and self.place.get(RESTARTS) is not None:
                self.place.delete(RESTARTS)

    def write_count(self) -> None:
        """Leaves the count for the next start of this launch."""
        if self.place is None or not (self.in_bucket or self.directory.is_dir()):
            return
        record = {"launch": os.environ.get(LAUNCH, ""), **dataclasses.asdict(self.count)}
        try:
            self.place.put(RESTARTS, f"{json.dumps(record)}\n".encode())
        except (OSError, InputError, RunAgain) as error:
            why = error.strerror if isinstance(error, OSError) else error
            self.say(f"restart {self.count.in_vain} is not counted: {RESTARTS}: {why}")


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _program(python: str, arguments: Sequence[str]) -> list[str]:
    return [python, "-m", "jaxtrain.main", *arguments]


def _whole_number(name: str, default: str) -> int:
    text = os.environ.get(name) or default
    if not text.isdecimal():
        raise InputError(f"{name} is '{text}': set it to a whole number")
    return int(text)


def _named(code: int) -> str:
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
        if count in ("--help", "-h"):
            terminal.out(f"usage: {usage}")
            raise SystemExit(DONE)
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
        super().__init__(script, arguments, os.environ.get("RESTARTS") or "0")
        nodes = os.environ.get("WORLD_SIZE") or "1"
        if not re.fullmatch("[1-9][0-9]*", nodes):
            raise InputError(f"WORLD_SIZE is '{nodes}': set it to the number of nodes")
        self.alone, self.has_first = nodes == "1", (os.environ.get("RANK") or "0") == "0"


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
        cluster = os.environ.get("SLURM_CLUSTER_NAME")
        os.environ[LAUNCH] = "-".join(filter(None, ("slurm", cluster, self._job)))

    def until_done(self) -> int:
        """Runs the tasks once, and requeues the job if another start may help."""
        self.read_count()
        if self._requeued is None:
            self.count = Count(self.count.newest)
            self.refuse_second()
        code = self.run_once(self.arguments_of_start(again=self._requeued is not None))
        if code in (0, WRONG_USE, HOPELESS, INTERRUPTED):
            return code
        description = _output(["scontrol", "show", "job", self._job])
        state = "".join(re.findall("^ *JobState=([A-Z_]*)", description, re.MULTILINE)[:1])
        if state != "RUNNING":
            self.say(f"ended with {_named(code)}, and the job is {state}: not requeued")
            return code
        self.stopped_by = None  # a signal ends the wait below; then the next start waits
        if not self.may_start(code, "not requeued"):
            return 1 if code == RUN_AGAIN else code
        self.write_count()
        self.say(f"ended with {_named(code)}: requeued, {self.counted()}")
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
        self.has_first = os.environ.get("JOB_COMPLETION_INDEX", "0") == "0"
        if uid := os.environ.get("JOBSET_UID"):
            os.environ[LAUNCH] = f"jobset-{uid}"

    def run(self) -> int:
        """Returns doctor's exit code; JobSet would run it again after 1."""
        code = super().run()
        return WRONG_USE if self.doctor and code not in (0, INTERRUPTED, RUN_AGAIN) else code

    def until_done(self) -> int:
        """Becomes the process, or returns 2 after too many restarts without a new checkpoint."""
        if self.has_first and self.restarts:
            self.read_count()
            self.count = self.count.after(self.newest())
            if self.count.in_vain > self.limits["MAX_RESTARTS"]:
                self.say(f"{self.in_a_row()}: giving up")
                return WRONG_USE
            self.say(self.counted())
            # Before the start, because a pod that is evicted or out of memory can no longer count.
            self.write_count()
            time.sleep(min(self.delay_s(), _LONGEST_POD_DELAY_S))
        elif self.has_first:
            self.refuse_second()
            self.forget_count()
        command = self.program(self.arguments_of_start(again=self.restarts > 0))
        return os.execvp(command[0], command)


_LAUNCHERS: dict[str, tuple[str, Callable[[str, Sequence[str]], Launcher]]] = {
    "local": ("local.sh", Local),
    "platform": ("platform.sh", Platform),
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
        if not arguments or arguments[0] not in _LAUNCHERS:
            raise InputError(f"which launcher? {', '.join(_LAUNCHERS)}")
        script, launcher = _LAUNCHERS[arguments[0]]
        return launcher(script, arguments[1:]).run()
    except InputError as error:
        terminal.fail(error)
        return WRONG_USE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
