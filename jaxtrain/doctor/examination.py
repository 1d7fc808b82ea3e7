"""Runs the checks in a separate process with a time limit.

A dead mount or a hanging NCCL blocks that process and not the doctor: it is ended, and the hang is
the last finding.
"""

import dataclasses
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any

from jaxtrain import terminal
from jaxtrain.doctor.finding import Finding, problem
from jaxtrain.xla.subprocess_worker import SubprocessWorker, WorkerFailed, environment

LIMIT_S = 180.0
_REMOVE_S = 10.0
_FUNCTION = "jaxtrain.doctor.worker:examine"
_CRASH_CURE = "see dmesg (out of memory, Xid errors of a GPU); for NCCL, set NCCL_DEBUG=INFO"
# What a group of checks did not do, and the fix.
_HANGS = {
    "start": (
        "the process that runs the checks did not start, or the NVIDIA driver did not answer",
        "check whether this host is overloaded (uptime, free), and that nvidia-smi answers",
    ),
    "processes": (
        "the processes of the run did not all connect",
        "start all processes at the same time; open the coordinator's port between the hosts",
    ),
    "devices": (
        "the devices did not answer",
        "check nvidia-smi, and dmesg for Xid errors: a GPU that does not answer needs a restart",
    ),
    "system": (
        "the host, or the disk of --output-dir, did not answer",
        "a file system does not answer: check df, and mount for a dead network mount",
    ),
    "collective": (
        "the devices did not finish an all-reduce, or an exchange between hosts",
        "NCCL_DEBUG=INFO shows where it waits: the network between the GPUs or hosts "
        "(NCCL_SOCKET_IFNAME), or a missing process",
    ),
    "data": (
        "the data did not open and yield batches",
        "large data takes long to open the first time, in doctor or in the run: start the run once "
        "on one host; if the data is on a network file system, check that it answers (ls)",
    ),
    "checkpoint": (
        "a small checkpoint was not written and read",
        "the disk of --output-dir is slow or does not answer: check df, iostat -x 1",
    ),
    "others": ("the other processes did not answer", "see what they printed"),
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


def examine(request: DoctorRequest, limit_s: float = LIMIT_S) -> Iterator[Event]:
    """Yields findings and the messages of :mod:`jaxtrain.doctor.worker`, as they arrive.

    Args:
        request: the run to check.
        limit_s: for all checks together.

    Raises:
        InputError: the config is wrong.
    """
    group = "start"
    scratch: list[str] = []
    with tempfile.TemporaryDirectory(prefix="jaxtrain-doctor-") as temporary:
        asked = dataclasses.asdict(request) | {"temporary": temporary}
        try:
            with SubprocessWorker(_FUNCTION, asked, environment()) as worker:
                for message in worker.messages(limit_s):
                    if "finding" in message:
                        yield Finding(**message["finding"])
                    elif "scratch" in message:
                        scratch.append(message["scratch"])
                    else:
                        group = message.get("group", group)
                        yield message
        except TimeoutError:
            what, cure = _HANGS[group]
            yield _stopped(group, f"{what} within {limit_s:.0f} s; no later check was made", cure)
        except WorkerFailed as failed:
            what = f"the process that checks '{group}' {failed}; no later check was made"
            yield _stopped(group, what, _CRASH_CURE)
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
