"""Runs all checks in one separate process with one time limit.

A dead mount or a hanging NCCL blocks that process and not the doctor: it is ended, and the hang is
the last finding.
"""

import dataclasses
import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxtrain import terminal
from jaxtrain.doctor.finding import Check, Finding, problem, run_checks
from jaxtrain.jobs import subprocess_worker
from jaxtrain.jobs.subprocess_worker import Send, SubprocessWorker, WorkerFailed, environment
from jaxtrain.storage import bucket
from jaxtrain.storage.atomic import expanded

LIMIT_S = 180.0
_REMOVE_S = 10.0
_FUNCTION = "jaxtrain.doctor.examination:run_groups"
_CRASH_CURE = "see dmesg (out of memory, Xid errors of a GPU); for NCCL, set NCCL_DEBUG=INFO"
# What to do if a group of checks hangs.
_HANG_CURES = {
    "start": "check that nvidia-smi answers, and whether this host is overloaded (uptime, free)",
    "processes": "start all processes at the same time; open the coordinator's port between hosts",
    "devices": "check nvidia-smi, and dmesg for Xid errors: such a GPU needs a restart",
    "system": "a file system does not answer: check df, and mount for a dead network mount",
    "collective": "set NCCL_DEBUG=INFO to see where it waits: the network between the GPUs or "
    "hosts (NCCL_SOCKET_IFNAME), or a missing process",
    "data": "large data takes long to open the first time: start the run once on one host; if the "
    "data is on a network file system, check that it answers (ls)",
    "checkpoint": "the disk of --output-dir is slow or does not answer: check df, iostat -x 1",
    "others": "see what the other processes printed",
}


Event = dict[str, Any] | Finding


def examine(request: Mapping[str, Any], limit_s: float = LIMIT_S) -> Iterator[Event]:
    """Yields findings, and the other messages of :func:`run_groups`, as they arrive.

    Args:
        request: the run to check: its ``config`` and ``overrides``, and the flags ``output_dir``,
            ``resume``, and ``simulate_devices`` as typed; None if not set.
    """
    group = "start"
    scratch: list[str] = []

    def ended(event: str, cure: str) -> Finding:
        seen = f"{event}; no later check was made"
        return dataclasses.replace(problem(seen, cure), group=group, check="time")

    try:
        with SubprocessWorker(_FUNCTION, request, environment()) as worker:
            for message in worker.messages(limit_s):
                if "finding" in message:
                    yield Finding(**message["finding"])
                elif "scratch" in message:
                    scratch.append(message["scratch"])
                else:
                    group = message.get("group", group)
                    yield message
    except TimeoutError:
        yield ended(f"'{group}' did not end within {limit_s:.0f} s", _HANG_CURES[group])
    except WorkerFailed as failed:
        yield ended(f"the process that checks '{group}' {failed}", _CRASH_CURE)
    finally:
        for folder in scratch:
            _remove(folder)


def _remove(folder: str) -> None:
    """Removes what a killed worker left, in a separate process because the disk may be dead."""
    try:
        subprocess.run(["rm", "-rf", "--", folder], timeout=_REMOVE_S, check=False)
    except subprocess.TimeoutExpired:
        terminal.warn(f"could not remove {folder}")


def run_groups(request: dict[str, Any], send: Send) -> None:
    """Runs one group of checks after another, in the separate process.

    Without a connection to the other processes, the group "processes" is the last one.

    Args:
        send: takes {"about": ...} once, {"group": name} when a group begins, {"finding": ...}, and
            {"scratch": folder} for a folder to remove if this process dies.
    """
    # Unlike a run, doctor must not reserve the GPU's memory, which other programs may need.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    from jaxtrain import config, versions
    from jaxtrain.checkpoint import remote, resume
    from jaxtrain.cost import cards
    from jaxtrain.doctor import checkpointing, collectives, data, hosts, machine
    from jaxtrain.doctor.subject import Subject
    from jaxtrain.storage import cache
    from jaxtrain.telemetry import hardware
    from jaxtrain.training import run_directory

    run = config.load(request["config"], request["overrides"])
    short = cards.card_of_config(run.name)
    output_dir = request["output_dir"]
    url = None
    if output_dir is not None and bucket.is_bucket(output_dir):
        url = bucket.normalized(output_dir, "--output-dir")
        output = remote.stage(url, cache.root(run.data.cache_dir))
    else:
        output = expanded(output_dir) if output_dir else run_directory.ROOT / run.name
    send({"about": {"config": run.name, "host": socket.gethostname(), "versions": versions.line()}})
    subject = Subject(
        run=run,
        card=None if short is None else cards.card(short),
        output=output.absolute(),
        url=url,
        resumes=resume.is_expected(
            request["resume"], output if output_dir else None, run_directory.ROOT / run.name
        ),
        simulate_devices=request["simulate_devices"],
        driver=hardware.driver(),
        environment=os.environ,
        scratch=lambda folder: send({"scratch": str(folder)}),
    )
    findings: list[Finding] = []

    def report(finding: Finding) -> None:
        findings.append(finding)
        send({"finding": dataclasses.asdict(finding)})

    groups: dict[str, Callable[[], Mapping[str, Check]]] = {
        "processes": lambda: hosts.checks(subject),
        "devices": lambda: machine.device_checks(subject),
        "system": lambda: machine.system_checks(subject),
        "collective": lambda: collectives.checks(subject),
        "data": lambda: data.checks(subject),
        "checkpoint": lambda: checkpointing.checks(subject),
        "others": lambda: {"findings": lambda: hosts.of_other_processes(subject.store, findings)},
    }
    for group, checks in groups.items():
        send({"group": group})
        run_checks(group, checks(), report)
        if group == "processes":
            if not subject.connected:
                break
            subprocess_worker.own_signals()  # jax.distributed replaces our signal handler
    hosts.leave()
