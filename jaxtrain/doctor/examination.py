"""Runs the groups of checks in a process of their own, each within its time.

A dead mount or a hanging NCCL stops that process and not the doctor: it is ended, the group's hang
is a finding, and the groups that follow go on in a new one.
"""

import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxtrain import terminal
from jaxtrain.config import invocation
from jaxtrain.doctor.finding import Finding, problem
from jaxtrain.errors import InputError

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
_GRACE_S = 5.0
_REMOVE_S = 10.0
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

_HANGS = {
    "start": "the examining process has not started",
    "processes": "the processes of the run have not all met",
    "system": "the host, or the disk of --output-dir, has not answered",
    "collective": "the devices have not ended an all-reduce",
    "data": "the data has not opened and given its batches",
    "checkpoint": "a small checkpoint was not written and read",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
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


def examine(request: Request, limits: Mapping[str, float] = LIMITS_S) -> Iterator[Event]:
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
        stopped_in: str | None = None
        with _Worker(request, left, connect) as worker:
            group, limit = "start", _START_S
            while True:
                message = worker.next(limit)
                if message is None:  # it hangs, or has ended
                    stopped_in = group
                    yield _stopped(group, limit, worker.ended())
                    break
                if "wrong" in message:
                    raise InputError(message["wrong"])
                if message.get("done"):
                    return
                if "group" in message:
                    group = message["group"]
                    limit = limits[group]
                    worker.begin()
                if "finding" in message:
                    yield Finding(**message["finding"])
                elif "group" in message or ("about" in message and not about):
                    about = about or "about" in message
                    yield message
        if stopped_in not in left:  # before the first group: a new process would do no better
            return
        left = left[left.index(stopped_in) + 1 :]
        # The other processes still wait for the one that was ended: what follows is examined alone.
        connect = False
        left = [name for name in left if name != "others"]
        if left:
            left = ["processes", *left] if left[0] != "processes" else left


class _Worker:
    """A process that examines, and its messages."""

    def __init__(self, request: Request, groups: list[str], connect: bool) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="jaxtrain-doctor-")
        self._said = Path(self._folder.name) / "said.txt"
        self._scratch: list[str] = []
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        reading, writing = os.pipe()
        path = Path(self._folder.name) / "request.json"
        temporary = Path(self._folder.name) / "temporary"
        temporary.mkdir()
        asked = dataclasses.asdict(request) | {
            "groups": groups,
            "connect": connect,
            "pipe": writing,
            "temporary": str(temporary),
        }
        path.write_text(json.dumps(asked))
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jaxtrain.doctor.worker", str(path)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=_environment(os.environ),
                pass_fds=(writing,),
            )
        os.close(writing)
        self._thread = threading.Thread(target=self._listen, args=(reading,), daemon=True)
        self._thread.start()
        self.begin()

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        for folder in self._scratch:
            _remove(folder)
        self._folder.cleanup()

    def begin(self) -> None:
        """The time of a group starts."""
        self._began = time.monotonic()

    def next(self, limit_s: float) -> dict[str, Any] | None:
        """The next message; None where none comes in what is left of a group's time."""
        left_s = max(0.0, self._began + limit_s - time.monotonic())
        try:
            return self._messages.get(timeout=left_s)
        except queue.Empty:
            return None

    def ended(self) -> str:
        """How it ended, in words; empty while it runs."""
        try:
            code = self._process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            return ""
        last = self._said.read_text(errors="replace").strip().splitlines()
        words = f": {last[-1][:300]}" if last else ""
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return f"was ended {how}{words}"

    def _listen(self, reading: int) -> None:
        with open(reading, encoding="utf-8") as lines:
            for line in lines:
                message = json.loads(line)
                if "scratch" in message:
                    self._scratch.append(message["scratch"])
                else:
                    self._messages.put(message)
        self._messages.put(None)

    def _end(self) -> None:
        """First in a way that lets it tidy up."""
        self._process.terminate()
        try:
            self._process.wait(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            try:
                self._process.wait(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                return  # the kernel waits for a disk; its pipe stays open
        self._thread.join(timeout=_GRACE_S)


def _stopped(group: str, limit_s: float, ended: str) -> Finding:
    late = _HANGS.get(group, f"'{group}' has not been examined")
    seen = f"what examines '{group}' {ended}" if ended else f"{late} within {limit_s:.0f} s"
    cure = (
        "see dmesg (out of memory, Xid errors of a GPU); of NCCL, NCCL_DEBUG=INFO says more"
        if ended
        else _CURES.get(group, "see whether this host is overloaded: uptime, free")
    )
    found = problem(seen, cure)
    return dataclasses.replace(found, group=group, check="time")


def _environment(outside: Mapping[str, str]) -> dict[str, str]:
    """The worker has to find this jaxtrain, installed or not."""
    checkout = str(Path(__file__).resolve().parents[2])
    paths = [checkout, *filter(None, [outside.get("PYTHONPATH")])]
    return {**outside, "PYTHONPATH": os.pathsep.join(paths), "TF_CPP_MIN_LOG_LEVEL": "2"} | {
        invocation.PROGRAM: invocation.program(outside)
    }


def _remove(folder: str) -> None:
    """What a worker that was killed left; in a process of its own, as the disk may be dead."""
    try:
        subprocess.run(["rm", "-rf", "--", folder], timeout=_REMOVE_S, check=False)
    except subprocess.TimeoutExpired:
        terminal.warn(f"could not remove {folder}")
