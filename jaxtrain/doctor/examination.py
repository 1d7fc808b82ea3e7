"""Runs the groups of checks in a separate process, each with a time limit.

A dead mount or a hanging NCCL blocks that process and not the doctor: it is ended, the hang is a
finding, and the remaining groups run in a new process.
"""

import contextlib
import dataclasses
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import Any

from jaxtrain import terminal
from jaxtrain.doctor.finding import Finding, problem
from jaxtrain.xla.subprocess_worker import SubprocessWorker, WorkerFailed, environment

GROUPS = ("processes", "devices", "system", "collective", "data", "checkpoint", "others")
LIMITS_S: Mapping[str, float] = {
    "processes": 60.0,  # the others may start later
    "devices": 30.0,
    "system": 10.0,
    "collective": 30.0,
    "data": 45.0,
    "checkpoint": 45.0,
    "others": 90.0,  # slower hosts
}
_START_S = 60.0
_REMOVE_S = 10.0
_FUNCTION = "jaxtrain.doctor.worker:examine"
_CURES = {
    "processes": "start all processes at the same time; open the coordinator's port between the "
    "hosts",
    "devices": "check nvidia-smi, and dmesg for Xid errors: a GPU that does not answer needs a "
    "restart",
    "system": "a file system does not answer: check df, and mount for a dead network mount",
    "collective": "NCCL_DEBUG=INFO shows where it waits: the network between the GPUs or hosts "
    "(NCCL_SOCKET_IFNAME), or a missing process",
    "data": "large data takes long to open the first time, in doctor or in the run: start the run "
    "once on one host; if the data is on a network file system, check that it answers (ls)",
    "checkpoint": "the disk of --output-dir is slow or does not answer: check df, iostat -x 1",
    "others": "see what the other processes printed",
}

_CRASH_CURE = "see dmesg (out of memory, Xid errors of a GPU); for NCCL, set NCCL_DEBUG=INFO"
_HANGS = {
    "start": "the process that runs the checks did not start",
    "processes": "the processes of the run did not all connect",
    "system": "the host, or the disk of --output-dir, did not answer",
    "collective": "the devices did not finish an all-reduce",
    "data": "the data did not open and yield batches",
    "checkpoint": "a small checkpoint was not written and read",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorRequest:
    """The run to check.

    Attributes:
        config: its config, a name or a path.
        overrides: fields set on the command line, as typed.
        output_dir: where the run would write; None for the run's default.
        resume: what the run would resume from, as typed; None if it would not resume.
        simulate_devices: number of virtual CPU devices; None for the real devices.
    """

    config: str
    overrides: tuple[str, ...]
    output_dir: str | None
    resume: str | None
    simulate_devices: int | None


Event = dict[str, Any] | Finding


def examine(request: DoctorRequest, limits: Mapping[str, float] = LIMITS_S) -> Iterator[Event]:
    """Yields findings and the messages of :mod:`jaxtrain.doctor.worker`, as they arrive.

    Args:
        request: the run to check.
        limits: group -> seconds; a group without a limit is skipped.

    Raises:
        InputError: the config is wrong.
    """
    left = [name for name in GROUPS if name in limits]
    connect = True
    about = False
    while left:
        group, limit, began = "start", _START_S, time.monotonic()
        scratch: list[str] = []
        with _worker(request, left, connect, scratch) as worker:
            while True:
                try:
                    message = worker.receive(began + limit - time.monotonic())
                except TimeoutError:
                    late = _HANGS.get(group, f"the checks of '{group}' did not finish")
                    cure = _CURES.get(group, "check whether this host is overloaded: uptime, free")
                    yield _stopped(group, f"{late} within {limit:.0f} s", cure)
                    break
                except WorkerFailed as failed:
                    yield _stopped(
                        group, f"the process that checks '{group}' {failed}", _CRASH_CURE
                    )
                    break
                if message is None or "done" in message:
                    return
                if "scratch" in message:
                    scratch.append(message["scratch"])
                if "group" in message:
                    group = message["group"]
                    limit, began = limits[group], time.monotonic()
                if "finding" in message:
                    yield Finding(**message["finding"])
                elif "group" in message or ("about" in message and not about):
                    about = about or "about" in message
                    yield message
        if group not in left:  # before the first group: a new process would fail again
            return
        left = left[left.index(group) + 1 :]
        # The other processes still wait for the one that was ended: this one continues alone.
        connect = False
        left = [name for name in left if name != "others"]
        if left:
            left = ["processes", *left] if left[0] != "processes" else left


@contextlib.contextmanager
def _worker(
    request: DoctorRequest, groups: list[str], connect: bool, scratch: list[str]
) -> Iterator[SubprocessWorker]:
    """Starts a process that runs checks; ends it and removes its files on exit.

    Args:
        request: the run to check.
        groups: the groups of checks to run.
        connect: False if an earlier process has hung: this one runs alone.
        scratch: folders that it made elsewhere, as far as its messages were received.
    """
    with tempfile.TemporaryDirectory(prefix="jaxtrain-doctor-") as temporary:
        asked = dataclasses.asdict(request) | {
            "groups": groups,
            "connect": connect,
            "temporary": temporary,
        }
        try:
            with SubprocessWorker(_FUNCTION, asked, environment()) as worker:
                yield worker
        finally:
            for folder in scratch:
                _remove(folder)


def _stopped(group: str, seen: str, cure: str) -> Finding:
    return dataclasses.replace(problem(seen, cure), group=group, check="time")


def _remove(folder: str) -> None:
    """Removes what a killed worker left, in a separate process because the disk may be dead."""
    try:
        subprocess.run(["rm", "-rf", "--", folder], timeout=_REMOVE_S, check=False)
    except subprocess.TimeoutExpired:
        terminal.warn(f"could not remove {folder}")
