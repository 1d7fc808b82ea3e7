"""``jaxtrain configs list | show NAME | diff A B``: lists, shows, and compares configs."""

from jaxtrain import config, terminal
from jaxtrain.config import field_values, files, overrides
from jaxtrain.errors import InputError
from jaxtrain.storage import addresses

USAGE = """\
usage: jaxtrain configs list
       jaxtrain configs show NAME [--section.field VALUE ...]
       jaxtrain configs diff A B

Lists the shipped configs, shows every field of one, or shows how two differ.
NAME, A, and B are shipped configs or paths of .py files."""


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code.

    Raises:
        InputError: wrong use.
    """
    match arguments:
        case [] | ["--help"] | ["-h"] | [_, "--help"] | [_, "-h"]:
            print(USAGE)
        case ["list"]:
            _list()
        case ["show", name, *changes]:
            _show(name, changes)
        case ["diff", before, after]:
            _diff(before, after)
        case [("list" | "show" | "diff") as action, *rest]:
            wanted = {"list": "no argument", "show": "one NAME", "diff": "two names"}[action]
            raise InputError(f"configs {action} takes {wanted}, not {' '.join(rest) or 'nothing'}")
        case [action, *_]:
            hint = field_values.did_you_mean(action, ("list", "show", "diff"))
            raise InputError(f"configs: unknown action '{action}'; {hint}")
    return 0


def _list() -> None:
    names = files.names()
    width = max(map(len, names), default=0)
    for name in names:
        terminal.out(f"{name:{width}}  {_first_line(name)}")


def _show(name: str, changes: list[str]) -> None:
    run = config.load(name, changes)
    terminal.out(files.docstring(name))
    print()
    everything = [
        leaf._replace(value=addresses.scrubbed(leaf.value)) for leaf in overrides.leaves(run)
    ]
    width = max(len(leaf.name) for leaf in everything)
    for leaf in everything:
        terminal.out(f"{leaf.name:{width}}  {' '.join(field_values.words(leaf.value))}")


def _diff(before: str, after: str) -> None:
    left, right = config.load(before), config.load(after)
    everything = config.differences(config.to_dict(left), config.to_dict(right))
    found = [line for line in everything if not line.startswith("name: ")]
    for line in found:
        terminal.out(line)
    if not found:
        terminal.out(f"{before} and {after} are the same")


def _first_line(name: str) -> str:
    return files.docstring(name).partition("\n")[0]
