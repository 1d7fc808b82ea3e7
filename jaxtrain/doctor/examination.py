"""Runs the groups of checks in a process of their own, each within its time.

A dead mount or a hanging NCCL stops that process and not the doctor: it is ended, the group's hang
is a finding, and the groups that follow go on in a new one.
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
    "processes": 60.0,  # others may start later
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
    "devices": "nvidia-smi, and dmesg for Xid errors: a GPU that does not answer needs a restart",
    "system": "a file system does not answer: df, and mount for a dead network mount",
    "collective": "NCCL_DEBUG=INFO shows where it waits: the network between the GPUs or hosts "
    "(NCCL_SOCKET_IFNAME), or a process that did not come",
    "data": "the first opening of large data takes long, and the run will do it: start it once on "
    "one host; if the data lies on a network, see whether its mount answers (ls)",
    "checkpoint": "the disk of --output-dir is slow or does not answer: df, iostat -x 1",
    "others": "see what the other processes printed",
}

_CRASH_CURE = "see dmesg (out of memory, Xid errors of a GPU); of NCCL, NCCL_DEBUG=INFO says more"
_HANGS = {
    "start": "the examining process has not started",
    "processes": "the processes of the run have not all met",
    "system": "the host, or the disk of --output-dir, has not answered",
    "collective": "the devices have not ended an all-reduce",
    "data": "the data has not opened and given its batches",
    "checkpoint": "a small checkpoint was not written and read",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorRequest:
    """What is to be examined.

    Attributes:
        config: a name or a path.
        overrides: as typed.
        output_dir: where the run would write; None is the run's own default.
        resume: what the run would resume from, as typed; None is nothing.
        simulate_devices: virtual CPU devices; None uses what is there.
    """

    config: str
    overrides: tuple[str, ...]
    output_dir: str | None
    resume: str | None
    simulate_devices: int | None


Event = dict[str, Any] | Finding


def examine(request: DoctorRequest, limits: Mapping[str, float] = LIMITS_S) -> Iterator[Event]:
    """What is seen, as it is seen: findings, and the messages of :mod:`jaxtrain.doctor.worker`.

    Args:
        request: what to examine.
        limits: group -> seconds; a group without one is left out.

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
                    late = _HANGS.get(group, f"'{group}' has not been examined")
                    cure = _CURES.get(group, "see whether this host is overloaded: uptime, free")
                    yield _stopped(group, f"{late} within {limit:.0f} s", cure)
                    break
                except WorkerFailed as failed:
                    yield _stopped(group, f"what examines '{group}' {failed}", _CRASH_CURE)
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
        if group not in left:  # before the first group: a new process would do no better
            return
        left = left[left.index(group) + 1 :]
        # The other processes still wait for the one that was ended: what follows is examined alone.
        connect = False
        left = [name for name in left if name != "others"]
        if left:
            left = ["processes", *left] if left[0] != "processes" else left


@contextlib.contextmanager
def _worker(
    request: DoctorRequest, groups: list[str], connect: bool, scratch: list[str]
) -> Iterator[SubprocessWorker]:
    """A process that examines; in the end nothing is left of it, nor of what it made.

    Args:
        request: what to examine.
        groups: of checks.
        connect: False where an earlier process has hung: this one is alone.
        scratch: folders that it made elsewhere, as far as its messages were received.
    """
    with tempfile.TemporaryDirectory(prefix="jaxtrain-doctor-") as temporary:
        asked = dataclasses.asdict(request) | {
            "groups": groups,
            "connect": connect,
            "temporary": temporary,
        }
        worker = SubprocessWorker(_FUNCTION, asked, environment())
        try:
            with worker:
                yield worker
        finally:
            scratch += [message["scratch"] for message in worker.unread() if "scratch" in message]
            for folder in scratch:
                _remove(folder)


def _stopped(group: str, seen: str, cure: str) -> Finding:
    return dataclasses.replace(problem(seen, cure), group=group, check="time")


def _remove(folder: str) -> None:
    """What a worker that was killed left; in a process of its own, as the disk may be dead."""
    try:
        subprocess.run(["rm", "-rf", "--", folder], timeout=_REMOVE_S, check=False)
    except subprocess.TimeoutExpired:
        terminal.warn(f"could not remove {folder}")
