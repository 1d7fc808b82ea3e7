"""``jaxtrain compare``: tells whether a change is better."""

import json
import shlex
from pathlib import Path

from jaxtrain import comparison, config, terminal
from jaxtrain.cli import command_line, commands
from jaxtrain.comparison import experiment, report
from jaxtrain.errors import InputError
from jaxtrain.storage import atomic


def main(flags: commands.Compare) -> int:
    """Runs the command and returns its exit code.

    Raises:
        InputError: wrong use, or a run that cannot end well.
        RunAgain: only temporary failures.
    """
    atomic.check_writable("--json", flags.json)
    names = (flags.config, *flags.others)
    folders = [atomic.expanded(name) for name in names]
    if all(folder.is_dir() for folder in folders):
        answer = _existing(flags, folders)
    else:
        answer = _trained(flags, names)
    if flags.json is not None:
        atomic.write_whole(flags.json, json.dumps(answer.to_dict(), indent=1) + "\n")
    return 0


def _existing(flags: commands.Compare, folders: list[Path]) -> experiment.Comparison:
    if flags.overrides or flags.change:
        raise InputError("compare of runs that exist changes no fields: drop them")
    if len(folders) % 2:
        raise InputError(
            f"compare takes pairs of runs, but {len(folders)} folders are given: add the other run "
            f"of {folders[-1]}"
        )
    pairs = list(zip(folders[::2], folders[1::2], strict=True))
    answer = experiment.of_existing(pairs, flags.metric, None, flags.practical)
    terminal.out(experiment.summary(answer))
    if flags.output_dir is not None:
        words = (" ".join(map(str, folders[::2])), " ".join(map(str, folders[1::2])))
        report.write(answer, words, flags.output_dir / report.NAME)
        terminal.out(f"report: {flags.output_dir / report.NAME}")
    return answer


def _trained(flags: commands.Compare, names: tuple[str, ...]) -> experiment.Comparison:
    if len(names) > 2:
        raise InputError(
            f"compare takes two configs, not {len(names)}: {' '.join(names)}; or pairs of run "
            "directories that exist"
        )
    changes = [word for change in flags.change for word in shlex.split(change)]
    if len(names) == 1 and not changes:
        raise InputError(
            f'what is compared with {names[0]}? Add --change "--section.field VALUE", or another '
            "config"
        )
    sides = [(names[0], [*flags.overrides]), (names[-1], [*flags.overrides, *changes])]
    a, b = (config.load(name, overrides) for name, overrides in sides)
    words = tuple(shlex.join([name, *overrides]) for name, overrides in sides)
    with command_line.resumable("runs"):
        return comparison.run(
            a,
            b,
            (words[0], words[1]),
            metric=flags.metric,
            practical=flags.practical,
            at=flags.at,
            pairs=flags.pairs,
            hours=flags.hours,
            output_dir=flags.output_dir,
            runs_dir=flags.runs,
            simulate_devices=flags.simulate_devices,
            say=terminal.out,
        )
