"""Looks at one thing after the other, and tells whoever started it, a JSON object a line.

    python -m jaxtrain.doctor.worker REQUEST.json

Started by :mod:`jaxtrain.doctor.examination`, which ends it where it hangs.
"""

import functools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from jaxtrain.doctor.finding import Check, Finding, run_checks
from jaxtrain.errors import InputError
from jaxtrain.storage.atomic import expanded

Write = Callable[[dict[str, Any]], None]


def main(path: str) -> int:
    """Reads a request and examines what it names.

    Tells {"wrong": ...} where the config is wrong; else {"about": ...} once, {"group": name} as
    each group begins, {"finding": ...}, {"scratch": folder} for a folder to be removed should this
    process die, and {"done": true}.
    """
    _mind_signals()
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    request = json.loads(Path(path).read_text())
    os.set_inheritable(request["pipe"], False)
    with open(request["pipe"], "w", encoding="utf-8") as pipe:

        def write(message: dict[str, Any]) -> None:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()

        try:
            _examine(request, write)
        except InputError as error:
            write({"wrong": str(error)})
        write({"done": True})
    from jaxtrain.doctor import hosts

    hosts.leave()
    return 0


def _examine(request: dict[str, Any], write: Write) -> None:
    # jax's threads of a GPU are to leave its memory to others; a run reserves it, this does not.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    from jaxtrain import config, versions
    from jaxtrain.doctor.exchange import Exchange
    from jaxtrain.doctor.subject import Subject
    from jaxtrain.planning import cards
    from jaxtrain.telemetry import hardware
    from jaxtrain.training import run_directory

    run = config.load(request["config"], request["overrides"])
    short = cards.card_of_config(run.name)
    given = request["output_dir"]
    output = expanded(given) if given else run_directory.ROOT / run.name
    write(
        {"about": {"config": run.name, "host": socket.gethostname(), "versions": versions.line()}}
    )
    subject = Subject(
        run=run,
        card=None if short is None else cards.card(short),
        output=output.absolute(),
        resumes=_resumes(request["resume"], output if given else None),
        simulate_devices=request["simulate_devices"],
        driver=hardware.driver(),
        environment=os.environ,
        temporary=Path(request["temporary"]),
        scratch=lambda folder: write({"scratch": str(folder)}),
        exchange=Exchange(0, 1, None),
    )
    own: list[Finding] = []

    def tell(found: Finding) -> None:
        own.append(found)
        write({"finding": found.as_dict()})

    groups = _groups(subject, own, connect=request["connect"])
    for name in request["groups"]:
        write({"group": name})
        run_checks(name, _checks(groups[name]), tell)
        if name == "processes":
            _mind_signals()  # jax.distributed puts a handler of its own over ours


def _resumes(resume: str | None, output: Path | None) -> bool:
    """Whether a run with this ``--resume`` finds a checkpoint, and so needs no ``init_from``."""
    from jaxtrain.checkpoint import layout, saver
    from jaxtrain.checkpoint.resume import newest_runs
    from jaxtrain.training import run_directory

    if resume is None:
        return False
    if resume != "latest":
        return True  # another checkpoint, or a mistake that the run itself names
    if output is None:
        return bool(newest_runs(run_directory.ROOT))
    return layout.latest_in(output / saver.CHECKPOINTS) is not None


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

        return {"findings": lambda: hosts.others(subject.exchange, own)}

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


def _mind_signals() -> None:
    """Ctrl-C is for whoever started this, and then ends it by SIGTERM: through finally clauses."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def _end_with(parent: int) -> None:
    """Whoever started this may be killed; nobody reads what it tells then."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
