"""Runs one check after another, and sends each finding at once.

It runs in a separate process, which :mod:`jaxtrain.doctor.examination` ends if it hangs.
"""

import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxtrain.doctor.finding import Check, Finding, run_checks
from jaxtrain.storage import bucket
from jaxtrain.storage.atomic import expanded
from jaxtrain.xla import gpu_memory, subprocess_worker
from jaxtrain.xla.subprocess_worker import Send


def examine(request: dict[str, Any], send: Send) -> None:
    """Runs all checks.

    Args:
        request: :class:`jaxtrain.doctor.examination.DoctorRequest` as a dict, with ``temporary``, a
            folder that is removed afterwards.
        send: takes {"about": ...} once, {"group": name} when a group begins, {"finding": ...}, and
            {"scratch": folder} for a folder to remove if this process dies.

    Raises:
        InputError: the config is wrong.
    """
    # Unlike a run, doctor must not reserve the GPU's memory, which other programs may need.
    gpu_memory.share_memory(os.environ)
    from jaxtrain import config, sharding, versions
    from jaxtrain.checkpoint import remote, resume
    from jaxtrain.data import cache
    from jaxtrain.distributed.key_value import KeyValueStore
    from jaxtrain.doctor import checkpointing, collective, devices, hosts, loader, system
    from jaxtrain.doctor.subject import Subject
    from jaxtrain.planning import cards
    from jaxtrain.telemetry import hardware
    from jaxtrain.training import run_directory

    run = config.load(request["config"], request["overrides"])
    short = cards.card_of_config(run.name)
    given = request["output_dir"]
    url = None
    if given is not None and bucket.is_bucket(given):
        url = bucket.normalized(given, "--output-dir")
        output = remote.stage(url, cache.root(run.data.cache_dir))
    else:
        output = expanded(given) if given else run_directory.ROOT / run.name
    send({"about": {"config": run.name, "host": socket.gethostname(), "versions": versions.line()}})
    subject = Subject(
        run=run,
        card=None if short is None else cards.card(short),
        output=output.absolute(),
        url=url,
        resumes=resume.is_expected(
            request["resume"], output if given else None, run_directory.ROOT
        ),
        simulate_devices=request["simulate_devices"],
        driver=hardware.driver(),
        environment=os.environ,
        temporary=Path(request["temporary"]),
        scratch=lambda folder: send({"scratch": str(folder)}),
        store=KeyValueStore(),
    )
    own: list[Finding] = []

    def report(found: Finding) -> None:
        own.append(found)
        send({"finding": found.as_dict()})

    def of_devices() -> Mapping[str, Check]:
        subject.run, _ = sharding.as_found(subject.run)  # once the processes are connected
        return devices.checks(subject)

    groups: dict[str, Callable[[], Mapping[str, Check]]] = {
        "processes": lambda: hosts.checks(subject),
        "devices": of_devices,
        "system": lambda: system.checks(subject),
        "collective": lambda: collective.checks(subject),
        "data": lambda: loader.checks(subject),
        "checkpoint": lambda: checkpointing.checks(subject),
        "others": lambda: {"findings": lambda: hosts.others(subject.store, own)},
    }
    for group, make in groups.items():
        send({"group": group})
        run_checks(group, make, report)
        if group == "processes":
            subprocess_worker.own_signals()  # jax.distributed replaces our signal handler
    hosts.leave()
