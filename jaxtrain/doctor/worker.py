"""Looks at one thing after the other, and sends each finding as it is made.

Runs in a process of its own, which :mod:`jaxtrain.doctor.examination` ends where it hangs.
"""

import functools
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from jaxtrain.doctor.finding import Check, Finding, run_checks
from jaxtrain.storage.atomic import expanded
from jaxtrain.xla import subprocess_worker
from jaxtrain.xla.subprocess_worker import Send


def examine(request: dict[str, Any], send: Send) -> None:
    """Examines what a request names.

    Args:
        request: :class:`jaxtrain.doctor.examination.DoctorRequest` as a dict, ``groups``,
            ``connect`` and ``temporary``, a folder that is removed afterwards.
        send: takes {"about": ...} once, {"group": name} as each group begins, {"finding": ...},
            {"scratch": folder} for a folder to be removed should this process die, and
            {"done": true}.

    Raises:
        InputError: the config is wrong.
    """
    _examine(request, send)
    send({"done": True})
    from jaxtrain.doctor import hosts

    hosts.leave()


def _examine(request: dict[str, Any], send: Send) -> None:
    # jax's threads of a GPU are to leave its memory to others; a run reserves it, this does not.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    from jaxtrain import config, versions
    from jaxtrain.checkpoint import resume
    from jaxtrain.distributed.key_value import KeyValueStore
    from jaxtrain.doctor.subject import Subject
    from jaxtrain.planning import cards
    from jaxtrain.telemetry import hardware
    from jaxtrain.training import run_directory

    run = config.load(request["config"], request["overrides"])
    short = cards.card_of_config(run.name)
    given = request["output_dir"]
    output = expanded(given) if given else run_directory.ROOT / run.name
    send({"about": {"config": run.name, "host": socket.gethostname(), "versions": versions.line()}})
    subject = Subject(
        run=run,
        card=None if short is None else cards.card(short),
        output=output.absolute(),
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

    def tell(found: Finding) -> None:
        own.append(found)
        send({"finding": found.as_dict()})

    groups = _groups(subject, own, connect=request["connect"])
    for name in request["groups"]:
        send({"group": name})
        run_checks(name, _checks(groups[name]), tell)
        if name == "processes":
            subprocess_worker.own_signals()  # jax.distributed puts a handler of its own over ours


def _groups(subject: Any, own: list[Finding], *, connect: bool) -> dict[str, Any]:
    """Name -> what makes the group's checks; what a group imports takes the group's own time."""

    def processes() -> dict[str, Check]:
        from jaxtrain.doctor import hosts

        return hosts.checks(subject, connect)

    def module(name: str) -> dict[str, Check]:
        import importlib

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
    """A group's checks; where they cannot even be made, a check that says so."""
    try:
        return make()
    except Exception as error:
        failure = error

        def fail() -> NoReturn:
            raise failure

        return {"start": fail}
