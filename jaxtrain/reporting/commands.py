"""The page's section with the commands that one types next, each with a button that copies it."""

import ast
import importlib.resources
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxtrain.config import invocation
from jaxtrain.errors import shortest_folder
from jaxtrain.reporting import facts, run_files
from jaxtrain.reporting.markup import Html, element
from jaxtrain.reporting.run_files import RecordedRun
from jaxtrain.reporting.sections import named, section

_LENGTHS = ("steps", "epochs", "tokens_per_param")
_MOST_CHARACTERS, _LONGEST_NAME = 2000, 100


def next_commands(runs: Sequence[RecordedRun]) -> Html:
    """Shows how to resume, use, export, and compare each run."""
    parts: list[object] = []
    for index, run in enumerate(runs):
        found = list(_commands(run, run.directory, invocation.program()))
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


def _commands(run: RecordedRun, directory: object, program: str) -> Iterator[tuple[str, str]]:
    """Yields a purpose and a command; the arguments of a run are quoted for a shell."""
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
    model = run.config.get("model", {}).get("class")
    names = _names_of(model) if isinstance(model, str) else {}
    if usage := names.get("usage"):
        found.append(("try the model", f"{program} {usage.format(run=quoted, input='IN.mp4')}"))
    if "to_weights" in names:
        found.append(("export the weights", f"{program} export {quoted} model.safetensors"))
    found.append(("write this page again", f"{program} report {quoted}"))
    # A command with control or direction characters would not be the one that the page shows.
    for purpose, command in found:
        if command.isprintable() and len(command) <= _MOST_CHARACTERS:
            yield purpose, command


def _names_of(model: str) -> dict[str, str]:
    """Returns the names in the body of a model's Config, with the texts that they are set to.

    They are read from its source: to import a model is to import jax, which takes seconds.
    """
    package = importlib.resources.files("jaxtrain.models")
    places = (
        (package / f"{model}.py", package / model / "config.py")
        if model.isidentifier() and len(model) < _LONGEST_NAME
        else ()
    )
    for path in places:
        if not path.is_file():
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name == "Config":
                methods = {one.name: "" for one in node.body if isinstance(one, ast.FunctionDef)}
                return methods | {
                    ast.unparse(one.targets[0]): str(one.value.value)
                    for one in node.body
                    if isinstance(one, ast.Assign) and isinstance(one.value, ast.Constant)
                }
    return {}


def _twice_as_long(loop: Mapping[str, Any]) -> dict[str, str]:
    """Returns the override that doubles the length of the run; {} if it is unknown."""
    for name in _LENGTHS:
        length: Any = loop.get(name)
        if run_files.is_number(length):
            return {f"--loop.{name}": f"{2 * length}"}
    return {}
