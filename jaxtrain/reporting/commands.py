"""The page's section with the commands that one types next, each with a button that copies it."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from jaxtrain.config import invocation
from jaxtrain.errors import shortest_folder
from jaxtrain.reporting import facts
from jaxtrain.reporting.markup import Html, element
from jaxtrain.reporting.run_files import RecordedRun
from jaxtrain.reporting.sections import named, section

_LENGTHS = ("steps", "epochs", "tokens_per_param")


def next_commands(runs: Sequence[RecordedRun]) -> Html:
    """Shows how to resume, use, export, and compare each run."""
    parts: list[object] = []
    for index, run in enumerate(runs):
        found = _commands(run, run.directory, invocation.program())
        if found and len(runs) > 1:
            parts.append(element("h3", named(runs, index)))
        parts += [_command(purpose, command) for purpose, command in found]
    note = "For a shell in the folder where this page was written."
    return section("Next commands", *parts, note=note) if parts else Html("")


def _command(purpose: str, command: str) -> Html:
    button = element(
        "button",
        "Copy",
        type="button",
        class_="copy",
        hidden=True,
        aria_label=f"Copy the command: {purpose}",
    )
    code = element("code", command, tabindex="0")
    return element("div", element("p", purpose), code, button, class_="command")


def _commands(run: RecordedRun, directory: object, program: str) -> list[tuple[str, str]]:
    """Returns purposes and commands; the arguments of a run are quoted for a shell."""
    here = shortest_folder(str(directory))
    quoted = shlex.quote(here)
    start = run.last("start")
    arguments = [str(one) for one in start.get("arguments") or ()]
    again = {"--output-dir": here, "--resume": "latest"}
    found: list[tuple[str, str]] = []
    if arguments:
        if facts.ending(run).word == "done":
            longer = _twice_as_long(run.config.get("loop", {}))
            if longer:
                command = invocation.again(program, arguments, again | longer)
                found.append(("resume for longer", command))
        elif not run.active_process:
            found.append(("resume", invocation.again(program, arguments, again)))
    for purpose, key in (("try the model", "usage"), ("export the weights", "export_usage")):
        if usage := start.get(key):
            words = usage.format(run=quoted, input="IN.mp4", out=f"{quoted}/")
            found.append((purpose, f"{program} {words}"))
    found.append(("write this page again", f"{program} report {quoted}"))
    return found


def _twice_as_long(loop: Mapping[str, Any]) -> dict[str, str]:
    """Returns the override that doubles the length of the run; {} if it is unknown."""
    for name in _LENGTHS:
        length = loop.get(name)
        if length is not None:
            return {f"--loop.{name}": f"{2 * length}"}
    return {}
