"""Runs one check after another, and sends each finding at once.

It runs in a separate process, which :mod:`jaxtrain.doctor.examination` ends if it hangs.
"""

import functools
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from jaxtrain.doctor.finding import Check, Finding, run_checks
from jaxtrain.storage import bucket
from jaxtrain.storage.atomic import expanded
from jaxtrain.xla import gpu_memory, subprocess_worker
from jaxtrain.xla.subprocess_worker import Send


def examine(request: dict[str, Any], send: Send) -> None:
    """Runs the groups of checks in a request.

    Args:
        request: :class:`jaxtrain.doctor.examination.DoctorRequest` as a dict, with ``groups``,
            ``connect`` and ``temporary``, a folder that is removed afterwards.
        send: takes {"about": ...} once, {"group": name} when a group begins, {"finding": ...},
            {"scratch": folder} for a folder to remove if this process dies, and {"done": true}.

    Raises:
        InputError: the config is wrong.
    """
    _examine(request, send)
    send({"done": True})
    from jaxtrain.doctor import hosts

    hosts.leave()


def _examine(request: dict[str, Any], send: Send) -> None:
    # Unlike a run, doctor must not reserve the GPU's memory, which other programs may need.
    gpu_memory.share_memory(os.environ)
    from jaxtrain import config, versions
    from jaxtrain.checkpoint import remote, resume
    from jaxtrain.data import cache
    from jaxtrain.distributed.key_value import KeyValueStore
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

    groups = _groups(subject, own, connect=request["connect"])
    for name in request["groups"]:
        send({"group": name})
        run_checks(name, _checks(groups[name]), report)
        if name == "processes":
            subprocess_worker.own_signals()  # jax.distributed replaces our signal handler


def _groups(subject: Any, own: list[Finding], *, connect: bool) -> dict[str, Any]:
    """Returns name -> function that makes the group's checks; it imports in the group's time."""

    def processes() -> dict[str, Check]:
        from jaxtrain.doctor import hosts

        return hosts.checks(subject, connect)

    def module(name: str) -> dict[str, Check]:
        import importlib

        from jaxtrain import sharding

        subject.run, _ = sharding.as_found(subject.run)  # once the processes are connected
        found: dict[str, Check] = importlib.import_module(f"jaxtrain.doctor.{name}").checks(subject)
        return found

    def others() -> dict[str, Check]:
        from jaxtrain.doctor import hosts

        return {"findings": lambda: hosts.others(subject.store, own)}

    return {
        "processes": processes,
        "devices": functools.partial(module, "devices"),
        "system": functools.partial(module, "system"),
        "collective": functools.partial(module, "collective"),
        "data": functools.partial(module, "loader"),
        "checkpoint": functools.partial(module, "checkpointing"),
        "others": others,
    }


def _checks(make: Callable[[], dict[str, Check]]) -> dict[str, Check]:
    """Makes a group's checks; if that fails, returns a check that raises the error."""
    try:
        return make()
    except Exception as error:
        failure = error

        def fail() -> NoReturn:
            raise failure

        return {"start": fail}
