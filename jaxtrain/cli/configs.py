"""``jaxtrain configs list | show NAME | diff A B``: lists, shows, and compares configs."""

from collections.abc import Sequence

from jaxtrain import config, terminal
from jaxtrain.cli import commands
from jaxtrain.config import field_values, files, overrides
from jaxtrain.storage import addresses


def main(flags: commands.ConfigsList | commands.ConfigsShow | commands.ConfigsDiff) -> int:
    """Runs the command and returns its exit code."""
    if isinstance(flags, commands.ConfigsShow):
        _show(flags.config, flags.overrides)
    elif isinstance(flags, commands.ConfigsDiff):
        _diff(flags.before, flags.after)
    else:
        _list()
    return 0


def _list() -> None:
    names = files.names()
    width = max(map(len, names), default=0)
    for name in names:
        terminal.out(f"{name:{width}}  {_first_line(name)}")


def _show(name: str, changes: Sequence[str]) -> None:
    run = config.load(name, changes)
    terminal.out(f"{files.docstring(name)}\n")
    everything = [
        leaf._replace(value=addresses.scrubbed(leaf.value)) for leaf in overrides.leaves(run)
    ]
    width = max(len(leaf.name) for leaf in everything)
    for leaf in everything:
        terminal.out(f"{leaf.name:{width}}  {' '.join(field_values.as_arguments(leaf.value))}")


def _diff(before: str, after: str) -> None:
    left, right = config.load(before), config.load(after)
    everything = config.differences(config.to_dict(left), config.to_dict(right))
    differing = [line for line in everything if not line.startswith("name: ")]
    for line in differing:
        terminal.out(line)
    if not differing:
        terminal.out(f"{before} and {after} are the same")


def _first_line(name: str) -> str:
    return files.docstring(name).partition("\n")[0]
